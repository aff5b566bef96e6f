"""``dgr up``: the stages of a route file as child processes of this one, started again when they end."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import trio

from dgr.cli.exit_codes import BAD_INPUT
from dgr.errors import InputError
from dgr.model.artifact import Artifact
from dgr.model.route import StageRef
from dgr.model.route_file import RouteFile, read_route_file
from dgr.wire.nurseries import open_nursery
from dgr.wire.tcp import is_loopback, parse_address

__all__ = ["register", "run", "stage_command"]

#: Seconds between two starts of a stage that keeps ending: at first, and at most.
_FIRST_PAUSE = 0.2
_LAST_PAUSE = 10.0
#: A stage that ran this long starts again with the first pause.
_SETTLED = 30.0
#: Seconds a stage has to end by itself when told to.
_GRACE = 10.0


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "up",
        help="run the local stages of a route as child processes",
        description="Start every stage of a route file whose address is on this machine, and start it again when it ends."
        " Each takes its share of the cores. Ends on SIGINT or SIGTERM, with all of them.",
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
    parser.add_argument("--json", action="store_true", help="print JSON lines: one for every start and end of a stage")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    trio.run(_up, args)
    return 0


def _local(file: RouteFile, only: list[str] | None) -> list[StageRef]:
    if only is not None:
        known = {ref.address: ref for ref in file.route.stages}
        if unknown := [address for address in only if address not in known]:
            raise InputError(f"the route has no stage {unknown[0]}; it has {', '.join(known)}")
        return [known[address] for address in only]
    local = [ref for ref in file.route.stages if is_loopback(parse_address(ref.address)[0])]
    if not local:
        raise InputError(
            "no stage of the route has a loopback address; name the ones to start here with --only ADDRESS"
        )
    return local


def stage_command(file: RouteFile, ref: StageRef, model: Path, threads: int, sessions: int) -> list[str]:
    """The command line of one stage."""
    flags = {
        "n_ctx": "--ctx",
        "n_batch": "--batch",
        "n_ubatch": "--ubatch",
        "type_k": "--type-k",
        "numerics": "--numerics",
    }
    command = [sys.executable, "-m", "dgr", "stage", str(model), "--layers", str(ref.layers), "--listen", ref.address]
    command += ["--threads", str(threads), "--sessions", str(file.context.get("n_seq_max", sessions))]
    for key, flag in flags.items():
        if key in file.context:
            command += [flag, str(file.context[key])]
    if file.context.get("flash_attn") is False:
        command += ["--flash-attn", "off"]
    if file.tls is not None:
        for flag, path in zip(("--tls-ca", "--tls-cert", "--tls-key"), file.tls, strict=True):
            command += [flag, str(path)]
    return [*command, "--json", "--until-stdin-closes"]


async def _up(args: argparse.Namespace) -> None:
    file = read_route_file(args.route)
    model = Path(args.model) if args.model else file.model
    if model is None:
        raise InputError("give --model GGUF, or `model` in the route file")
    file.route.check(Artifact.open(model).hp.n_layers)
    stages = _local(file, args.only)
    threads = args.threads or max(1, len(os.sched_getaffinity(0)) // len(stages))
    async with open_nursery() as nursery:
        for ref in stages:
            command = stage_command(file, ref, model, threads, args.sessions)
            nursery.start_soon(_keep, ref, command, _reporter(args.json))
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                break
        nursery.cancel_scope.cancel()


def _reporter(as_json: bool) -> Any:
    def report(ref: StageRef, event: str, **facts: Any) -> None:
        if as_json:
            print(json.dumps({"stage": ref.address, "layers": str(ref.layers), "event": event, **facts}), flush=True)
        else:
            tail = ", ".join(f"{name} {value}" for name, value in facts.items())
            print(f"stage {ref.address} ({ref.layers}) {event}{': ' if tail else ''}{tail}", flush=True)

    return report


async def _keep(ref: StageRef, command: list[str], report: Any) -> None:
    """Run a stage again and again; only one that refuses its arguments is not started anew."""
    pause = _FIRST_PAUSE
    while True:
        began = trio.current_time()
        code = await _run_once(ref, command, report)
        if trio.current_time() - began > _SETTLED:
            pause = _FIRST_PAUSE
        if code == BAD_INPUT:
            raise InputError(f"stage {ref.address} ({ref.layers}) refuses its arguments; its own message is above")
        report(ref, "ended", code=code, again_in_seconds=pause)
        await trio.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE)


async def _run_once(ref: StageRef, command: list[str], report: Any) -> int:
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = b""
        async for part in process.stdout:
            line += part
            if b"\n" in line:
                report(ref, "ready", pid=process.pid)
                line = b""
        return await process.wait()
    finally:
        with trio.CancelScope(shield=True):
            if process.returncode is None:
                process.terminate()
                with trio.move_on_after(_GRACE):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
            await process.stdout.aclose()
            if process.stdin is not None:
                await process.stdin.aclose()
