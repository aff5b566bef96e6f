"""``dgr plan``: cuts that fit the memory of each host, as a table and as a route file."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from dgr.artifact.artifact import Artifact
from dgr.artifact.pace import HopSpeed, Pace, RoutePace, Workload
from dgr.artifact.plan import Goal, Plan, check_fits, costs_of, propose, propose_fast, refine
from dgr.artifact.speeds import layer_kinds, read_speed
from dgr.cli.progress import progress_bar
from dgr.cli.streams import print_json
from dgr.cli.tables import render_table
from dgr.client.pace import CHUNK_SECONDS
from dgr.cluster.route_file import RouteFile, format_route_file
from dgr.core.files.outputs import write_file
from dgr.core.files.targets import find_target
from dgr.core.route import LayerRange, Route, StageRef
from dgr.core.units import human_bytes
from dgr.core.values import ContextParams, Numerics
from dgr.engine.budget import parse_budget
from dgr.engine.llama import estimate_memory
from dgr.engine.opening import warn_beyond_training
from dgr.errors import InputError
from dgr.v4.state_map import ContextShape

__all__ = ["register", "run"]

_log = logging.getLogger("dgr.plan")

_DEFAULTS = ContextParams()
_FIRST_PORT = 7701
#: A hop where nothing is said: hosts side by side.
_HOP = "0.5ms/1GiB"
_PROMPT = 2048
_GOALS = {"latency": Goal.SUM, "sessions": Goal.SLOWEST, "prefill": Goal.SLOWEST}
_HOP_FORM = re.compile(r"(\d+(?:\.\d*)?)\s*ms/(.+)")


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "plan",
        help="propose cuts that fit each host",
        description="Propose layer ranges for some stages, so that weights, state and compute buffers fit the memory of each"
        " host and the stages weigh about the same; or, with --speeds, so that the route is as fast as it can be. Weights are"
        " not read; the buffers are counted by the native allocator without allocating them. Exit code 2 when no plan fits: the"
        " message says where, and by how many bytes.",
    )
    parser.add_argument("model", metavar="MODEL", help="the GGUF file, or the first of its parts")
    parser.add_argument(
        "--stages", type=int, metavar="N", help="stages (default: as many as memory sizes or addresses)"
    )
    parser.add_argument(
        "--ctx", type=int, required=True, metavar="C", help="tokens per session, rounded up to a multiple of 256"
    )
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
    parser.add_argument(
        "--speeds",
        metavar="HOST.json,...",
        help="what `dgr benchmark` measured on each host, head first; one file counts for all. The plan is then the fastest"
        " one that fits, and says what it will do",
    )
    parser.add_argument(
        "--hops",
        metavar="MS/RATE,...",
        help="round trip and bytes a second from client to head, between stages, and from tail to client, as 20ms/10MiB;"
        f" one counts for all (default: {_HOP})",
    )
    parser.add_argument(
        "--goal",
        choices=[*_GOALS],
        help="what to make fastest: one session's tokens (latency), those of all sessions (sessions), or prompts (prefill)"
        " (default: latency, or sessions if there are several)",
    )
    parser.add_argument(
        "--prompt",
        type=int,
        default=_PROMPT,
        metavar="N",
        help=f"tokens of the prompt to predict for (default: {_PROMPT})",
    )
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
    memory, addresses, speeds = _listed(args.memory), _listed(args.addresses), _listed(args.speeds)
    n_stages = args.stages or max(len(addresses or ()), len(memory or ()), len(speeds or ()))
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
    warn_beyond_training(artifact.hp, args.ctx)
    shape = ContextShape(args.ctx, min(args.ubatch, args.batch), args.sessions, args.type_k)

    costs = costs_of(artifact, shape)

    def compute(layers: LayerRange) -> int:
        """Everything beside weights and state: buffers, and the allocator's padding between tensors."""
        return estimate_memory(artifact, layers, context).total - costs.weights_of(layers) - costs.state_of(layers)

    sizes = None if memory is None else [parse_budget(size) for size in memory]
    pace = None if speeds is None else _pace(args, artifact, speeds, n_stages)
    choose = (
        propose if pace is None else partial(propose_fast, goal=_goal(args), seconds=_seconds(args, pace, n_stages))
    )
    with progress_bar("counting the buffers"):
        plan = refine(costs, n_stages, sizes, compute, choose)
    predicted = None if pace is None else _predicted(args, pace, plan)
    file = _route_file(args, artifact, plan, hosts)
    text = "" if args.out is None else format_route_file(file)
    if args.json:
        print_json(_object(plan, hosts, file, predicted))
    elif args.out != "-":
        print(_table(plan, hosts, predicted))
        if predicted is not None:
            print(_words(args, predicted))
    check_fits(plan, hosts)
    if args.out == "-":
        print(text, end="")
    elif target is not None:
        write_file(target, text.encode())
        if not args.json:
            print(f"\nwritten to {target.path}; start the stages with: dgr up {target.path}")
    return 0


