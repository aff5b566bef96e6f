"""``dgr top``: a server and its stages at a glance, from their ``/metrics``."""

from __future__ import annotations

import argparse
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs
import trio

from dgr.cli.exit_codes import FAILED
from dgr.cli.options import require_extra
from dgr.cli.streams import print_json
from dgr.cli.tables import render_table
from dgr.cluster.route_file import read_route_file
from dgr.core.files.inputs import read_whole
from dgr.core.units import human_bytes
from dgr.errors import InputError
from dgr.text import one_line
from dgr.wire.nurseries import open_nursery

if TYPE_CHECKING:
    from dgr.serving.monitor.readings import Reading, ServerView, StageView

__all__ = ["read_key", "register", "run"]

#: Seconds in which a server or a stage must answer.
_PATIENCE = 5.0
#: More than any server's metrics: it is something else.
_MOST_BYTES = 8 << 20
#: Back to the first line of a terminal, and nothing below it.
_CLEAR = "\x1b[H\x1b[J"
#: What lacks a scheme to be a URL.
_HOST_AND_PORT = re.compile(r"[^/\s]+:[0-9]+/?")


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "top",
        help="watch servers and stages (extra `metrics`)",
        description="Read /metrics of servers and stages again and again, and show who is ready, which sessions there are,"
        " and what was done since the reading before. Ends on SIGINT. Exit code with --once: 0 everyone was read, 1 not.",
    )
    parser.add_argument(
        "where",
        nargs="+",
        metavar="URL|ROUTE.toml",
        help="http://HOST:PORT of a server or a stage, or a route file whose stages have `metrics`",
    )
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="between two readings (default: 2)")
    parser.add_argument("--api-key-file", metavar="FILE", help="whose first line is sent as the key to the URLs")
    parser.add_argument("--once", action="store_true", help="read twice, show what was done in between, and end")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each reading but the first")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    require_extra("dgr top", "metrics", ("prometheus_client",))
    if not 0.1 <= args.every <= 3600:
        raise InputError(f"--every is {args.every:g} seconds; give 0.1 to 3600")
    key = None if args.api_key_file is None else read_key(Path(args.api_key_file))
    return trio.run(_watch, _targets(args.where, key), args)


