"""`dgr serve` as a program of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CONTEXT = ("--ctx", "256", "--batch", "64", "--ubatch", "64")


@contextmanager
def served(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The program, and its ready line."""
    command = [
        sys.executable,
        "-m",
        "dgr",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--json",
        *(() if "--route" in arguments else CONTEXT),
        *map(str, arguments),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=20)[1]
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()