def _goal(args: argparse.Namespace) -> Goal:
    return _GOALS[args.goal or ("latency" if args.sessions == 1 else "sessions")]


def _pace(args: argparse.Namespace, artifact: Artifact, paths: list[str], n_stages: int) -> RoutePace:
    if args.prompt < 1:
        raise InputError(f"--prompt is {args.prompt}; give the tokens of a prompt")
    if len(paths) not in (1, n_stages):
        raise InputError(
            f"{len(paths)} files of speeds for {n_stages} stages; give one for all, or one per stage, head first"
        )
    speeds = [read_speed(path) for path in paths]
    for path, speed in zip(paths, speeds, strict=True):
        if speed.numerics != args.numerics:
            raise InputError(f"{path} was measured with {speed.numerics} numerics; the plan is for {args.numerics}")
    least, path = min((speed.decode[-1].sequences, path) for path, speed in zip(paths, speeds, strict=True))
    if least < args.sessions:
        _log.warning(
            "%s was measured with at most %d sequences; what is predicted for %d sessions goes on beyond that in a straight"
            " line: measure with dgr benchmark --sequences 1,2,…,%d",
            path, least, args.sessions, args.sessions,
        )  # fmt: skip
    hops = [_hop(text) for text in _listed(args.hops) or [_HOP]]
    if len(hops) not in (1, n_stages + 1):
        raise InputError(
            f"{len(hops)} hops for {n_stages} stages; give one for all, or {n_stages + 1}: from the client, between, and back"
        )
    return RoutePace(
        speeds=speeds * (n_stages if len(speeds) == 1 else 1),
        hops=hops * (n_stages + 1 if len(hops) == 1 else 1),
        kinds=layer_kinds(artifact),
        boundary=4 * artifact.hp.boundary_width,
    )


def _hop(text: str) -> HopSpeed:
    match = _HOP_FORM.fullmatch(text)
    if match is None:
        raise InputError(f"hop {text[:40]!r} is not like {_HOP}: a round trip in ms, and bytes a second")
    return HopSpeed(float(match[1]) / 1e3, parse_budget(match[2]))


def _chunk(args: argparse.Namespace) -> int:
    return int(min(args.ubatch, args.batch))


def _seconds(args: argparse.Namespace, pace: RoutePace, n_stages: int) -> Callable[[int, LayerRange], float]:
    """What a stage takes, by the plan's goal."""
    if args.goal == "prefill":
        return lambda index, layers: pace.chunk(index, layers, _chunk(args))
    together = 1 if _goal(args) is Goal.SUM else -(-args.sessions // n_stages)
    return lambda index, layers: pace.step(index, layers, together)


def _predicted(args: argparse.Namespace, pace: RoutePace, plan: Plan) -> Pace:
    cuts = [stage.layers for stage in plan.stages]
    chunk = _chunk(args)
    if Numerics(args.numerics).exact_kernels:
        chunk = pace.timely_chunk(cuts, chunk, CHUNK_SECONDS)
    return pace.predict(cuts, Workload(args.sessions, args.prompt, chunk))


def _words(args: argparse.Namespace, predicted: Pace) -> str:
    many = f"; {args.sessions} sessions together {predicted.tokens_per_second:.1f}" if args.sessions > 1 else ""
    return (
        f"\npredicted: {1 / predicted.ring:.1f} tokens/s of one session (a ring of {1e3 * predicted.ring:.1f} ms){many};"
        f" first token of a prompt of {args.prompt} after {predicted.first_token:.2f} s, in"
        f" chunks of {predicted.chunk_tokens}"
    )


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


def _object(plan: Plan, hosts: list[str], file: RouteFile, predicted: Pace | None) -> dict[str, Any]:
    return {
        "fits": plan.fits,
        "predicted": None if predicted is None else attrs.asdict(predicted),
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


def _table(plan: Plan, hosts: list[str], predicted: Pace | None) -> str:
    rows = [["stage", "layers", "count", "weights", "state", "compute", "total", "memory", "free"]]
    if predicted is not None:
        rows[0] += ["step, ms", "chunk, ms"]
    for index, (host, stage) in enumerate(zip(hosts, plan.stages, strict=True)):
        room = "" if stage.memory is None else human_bytes(stage.memory)
        free = "" if stage.memory is None else human_bytes(stage.memory - stage.total)
        if stage.missing:
            free = f"lacks {human_bytes(stage.missing)}"
        sizes = (stage.weights, stage.state, stage.compute, stage.total)
        rows.append([host, str(stage.layers), str(len(stage.layers)), *map(human_bytes, sizes), room, free])
        if predicted is not None:
            rows[-1] += [f"{1e3 * seconds[index]:.2f}" for seconds in (predicted.decode, predicted.chunk)]
    return render_table(rows, numeric=range(2, len(rows[0])))