def read_key(path: Path) -> str:
    """The first API key of a file. Raises :class:`~dgr.errors.InputError`."""
    try:
        lines = [line.strip() for line in read_whole(path, 1 << 20, "a file of API keys").decode().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read an API key from {path}: {error}") from error
    key = next((line for line in lines if line and not line.startswith("#")), "")
    if not key or not key.isascii() or not key.isprintable():
        raise InputError(f"{path} does not begin with an API key of printable ASCII characters")
    return key


def _targets(where: Sequence[str], key: str | None) -> list[urllib.request.Request]:
    """What to ask. A key goes to URLs alone: the stages of a route have none."""
    targets = []
    for one in where:
        if "://" in one:
            target = urllib.request.Request(_metrics_url(one))
            if key is not None:
                target.add_unredirected_header("Authorization", f"Bearer {key}")
            targets.append(target)
            continue
        if _HOST_AND_PORT.fullmatch(one) and not Path(one).exists():
            raise InputError(f"{one!r} is neither a URL nor a route file: give http://{one}")
        file = read_route_file(one)
        if not file.stage_metrics:
            raise InputError(f"no [[stage]] of {one} has `metrics`: where it answers /metrics, as HOST:PORT")
        targets += [urllib.request.Request(f"http://{address}/metrics") for address in file.stage_metrics.values()]
    return targets


def _metrics_url(text: str) -> str:
    try:
        url = urlsplit(text)
        valid = (
            url.scheme in ("http", "https") and url.hostname and url.port != 0 and text.isascii() and text.isprintable()
        )
    except ValueError:
        valid = False
    if not valid:
        raise InputError(f"{text!r} is not a URL like http://127.0.0.1:8000")
    return text if url.path not in ("", "/") else f"{url.scheme}://{url.netloc}/metrics"


async def _watch(targets: Sequence[urllib.request.Request], args: argparse.Namespace) -> int:
    before: Mapping[str, Reading | str] = await _read_all(targets)
    while True:
        await trio.sleep(args.every)
        now = await _read_all(targets)
        views = _views(before, now)
        _show(views, args)
        if args.once:
            return FAILED if any(isinstance(one, str) for one in views.values()) else 0
        before = now


async def _read_all(targets: Sequence[urllib.request.Request]) -> dict[str, Reading | str]:
    """A reading of each, or why there is none; side by side, as one that hangs must not hold up the others."""
    found: dict[str, Reading | str] = {target.full_url: "" for target in targets}

    async def read(target: urllib.request.Request) -> None:
        found[target.full_url] = await trio.to_thread.run_sync(partial(_read, target), abandon_on_cancel=True)

    async with open_nursery() as nursery:
        for target in targets:
            nursery.start_soon(read, target)
    return found


def _read(target: urllib.request.Request) -> Reading | str:
    from dgr.serving.monitor.readings import Reading

    try:
        with urllib.request.urlopen(target, timeout=_PATIENCE) as answer:
            raw = answer.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            return f"it answers with more than {human_bytes(_MOST_BYTES)}"
        return Reading(raw.decode(), time.monotonic())
    except urllib.error.HTTPError as error:
        more = "; give --api-key-file" if error.code == 401 else ""
        error.close()
        return f"HTTP status {error.code}{more}"
    except urllib.error.URLError as error:
        return str(error.reason)
    except (OSError, HTTPException, UnicodeDecodeError, InputError) as error:
        return str(error) or type(error).__name__


def _views(
    before: Mapping[str, Reading | str], now: Mapping[str, Reading | str]
) -> dict[str, ServerView | StageView | str]:
    from dgr.serving.monitor.readings import view

    views: dict[str, ServerView | StageView | str] = {}
    for url, reading in now.items():
        if isinstance(reading, str):
            views[url] = reading
            continue
        earlier = before[url]
        try:
            views[url] = view([reading if isinstance(earlier, str) else earlier, reading])
        except InputError as error:
            views[url] = str(error)
    return views


def _show(views: Mapping[str, ServerView | StageView | str], args: argparse.Namespace) -> None:
    from dgr.serving.monitor.readings import ServerView

    servers = {url: one for url, one in views.items() if isinstance(one, ServerView)}
    stages = {url: one for url, one in views.items() if not isinstance(one, ServerView | str)}
    lost = {url: one for url, one in views.items() if isinstance(one, str)}
    if args.json:
        print_json(
            {
                "time": time.time(),
                "servers": [{"url": url, **attrs.asdict(one)} for url, one in servers.items()],
                "stages": [{"url": url, **attrs.asdict(one)} for url, one in stages.items()],
                "unreachable": [{"url": url, "why": why} for url, why in lost.items()],
            }
        )
        return
    parts = [table for table in (_server_table(servers), _stage_table(stages)) if table]
    parts += [f"{one_line(url)}: {one_line(why)}" for url, why in lost.items()]
    clear = _CLEAR if sys.stdout.isatty() and not args.once else ""
    print(clear + "\n\n".join(parts), flush=True)


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]


def _server_table(servers: Mapping[str, ServerView]) -> str:
    if not servers:
        return ""
    rows = [["SERVER", "READY", "ROUTE", "EPOCH", "RUN", "WAIT", "SLOTS", "KEPT", "PROMPT t/s", "DRAWN t/s", "CACHED"]]
    for url, one in servers.items():
        hits = "-" if one.cache_hit_ratio is None else f"{one.cache_hit_ratio:.0%}"
        rows.append(
            [
                _host(url), "yes" if one.ready else "no", f"{one.route} {one.route_state}", str(one.epoch), str(one.running),
                str(one.waiting), str(one.slots), str(one.sessions_kept), f"{one.prompt_tokens_per_second:.1f}",
                f"{one.tokens_per_second:.1f}", hits,
            ]
        )  # fmt: skip
    return render_table(rows, range(3, 11))


def _stage_table(stages: Mapping[str, StageView]) -> str:
    if not stages:
        return ""
    heads = ["STAGE", "READY", "LAYERS", "ROUTES", "SESSIONS", "LEASED", "BUSY", "DECODE t/s", "BATCH", "PREFILL t/s"]
    rows = [[*heads, "LINKS", "STATE", "RESIDENT"]]
    for url, one in stages.items():
        ready = "drained" if one.draining else "yes" if one.ready else "no"
        routes = " ".join(f"{route}/{epoch}" for route, epoch in one.routes.items())
        rows.append(
            [
                _host(url), ready, one.layers or "-", routes or "-", str(one.sessions),
                f"{one.slots_leased}/{one.slots}", f"{one.busy:.0%}", f"{one.decode_tokens_per_second:.1f}",
                "-" if one.decode_batch is None else f"{one.decode_batch:.1f}", f"{one.prefill_tokens_per_second:.1f}",
                f"{human_bytes(int(one.bytes_per_second))}/s", human_bytes(one.state_leased_bytes),
                human_bytes(one.resident_bytes),
            ]
        )  # fmt: skip
    return render_table(rows, range(4, 13))
