"""The HTTP side of a stage: ``/metrics``, ``/health``, ``/ready``, and nothing else. The links have ports of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dgr.serving.connections.listener import Listener
from dgr.serving.http.keys import App, Gate
from dgr.serving.http.server import HttpPolicy, address_of, bind, server_config
from dgr.serving.monitor.stage import StageMonitor
from dgr.wire.nurseries import open_nursery
from dgr.wire.tcp import is_loopback

__all__ = ["open_endpoint"]

#: A scraper takes what it asked for at once, or is gone.
_POLICY = HttpPolicy(grace=0, client_timeout=10)
#: Connections at once: scrapers and probes are few.
_MOST = 64
#: Seconds for answers under way at the end.
_LAST_BYTES = 1.0


def _app(monitor: StageMonitor) -> Starlette:
    async def metrics(_: Request) -> Response:
        return Response(monitor.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(_: Request) -> Response:
        if monitor.not_ready is None:
            return _json({"status": "ready"})
        return _json({"status": "not ready", "reason": monitor.not_ready}, 503)

    return Starlette(routes=[Route("/metrics", metrics), Route("/health", health), Route("/ready", ready)])


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


#: What lets others ask than programs and pages of this address.
_WAY_OUT = "ask from a program, or give --metrics an address of this host that the asker alone reaches"


@asynccontextmanager
async def open_endpoint(address: str, monitor: StageMonitor) -> AsyncIterator[list[str]]:
    """Answer on ``HOST:PORT`` (port 0: any free one) for the length of the block; gives the addresses.

    On loopback pages of other sites, open in a browser of this machine, are not answered. Raises
    :class:`~dgr.errors.InputError` for an address that cannot be had.
    """
    sockets = bind(address, _POLICY)
    addresses = [address_of(sock) for sock in sockets]
    local_only = all(is_loopback(sock.getsockname()[0]) for sock in sockets)
    app: App = Gate(_app(monitor), None, frozenset(), local_only=local_only, way_out=_WAY_OUT)
    listener = Listener(app, server_config(), most=_MOST, client_timeout=_POLICY.client_timeout)
    stop = trio.Event()

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        with trio.CancelScope(shield=True):  # it is told to end, and lets answers end
            await listener.serve(sockets, stop=stop, grace=_LAST_BYTES, task_status=task_status)

    async with open_nursery() as nursery:
        await nursery.start(run)
        try:
            yield addresses
        finally:
            stop.set()
