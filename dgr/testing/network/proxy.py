"""A faulty proxy before a stage: an address of its own, behind which every connection passes a :class:`~.relay.Relay`.

A route along proxies (:func:`open_proxies`) sends everything that goes to a stage through that stage's proxy: what the
client says to it and hears from it, and what the stage before it pushes::

    async with open_up(file) as up, open_proxies(file.route) as (route, proxies):
        async with open_pipeline_on(RemoteConnector(LinkPolicy()), route) as pipeline:
            await proxies[1].cut()
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from dgr.core.route import Route, StageRef
from dgr.testing.network.relay import CAPACITY, Relay, open_relay
from dgr.wire.tcp import parse_address

__all__ = ["FaultyProxy", "open_proxies", "open_proxy"]


class FaultyProxy:
    """An address before a stage's own: everything that is dialled there passes a relay. Made by :func:`open_proxy`."""

    def __init__(self, target: str, address: str, capacity: int) -> None:
        #: Where to dial, HOST:PORT.
        self.address = address
        #: The connections there are now, oldest first.
        self.relays: list[Relay] = []
        self._target = parse_address(target)
        self._capacity = capacity
        self._delay = 0.0
        self._rate: float | None = None
        #: Bytes and turns of connections that have ended.
        self._ended = (0, 0)

    @property
    def passed(self) -> int:
        """Bytes passed on, both ways, on every connection that there was."""
        return self._ended[0] + sum(relay.rightward.forwarded + relay.leftward.forwarded for relay in self.relays)

    @property
    def turns(self) -> int:
        """:attr:`Relay.turns <.relay.Relay.turns>` of every connection that there was, together."""
        return self._ended[1] + sum(relay.turns for relay in self.relays)

    @property
    def delay(self) -> float:
        """Seconds that bytes take each way, on every connection, those to come included; may be set."""
        return self._delay

    @delay.setter
    def delay(self, seconds: float) -> None:
        self._delay = seconds
        for relay in self.relays:
            self._set(relay)

    @property
    def rate(self) -> float | None:
        """Bytes a second that pass each way at most, on every connection by itself, those to come included; may be set."""
        return self._rate

    @rate.setter
    def rate(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        for relay in self.relays:
            self._set(relay)

    async def cut(self) -> None:
        """Reset every connection there is; new ones find their way."""
        for relay in list(self.relays):
            await relay.cut()

    def stall(self) -> None:
        """Pass nothing on any more on the connections there are; both their ends still believe in them."""
        for relay in self.relays:
            relay.rightward.stall()
            relay.leftward.stall()

    def _set(self, relay: Relay) -> None:
        relay.rightward.delay = relay.leftward.delay = self._delay
        relay.rightward.rate = relay.leftward.rate = self._rate

    async def _join(self, near: trio.SocketStream) -> None:
        try:
            far = await trio.open_tcp_stream(*self._target)
        except OSError:
            await trio.aclose_forcefully(near)  # as nobody listens there
            return
        for stream in (near, far):
            if self._capacity < CAPACITY:  # else the kernel takes megabytes before the relay does
                stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, self._capacity)
        async with open_relay(near, far, capacity=self._capacity) as relay:
            self._set(relay)
            self.relays.append(relay)
            try:
                await relay.wait_closed()
            finally:
                self.relays.remove(relay)
                passed = relay.rightward.forwarded + relay.leftward.forwarded
                self._ended = self._ended[0] + passed, self._ended[1] + relay.turns


@asynccontextmanager
async def open_proxy(target: str, *, capacity: int = CAPACITY) -> AsyncIterator[FaultyProxy]:
    """A proxy on loopback to the address ``target``, for the length of the block.

    ``capacity``: as of a relay; with less than usual the kernel's own buffers before it are as small.
    """
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    proxy = FaultyProxy(target, f"127.0.0.1:{listener.socket.getsockname()[1]}", capacity)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, proxy._join, [listener])
        yield proxy
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_proxies(route: Route) -> AsyncIterator[tuple[Route, list[FaultyProxy]]]:
    """A proxy before each stage, and the route along the proxies."""
    async with contextlib.AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(open_proxy(ref.address)) for ref in route.stages]
        refs = (StageRef(proxy.address, ref.layers) for proxy, ref in zip(proxies, route.stages, strict=True))
        yield Route(tuple(refs)), proxies
