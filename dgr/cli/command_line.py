"""Entry of the ``dgr`` command: find the command, run it, turn errors into two lines and an exit code."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from dgr.cli import (
    benchmark,
    doctor,
    drain,
    fixture,
    generate,
    inspect,
    keys,
    logits,
    plan,
    selftest,
    serve,
    slices,
    stage,
    top,
    trace,
    up,
)
from dgr.cli.exit_codes import run_command
from dgr.cli.logs import FORMAT_VARIABLE, FORMATS, LEVELS, start_logging
from dgr.cli.parser import CommandParser
from dgr.engine.native import build_info

__all__ = ["main"]


class _Version(argparse.Action):
    """Print versions and leave; asked for only when the flag is given."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the versions of dgr and of its llama.cpp, and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"dgr {version('dgr')}, llama.cpp {build_info()['llama_cpp_commit'][:9]}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="dgr", description="Run DeepSeek V4 Flash as a pipeline of layer-range stages, bit for bit."
    )
    parser.add_argument("--version", action=_Version)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (
        generate,
        serve,
        logits,
        plan,
        benchmark,
        slices,
        stage,
        up,
        drain,
        top,
        trace,
        doctor,
        keys,
        inspect,
        fixture,
        selftest,
    ):
        command.register(subparsers)
    _add_log(parser, {"log": "warning", "log_format": None})
    return parser


def _add_log(parser: argparse.ArgumentParser, defaults: Mapping[str, str | None]) -> None:
    """``--log`` and its format, before the command and after it; one that is not given after it leaves the other in force."""
    parser.add_argument(
        "--log",
        metavar="LEVEL",
        default=defaults.get("log", argparse.SUPPRESS),
        help=f"log level: {', '.join(LEVELS)} (default: warning)",
    )
    parser.add_argument(
        "--log-format",
        choices=FORMATS,
        default=defaults.get("log_format", argparse.SUPPRESS),
        help=f"lines of text, or JSON objects (default: {FORMAT_VARIABLE} of the environment, else text)",
    )
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _add_log(command, {})


def _run(argv: Sequence[str] | None) -> int:
    args = _parser().parse_args(argv)
    start_logging(args.log, args.log_format)
    return int(args.run(args))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 failed, 2 bad input, 130 interrupted."""
    return run_command("dgr", lambda: _run(argv))
