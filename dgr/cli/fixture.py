"""``dgr fixture``: write a small DeepSeek V4 model."""

from __future__ import annotations

import argparse
import json
from typing import Any

import attrs

from dgr.model.targets import find_target, not_writable
from dgr.selftest.fixture.writer import add_arguments, write_from_arguments

__all__ = ["register", "run"]


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "fixture",
        help="write a small V4 model",
        description="Write a small DeepSeek V4 model: the real graph and schedule, narrow widths, the same bytes for a"
        " seed on every machine.",
    )
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    target = find_target(args.out)  # looked at before anything is computed
    if target.direct:
        raise not_writable(args.out, "a model is a file, and this is none")
    if args.parts == 1:
        args.out = target.file  # what a link leads to is replaced, not the link
    summary = write_from_arguments(args)
    if args.json:
        print(json.dumps(attrs.asdict(summary)))
        return 0
    block = " and the MTP block" if summary.mtp else ""
    print(f"{summary.path}: {summary.file_bytes / 2**20:.1f} MiB, {summary.n_parameters / 1e6:.1f} M parameters")
    print(f"preset {summary.preset}, weights {summary.weights}, seed {summary.seed}, {summary.layers} layers{block}")
    return 0
