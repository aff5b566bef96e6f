"""``dgr stage``: one layer range as a process that pipelines and other stages reach."""

from __future__ import annotations

import argparse
import logging
import math
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from dgr.artifact.artifact import Artifact
from dgr.cli.notify import open_notifier
from dgr.cli.options import (
    add_context_arguments,
    add_link_arguments,
    context_of,
    link_policy_of,
    placement_of,
    require_extra,
)
from dgr.cli.progress import progress_bar, silent_bar
from dgr.cli.streams import print_json, until_input_ends
from dgr.cluster.certificates import CertificateSource, sources_of, watch
from dgr.cluster.server import StageServer
from dgr.core.route import LayerRange
from dgr.core.units import human_bytes
from dgr.engine.budget import check_budget, parse_budget
from dgr.engine.llama import LlamaEngine, estimate_memory
from dgr.engine.opening import warn_beyond_training
from dgr.errors import InputError
from dgr.protocol.lossless import require_packer
from dgr.stage.shard import MIN_IDLE, Shard, open_shard
from dgr.wire.nurseries import open_nursery
from dgr.wire.tcp import address_of, listen

if TYPE_CHECKING:
    from dgr.serving.monitor.stage import StageMonitor

__all__ = ["register", "run"]

_log = logging.getLogger("dgr.stage")

