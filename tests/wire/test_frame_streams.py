"""Packets over every kind of transport: the same frames, with no copy that the transport does not need."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked
from wire.wire_samples import FLASH, SMALL, boundary, flat

from dgr.errors import FrameError, LinkBroken
from dgr.wire import framing, memory_transports, streams
from dgr.wire.frames import Boundary, Pong
from dgr.wire.framing import Limits, encode
from dgr.wire.links import Link, open_link

LIMITS = evolve(SMALL, n_batch=512, boundary_width=1024, fragment=300_000)


@asynccontextmanager
async def sockets() -> AsyncIterator[tuple[trio.SocketStream, trio.SocketStream]]:
    """Two ends of a TCP connection on loopback."""
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        near = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        far = await listener.accept()
        try:
            yield near, far
        finally:
            await trio.aclose_forcefully(near)
            await trio.aclose_forcefully(far)


async def _exchange(left: Link, right: Link, seed: int) -> None:
    """Payloads of many lengths and control messages both ways, from several sessions at once."""
    chance = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 512]
    chance.shuffle(lengths)

    async def send(link: Link, session: int) -> None:
        for seq, n_tokens in enumerate(lengths, 1):
            await link.send(*boundary(session, seq, n_tokens, LIMITS))
            link.send_nowait(Pong(seq))

    async def check(link: Link) -> None:
        for _ in range(2 * 2 * len(lengths)):
            received = await anext(link)
            if isinstance(received.frame, Boundary):
                frame = received.frame
                _, payload = boundary(frame.key.session, frame.seq, len(frame.tokens), LIMITS)
                assert bytes(received.payload or b"") == payload

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for link in (left, right):
                nursery.start_soon(check, link)
                for session in (1, 2):
                    nursery.start_soon(send, link, session)


@pytest.mark.parametrize("fragment", [4096, 100_000, 300_000])
async def test_frames_pass_over_sockets_whole_whatever_their_length(fragment: int) -> None:
    limits = evolve(LIMITS, fragment=fragment)
    async with sockets() as (near, far), open_link(near, limits) as left, open_link(far, limits) as right:
        await _exchange(left, right, fragment)


async def _partly_sent(monkeypatch: pytest.MonkeyPatch, at_once: int, losing: str = "") -> None:
    """``at_once``: bytes that the socket takes from whoever sends; the writer gets rid of 7777 at a time."""
    async with sockets() as (near, far), open_link(far, LIMITS) as right:
        later, now = near.socket.sendmsg, os.writev

        async def few(parts: list[memoryview]) -> int:
            missing = 1 if losing == "later" and parts[0].nbytes > 1 else 0
            return await later([parts[0][: min(7777, parts[0].nbytes - missing)]]) + missing

        def fewer(descriptor: int, parts: list[bytes | memoryview]) -> int:
            if not at_once:
                raise BlockingIOError
            data = b"".join(parts)
            missing = 1 if losing == "now" and len(data) > 1 else 0
            return now(descriptor, [data[: min(at_once, len(data) - missing)]]) + missing

        monkeypatch.setattr(near.socket, "sendmsg", few, raising=False)
        async with open_link(near, LIMITS) as left:
            monkeypatch.setattr("dgr.wire.streams.os.writev", fewer)
            tokens = [boundary(3, seq, 1, LIMITS) for seq in range(1, 4)]
            for frame, payload in tokens:
                await left.send(frame, payload)
            for _, payload in tokens:
                assert bytes((await anext(right)).payload or b"") == payload
            await _exchange(left, right, 1)


@pytest.mark.parametrize("at_once", [0, 1, 150, 7777, 100_000])
async def test_a_socket_that_takes_a_few_bytes_at_a_time_gets_them_all(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _partly_sent(monkeypatch, at_once)


@pytest.mark.parametrize("losing", ["later", "now"])
async def test_a_part_that_is_not_sent_is_noticed(losing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, LinkBroken, FrameError, ExceptionGroup)):
        await _partly_sent(monkeypatch, 100_000, losing)


async def test_what_is_short_is_written_by_whoever_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token and a control message; a chunk is the writer's."""
    by_the_writer: list[int] = []
    send = streams._SocketStream.send

    async def spied(self: streams._SocketStream, head: bytes, body: memoryview | None) -> None:
        by_the_writer.append(len(head) + (0 if body is None else body.nbytes))
        await send(self, head, body)

    monkeypatch.setattr(streams._SocketStream, "send", spied)
    async with sockets() as (near, far), open_link(near, FLASH) as left, open_link(far, FLASH) as right:
        for seq in range(1, 4):
            await left.send(*boundary(1, seq, 1, FLASH))
            left.send_nowait(Pong(seq))
            assert [type((await anext(right)).frame) for _ in range(2)] == [Boundary, Pong]
        assert by_the_writer == []
        frame, payload = boundary(1, 4, 64, FLASH)
        await left.send(frame, payload)
        assert bytes((await anext(right)).payload or b"") == payload
        assert sum(by_the_writer) >= len(payload)


