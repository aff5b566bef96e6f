"""``dgr fixture``: write a DeepSeek V4 model, small or of some layers."""

from __future__ import annotations

import argparse
from typing import Any

import attrs

from dgr.cli.progress import progress_bar
from dgr.cli.streams import print_json
from dgr.core.files.targets import Target, find_target, not_writable
from dgr.core.route import LayerRange
from dgr.core.units import human_bytes
from dgr.errors import InputError
from dgr.selftest.fixture import PRESETS, WEIGHTS, write_fixture

__all__ = ["register", "run"]


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "fixture",
        help="write a small V4 model",
        description="Write a DeepSeek V4 model: the real graph and schedule, narrow widths (or the published ones, of some"
        " layers), the same bytes for a seed on every machine.",
    )
    parser.add_argument("out", metavar="OUT.gguf", help="file to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of every value (default: 0)")
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="widths (default: tiny; wide for K-quants; real: the published ones, 3.4 GiB a layer)",
    )
    parser.add_argument(
        "--layers",
        default="43",
        metavar="N|A:B",
        help="first N layers of the schedule, as a whole model (default: 43); or layers A to B - 1 of all 43, as a slice",
    )
    parser.add_argument("--weights", choices=WEIGHTS, help="tensor types (default: f32; mixed for the preset real)")
    parser.add_argument("--mtp", action="store_true", help="append the MTP block (dgr never runs it)")
    parser.add_argument(
        "--sparse", action="store_true", help="header and sizes only; the weights are a hole in the file"
    )
    parser.add_argument(
        "--parts",
        type=int,
        default=1,
        metavar="N",
        help="write N files, OUT-00001-of-0000N.gguf and so on, and the model's manifest; the first holds no tensor",
    )
    parser.add_argument(
        "--learned",
        action="store_true",
        help="write the model that has learned instead: English, a byte a token, and recall of what was stated far back"
        " (--weights alone goes with it; default: mixed)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def _layers(text: str) -> int | LayerRange:
    if ":" in text:
        return LayerRange.parse(text)
    if not (text.isascii() and text.isdigit()):
        raise InputError(f"--layers is {text!r}; give a number of layers, or a range A:B such as 2:4")
    return int(text[:9])


def _write_learned(args: argparse.Namespace, target: Target) -> int:
    from dgr.selftest.learned.model import learned_summary, write_learned  # numpy is loaded with it

    for flag, given in (
        ("--seed", args.seed != 0),
        ("--preset", args.preset is not None),
        ("--layers", args.layers != "43"),
        ("--mtp", args.mtp),
        ("--sparse", args.sparse),
        ("--parts", args.parts != 1),
    ):
        if given:
            raise InputError(f"{flag} cannot go with --learned: that model is what it is; give --weights alone")
    summary = learned_summary(write_learned(target.file, args.weights or "mixed"), args.weights or "mixed")
    summary = attrs.evolve(summary, path=args.out)
    if args.json:
        print_json(attrs.asdict(summary))
        return 0
    print(f"{summary.path}: {human_bytes(summary.file_bytes)}, {summary.n_parameters / 1e6:.1f} M parameters")
    print(f"learned, weights {summary.weights}, {summary.layers} layers")
    return 0


def run(args: argparse.Namespace) -> int:
    layers = _layers(args.layers)
    target = find_target(args.out)  # looked at before anything is computed
    if target.direct:
        raise not_writable(args.out, "a model is a file, and this is none")
    if args.learned:
        return _write_learned(args, target)
    with progress_bar("writing the model") as progress:
        summary = write_fixture(
            target.file if args.parts == 1 else args.out,  # what a link leads to is replaced, not the link
            seed=args.seed,
            preset=args.preset,
            layers=layers,
            mtp=args.mtp,
            weights=args.weights,
            sparse=args.sparse,
            parts=args.parts,
            progress=progress,
        )
    # Said as it was asked for: through a link it was written where that leads.
    summary = attrs.evolve(summary, path=args.out) if args.parts == 1 else summary
    if args.json:
        print_json(attrs.asdict(summary))
        return 0
    block = " and the MTP block" if summary.mtp else ""
    some = "" if isinstance(layers, int) else f" of which it holds {summary.holds}"
    print(f"{summary.path}: {human_bytes(summary.file_bytes)}, {summary.n_parameters / 1e6:.1f} M parameters")
    print(
        f"preset {summary.preset}, weights {summary.weights}, seed {summary.seed}, {summary.layers} layers{some}{block}"
    )
    return 0
