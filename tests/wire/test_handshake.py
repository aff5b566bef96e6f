"""The preamble: who speaks another schema, or is not dgr at all, is told apart before any frame."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock

from dgr.errors import DeadlineExceeded, DgrError, FrameError, LinkBroken
from dgr.testing.network.relay import open_relay
from dgr.wire import handshake
from dgr.wire.frames import SCHEMA_HASH, SCHEMA_VERSION
from dgr.wire.handshake import HANDSHAKE_LIMITS, exchange_preamble
from dgr.wire.memory import memory_transports

OURS = handshake._PREAMBLE.pack(handshake._MAGIC, SCHEMA_VERSION, bytes.fromhex(SCHEMA_HASH))


async def test_two_of_the_same_build_agree_even_byte_by_byte(autojump_clock: MockClock) -> None:
    near, near_plug = memory_transports()
    far_plug, far = memory_transports()
    async with open_relay(near_plug, far_plug) as relay, trio.open_nursery() as nursery:
        relay.rightward.trickle()
        relay.leftward.trickle(1, interval=0.1)
        nursery.start_soon(exchange_preamble, near, 5.0)
        nursery.start_soon(exchange_preamble, far, 5.0)


async def test_not_a_byte_behind_the_preamble_is_taken(autojump_clock: MockClock) -> None:
    near, far = memory_transports()
    await far.send_all(OURS + b"first frame")
    await exchange_preamble(near, 1.0)
    assert await near.receive_some() == b"first frame"


@pytest.mark.parametrize(
    ("theirs", "error", "match"),
    [
        (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", FrameError, "not dgr: its first bytes are b'GET / HT'"),
        (b"\x16\x03\x01" + bytes(40), FrameError, "not dgr"),
        (
            OURS[:6] + b"\x63\x00" + OURS[8:],
            FrameError,
            f"speaks schema 99 .{SCHEMA_HASH}., this one {SCHEMA_VERSION} ",
        ),
        (OURS[:8] + bytes(16), FrameError, f"schema {SCHEMA_VERSION} .{'00' * 16}., this one {SCHEMA_VERSION} "),
        (b"", LinkBroken, "after 0 bytes"),
        (OURS[:23], LinkBroken, "after 23 bytes"),
    ],
)
async def test_a_stranger_is_refused_with_what_it_said(
    theirs: bytes, error: type[DgrError], match: str, autojump_clock: MockClock
) -> None:
    near, far = memory_transports()
    await far.send_all(theirs)
    await far.aclose()
    near.send_all = _swallow  # type: ignore[method-assign]  # the stranger reads nothing
    with pytest.raises(error, match=match):
        await exchange_preamble(near, 1.0)


async def _swallow(data: object) -> None:
    await trio.lowlevel.checkpoint()


async def test_a_party_that_closes_at_once_is_a_broken_link(autojump_clock: MockClock) -> None:
    near, far = memory_transports()
    await far.aclose()
    with pytest.raises(LinkBroken, match="before it said what it speaks"):
        await exchange_preamble(near, 1.0)


async def _nothing(far: trio.abc.Stream) -> None:
    await trio.sleep_forever()


async def _a_byte_a_second(far: trio.abc.Stream) -> None:
    for byte in OURS:
        await far.send_all(bytes([byte]))
        await trio.sleep(1)


@pytest.mark.parametrize("peer", [_nothing, _a_byte_a_second])
async def test_a_silent_or_dripping_peer_is_refused_within_the_deadline(
    peer: Callable[[trio.abc.Stream], Awaitable[None]], autojump_clock: MockClock
) -> None:
    near, far = memory_transports()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer, far)
        with pytest.raises(DeadlineExceeded, match="within 10 s"):
            await exchange_preamble(near, 10.0)
        assert trio.current_time() == pytest.approx(10)
        nursery.cancel_scope.cancel()


def test_next_to_nothing_can_be_sent_before_both_sides_know_each_other() -> None:
    assert HANDSHAKE_LIMITS.under_way <= 8
    assert HANDSHAKE_LIMITS.message <= 70_000
