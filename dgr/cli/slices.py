"""``dgr slice``: a file with one stage's share of a model."""

from __future__ import annotations

import argparse
from typing import Any

import attrs

from dgr.artifact.artifact import Artifact
from dgr.artifact.slicing import write_slice
from dgr.cli.progress import progress_bar
from dgr.cli.streams import json_line
from dgr.cli.summary import print_beside
from dgr.core.files.targets import find_target
from dgr.core.route import LayerRange
from dgr.core.units import human_bytes

__all__ = ["register", "run"]


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "slice",
        help="write the share of a model that a layer range needs",
        description="Write a GGUF that holds what a stage of some layers needs and nothing else, so that its host stores and"
        " fetches only its share. It keeps the identity of the model, and `dgr stage` takes it like the model.",
    )
    parser.add_argument("model", metavar="MODEL", help="the GGUF file, or the first of its parts, or a larger slice")
    parser.add_argument("--layers", required=True, metavar="A:B", help="main layers of the slice")
    parser.add_argument("-o", "--out", required=True, metavar="OUT.gguf", help="file to write")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    artifact, layers = Artifact.open(args.model), LayerRange.parse(args.layers)
    artifact.check(layers)
    target = find_target(args.out)
    target.check_apart(*artifact.parts.paths)
    with progress_bar("reading the model") as progress:
        artifact.manifest(progress)
    with progress_bar("writing the slice") as progress:
        summary = write_slice(artifact, layers, target, progress)
    if args.json:
        print_beside(target, json_line(attrs.asdict(summary)))
        return 0
    share = summary.weight_bytes / max(1, artifact.weight_bytes(artifact.hp.whole))
    print_beside(
        target,
        f"{summary.path}: layers {layers}, {summary.n_tensors} tensors, {human_bytes(summary.file_bytes)}"
        f" ({share:.0%} of the weights)\nmodel {summary.identity}, range {summary.range_digest}",
    )
    return 0
