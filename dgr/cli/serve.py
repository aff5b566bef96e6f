"""``dgr serve``: a pipeline behind OpenAI's and Anthropic's HTTP APIs."""

from __future__ import annotations

import argparse
import math
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from dgr.artifact.artifact import Artifact
from dgr.cli.notify import Notifier, open_notifier
from dgr.cli.options import add_ahead_argument, add_link_arguments, add_model_arguments, link_policy_of, require_extra
from dgr.cli.pipelines import add_route_argument, check_wait, enter_waiting, open_local, route_of
from dgr.cli.progress import progress_bar
from dgr.cli.streams import print_json, until_input_ends
from dgr.client.pipeline import Pipeline, Timeouts
from dgr.cluster.certificates import sources_of, watch
from dgr.cluster.connect import open_route
from dgr.cluster.follow import follow_route
from dgr.cluster.route_file import RouteFile
from dgr.core.units import human_bytes
from dgr.engine.vocab import LlamaVocabulary
from dgr.errors import InputError
from dgr.serving.api.vocabulary import ServingVocabulary
from dgr.serving.engine import ServingLimits, open_serving
from dgr.serving.tracing.server import ServerTracing, check_folder, open_tracing
from dgr.stage.shard import Shard
from dgr.wire.credentials import Credentials
from dgr.wire.nurseries import open_nursery

if TYPE_CHECKING:
    from dgr.serving.http.service import ServerOptions, Service

__all__ = ["register", "run"]