#: Seconds without work after which a session does not hold up the end of a stage that drains; and between two looks.
_IDLE, _LOOK = 10, 0.1


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "stage",
        help="serve a layer range to pipelines",
        description="Load a layer range and serve it. The stage is told by each pipeline which stage comes next; it needs to"
        " know no other. It prints its address when it is ready, and ends on SIGINT or SIGTERM.",
    )
    parser.add_argument("model", metavar="MODEL", help="the GGUF file")
    parser.add_argument("--layers", required=True, metavar="A:B", help="main layers to own")
    parser.add_argument(
        "--listen",
        required=True,
        metavar="HOST:PORT",
        help="where to listen: port 0 takes any free one, unix:/PATH links processes of this user on this host",
    )
    parser.add_argument("--sessions", type=int, default=4, metavar="N", help="sequence slots (n_seq_max, default: 4)")
    parser.add_argument("--ttl", type=float, default=math.inf, metavar="SECONDS", help="drop sessions idle for longer")
    parser.add_argument(
        "--least-idle",
        dest="min_idle",
        type=float,
        default=MIN_IDLE,
        metavar="SECONDS",
        help=f"sessions idle for less do not make room for others (default: {MIN_IDLE:g})",
    )
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="answer /metrics (Prometheus), /health and /ready there over HTTP, from the start (extra `metrics`)",
    )
    parser.add_argument(
        "--drain",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="on a signal take nobody new, and end when no session is left, or after this long, or on a second signal"
        " (default: 0, end at once)",
    )
    add_context_arguments(parser)
    add_link_arguments(parser)
    parser.add_argument(
        "--until-stdin-closes", action="store_true", help="also end when standard input ends: with the parent process"
    )
    parser.add_argument("--json", action="store_true", help="print the address and the identity as one JSON line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.metrics is not None:
        require_extra("dgr stage --metrics", "metrics", ("anycorn", "prometheus_client", "starlette"))
    trio.run(_stage, args)
    return 0


async def _stage(args: argparse.Namespace) -> None:
    policy = link_policy_of(args)
    if not args.ttl > 0:
        raise InputError(f"--ttl is {args.ttl:g}; give the seconds after which an idle session is dropped")
    if not args.min_idle >= 0:
        raise InputError(f"--least-idle is {args.min_idle:g}; give 0 or more seconds")
    if not 0 <= args.drain <= 86_400:
        raise InputError(f"--drain is {args.drain:g} seconds; give 0 to 86400")
    layers = LayerRange.parse(args.layers)
    context = context_of(args)
    require_packer(context.wire)
    # The port is taken before the weights are read: a wrong address shows at once.
    listeners = await listen(args.listen, credentials=policy.credentials, allow_plain=policy.allow_plain)
    async with AsyncExitStack() as stack:
        manager = await stack.enter_async_context(open_notifier(f"loading layers {layers}"))
        certificates = sources_of(policy.credentials)
        monitor, metrics = await _open_monitor(stack, args.metrics, certificates)
        engine = await trio.to_thread.run_sync(_load, args, layers)
        stack.callback(engine.stop)
        server = StageServer(policy)
        async with (
            open_shard(engine, server.dial, name=str(layers), idle_timeout=args.ttl, min_idle=args.min_idle) as shard,
            open_nursery() as nursery,
        ):
            await nursery.start(server.serve, shard, listeners)
            nursery.start_soon(watch, *certificates)
            if monitor is not None:
                monitor.opened(shard, server)
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                _announce(args, listeners, engine, metrics)  # from here on a signal is an orderly end
                manager.ready(f"serves layers {layers}")
                by_signal = await _until_told(args, signals)
                if by_signal and args.drain:
                    manager.status("draining")
                    await _drain(shard, args.drain, signals)
            manager.stopping()
            if monitor is not None:
                monitor.ending()
            engine.abort()  # a step under way ends early
            nursery.cancel_scope.cancel()
    context = engine.describe().context
    _log.info("stage %s with %d slots of %d tokens ended", layers, context.n_seq_max, context.n_ctx)


async def _open_monitor(
    stack: AsyncExitStack, address: str | None, certificates: tuple[CertificateSource, ...]
) -> tuple[StageMonitor | None, list[str]]:
    """What ``--metrics`` asks for, until the stack ends, and where it is."""
    if address is None:
        return None, []
    from dgr.serving.monitor.endpoint import open_endpoint
    from dgr.serving.monitor.stage import StageMonitor

    monitor = StageMonitor(certificates)
    return monitor, await stack.enter_async_context(open_endpoint(address, monitor))


def _load(args: argparse.Namespace, layers: LayerRange) -> LlamaEngine:
    # A parent process shows that its stages are starting; their own displays would overwrite each other.
    showing = silent_bar if args.until_stdin_closes else progress_bar
    artifact, context, placement = Artifact.open(Path(args.model)), context_of(args), placement_of(args)
    if args.memory is not None:
        with showing("counting the buffers"):
            report = estimate_memory(artifact, layers, context, placement)
        check_budget({f"stage {layers}": report}, context.n_seq_max, parse_budget(args.memory))
    artifact.check(layers)
    warn_beyond_training(artifact.hp, context.n_ctx)
    with showing("reading the weights") as progress:
        artifact.verify_weights(layers, progress)
    with showing("loading the weights"):
        return LlamaEngine(
            artifact, layers, context, threads=args.threads, mmap=args.mmap, mlock=args.mlock, placement=placement
        )


def _announce(
    args: argparse.Namespace, listeners: list[trio.SocketListener], engine: LlamaEngine, metrics: list[str]
) -> None:
    address = address_of(listeners[0])
    about, memory = engine.describe(), engine.memory()
    slots = f"{about.context.n_seq_max} slot{'' if about.context.n_seq_max == 1 else 's'}"
    if args.json:
        line = {
            "address": address,
            "layers": str(about.layers),
            "artifact": about.artifact,
            "kernel_fingerprint": about.kernel_fingerprint,
            "devices": list(about.devices),
            "weights_bytes": memory.weights,
            "state_bytes": sum(memory.state.values()),
            "compute_bytes": memory.compute,
            "device_bytes": {name: device.total for name, device in memory.devices.items()},
            "graph_splits": engine.graph_splits,
        }
        if metrics:
            line["metrics"] = [f"http://{where}/metrics" for where in metrics]
        print_json(line)
    else:
        print(
            f"stage {about.layers} listens on {address}, {about.context.numerics.value} numerics on"
            f" {', '.join(about.devices)}, {slots} of {about.context.n_ctx} tokens: weights"
            f" {human_bytes(memory.weights)}, state"
            f" {human_bytes(sum(memory.state.values()))}, compute {human_bytes(memory.compute)}"
            + "".join(f"; of it {human_bytes(device.total)} on {name}" for name, device in memory.devices.items())
            + (f"; metrics at http://{metrics[0]}/metrics" if metrics else ""),
            flush=True,
        )


async def _until_told(args: argparse.Namespace, signals: AsyncIterator[int]) -> bool:
    """Wait for a signal, or for the end of standard input; whether it was a signal."""
    by_signal = False
    async with open_nursery() as nursery:
        if args.until_stdin_closes:
            nursery.start_soon(until_input_ends, nursery.cancel_scope.cancel)
        async for _ in signals:
            by_signal = True
            break
        nursery.cancel_scope.cancel()
    return by_signal


async def _drain(shard: Shard, seconds: float, signals: AsyncIterator[int]) -> None:
    """Take nobody new, and wait until no session is left, for ``seconds``, or for another signal."""
    shard.draining.begin(_IDLE)
    with trio.move_on_after(seconds):
        async with open_nursery() as nursery:

            async def empty() -> None:
                while shard.statistics().sessions:  # noqa: ASYNC110 (a shard's figures tell nobody)
                    await trio.sleep(_LOOK)
                nursery.cancel_scope.cancel()

            nursery.start_soon(empty)
            async for _ in signals:
                break
            nursery.cancel_scope.cancel()
