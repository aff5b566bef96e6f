"""Links to an echo: a boundary frame goes there and comes back, and so do bare bytes on the same transport.

Over ``memory`` the echo is a task of this process, over ``unix``, ``tcp`` and ``tls`` a process of its own on this host::

    python -P -m dgr_bench.links.echo ADDRESS [KEYS]     # be that process; prints its address
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import trio
from attrs import frozen

from dgr.cli.children import python_module
from dgr.cli.keys import make_keys
from dgr.core.values import Expectation, Key, LogitsWanted, SamplingParams
from dgr.errors import DgrError, LinkBroken
from dgr.testing.network.proxy import FaultyProxy, open_proxy
from dgr.testing.network.relay import CAPACITY
from dgr.v4.hyper_parameters import V4_FLASH
from dgr.wire import Limits, Link, frames, memory_transports, open_link
from dgr.wire.credentials import Credentials
from dgr.wire.memory import MemoryTransport
from dgr.wire.streams import PacketStream
from dgr.wire.tcp import accept, address_of, dial, listen

#: Links of V4 Flash: the residual stream is four times as wide as the model.
WIDTH = 4 * V4_FLASH.n_embd
LIMITS = Limits(n_batch=512, boundary_width=WIDTH, n_vocab=V4_FLASH.n_vocab)
#: As a decode step carries it to the tail.
_SAMPLING = SamplingParams(0.7, 40, 0.95, 0.05, 1.1, 0.1, 0.1, -1, 2**32 - 1, 0, 0)
_HOST = "127.0.0.1"
#: Seconds for a TLS handshake.
_HANDSHAKE = 10.0
#: Seconds without a byte after which a relay has passed everything on.
_QUIET = 0.1

Connect: TypeAlias = Callable[[], AbstractAsyncContextManager[trio.abc.Stream]]


def payload_bytes(n_tokens: int) -> int:
    """Bytes of the residual of some tokens."""
    return 4 * n_tokens * WIDTH


def _limits_on(transport: trio.abc.Stream) -> Limits:
    """As between two stages: in one process, a payload goes in one piece."""
    if isinstance(transport, MemoryTransport):
        return LIMITS.unbroken()
    return LIMITS.within_host() if isinstance(transport, PacketStream) else LIMITS


def boundary_of(n_tokens: int, session: int = 1) -> frames.Boundary:
    """A frame as a stage sends it, late in a long context: its numbers take all their bytes."""
    expect = Expectation(1_000_000, bytes(16))
    tokens = (V4_FLASH.n_vocab - 1,) * n_tokens
    return frames.Boundary(
        Key(bytes(16), 1, session),
        1_000_000,
        expect,
        tokens,
        LogitsWanted.LAST,
        _SAMPLING,
        payload=payload_bytes(n_tokens),
    )


# --- the far side ----------------------------------------------------------------------------------------------------


async def _echo(transport: trio.abc.Stream) -> None:
    """Send back what comes: first byte ``b`` for bare bytes, ``l`` for a link, which is told again."""
    way = await transport.receive_some(1)
    if way == b"l":
        await transport.send_all(way)
        async with open_link(transport, _limits_on(transport)) as link:
            async for received in link:
                await link.send(received.frame, received.payload)
                link.grant(0 if received.payload is None else received.payload.nbytes)
    else:
        while data := await transport.receive_some(65536):
            await transport.send_all(data)


async def _serve(address: str, credentials: Credentials | None) -> None:
    """Be the far side in a process of its own; print where."""
    listeners = await listen(address, credentials=credentials, allow_plain=True)
    tls = None if credentials is None else credentials.context(server=True)
    print(address_of(listeners[0]), flush=True)

    async def take(stream: trio.SocketStream) -> None:
        try:
            await _echo(await accept(stream, tls, _HANDSHAKE))
        except (trio.BrokenResourceError, DgrError):
            return  # the near side is done and does not say goodbye

    await trio.serve_listeners(take, listeners)


def _credentials_in(folder: Path) -> Credentials:
    return Credentials(folder / "ca.pem", folder / f"{_HOST}.pem", folder / f"{_HOST}.key")


# --- the near side ---------------------------------------------------------------------------------------------------


@frozen
class Echo:
    """An echo that runs."""

    #: Streams to it.
    connect: Connect
    #: Address of the process; None in this process.
    address: str | None
    credentials: Credentials | None

    @asynccontextmanager
    async def counted(self, capacity: int = CAPACITY) -> AsyncIterator[tuple[trio.abc.Stream, FaultyProxy]]:
        """A stream to the process, and the cable under it, which counts the bytes on the wire.

        ``capacity``: bytes that the cable holds each way, beside what the kernel holds before it.
        """
        if self.address is None:
            raise ValueError("an echo in this process has no wire to count on")
        async with open_proxy(self.address, capacity=capacity) as cable:
            near = await dial(cable.address, credentials=self.credentials)
            try:
                yield near, cable
            finally:
                await trio.aclose_forcefully(near)


@asynccontextmanager
async def _connect_memory() -> AsyncIterator[trio.abc.Stream]:
    near, far = memory_transports()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_echo, far)
        yield near
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _process(address: str, keys: Path | None) -> AsyncIterator[str]:
    """The echo as a child process; returns its address."""
    command = python_module("dgr_bench.links.echo", address, *([] if keys is None else [str(keys)]))
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield (await process.stdout.receive_some(256)).decode().strip()
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stdout.aclose()


@asynccontextmanager
async def open_echo(transport: str) -> AsyncIterator[Echo]:
    """Run an echo for the length of the block. ``transport``: ``memory``, ``unix``, ``tcp`` or ``tls``."""
    if transport == "memory":
        yield Echo(_connect_memory, None, None)
        return
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) if transport == "tls" else None
        if keys is not None:
            make_keys(keys, [_HOST], 1)
        credentials = None if keys is None else _credentials_in(keys)
        asked = f"unix:{folder}/echo" if transport == "unix" else f"{_HOST}:0"
        async with _process(asked, keys) as address:

            @asynccontextmanager
            async def connect() -> AsyncIterator[trio.abc.Stream]:
                stream = await dial(address, credentials=credentials)
                try:
                    yield stream
                finally:
                    await trio.aclose_forcefully(stream)

            yield Echo(connect, address, credentials)


@asynccontextmanager
async def open_echo_link(transport: trio.abc.Stream) -> AsyncIterator[Link]:
    """A link to an echo over a stream to it, with credits as between two stages."""
    await transport.send_all(b"l")
    # Nothing of a link's may come before there is one: what lies in shared memory would belong to nobody.
    await transport.receive_some(1)
    async with open_link(transport, _limits_on(transport), credit=LIMITS.under_way) as link:
        yield link


async def bare_round(transport: trio.abc.Stream, payload: bytes) -> float:
    """Seconds for a round trip of the payload's bytes, sent and read at the same time, as a link does."""
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(transport.send_all, payload)
        left = len(payload)
        while left:
            left -= len(await transport.receive_some(65536))
    return trio.current_time() - began