_LIMITS = ServingLimits()
#: Slots of stages in this process, where nothing is said.
_SESSIONS, _PREFIXES = 4, 4
#: What marks a checkpoint that was trained on the later ladder of efforts, in its name.
_LATER = ("0731", "0813")
#: What a model's name cannot hold.
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]")


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "serve",
        help="answer OpenAI's and Anthropic's HTTP APIs (extra `http`)",
        description="Serve a model over OpenAI's and Anthropic's HTTP APIs, through stages in this process or those of a route."
        " It prints its address when it is ready. On SIGINT or SIGTERM it admits nobody, lets answers end, and leaves.",
    )
    add_route_argument(parser)
    parser.add_argument(
        "--follow", action="store_true", help="with --route: read the file again and again, and go where it says"
    )
    parser.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help="with --route: wait so long for stages that are not up yet (default: one that is not there ends the command)",
    )
    add_ahead_argument(parser)
    parser.add_argument(
        "--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="where (default: 127.0.0.1:8000)"
    )
    parser.add_argument("--name", metavar="NAME", help="the model's name in requests (default: the file's)")
    parser.add_argument(
        "--sessions",
        type=int,
        metavar="N",
        help="conversations answered at once and kept (default: 4; with --route, as many as its stages have slots)",
    )
    parser.add_argument(
        "--prefixes",
        type=int,
        metavar="M",
        help="slots for copies of prompts and of system texts, beside those of the conversations (default: 4; with --route,"
        " what --sessions leaves of its stages' slots)",
    )
    parser.add_argument("--api-key-file", metavar="FILE", help="API keys, one a line; without it anyone may ask")
    parser.add_argument(
        "--allow-anyone",
        action="store_true",
        help="without API keys: listen beyond loopback, and answer pages of other sites",
    )
    parser.add_argument("--open-metrics", action="store_true", help="/metrics needs no key")
    parser.add_argument(
        "--stage-metrics",
        action="store_true",
        help="with --route: /metrics tells of its stages too, each with the label `stage`; of stages in this process it does",
    )
    parser.add_argument(
        "--trace-dir",
        metavar="DIR",
        help="a trace of every request for ui.perfetto.dev, as a file; the last 1000 are kept",
    )
    parser.add_argument(
        "--otel",
        action="store_true",
        help="a trace of every request to an OpenTelemetry collector, as OTEL_* of the environment say (extra `otel`)",
    )
    parser.add_argument("--https-cert", metavar="PEM", help="certificate of the HTTP server")
    parser.add_argument("--https-key", metavar="PEM", help="key of the HTTP server")
    parser.add_argument(
        "--thinking",
        choices=["off", "low", "high", "max"],
        default="low",
        help="effort of thinking where a request says nothing of it (default: low)",
    )
    parser.add_argument(
        "--ladder",
        choices=["preview", "0731"],
        help="which words the checkpoint takes for which effort (default: 0731 when its name says so, else preview)",
    )
    parser.add_argument(
        "--max-queued",
        type=int,
        default=_LIMITS.max_waiting,
        metavar="N",
        help=f"choices that may wait for a slot (default: {_LIMITS.max_waiting})",
    )
    parser.add_argument(
        "--max-queued-tokens", type=int, metavar="N", help="prompt tokens that may wait (default: 8 contexts' worth)"
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=_LIMITS.deadline,
        metavar="SECONDS",
        help=f"most seconds from admission to the last token (default: {_LIMITS.deadline:g})",
    )
    parser.add_argument(
        "--grace", type=float, default=30.0, metavar="SECONDS", help="for answers under way at the end (default: 30)"
    )
    parser.add_argument(
        "--client-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="end a connection whose client takes nothing for this long (default: 30)",
    )
    parser.add_argument(
        "--keep-alive",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="a comment after so many quiet seconds of a stream, up to 15; 0: none (default: 10)",
    )
    parser.add_argument(
        "--max-body", type=int, default=8 << 20, metavar="BYTES", help="most bytes of a request (default: 8 MiB)"
    )
    add_model_arguments(parser)
    add_link_arguments(parser)
    parser.add_argument(
        "--until-stdin-closes", action="store_true", help="also end when standard input ends: with the parent process"
    )
    parser.add_argument("--json", action="store_true", help="print what is served as one JSON line when it is ready")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    require_extra("dgr serve", "http", ("anycorn", "deepseek_recipe", "prometheus_client", "starlette"))
    if args.otel:
        require_extra("dgr serve --otel", "otel", ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk"))
    if args.trace_dir is not None:
        check_folder(Path(args.trace_dir))
    trio.run(_serve, args)
    return 0


async def _serve(args: argparse.Namespace) -> None:
    from dgr.serving.http.app import make_app
    from dgr.serving.http.keys import ApiKeys
    from dgr.serving.http.server import HttpPolicy, address_of, bind, check_reach, run_server
    from dgr.serving.http.service import Service

    shards: list[Shard] = []
    check_wait(args.wait, has_route=args.route is not None)
    path, credentials, opened, followed = _pipeline(args, shards.append)
    limits = ServingLimits(
        sessions=args.sessions,
        prefixes=args.prefixes,
        max_waiting=args.max_queued,
        max_waiting_tokens=args.max_queued_tokens,
        deadline=args.deadline,
        ahead=args.ahead,
    )
    policy = HttpPolicy(tls=_tls(args), grace=args.grace, client_timeout=args.client_timeout)
    certificates = sources_of(credentials, policy.https)
    keys = None if args.api_key_file is None else ApiKeys.read(Path(args.api_key_file))
    # The port is taken before the weights are read: a wrong address shows at once.
    sockets = bind(args.listen, policy)
    addresses = [address_of(sock) for sock in sockets]
    try:
        check_reach(sockets, has_keys=keys is not None, allow_anyone=args.allow_anyone)
        artifact = await trio.to_thread.run_sync(Artifact.open, path)
        options = _options(args, artifact)
        async with AsyncExitStack() as stack:
            manager = await stack.enter_async_context(open_notifier(f"opening the stages of {options.model}"))
            vocabulary = stack.enter_context(LlamaVocabulary(artifact))
            with progress_bar("opening the stages"):
                pipeline = await enter_waiting(stack, opened, args.wait)
            engine = await stack.enter_async_context(open_serving(pipeline, limits))
            words = ServingVocabulary.of_model(vocabulary, artifact)
            service = await trio.to_thread.run_sync(Service.of, engine, words, options)
            service.metrics.tell_of_certificates(certificates)
            service.tracing = await _tracing(args, stack, pipeline)
            local_only = keys is None and not args.allow_anyone
            app = make_app(service, keys, open_metrics=args.open_metrics, local_only=local_only)
            stop = trio.Event()
            serve = partial(run_server, app, engine, sockets, policy, stop=stop)
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async with open_nursery() as nursery:
                    await nursery.start(_serve_until_end, nursery.cancel_scope, serve)
                    nursery.start_soon(watch, *certificates)
                    nursery.start_soon(_take_signals, signals, stop, nursery.cancel_scope)
                    nursery.start_soon(_tell_of_end, stop, manager)
                    if args.until_stdin_closes:
                        nursery.start_soon(until_input_ends, stop.set)
                    if followed is not None:
                        nursery.start_soon(follow_route, pipeline, followed)
                    _announce(args, addresses, service, shards, has_keys=keys is not None)
                    manager.ready(f"serves {options.model} at {addresses[0]}")
    finally:
        for sock in sockets:
            sock.close()


async def _tracing(args: argparse.Namespace, stack: AsyncExitStack, pipeline: Pipeline) -> ServerTracing | None:
    """What traces requests, if any flag says so."""
    if args.trace_dir is None and not args.otel:
        return None
    spans = None
    if args.otel:
        from dgr.serving.tracing.otel import OtelSpans, otlp_exporter

        spans = OtelSpans(await trio.to_thread.run_sync(otlp_exporter))
    folder = None if args.trace_dir is None else Path(args.trace_dir)
    return await stack.enter_async_context(open_tracing(pipeline, folder, spans))


async def _serve_until_end(
    scope: trio.CancelScope,
    serve: Callable[..., Awaitable[None]],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    await serve(task_status=task_status)
    scope.cancel()


async def _take_signals(signals: AsyncIterator[int], stop: trio.Event, scope: trio.CancelScope) -> None:
    """The first one lets answers end, a second one ends them."""
    async for _ in signals:
        if stop.is_set():
            scope.cancel()
        stop.set()


async def _tell_of_end(stop: trio.Event, manager: Notifier) -> None:
    await stop.wait()
    manager.stopping()


def _tls(args: argparse.Namespace) -> tuple[Path, Path] | None:
    if (args.https_cert is None) != (args.https_key is None):
        raise InputError("--https-cert and --https-key go together")
    return None if args.https_cert is None else (Path(args.https_cert), Path(args.https_key))


def _options(args: argparse.Namespace, artifact: Artifact) -> ServerOptions:
    from dgr.serving.api.prompts import Ladder, Thinking
    from dgr.serving.http.service import ServerOptions

    name = args.name or _NO_NAME.sub("-", artifact.file.path.stem).lstrip("-._:/")[:128] or "dgr"
    called = artifact.file.metadata.get("general.name")
    names = f"{artifact.file.path.name} {'' if called is None else called.value}"
    ladder = args.ladder or ("0731" if any(mark in names for mark in _LATER) else "preview")
    return ServerOptions(
        model=name,
        thinking=Thinking(args.thinking),
        ladder=Ladder(ladder),
        max_body=args.max_body,
        keep_alive=args.keep_alive or math.inf,
        stage_metrics=args.stage_metrics or args.route is None,
    )


def _pipeline(
    args: argparse.Namespace, on_shard: Callable[[Shard], None]
) -> tuple[Path, Credentials | None, Callable[[], AbstractAsyncContextManager[Pipeline]], RouteFile | None]:
    """The file of the vocabulary, the credentials of links, what opens the pipeline, and the route file to follow."""
    if args.route is None:
        if args.follow:
            raise InputError("--follow follows the file of --route; there is none")
        args.sessions = _SESSIONS if args.sessions is None else args.sessions
        args.prefixes = _PREFIXES if args.prefixes is None else args.prefixes
        if args.sessions < 1 or args.prefixes < 0:
            raise InputError(
                f"--sessions is {args.sessions} and --prefixes {args.prefixes}; give 1 or more, and 0 or more"
            )
        # Each has a slot of the stages' contexts.
        slots = argparse.Namespace(**{**vars(args), "sessions": args.sessions + args.prefixes})
        local = open_local(slots, on_shard)  # refuses what cannot be before the port is taken
        return Path(args.model), None, lambda: local, None
    file, model = route_of(args)
    policy = link_policy_of(args, file.tls)
    remote = partial(
        open_route,
        file,
        policy=policy,
        model=None,
        chunk=args.chunk,
        chunk_seconds=args.chunk_seconds,
        timeouts=Timeouts(),
    )
    return Path(model), policy.credentials, remote, file if args.follow else None


def _announce(
    args: argparse.Namespace, addresses: list[str], service: Service, shards: list[Shard], *, has_keys: bool
) -> None:
    scheme = "http" if args.https_cert is None else "https"
    urls = [f"{scheme}://{address}" for address in addresses]
    engine, options = service.engine, service.options
    # Of the stages in this process; allocated whether it is used or not.
    state = sum(sum(shard.ledger.memory.state.values()) for shard in shards)
    if args.json:
        print_json(
            {
                "url": urls[0],
                "urls": urls,
                "model": options.model,
                "n_ctx": service.n_ctx,
                "sessions": engine.line.slots,
                "prefixes": engine.sessions.places_of_prefixes,
                "state_bytes": state if shards else None,
                "thinking": options.thinking.value,
                "ladder": options.ladder.value,
                "api_keys": has_keys,
                "artifact": engine.pipeline.descriptions[0].artifact,
                "stages": [{"name": ref.address, "layers": str(ref.layers)} for ref in engine.pipeline.route.stages],
            }
        )
        return
    rounded = "" if args.route is not None or args.ctx == service.n_ctx else f" (--ctx {args.ctx}, rounded up)"
    print(
        f"{options.model} on {' and '.join(urls)}: {engine.line.slots} conversations of {service.n_ctx} tokens{rounded} at"
        " once,"
        f" {engine.sessions.places_of_prefixes} prefixes kept{f' ({human_bytes(state)} of state in all)' if shards else ''},"
        f" thinking {options.thinking.value} ({options.ladder.value}), {'API keys' if has_keys else 'no API keys'}",
        flush=True,
    )
