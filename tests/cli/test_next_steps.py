"""A command that fails says what is wrong on one line and what to do on the next, whatever went wrong."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable, Iterator

import pytest
from cli.commands import Result

import dgr.errors
from dgr.cli.command_line import _parser
from dgr.cli.exit_codes import run_command
from dgr.errors import DgrError
from dgr_bench.cli import _parser as bench_parser

ERRORS = [found for _, found in inspect.getmembers(dgr.errors, inspect.isclass) if issubclass(found, DgrError)]
OTHERS: list[Exception] = [
    FileNotFoundError(2, "No such file", "a\nb"),
    PermissionError(13, "no", "x"),
    OSError(28, "full"),
    MemoryError(),
]


def lines_of(error: Exception, capsys: pytest.CaptureFixture[str]) -> list[str]:
    def fail() -> int:
        raise error

    assert run_command("dgr", fail) in (1, 2)
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    "error", [*(found("a value\nis wrong") for found in ERRORS), *OTHERS], ids=lambda error: type(error).__name__
)
def test_any_error_is_two_lines(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    said, step = lines_of(error, capsys)
    assert said.startswith("dgr: error: ")
    assert step.startswith("dgr: next: ")
    assert step.endswith(f" [{type(error).__name__}]")


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_has_a_cause_and_a_step_of_its_own(error: type[DgrError]) -> None:
    assert error.__doc__
    assert "next_step" in vars(error)
    assert len(error.next_step) > 20
    assert error.next_step.isascii()
    assert "\n" not in error.next_step


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for found in action.choices.values():
                yield from commands(found)


PARSERS = [*commands(_parser()), *commands(bench_parser())]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_every_command_refuses_arguments_in_two_lines(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["--no-such-flag", "\x1b[2J", *[f"extra{index}" for index in range(4)]])
    assert end.value.code == 2
    said, step = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{parser.prog}: error: ")
    assert step == f"{parser.prog}: next: `{parser.prog} --help` lists what it takes [arguments]"
    assert "\x1b" not in said


def test_a_flag_that_a_command_lacks_is_told_by_that_command(run: Callable[..., Result]) -> None:
    said, step = run("generate", "--modle", "x.gguf", "--prompt", "x").err.splitlines()
    assert said == "dgr generate: error: unrecognized arguments: --modle x.gguf; did you mean --model?"
    assert "`dgr generate --help`" in step
    assert run("doctor", "route.toml").err.splitlines()[0] == "dgr doctor: error: unrecognized arguments: route.toml"


def test_the_steps_that_commands_name_are_commands(run: Callable[..., Result]) -> None:
    known = {parser.prog.split()[-1] for parser in commands(_parser())}
    for error in ERRORS:
        for named in error.next_step.split("`")[1::2]:
            if named.startswith("dgr "):
                assert named.split()[1] in known, (error, named)
    assert run("inspect", os.devnull).err.splitlines()[1].endswith("[ArtifactError]")
