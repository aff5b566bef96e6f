"""What comes together is taken together, and what was consumed is granted together: without a byte too few or too late."""

from __future__ import annotations

import random

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked
from wire.wire_samples import SMALL, boundary, raw

from dgr.errors import FrameError, LinkBroken
from dgr.wire.frames import Credit, Ping, Pong
from dgr.wire.links import Link, open_link
from dgr.wire.memory import memory_transports

#: Credit for two of the largest payloads, as links between stages have.
ALL = SMALL.under_way
LARGEST = ALL // 2


class Turns(trio.abc.Instrument):
    """Counts the turns that one task takes."""

    def __init__(self, task: trio.lowlevel.Task) -> None:
        self.count = 0
        self._task = task

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task is self._task


async def test_frames_that_came_together_cost_one_turn(autojump_clock: MockClock) -> None:
    near, far = memory_transports()
    async with open_link(near, SMALL) as left, open_link(far, SMALL) as right:
        turns = Turns(trio.lowlevel.current_task())
        for session in range(1, 6):
            await left.send(*boundary(session))
        left.send_nowait(Pong(1))
        trio.lowlevel.add_instrument(turns)
        taken = await right.receive()
        trio.lowlevel.remove_instrument(turns)
        assert len(taken) == 6
        assert turns.count <= 1
        assert right.statistics().frames_received == 6


async def test_frames_of_the_link_itself_are_not_given_out(autojump_clock: MockClock) -> None:
    near, far = memory_transports()
    async with open_link(near, SMALL) as left, open_link(far, SMALL) as right:
        left.send_nowait(Ping(7))
        left.send_nowait(Credit(1))
        left.send_nowait(Ping(0))
        with trio.move_on_after(1) as scope:
            await right.receive()
        assert scope.cancelled_caught
        assert [received.frame for received in await left.receive()] == [Pong(7)]


async def test_the_end_is_an_empty_burst(autojump_clock: MockClock) -> None:
    near, far = memory_transports()
    async with open_link(far, SMALL) as right:
        await near.send_all(raw(Pong(1)) + raw(Pong(2)))
        await near.aclose()
        assert [received.frame for received in await right.receive()] == [Pong(1), Pong(2)]
        assert await right.receive() == await right.receive() == []


@pytest.mark.parametrize(("tail", "error"), [(b"\xff" * 16, FrameError), (raw(Pong(3))[:-1], LinkBroken)])
async def test_what_came_before_an_error_is_given_out_first(
    autojump_clock: MockClock, tail: bytes, error: type[Exception]
) -> None:
    near, far = memory_transports()
    async with open_link(far, SMALL) as right:
        await near.send_all(raw(Pong(1)) + tail)
        await near.aclose()
        assert [received.frame for received in await right.receive()] == [Pong(1)]
        for _ in range(2):
            with pytest.raises(error):
                await right.receive()


async def test_credit_that_nobody_needs_yet_is_not_told(autojump_clock: MockClock) -> None:
    near, far = memory_transports()
    async with open_link(near, SMALL, credit=ALL) as left, open_link(far, SMALL, granted=ALL) as right:
        right.grant(ALL // 4 - 1)
        await wait_all_tasks_blocked()
        assert right.statistics().frames_sent == 0
        right.grant(1)
        assert right.statistics().frames_sent == 1
        await left.aclose()


async def send_many(left: Link, right: Link) -> int:
    """Payloads of any size up to the largest, each consumed as it comes; how many came within a minute."""
    dice, came = random.Random(3), 0

    async def send() -> None:
        for number in range(200):
            tokens = dice.choice((1, 1, 2, SMALL.n_batch - 1, SMALL.n_batch))
            await left.send(*boundary(number % 3 + 1, number, tokens, SMALL))

    with trio.move_on_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            nursery.start_soon(left.receive)
            while came < 200:
                for received in await right.receive():
                    right.grant(len(received.payload or b""))
                    came += 1
            nursery.cancel_scope.cancel()
    return came


@pytest.mark.parametrize("granted", [LARGEST, LARGEST + 1, 3 * LARGEST // 2, ALL, 3 * ALL])
async def test_no_payload_waits_for_credit_that_is_held_back(autojump_clock: MockClock, granted: int) -> None:
    near, far = memory_transports()
    async with open_link(near, SMALL, credit=granted) as left, open_link(far, SMALL, granted=granted) as right:
        assert await send_many(left, right) == 200


async def test_credit_that_is_held_back_for_too_long_would_be_seen(autojump_clock: MockClock) -> None:
    near, far = memory_transports()
    async with open_link(near, SMALL, credit=ALL) as left, open_link(far, SMALL, granted=ALL) as right:
        right._due_at = ALL
        assert await send_many(left, right) < 200
