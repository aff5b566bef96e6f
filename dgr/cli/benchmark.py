"""``dgr benchmark``: how fast this host computes, in a file that ``dgr plan --speeds`` reads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from dgr.artifact.artifact import Artifact
from dgr.artifact.speeds import HostSpeed
from dgr.cli.progress import progress_bar
from dgr.cli.streams import print_json
from dgr.cli.tables import render_table
from dgr.core.files.outputs import write_file
from dgr.core.files.targets import find_target
from dgr.core.values import ContextParams, Numerics
from dgr.engine.speeds import SpeedPlan, measure_speed
from dgr.errors import InputError

__all__ = ["register", "run"]

_DEFAULTS, _PLAN = ContextParams(), SpeedPlan()


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "benchmark",
        help="measure how fast this host computes, for dgr plan",
        description="Measure seconds of a decode step and of a prefill chunk by kind of layer, on ranges of four layers at"
        " most. Run it on every host, with what its stage will have (threads, numerics, --ubatch), and nothing"
        " else running.",
    )
    parser.add_argument("model", metavar="MODEL", help="the GGUF file, or the first of its parts")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="compute threads of the stage (default: 1)")
    parser.add_argument(
        "--sequences",
        default=",".join(map(str, _PLAN.sequences)),
        metavar="N,...",
        help=f"sequences of a decode step, from 1 on (default: {','.join(map(str, _PLAN.sequences))})",
    )
    parser.add_argument(
        "--depth",
        type=int,
        default=_PLAN.depth,
        metavar="N",
        help=f"tokens that a sequence holds when a step is measured (default: {_PLAN.depth})",
    )
    parser.add_argument("--ubatch", type=int, default=_DEFAULTS.n_ubatch, metavar="N", help="tokens of a chunk")
    parser.add_argument("--type-k", default=_DEFAULTS.type_k, metavar="TYPE", help="K-cache type: f16, f32, q8_0")
    parser.add_argument("--numerics", choices=[one.value for one in Numerics], default=_DEFAULTS.numerics.value)
    parser.add_argument("-o", "--out", metavar="HOST.json", help="write the file that dgr plan reads")
    parser.add_argument("--json", action="store_true", help="print what the file would hold")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        sequences = tuple(int(part) for part in args.sequences.split(","))
    except ValueError as error:
        raise InputError(f"--sequences is {args.sequences!r}; give numbers from 1 on, as 1,2,4") from error
    artifact = Artifact.open(args.model)
    target = None if args.out is None else find_target(args.out)
    if target is not None:
        target.check_apart(*artifact.parts.paths)
        if target.is_standard_output:
            raise InputError("-o names standard output, where --json prints what the file would hold; leave one out")
    context = ContextParams(
        n_batch=args.ubatch, n_ubatch=args.ubatch, type_k=args.type_k, numerics=Numerics(args.numerics)
    )
    with progress_bar("measuring ranges", str) as progress:
        speed = measure_speed(artifact, context, SpeedPlan(args.threads, sequences, args.depth), progress)
    text = msgspec.json.format(msgspec.json.encode(speed)).decode() + "\n"
    if args.json:
        print_json(msgspec.to_builtins(speed))
    else:
        print(_table(speed))
    if target is not None:
        write_file(target, text.encode())
        if not args.json:
            print(f"\nwritten to {Path(args.out)}; plan with: dgr plan MODEL --speeds {args.out},… --ctx …")
    return 0


def _table(speed: HostSpeed) -> str:
    timings = (*speed.decode, *speed.prefill)
    heads = [f"{timing.sequences} x {timing.tokens}" for timing in timings]
    rows = [["milliseconds of", *heads], ["a call", *(f"{1e3 * timing.call:.3f}" for timing in timings)]]
    rows += [
        [f"a layer, {kind}", *(f"{1e3 * timing.layers[kind]:.3f}" for timing in timings)] for kind in timings[0].layers
    ]
    rows += [
        [f"the {end}, beside", *(f"{1e3 * getattr(timing, end):.3f}" for timing in timings)] for end in ("head", "tail")
    ]
    return render_table(rows, numeric=range(1, len(rows[0])))