async def test_a_socket_reads_payloads_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what comes with the headers."""
    copied = 0
    take = framing._Assembly.take

    def counted(self: framing._Assembly, part: memoryview, lasting: bool) -> None:
        nonlocal copied
        copied += part.nbytes
        take(self, part, lasting)

    monkeypatch.setattr(framing._Assembly, "take", counted)
    async with sockets() as (near, far), open_link(near, FLASH) as left, open_link(far, FLASH) as right:
        frame, payload = boundary(n_tokens=64, limits=FLASH)
        await left.send(frame, payload)
        received = await anext(right)
    assert bytes(received.payload or b"") == payload
    fragments = -(-len(payload) // FLASH.fragment)
    assert copied <= streams._FIRST + 2 * fragments * streams._BETWEEN < len(payload) / 20


@pytest.mark.parametrize("end", ["near", "far"])
async def test_a_socket_that_goes_ends_the_link(end: str) -> None:
    async with sockets() as (near, far), open_link(near, LIMITS) as link:
        await (near if end == "near" else far).aclose()
        if end == "near":
            with pytest.raises(LinkBroken):
                await anext(link)
        else:
            assert [received async for received in link] == []


async def test_a_payload_is_handed_over_in_memory_as_it_is(autojump_clock: MockClock) -> None:
    near, far = memory_transports()
    limits = FLASH.unbroken()
    async with open_link(near, limits) as left, open_link(far, limits) as right:
        for n_tokens, shared in ((1, False), (2, True), (512, True)):
            frame, payload = boundary(n_tokens=n_tokens, limits=FLASH)
            buffer = bytearray(payload)
            await left.send(frame, buffer)
            received = await anext(right)
            assert received.payload is not None
            assert (received.payload.obj is buffer) is shared
            assert received.payload == payload
            if shared:
                assert received.payload.readonly


async def test_what_waits_in_memory_is_bounded(autojump_clock: MockClock) -> None:
    near, far = memory_transports()
    limits = evolve(LIMITS.unbroken(), streams=64)
    async with open_link(near, limits) as left, open_link(far, limits) as right, trio.open_nursery() as nursery:
        sent: list[int] = []

        async def send(session: int) -> None:
            await left.send(*boundary(session, 1, 256, LIMITS))
            sent.append(session)

        for session in range(1, 9):
            nursery.start_soon(send, session)
        await wait_all_tasks_blocked()
        # One MiB in the pipe, one with the writer's packet, and what may be under way.
        assert left.statistics().bytes_sent < (1 << 20) + 8192
        assert left.statistics().bytes_queued <= limits.under_way
        assert len(sent) < 8
        got = [(await anext(right)).frame for _ in range(8)]
    assert sorted(frame.key.session for frame in got if isinstance(frame, Boundary)) == list(range(1, 9))


def _never_full(self: object) -> bool:
    return True


async def test_without_that_bound_the_test_of_it_fails(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    room: Callable[[object], bool] = _never_full
    monkeypatch.setattr("dgr.wire.memory.MemoryTransport.has_room", property(room))
    with pytest.raises((AssertionError, ExceptionGroup)):
        await test_what_waits_in_memory_is_bounded(autojump_clock)


def test_in_one_piece_means_one_fragment_of_any_legal_boundary() -> None:
    for limits in (SMALL, FLASH, Limits(n_batch=2**16, boundary_width=2**15, n_vocab=1)):
        assert limits.unbroken().fragment == min(limits.under_way, 2**32 - 1)
    frame, payload = boundary(n_tokens=FLASH.n_batch, limits=FLASH)
    assert len(list(encode(frame, payload, 1, FLASH.unbroken()))) == 2
    assert len(flat(next(encode(frame, payload, 1, FLASH)))) < 5000
