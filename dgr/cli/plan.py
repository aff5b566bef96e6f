"""``dgr plan``: cuts that fit the memory of each host, as a table and as a route file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dgr.artifact.artifact import Artifact
from dgr.artifact.plan import Plan, check_fits, costs_of, refine
from dgr.cli.progress import progress_bar
from dgr.cli.streams import print_json
from dgr.cli.tables import render_table
from dgr.cluster.route_file import RouteFile, format_route_file
from dgr.core.files.outputs import write_file
from dgr.core.files.targets import find_target
from dgr.core.route import LayerRange, Route, StageRef
from dgr.core.units import human_bytes
from dgr.core.values import ContextParams, Numerics
from dgr.engine.budget import parse_budget
from dgr.engine.llama import estimate_memory
from dgr.errors import InputError
from dgr.v4.state_map import ContextShape

__all__ = ["register", "run"]

_DEFAULTS = ContextParams()
_FIRST_PORT = 7701


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "plan",
        help="propose cuts that fit each host",
        description="Propose layer ranges for some stages, so that weights, state and compute buffers fit the memory of each"
        " host and the stages weigh about the same. Weights are not read; the buffers are counted by the native allocator"
        " without allocating them. Exit code 2 when no plan fits: the message says where, and by how many bytes.",
    )
    parser.add_argument("model", metavar="MODEL", help="the GGUF file, or the first of its parts")
    parser.add_argument(
        "--stages", type=int, metavar="N", help="stages (default: as many as memory sizes or addresses)"
    )
    parser.add_argument("--ctx", type=int, required=True, metavar="C", help="tokens per session")
    parser.add_argument(
        "--sessions", type=int, default=1, metavar="S", help="sequence slots of each stage (default: 1)"
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE,...",
        help="memory of each host, head first, such as 64GiB,24GiB; one size counts for all",
    )
    parser.add_argument(
        "--addresses",
        metavar="HOST:PORT,...",
        help=f"addresses of the stages (default: 127.0.0.1:{_FIRST_PORT} and on)",
    )
    parser.add_argument(
        "--batch", type=int, default=_DEFAULTS.n_batch, metavar="N", help="most tokens in a native call"
    )
    parser.add_argument("--ubatch", type=int, default=_DEFAULTS.n_ubatch, metavar="N", help="tokens of a sub-batch")
    parser.add_argument("--type-k", default=_DEFAULTS.type_k, metavar="TYPE", help="K-cache type: f16, f32, q8_0")
    parser.add_argument("--numerics", choices=[one.value for one in Numerics], default=_DEFAULTS.numerics.value)
    parser.add_argument("-o", "--out", metavar="ROUTE.toml", help="write a route file (- prints it)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _addresses(given: list[str] | None, n_stages: int) -> list[str]:
    addresses = given or [f"127.0.0.1:{_FIRST_PORT + index}" for index in range(n_stages)]
    if len(addresses) != n_stages:
        raise InputError(f"{len(addresses)} addresses for {n_stages} stages; give one per stage, head first")
    return addresses


def run(args: argparse.Namespace) -> int:
    memory, addresses = _listed(args.memory), _listed(args.addresses)
    n_stages = args.stages or len(addresses or memory or ())
    if n_stages < 1:
        raise InputError("say how many stages: --stages N")
    artifact = Artifact.open(args.model)
    target = None if args.out in (None, "-") else find_target(args.out)
    if target is not None and target.is_standard_output:
        target, args.out = None, "-"
    if args.json and args.out == "-":
        raise InputError("--json and the route file would share standard output; give -o a file, or leave --json out")
    if target is not None:
        target.check_apart(*artifact.parts.paths)
    hosts = _addresses(addresses, n_stages)
    context = ContextParams(
        n_ctx=args.ctx,
        n_batch=args.batch,
        n_ubatch=args.ubatch,
        n_seq_max=args.sessions,
        type_k=args.type_k,
        numerics=Numerics(args.numerics),
    )
    shape = ContextShape(args.ctx, min(args.ubatch, args.batch), args.sessions, args.type_k)

    costs = costs_of(artifact, shape)

    def compute(layers: LayerRange) -> int:
        """Everything beside weights and state: buffers, and the allocator's padding between tensors."""
        return estimate_memory(artifact, layers, context).total - costs.weights_of(layers) - costs.state_of(layers)

    sizes = None if memory is None else [parse_budget(size) for size in memory]
    with progress_bar("counting the buffers"):
        plan = refine(costs, n_stages, sizes, compute)
    file = _route_file(args, artifact, plan, hosts)
    text = "" if args.out is None else format_route_file(file)
    if args.json:
        print_json(_object(plan, hosts, file))
    elif args.out != "-":
        print(_table(plan, hosts))
    check_fits(plan, hosts)
    if args.out == "-":
        print(text, end="")
    elif target is not None:
        write_file(target, text.encode())
        if not args.json:
            print(f"\nwritten to {target.path}; start the stages with: dgr up {target.path}")
    return 0


def _route_file(args: argparse.Namespace, artifact: Artifact, plan: Plan, hosts: list[str]) -> RouteFile:
    known = artifact.known_manifest()
    route = Route(tuple(StageRef(host, stage.layers) for host, stage in zip(hosts, plan.stages, strict=True)))
    route.check(artifact.hp.n_layers)
    return RouteFile(
        path=Path("route.toml" if args.out in (None, "-") else args.out),
        route=route,
        context={
            "n_ctx": args.ctx,
            "n_batch": args.batch,
            "n_ubatch": args.ubatch,
            "n_seq_max": args.sessions,
            "type_k": args.type_k,
            "numerics": args.numerics,
        },
        artifact=None if known is None else known.identity,
        model=artifact.file.path,
    )


def _object(plan: Plan, hosts: list[str], file: RouteFile) -> dict[str, Any]:
    return {
        "fits": plan.fits,
        "artifact": file.artifact,
        "context": dict(file.context),
        "stages": [
            {
                "address": host,
                "layers": str(stage.layers),
                "weights_bytes": stage.weights,
                "state_bytes": stage.state,
                "compute_bytes": stage.compute,
                "total_bytes": stage.total,
                "memory_bytes": stage.memory,
                "missing_bytes": stage.missing,
            }
            for host, stage in zip(hosts, plan.stages, strict=True)
        ],
    }


def _table(plan: Plan, hosts: list[str]) -> str:
    rows = [["stage", "layers", "count", "weights", "state", "compute", "total", "memory", "free"]]
    for host, stage in zip(hosts, plan.stages, strict=True):
        room = "" if stage.memory is None else human_bytes(stage.memory)
        free = "" if stage.memory is None else human_bytes(stage.memory - stage.total)
        if stage.missing:
            free = f"lacks {human_bytes(stage.missing)}"
        sizes = (stage.weights, stage.state, stage.compute, stage.total)
        rows.append([host, str(stage.layers), str(len(stage.layers)), *map(human_bytes, sizes), room, free])
    return render_table(rows, numeric=range(2, 9))
