"""Entry of the ``dgr`` command: find the command, run it, turn errors into two lines and an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from dgr.cli import (
    benchmark,
    completion,
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
from dgr.cli.streams import print_json
from dgr.cli.versions import version_line, versions

__all__ = ["main"]


class _Version(argparse.Action):
    """Print versions and leave; asked for only when the flag is given."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        words = "show the versions of dgr and of its llama.cpp, and exit; with --json after it every identity"
        super().__init__(option_strings, dest, nargs=0, help=words)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(version_line())
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
    completion.register(subparsers, parser)
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
    words = sys.argv[1:] if argv is None else list(argv)
    if sorted(words) == ["--json", "--version"]:
        print_json(versions())
        return 0
    args = _parser().parse_args(words)
    start_logging(args.log, args.log_format)
    return int(args.run(args))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 failed, 2 bad input, 130 interrupted."""
    return run_command("dgr", lambda: _run(argv))
