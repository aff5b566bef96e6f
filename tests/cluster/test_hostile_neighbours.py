"""Processes of this user on this host that mean harm: a stage gives up their links, and serves on as if nothing had been."""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from attrs import frozen
from cluster.remote_stages import HANG, TWO, Host, client, open_hosts, stage
from hostile import raw

from dgr.testing.waits import until
from dgr.wire.frames import Hello
from dgr.wire.handshake import exchange_preamble
from dgr.wire.samehost.addresses import connect
from dgr.wire.samehost.handshake import dial_shared
from dgr.wire.samehost.memory import RING
from dgr.wire.samehost.stream import SharedStream

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="unix: addresses are there on Linux alone")

_RECORD = struct.Struct("<III")


@frozen
class Neighbour:
    """A connection to a stage that shares memory with it, in the hands of whoever may say what he likes."""

    stream: SharedStream

    async def say(self, inline: bytes = b"", placed: int = 0, given_back: int = 0) -> None:
        await self.send(_RECORD.pack(len(inline), placed, given_back) + inline)

    async def send(self, data: bytes) -> None:
        await self.stream._transport.send_all(data)


@asynccontextmanager
async def greeted(host: Host, hello: Hello) -> AsyncIterator[Neighbour]:
    stream = await dial_shared(Path(host.address.removeprefix("unix:")), HANG)
    try:
        await exchange_preamble(stream, HANG)
        neighbour = Neighbour(stream)
        await neighbour.say(raw(hello))
        assert await stream.receive_some(1)  # it is welcome
        yield neighbour
    finally:
        await trio.aclose_forcefully(stream)


LIES: dict[str, Callable[[Neighbour], Awaitable[None]]] = {
    "more than the ring": lambda one: one.say(placed=RING + 1),
    "nothing was announced": lambda one: one.say(placed=4096),
    "nothing was written": lambda one: one.say(given_back=4096),
    "no frame": lambda one: one.say(b"\xff" * 64),
    "half a record": lambda one: one.send(b"\0" * 7),
}


async def _gone(host: Host, *, but: int = 0) -> None:
    await until(lambda: host.server.statistics().links == but and host.server.statistics().handshaking == 0, HANG)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("role", ["client", "stage"])
async def test_a_neighbour_that_lies_loses_its_link_alone(lie: str, role: str, tmp_path: Path) -> None:
    async with open_hosts() as hosts:
        head, tail = [await hosts.start(layers, address=f"unix:{tmp_path}/{layers}") for layers in TWO]
        hello = client() if role == "client" else stage(head.address, TWO[0])
        async with greeted(tail, hello) as neighbour:
            assert tail.server.statistics().links == 1
            await LIES[lie](neighbour)
            if lie == "half a record":
                await neighbour.stream._transport.send_eof()
            await _gone(tail)
        await hosts.assert_serving([head, tail])


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"dgr-shm\2",
        pytest.param(b"", marks=pytest.mark.slow),
        b"dgr",
        pytest.param(b"dgr-shm\1" + bytes(60), marks=pytest.mark.slow),
    ],
    ids=["http", "another version", "silence", "half a word", "no preamble"],
)
async def test_a_neighbour_that_is_no_link_is_gone_within_a_deadline(words: bytes, tmp_path: Path) -> None:
    async with open_hosts() as hosts:
        host = await hosts.start("0:6", address=f"unix:{tmp_path}/stage")
        stream = await connect(tmp_path / "stage")
        if words:
            await stream.send_all(words)
        await until(lambda: host.server.statistics().refused == 1, HANG)
        await trio.aclose_forcefully(stream)
        await hosts.assert_serving([host])


@pytest.mark.parametrize("seed", range(3))
async def test_a_stage_outlives_any_records(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    async with open_hosts() as hosts:
        head, tail = [await hosts.start(layers, address=f"unix:{tmp_path}/{layers}") for layers in TWO]
        for _ in range(20):
            async with greeted(tail, stage(head.address, TWO[0])) as neighbour:
                neighbour.stream._memory.outgoing[:4096] = rng.randbytes(4096)
                for _ in range(rng.randrange(1, 8)):
                    numbers = [rng.choice([0, 0, 1, 8, 64, 4096, RING, 2**32 - 1]) for _ in range(3)]
                    try:
                        await neighbour.send(
                            _RECORD.pack(*numbers) + rng.randbytes(rng.choice([0, 8, numbers[0] % 5000]))
                        )
                    except trio.BrokenResourceError:
                        break
        await _gone(tail)
        await hosts.assert_serving([head, tail])
