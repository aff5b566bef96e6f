"""What is short is not kept waiting by what is long: over a slow line, in seconds of a clock that costs none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock
from wire.wire_samples import SMALL, boundary

from dgr.errors import LinkBroken
from dgr.testing.network.relay import Relay, open_relay
from dgr.wire import outbox
from dgr.wire.frames import Boundary, Ping, Pong
from dgr.wire.links import Link, open_link
from dgr.wire.memory import memory_transports

#: A chunk is 4 MiB, a token 8 KiB; fragments are as usual.
LIMITS = evolve(SMALL, n_batch=512, boundary_width=2048, fragment=256 * 1024, streams=8)
CHUNK = 4 * 512 * 2048
#: Bytes that memory transports and the relay hold before anything is held back: a megabyte and one packet more.
HELD = (1 << 20) + (256 << 10) + (64 << 10)
#: Bytes a second: ten megabits.
RATE = 1.25e6


@asynccontextmanager
async def slow_line(**options: Any) -> AsyncIterator[tuple[Link, Link, Relay]]:
    near, near_plug = memory_transports()
    far_plug, far = memory_transports()
    async with (
        open_relay(near_plug, far_plug, capacity=64 << 10) as relay,
        open_link(near, LIMITS, name="left", **options) as left,
        open_link(far, LIMITS, name="right") as right,
    ):
        relay.rightward.rate = relay.leftward.rate = RATE
        yield left, right, relay


async def _arrivals(link: Link, count: int) -> dict[str, float]:
    """When what came, by what it was."""
    found: dict[str, float] = {}
    while len(found) < count:
        frame = (await anext(link)).frame
        name = f"session {frame.key.session}" if isinstance(frame, Boundary) else type(frame).__name__
        found[name] = trio.current_time()
    return found


async def _behind_a_chunk(rounds: int = 1) -> tuple[float, float, float]:
    """Seconds until a control message, a token and the chunk before both are there."""
    async with slow_line() as (left, right, _):
        for _ in range(rounds - 1):
            await left.send(*boundary(1, 1, 512, LIMITS))
            await _arrivals(right, 1)
        await left.send(*boundary(1, 1, 512, LIMITS))
        await trio.sleep(1)  # the line is full
        began = trio.current_time()
        left.send_nowait(Pong(1))
        await left.send(*boundary(2, 1, 1, LIMITS))
        came = await _arrivals(right, 3)
        return came["Pong"] - began, came["session 2"] - began, came["session 1"] - began


async def test_what_is_short_waits_for_what_the_line_holds_and_a_fragment(autojump_clock: MockClock) -> None:
    control, token, chunk = await _behind_a_chunk()
    assert control < (HELD + LIMITS.fragment) / RATE
    assert token < (HELD + 2 * LIMITS.fragment) / RATE
    assert chunk > CHUNK / RATE - 1


class _InOrder(outbox.Outbox):
    """Everything goes in the order in which it came, whole."""

    def next_packet(self) -> outbox.Turn:
        control, self.control = self.control, type(self.control)()
        try:
            return super().next_packet() if self.turns else outbox.Turn(*control.popleft(), None)
        finally:
            self.control = control

    def written(self, outgoing: outbox.Outgoing | None, size: int, seconds: float = 0.0) -> None:
        super().written(outgoing, size, seconds)
        if outgoing is not None and outgoing.left:
            self.turns.rotate(1)


async def test_in_one_lane_it_would_wait_for_the_chunk(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr("dgr.wire.links.Outbox", _InOrder)
    control, token, chunk = await _behind_a_chunk()
    assert control > (HELD + LIMITS.fragment) / RATE
    assert token >= chunk


async def _longest_fragment(rate: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of the longest fragment once a line of that rate is known."""
    sizes: list[int] = []
    written = Link._written

    def noted(self: Link, turn: outbox.Turn, seconds: float = 0.0) -> None:
        sizes.append(turn.n_payload)
        written(self, turn, seconds)

    monkeypatch.setattr(Link, "_written", noted)
    async with slow_line() as (left, right, relay):
        relay.rightward.rate = rate
        await left.send(*boundary(1, 1, 512, LIMITS))
        await _arrivals(right, 1)
    return max(sizes[len(sizes) // 2 :])


async def test_fragments_are_short_on_a_slow_line_and_long_on_a_fast_one(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """20 ms of a line of ten megabits are 25 KB."""
    with monkeypatch.context() as one:
        assert await _longest_fragment(RATE, one) <= 32 * 1024
    with monkeypatch.context() as one:
        assert await _longest_fragment(1e9, one) == LIMITS.fragment
    monkeypatch.setattr(outbox, "_FRAGMENT_SECONDS", 1000.0)
    assert await _longest_fragment(RATE, monkeypatch) == LIMITS.fragment


@pytest.mark.parametrize("mutant", [False, True])
async def test_no_side_is_given_up_while_a_chunk_passes(
    mutant: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """It takes longer than three heartbeats, and its sender hears nothing but the answers to what it asks."""
    if mutant:
        monkeypatch.setattr("dgr.wire.links.Outbox", _InOrder)
    broken = False
    async with slow_line(heartbeat=0.8) as (left, right, relay), trio.open_nursery() as nursery:
        relay.leftward.rate = None

        async def hear() -> None:
            nonlocal broken
            try:
                async for _ in left:
                    pass
            except LinkBroken:
                broken = True

        nursery.start_soon(hear)
        began = trio.current_time()
        await left.send(*boundary(1, 1, 512, LIMITS))
        try:
            await _arrivals(right, 1)
        except (LinkBroken, StopAsyncIteration):
            assert mutant
        else:
            assert trio.current_time() - began > 3 * 0.8
        nursery.cancel_scope.cancel()
    assert broken is mutant


async def test_the_time_that_a_sign_of_life_takes_is_known_while_a_chunk_passes(autojump_clock: MockClock) -> None:
    async with slow_line(heartbeat=0.8) as (left, right, _), trio.open_nursery() as nursery:

        async def hear() -> None:
            async for received in left:
                assert not isinstance(received.frame, Ping)

        nursery.start_soon(hear)
        await left.send(*boundary(1, 1, 512, LIMITS))
        await _arrivals(right, 1)
        found = left.statistics().round_trip
        assert found is not None
        assert found < (HELD + LIMITS.fragment) / RATE + 0.1
        nursery.cancel_scope.cancel()
