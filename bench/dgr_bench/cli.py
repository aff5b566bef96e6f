"""Entry of ``dgr-bench``: find the command, run it, turn errors into two lines and an exit code."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import dgr_bench.compare as compare
import dgr_bench.describe as describe
import dgr_bench.page as page
from dgr.cli.exit_codes import run_command
from dgr.cli.parser import CommandParser
from dgr.errors import InputError
from dgr.text import utf8
from dgr_bench.certify import command as certify
from dgr_bench.certify import real_model, verify
from dgr_bench.drill import command as drill
from dgr_bench.frontier import command as frontier
from dgr_bench.links import hops, lanes, wires
from dgr_bench.overhead import builds, predictions, prefill, servers, sessions
from dgr_bench.overhead import command as overhead
from dgr_bench.peers import command as peers
from dgr_bench.quality import command as quality
from dgr_bench.results import SCHEMA
from dgr_bench.widths import command as widths

_COMMANDS = (
    certify.COMMAND,
    verify.COMMAND,
    compare.COMMAND,
    page.COMMAND,
    real_model.COMMAND,
    describe.PROFILE_COMMAND,
    describe.SCHEMA_COMMAND,
    frontier.COMMAND,
    drill.COMMAND,
    overhead.COMMAND,
    hops.COMMAND,
    builds.COMMAND,
    sessions.COMMAND,
    servers.COMMAND,
    prefill.COMMAND,
    predictions.COMMAND,
    wires.COMMAND,
    lanes.COMMAND,
    peers.COMMAND,
    quality.COMMAND,
    widths.COMMAND,
)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="dgr-bench",
        description="Certify and measure dgr. What measures writes result.json, report.md and plots/ into --out.",
    )
    versions = f"dgr-bench {version('dgr')}, results {SCHEMA}"
    parser.add_argument("--version", action="version", version=versions)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.register(subparsers)
    return parser


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    for word in words:
        if utf8(word) != word:
            raise InputError(
                f"{utf8(word)} is not UTF-8; results are, and could not name it: give the file another name"
            )
    args = _parser().parse_args(words)
    args.command_line = shlex.join(["dgr-bench", *words])
    if getattr(args, "default_out", None) is not None and args.out is None:
        args.out = Path(f"{args.default_out}-quick" if args.quick else args.default_out)
    return int(args.run(args))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 failed or not passed, 2 bad input, 130 interrupted."""
    return run_command("dgr-bench", lambda: _run(argv), "interrupted; the same command goes on from here")
