"""Commands run in this process, and stages as processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cli.commands import CONTEXT, Result, Stage

from dgr.cli import main
from dgr.cluster.route_file import RouteFile, format_route_file
from dgr.core.route import Route, StageRef


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """``run("keys", "host")``: run a `dgr` command in this process."""

    def command(*arguments: object) -> Result:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse's way
            code = int(end.code or 0)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Result(code, captured.out, captured.err)

    return command


@pytest.fixture(scope="module")
def stages() -> Iterator[Callable[..., list[Stage]]]:
    """``stages((model, layers, flag, ...), ...)``: start stages side by side; they end with the module."""
    with ExitStack() as stack:

        def start(*wanted: Sequence[object]) -> list[Stage]:
            processes = []
            for model, layers, *flags in wanted:
                command = [sys.executable, "-m", "dgr", "stage", str(model), "--layers", str(layers), *CONTEXT]
                command += ["--listen", "127.0.0.1:0", "--json", "--until-stdin-closes", *map(str, flags)]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                stack.callback(_end, process)
                processes.append(process)
            ready = []
            for process in processes:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line, f"a stage ended with {process.wait(10)}"
                ready.append(Stage(process, json.loads(line)))
            return ready

        yield start


def _end(process: subprocess.Popen[str]) -> None:
    """Its input ends, and so does it."""
    try:
        process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise


@pytest.fixture
def route_file(tmp_path: Path) -> Callable[..., Path]:
    """``route_file(refs, model=…, context=…, tls=…, artifact=…)``: a route file's path."""

    def write(refs: Sequence[StageRef], **fields: Any) -> Path:
        path = tmp_path / "route.toml"
        path.write_text(format_route_file(RouteFile(path, Route(tuple(refs)), fields.pop("context", {}), **fields)))
        return path

    return write