async def wire_bytes(echo: Echo, n_tokens: int, warm_up: int, rounds: int) -> int:
    """Bytes on the wire, both ways, of so many round trips of a boundary frame, after some that are not counted."""
    payload = bytes(payload_bytes(n_tokens))
    async with echo.counted() as (transport, cable), open_echo_link(transport) as link:

        async def settle() -> int:
            """Bytes passed on, once the last credit is through: a frame may be whole before it."""
            await link.flush()
            before, now = -1, 0
            while before != now:
                await trio.sleep(_QUIET)
                before, now = now, sum(one.rightward.forwarded + one.leftward.forwarded for one in cable.relays)
            return now

        for _ in range(warm_up):
            await link_round(link, n_tokens, payload)
        began = await settle()
        for _ in range(rounds):
            await link_round(link, n_tokens, payload)
        return await settle() - began


async def link_round(link: Link, n_tokens: int, payload: bytes) -> float:
    """Seconds for a round trip of a boundary frame, which is then consumed and granted again, as a stage does."""
    began = trio.current_time()
    await link.send(boundary_of(n_tokens), payload)
    async for received in link:
        if received.payload is not None and received.payload.nbytes == len(payload):
            link.grant(len(payload))
            return trio.current_time() - began
    raise LinkBroken("the echo went away")


if __name__ == "__main__":
    trio.run(_serve, sys.argv[1], _credentials_in(Path(sys.argv[2])) if sys.argv[2:] else None)
