"""The tutorial, done step by step as it reads, on one machine: two hosts are two loopback addresses."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages.reading import ROOT, Block, blocks_of

from dgr.testing import free_ports

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs/tutorial.md"
#: What runs until it is ended.
_ENDLESS = re.compile(r"^dgr (up|stage|serve|top) ")
#: What is done already: the build, and the environment that tests run in.
_DONE = re.compile(r"^(make demo|\. \.venv/bin/activate)$", re.MULTILINE)


class Shell:
    """A folder in which commands of the tutorial run, those that serve until the end."""

    def __init__(self, folder: Path, changes: dict[str, str]) -> None:
        self.folder, self._changes = folder, changes
        self._serving: list[subprocess.Popen[str]] = []
        (folder / "bin").mkdir()
        program = folder / "bin/dgr"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m dgr "$@"\n')
        program.chmod(0o755)
        self._environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def fitted(self, code: str) -> str:
        for before, after in self._changes.items():
            code = code.replace(before, after)
        return code

    def run(self, code: str, *, until: float = 0) -> str:
        """Run a block to its end, or begin it where it has none; one that may fail yet is tried until it does not."""
        code = self.fitted(_DONE.sub("", code))
        if _ENDLESS.match(code) and "dgr top" not in code:
            command = ["bash", "-c", f"exec {code}"]
            process = subprocess.Popen(
                command, cwd=self.folder, env=self._environment, stdout=subprocess.DEVNULL, text=True
            )
            self._serving.append(process)
            return ""
        deadline = time.monotonic() + until
        while True:
            command = ["bash", "-ec", code.replace("dgr top ", "dgr top --once ")]
            done = subprocess.run(
                command, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=180
            )
            if done.returncode == 0:
                return done.stdout
            assert time.monotonic() < deadline, done.stdout + done.stderr

    def end(self) -> None:
        """End what serves."""
        for process in self._serving:
            process.send_signal(signal.SIGTERM)
        for process in self._serving:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
        self._serving.clear()


@pytest.fixture
def shell(tiny: Path, tmp_path: Path) -> Iterator[Shell]:
    first, second, third, http = free_ports(4)
    changes = {
        "build/demo.gguf": shlex.quote(str(tiny)),
        "10.0.0.1": "127.0.0.1",
        "10.0.0.2": "127.0.0.2",
        ":7701": f":{first}",
        ":7702": f":{second}",
        ":7703": f":{third}",
        "--wait 600": f"--wait 600 --listen 127.0.0.1:{http}",
        "http://127.0.0.1:8000": f"http://127.0.0.1:{http}",
    }
    found = Shell(tmp_path, changes)
    try:
        yield found
    finally:
        found.end()


def drawn(said: str) -> str:
    """The answer among what `dgr generate` prints."""
    found = re.search(r"\n\n(.+)\n\n\d+ prompt tokens", said, re.DOTALL)
    assert found is not None, said
    return found[1]


def step(number: int) -> list[Block]:
    """The blocks below the heading of a step."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(f"## {number}. "))
    end = next(at for at, line in enumerate(lines) if at > begin and line.startswith("## "))
    found = [block for block in blocks_of(PAGE, "sh", "toml", "python") if begin < block.line <= end]
    return sorted(found, key=lambda block: block.line)


def test_the_tutorial(shell: Shell) -> None:
    answer, cuts = (shell.run(block.code) for block in step(1))
    assert "0:15" in cuts
    texts = [drawn(answer)]
    for number in (2, 3):
        shell.end()
        for block in step(number):
            if block.language == "toml":
                (shell.folder / title(block)).write_text(shell.fitted(block.code))
                continue
            said = shell.run(block.code, until=120)
            if "dgr generate" in block.code:
                texts.append(drawn(said))
    assert texts == [texts[0]] * 3

    serve, asked, program, top = step(4)
    shell.run(serve.code)
    assert '"content"' in shell.run(asked.code, until=120)
    exec(compile(shell.fitted(program.code), str(program), "exec"), {})
    assert "live" in shell.run(top.code)


def title(block: Block) -> str:
    """The name of the file that a block is."""
    fence = PAGE.read_text(encoding="utf-8").splitlines()[block.line - 2]
    found = re.search(r'title="([\w.]+)"', fence)
    assert found is not None
    return found[1]
