"""``dgr-bench certify``: the long-context certificate of a model on a split or a route."""

from __future__ import annotations

import argparse
import sys

from dgr.cli.options import add_link_arguments
from dgr_bench.benchmark import Benchmark, benchmark_command
from dgr_bench.certify.mutants import open_selftest
from dgr_bench.certify.profiles import PROFILES, QUICK
from dgr_bench.certify.run import add_subject_arguments, asked_profile, native_profile, open_job


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        metavar="P",
        help=f"{', '.join(PROFILES)}, or a JSON file (default: fixture-2; with --quick: {QUICK})",
    )
    add_subject_arguments(parser)
    parser.add_argument(
        "--numerics",
        choices=("exact", "native"),
        default="exact",
        help="native: the profile in native numerics, and how far they, other thread counts and the devices here are from"
        " exact ones, as distributions",
    )
    parser.add_argument("--selftest", action="store_true", help="run the mutants that every check must catch")
    add_link_arguments(parser)


def _certify(args: argparse.Namespace) -> Benchmark:
    if args.selftest:
        return open_selftest()
    profile = asked_profile(args, "fixture-2")
    if args.numerics == "native":
        profile = native_profile(args, profile)
    job = open_job(args, profile)
    print(f"profile {job.plan.name}, digest {job.plan.digest}, n_ctx {job.plan.n_ctx}", file=sys.stderr)
    return job


COMMAND = benchmark_command(
    "certify",
    "the long-context certificate of a model on a split or a route",
    "Certify that a model's state stays correct at long contexts: run every length of a profile on the whole model and on the"
    " stages, in several chunkings, on several threads, cancelled and re-prefilled; compare tokens, logits and states bit for"
    " bit, and the states with their closed forms.",
    _add_arguments,
    _certify,
)
