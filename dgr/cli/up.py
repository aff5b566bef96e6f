"""``dgr up``: the stages of a route file as child processes of this one, started again when they end."""

from __future__ import annotations

import argparse
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from dgr.artifact.artifact import Artifact
from dgr.cli.children import flags_of, python_module, spelled_out
from dgr.cli.exit_codes import BAD_INPUT, FAILED
from dgr.cli.logs import log_format
from dgr.cli.options import add_link_arguments, add_reserved_arguments, link_policy_of
from dgr.cli.progress import Activity, progress_bar, say_above
from dgr.cli.streams import json_line, tell
from dgr.cluster.connect import LinkPolicy
from dgr.cluster.route_file import RouteFile, read_route_file
from dgr.core.route import StageRef
from dgr.engine.budget import available_cpus
from dgr.errors import InputError, InvalidRoute
from dgr.wire.nurseries import open_nursery
from dgr.wire.tcp import is_loopback, parse_address

__all__ = ["register", "run", "stage_command"]

#: Keys of a route file's context that are flags of a stage.
_CONTEXT_FLAGS = {
    "n_ctx": "--ctx",
    "n_batch": "--batch",
    "n_ubatch": "--ubatch",
    "type_k": "--type-k",
    "numerics": "--numerics",
    "wire": "--wire",
}
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
    add_link_arguments(parser)
    add_reserved_arguments(parser)
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
    stages = _local(file, args.only)
    threads = max(1, available_cpus() // len(stages)) if args.threads is None else args.threads
    if threads < 1:
        raise InputError(f"--threads is {threads}; a stage computes with one or more")
    commands = {}
    for ref in stages:
        stage_model = file.stage_models.get(ref.address, model)
        commands[ref] = stage_command(
            file, ref, stage_model, threads, args.sessions, policy, args.log, log_format(args.log_format)
        )
    with progress_bar("starting the stages") as activity:
        refused = await _supervise(commands, _Reporter(len(stages), args.json, activity))
    if refused is not None:
        raise InputError(f"stage {refused.address} ({refused.layers}) refuses its arguments; its own message is above")


async def _supervise(commands: Mapping[StageRef, list[str]], report: _Reporter) -> StageRef | None:
    """Keep stages running until a signal comes, or until one refuses its arguments: that one."""
    refused: list[StageRef] = []
    async with open_nursery() as nursery:

        async def keep(ref: StageRef, command: list[str]) -> None:
            await _keep(ref, command, report)
            refused.append(ref)
            nursery.cancel_scope.cancel()

        for ref, command in commands.items():
            nursery.start_soon(keep, ref, command)
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                break
        nursery.cancel_scope.cancel()
    return refused[0] if refused else None


class _Reporter:
    """Tells every start and end of a stage; on a terminal it shows that some are still starting."""

    def __init__(self, n_stages: int, as_json: bool, activity: Activity | None) -> None:
        self._n_stages, self._as_json, self._activity = n_stages, as_json, activity
        self._ready: set[str] = set()

    def __call__(self, ref: StageRef, event: str, **facts: Any) -> None:
        if event == "ready":
            self._ready.add(ref.address)
        else:
            self._ready.discard(ref.address)
        if self._as_json:
            text = json_line({"stage": ref.address, "layers": str(ref.layers), "event": event, **facts})
        else:
            tail = ", ".join(f"{name} {value}" for name, value in facts.items())
            text = f"stage {ref.address} ({ref.layers}) {event}{': ' if tail else ''}{tail}"
        say_above(self._activity, text, rest=len(self._ready) == self._n_stages)


async def _keep(ref: StageRef, command: list[str], report: Callable[..., None]) -> None:
    """Run a stage again and again; returns only when it refuses its arguments as it starts for the first time.

    Later a refusal is a state of the machine: its port is taken for a moment, or a file that is being replaced is not there.
    """
    pause, first = _FIRST_PAUSE, True
    while True:
        began = trio.current_time()
        code = await _run_once(ref, command, report)
        if trio.current_time() - began > _SETTLED:
            pause = _FIRST_PAUSE
        if code == BAD_INPUT and first:
            return
        first = False
        report(ref, "ended", code=code, again_in_seconds=pause)
        await trio.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE)


async def _run_once(ref: StageRef, command: list[str], report: Callable[..., None]) -> int:
    """Run a stage to its end: its exit code, or that of a failure when no process could be started now."""
    try:
        process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        tell(f"dgr: stage {ref.address} cannot be started: {error}")
        return FAILED
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
