"""Entry of the ``dgr`` command: find the command, run it, turn errors into one line and an exit code."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version

from dgr.cli import doctor, fixture, generate, inspect, keys, logits, plan, selftest, slices, stage, up
from dgr.cli.exit_codes import BAD_INPUT, run_command
from dgr.engine.native import build_info
from dgr.errors import InputError

__all__ = ["main"]


class _Version(argparse.Action):
    """Print versions and leave; asked for only when the flag is given."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the versions of dgr and of its llama.cpp, and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"dgr {version('dgr')}, llama.cpp {build_info()['llama_cpp_commit'][:9]}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dgr", description="Run DeepSeek V4 Flash as a pipeline of layer-range stages, bit for bit."
    )
    parser.add_argument("--version", action=_Version)
    parser.add_argument("--log", metavar="LEVEL", default="warning", help="log level: debug, info, warning, error")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (generate, logits, plan, slices, stage, up, doctor, keys, inspect, fixture, selftest):
        command.register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code: 0, 1 failed, 2 bad input, 130 interrupted."""
    try:
        args = _parser().parse_args(argv)
    except InputError as error:  # a flag that is there only to be refused
        print(f"dgr: error: {error}", file=sys.stderr)
        return BAD_INPUT
    level = logging.getLevelNamesMapping().get(args.log.upper())
    if level is None:
        print(f"dgr: error: --log {args.log!r} is none of debug, info, warning, error", file=sys.stderr)
        return BAD_INPUT
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    return run_command("dgr", lambda: args.run(args))
