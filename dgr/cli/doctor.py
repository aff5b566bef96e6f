"""``dgr doctor``: what is wrong with a route, or with this machine, and what to do about it."""

from __future__ import annotations

import argparse
from typing import Any

import attrs
import msgspec
import trio

from dgr.cli.doctor_here import examine_here
from dgr.cli.options import add_link_arguments, link_policy_of
from dgr.cli.progress import progress_bar
from dgr.cli.streams import print_json
from dgr.cluster.doctor import RouteReport, examine
from dgr.cluster.route_file import read_route_file
from dgr.core.units import human_bytes
from dgr.text import one_line

__all__ = ["register", "run"]


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="examine the stages of a route, or this machine",
        description="Reach every stage of a route, compare what they are, measure round trip and bandwidth from here, fence"
        " the route once, and say for every problem what to do next. Without a route: what this build has kernels for, which"
        " types are exact here, what the machine has. Exit code 0: healthy, 1: problems.",
    )
    parser.add_argument("--route", metavar="TOML", help="the route file (default: this machine alone is examined)")
    add_link_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.route is None:
        return examine_here(args)
    file = read_route_file(args.route)
    policy = link_policy_of(args, file.tls)
    with progress_bar("examining the stages"):
        report = trio.run(examine, file, policy)
    if args.json:
        print_json(_as_json(report))
    else:
        _print(report)
    return 1 if report.problems else 0


def _as_json(report: RouteReport) -> dict[str, Any]:
    stages = []
    for stage in report.stages:
        fields = attrs.asdict(stage, recurse=False)
        if stage.identity is not None:
            fields["identity"] = msgspec.structs.asdict(stage.identity)
            fields["identity"] |= {
                "layers": str(stage.identity.layers),
                "context": msgspec.structs.asdict(stage.identity.context),
            }
        stages.append(fields)
    return {
        "healthy": not report.problems,
        "stages": stages,
        "problems": [attrs.asdict(problem) for problem in report.problems],
        "warnings": [attrs.asdict(warning) for warning in report.warnings],
        "fence_seconds": report.fence_seconds,
    }


def _print(report: RouteReport) -> None:
    for stage in report.stages:
        if stage.identity is None or stage.round_trip is None or stage.bandwidth is None:
            print(f"{stage.address:<24} {stage.layers:<6} of no use: see below")
        else:
            print(
                f"{stage.address:<24} {stage.layers:<6} round trip {1e3 * stage.round_trip:8.3f} ms"
                f"   {human_bytes(int(stage.bandwidth)):>10}/s   {one_line(stage.identity.runtime)}"
                f"   kernels {one_line(stage.identity.kernel_fingerprint[:8])}"
                f"   {stage.identity.context.numerics} on {one_line(', '.join(stage.identity.devices)) or 'unknown devices'}"
            )
    for problem in (*report.problems, *report.warnings):
        print(f"\n{problem.where}: {one_line(problem.what)}\n  next: {problem.next_step}")
    if report.fence_seconds is not None:
        print(f"healthy: every stage fenced an epoch within {1e3 * report.fence_seconds:.1f} ms")
