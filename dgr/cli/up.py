"""``dgr up``: the stages of a route file as child processes of this one, started again when they end."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from dgr.artifact.artifact import Artifact
from dgr.cli.children import flags_of, python_module, spelled_out
from dgr.cli.logs import log_format
from dgr.cli.notify import Notifier, open_notifier
from dgr.cli.options import add_link_arguments, add_reserved_arguments, link_policy_of, require_extra
from dgr.cli.progress import Activity, progress_bar, say_above
from dgr.cli.streams import json_line
from dgr.cluster.connect import LinkPolicy
from dgr.cluster.keeper import Keeper
from dgr.cluster.rolling import restart_all
from dgr.cluster.route_file import RouteFile, read_route_file
from dgr.cluster.upkeep import Patience
from dgr.core.route import StageRef
from dgr.engine.budget import available_cpus
from dgr.errors import InputError, InvalidRoute
from dgr.wire.nurseries import open_nursery
from dgr.wire.samehost.addresses import socket_path
from dgr.wire.tcp import is_loopback, parse_address

__all__ = ["register", "run", "stage_command"]

_log = logging.getLogger("dgr.up")

#: Keys of a route file's context that are flags of a stage.
_CONTEXT_FLAGS = {
    "n_ctx": "--ctx",
    "n_batch": "--batch",
    "n_ubatch": "--ubatch",
    "type_k": "--type-k",
    "numerics": "--numerics",
    "wire": "--wire",
}


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "up",
        help="run the local stages of a route as child processes",
        description="Start every stage of a route file whose address is on this machine, and start it again when it ends,"
        " freezes or hangs. Each takes its share of the cores. On SIGHUP they are restarted one after another, each when the"
        " one before serves again. Ends on SIGINT or SIGTERM, with all of them; on SIGHUP too where its input is a terminal.",
    )
    parser.add_argument("route", metavar="ROUTE.toml", help="the route file")
    parser.add_argument("--model", metavar="GGUF", help="the model file (default: the route file's)")
    parser.add_argument(
        "--sessions", type=int, default=4, metavar="N", help="sequence slots of each stage (default: 4)"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="compute threads of each stage (default: cores / stages)"
    )
    parser.add_argument("--only", action="append", metavar="ADDRESS", help="start only this stage (may be repeated)")
    parser.add_argument(
        "--frozen-after",
        type=float,
        default=Patience().silence,
        metavar="SECONDS",
        help=f"kill a stage that has not answered for this long (default: {Patience().silence:g})",
    )
    parser.add_argument(
        "--settle",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="on SIGHUP: most seconds for draining a stage, and for its sessions to come back (default: 60)",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="place the stages in a Ray cluster instead, one actor each (extra `ray`; default: the cluster of this host)",
    )
    parser.add_argument(
        "--ray-strategy",
        choices=["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"],
        default="STRICT_SPREAD",
        help="Ray's placement strategy (default: STRICT_SPREAD, a host for each stage)",
    )
    parser.add_argument(
        "-o",
        "--out",
        metavar="ROUTE.toml",
        help="with --ray: write the route there, with the addresses of the stages, now and whenever they change",
    )
    add_link_arguments(parser)
    add_reserved_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="print JSON lines: one for each thing that becomes of a stage"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.ray is not None:
        require_extra("dgr up --ray", "ray", ("ray",))
        if args.only is not None:
            raise InputError("--only names stages of this host, --ray places all of them; give one of the two")
        if args.out is None:
            raise InputError("--ray needs --out ROUTE.toml: Ray says where the stages are, and clients must be told")
    elif args.out is not None:
        raise InputError("--out goes with --ray; without it the stages are where the route file says")
    trio.run(_up, args)
    return 0


def _local(file: RouteFile, only: list[str] | None) -> list[StageRef]:
    if only is not None:
        known = {ref.address: ref for ref in file.stages}
        if unknown := [address for address in only if address not in known]:
            raise InputError(f"the route has no stage {unknown[0]}; it has {', '.join(known)}")
        return [known[address] for address in only]
    local = [ref for ref in file.stages if _is_here(ref.address)]
    if not local:
        raise InputError(
            "no stage of the route has a loopback address; name the ones to start here with --only ADDRESS"
        )
    return local


def _is_here(address: str) -> bool:
    return socket_path(address) is not None or is_loopback(parse_address(address)[0])


def stage_command(
    file: RouteFile,
    ref: StageRef,
    model: Path,
    threads: int,
    sessions: int,
    policy: LinkPolicy,
    log: str = "warning",
    log_format: str = "text",
) -> list[str]:
    """The command line of one stage."""
    values: dict[str, object] = {
        "--layers": ref.layers,
        "--listen": ref.address,
        "--threads": threads,
        "--sessions": file.context.get("n_seq_max", sessions),
    }
    values |= {flag: file.context[key] for key, flag in _CONTEXT_FLAGS.items() if key in file.context}
    if file.context.get("flash_attn") is False:
        values["--flash-attn"] = "off"
    if (tls := policy.credentials) is not None:
        files = {"--tls-ca": tls.ca, "--tls-cert": tls.certificate, "--tls-key": tls.key}
        values |= {flag: spelled_out(path) for flag, path in files.items()}
    values |= {"--heartbeat": f"{policy.heartbeat:g}", "--log": log, "--log-format": log_format}
    if ref.address in file.stage_metrics:
        values["--metrics"] = file.stage_metrics[ref.address]
    if (placed := file.stage_devices.get(ref.address)) is not None:
        values |= {} if placed.devices is None else {"--device": ",".join(placed.devices)}
        values |= {} if placed.gpu_layers is None else {"--gpu-layers": placed.gpu_layers}
    plain = ["--allow-plain"] if policy.allow_plain else []
    return python_module(
        "dgr", "stage", spelled_out(model), *flags_of(values), *plain, "--json", "--until-stdin-closes"
    )


async def _up(args: argparse.Namespace) -> None:
    file = read_route_file(args.route)
    model = Path(args.model) if args.model else file.model or next(iter(file.stage_models.values()), None)
    if model is None:
        raise InputError("give --model GGUF, or `model` in the route file")
    artifact = Artifact.open(model)
    if file.artifact is not None:
        with progress_bar("reading the model") as progress:
            found = artifact.manifest(progress).identity
        if found != file.artifact:
            raise InvalidRoute(f"{model} is artifact {found}; the route is for {file.artifact}")
    file.route.check(artifact.hp.n_layers)
    policy = link_policy_of(args, file.tls)
    if args.threads is not None and args.threads < 1:
        raise InputError(f"--threads is {args.threads}; a stage computes with one or more")
    if args.ray is not None:
        await _up_on_ray(args, file, model, policy)
        return
    stages = _local(file, args.only)
    threads = max(1, available_cpus() // len(stages)) if args.threads is None else args.threads
    if not 0.1 <= args.frozen_after <= 86_400:
        raise InputError(f"--frozen-after is {args.frozen_after:g} seconds; give 0.1 to 86400")
    if not 0 <= args.settle <= 86_400:
        raise InputError(f"--settle is {args.settle:g} seconds; give 0 to 86400")
    commands = {}
    for ref in stages:
        stage_model = file.stage_models.get(ref.address, model)
        commands[ref] = stage_command(
            file, ref, stage_model, threads, args.sessions, policy, args.log, log_format(args.log_format)
        )
    async with open_notifier(f"starting {len(stages)} stages") as manager:
        with progress_bar("starting the stages") as activity:
            report = _Reporter(len(stages), args.json, activity, manager)
            patience = Patience(silence=args.frozen_after)
            keepers = [Keeper(ref, command, policy, patience, report) for ref, command in commands.items()]
            ranges = Counter(ref.layers for ref in file.stages)
            replaceable = frozenset(ref.address for ref in stages if ranges[ref.layers] > 1)
            refused = await _supervise(
                keepers, lambda: restart_all(keepers, replaceable=replaceable, settle=args.settle, report=report)
            )
    if refused is not None:
        raise InputError(f"stage {refused.address} ({refused.layers}) refuses its arguments; its own message is above")


async def _up_on_ray(args: argparse.Namespace, file: RouteFile, model: Path, policy: LinkPolicy) -> None:
    from dgr.cli.ray_up import Placement, run_on_ray

    def command(ref: StageRef, threads: int) -> list[str]:
        stage_model, log = file.stage_models.get(ref.address, model), (args.log, log_format(args.log_format))
        return stage_command(file, ref, stage_model, threads, args.sessions, policy, *log)[len(python_module("dgr")) :]

    placement = Placement(args.ray, args.ray_strategy, args.threads, Path(args.out))
    n_stages = len(file.stages)
    async with open_notifier(f"placing {n_stages} stages") as manager:
        with progress_bar("placing the stages") as activity:
            report = _Reporter(n_stages, args.json, activity, manager)
            # Ray prints on standard output what it has to say of other processes.
            with (
                contextlib.redirect_stdout(sys.stderr),
                trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals,
            ):
                async with open_nursery() as nursery:
                    nursery.start_soon(run_on_ray, file, command, placement, report)
                    async for _ in signals:
                        break
                    nursery.cancel_scope.cancel()


async def _supervise(keepers: Sequence[Keeper], restart: Callable[[], Awaitable[None]]) -> StageRef | None:
    """Keep stages running until a signal comes, or until one refuses its arguments: that one."""
    refused: list[StageRef] = []
    async with open_nursery() as nursery:

        async def keep(keeper: Keeper) -> None:
            await keeper.run()
            refused.append(keeper.ref)
            nursery.cancel_scope.cancel()

        for keeper in keepers:
            nursery.start_soon(keep, keeper)
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            await _take_signals(signals, nursery, restart)
        nursery.cancel_scope.cancel()
    return refused[0] if refused else None


async def _take_signals(
    signals: AsyncIterator[int], nursery: trio.Nursery, restart: Callable[[], Awaitable[None]]
) -> None:
    """Until one comes that ends everything."""
    restarting = False

    async def go() -> None:
        nonlocal restarting
        restarting = True
        await restart()
        restarting = False

    async for number in signals:
        if number != signal.SIGHUP or os.isatty(0):  # a terminal that is closed says so too
            return
        if restarting:
            _log.warning("a rolling restart is under way; another one was not begun")
        else:
            nursery.start_soon(go)


class _Reporter:
    """Tells every start and end of a stage; on a terminal it shows that some are still starting."""

    def __init__(
        self, n_stages: int, as_json: bool, activity: Activity | None, manager: Notifier | None = None
    ) -> None:
        self._n_stages, self._as_json, self._activity, self._manager = n_stages, as_json, activity, manager
        self._ready: set[str] = set()
        self._out = sys.stdout  # what else is printed may be redirected

    def __call__(self, ref: StageRef, event: str, **facts: Any) -> None:
        if event in ("ready", "live"):
            self._ready.add(ref.address)
        elif event in ("ended", "frozen"):
            self._ready.discard(ref.address)
        if self._manager is not None:
            say = self._manager.ready if len(self._ready) == self._n_stages else self._manager.status
            say(f"{len(self._ready)} of {self._n_stages} stages are ready")
        if self._as_json:
            text = json_line({"stage": ref.address, "layers": str(ref.layers), "event": event, **facts})
        else:
            tail = ", ".join(f"{name} {value}" for name, value in facts.items())
            text = f"stage {ref.address} ({ref.layers}) {event}{': ' if tail else ''}{tail}"
        say_above(self._activity, text, rest=len(self._ready) == self._n_stages, out=self._out)
