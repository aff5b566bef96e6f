"""The relay: what it does to bytes, and that it loses none it was not told to lose."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from attrs import frozen
from trio.testing import MockClock, check_two_way_stream, wait_all_tasks_blocked

from dgr.testing.network.relay import Relay, open_relay
from dgr.wire.memory import memory_transports


@frozen
class Joined:
    """A relay, and what the two parties of a test hold."""

    relay: Relay
    left: trio.abc.Stream
    right: trio.abc.Stream


@asynccontextmanager
async def joined(capacity: int = 1024 * 1024) -> AsyncIterator[Joined]:
    left, left_plug = memory_transports()
    right_plug, right = memory_transports()
    async with open_relay(left_plug, right_plug, capacity=capacity) as relay:
        yield Joined(relay, left, right)
        await left.aclose()
        await right.aclose()


async def tcp_pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    near = await trio.open_tcp_stream("127.0.0.1", port)
    far = await listeners[0].accept()
    await listeners[0].aclose()
    return near, far


async def read_all(stream: trio.abc.Stream) -> bytes:
    data = b""
    while part := await stream.receive_some(65536):
        data += part
    return data


async def read_exactly(stream: trio.abc.Stream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = await stream.receive_some(size - len(data))
        assert part, f"the stream ended after {len(data)} of {size} bytes"
        data += part
    return data


async def test_bytes_pass_both_ways_in_order(autojump_clock: MockClock) -> None:
    async with joined() as j:
        await j.left.send_all(b"ping" * 50_000)
        assert await read_exactly(j.right, 200_000) == b"ping" * 50_000
        await j.right.send_all(b"pong")
        assert await read_exactly(j.left, 4) == b"pong"
        await wait_all_tasks_blocked()
        assert (j.relay.rightward.forwarded, j.relay.leftward.forwarded) == (200_000, 4)
        assert (j.relay.rightward.held, j.relay.leftward.held) == (0, 0)


async def test_two_parties_joined_by_a_relay_have_a_proper_stream() -> None:
    async with trio.open_nursery() as nursery:

        async def make() -> tuple[trio.abc.Stream, trio.abc.Stream]:
            left, left_plug = memory_transports()
            right_plug, right = memory_transports()

            async def run() -> None:
                async with open_relay(left_plug, right_plug) as relay:
                    await relay.wait_closed()

            nursery.start_soon(run)
            return left, right

        with trio.fail_after(30):
            await check_two_way_stream(make, None)


async def test_each_way_has_its_own_delay(autojump_clock: MockClock) -> None:
    async with joined() as j:
        j.relay.rightward.delay, j.relay.leftward.delay = 3.0, 40.0
        began = trio.current_time()
        await j.left.send_all(b"a")
        await j.right.send_all(b"b")
        assert await j.right.receive_some() == b"a"
        assert trio.current_time() - began == pytest.approx(3.0)
        assert await j.left.receive_some() == b"b"
        assert trio.current_time() - began == pytest.approx(40.0)


async def test_delay_is_not_a_bandwidth_limit(autojump_clock: MockClock) -> None:
    async with joined() as j:
        j.relay.rightward.delay = 5.0
        began = trio.current_time()
        for number in range(10):
            await j.left.send_all(bytes([number]))
            await trio.sleep(0.1)
        assert await read_exactly(j.right, 10) == bytes(range(10))
        assert trio.current_time() - began == pytest.approx(5.9)


async def test_a_delay_set_later_holds_for_bytes_on_their_way(autojump_clock: MockClock) -> None:
    async with joined() as j:
        j.relay.rightward.delay = 1000.0
        await j.left.send_all(b"a")
        await trio.sleep(1)
        j.relay.rightward.delay = 0.0
        assert await j.right.receive_some() == b"a"
        assert trio.current_time() < 2


async def test_a_stall_holds_bytes_until_resumed_and_loses_none(autojump_clock: MockClock) -> None:
    async with joined() as j:
        j.relay.rightward.stall()
        await j.left.send_all(b"abc")
        with trio.move_on_after(100) as silence:
            await j.right.receive_some()
        assert silence.cancelled_caught
        assert j.relay.rightward.held == 3
        await j.right.send_all(b"the other way goes on")
        assert await j.left.receive_some() == b"the other way goes on"
        j.relay.rightward.resume()
        assert await read_exactly(j.right, 3) == b"abc"


async def test_a_stalled_relay_holds_no_more_than_its_capacity(autojump_clock: MockClock) -> None:
    async with joined(capacity=1000) as j:
        j.relay.rightward.stall()
        with trio.move_on_after(10) as full:
            while True:
                await j.left.send_all(bytes(65536))
        assert full.cancelled_caught
        assert j.relay.rightward.held == 1000


async def test_trickle_passes_a_byte_at_a_time(autojump_clock: MockClock) -> None:
    async with joined() as j:
        j.relay.rightward.trickle()
        await j.left.send_all(b"abcdef")
        assert [await j.right.receive_some() for _ in range(6)] == [b"a", b"b", b"c", b"d", b"e", b"f"]


async def test_trickle_can_be_a_byte_a_second(autojump_clock: MockClock) -> None:
    async with joined() as j:
        j.relay.rightward.trickle(1, interval=1.0)
        await j.left.send_all(b"abcde")
        assert await read_exactly(j.right, 5) == b"abcde"
        assert trio.current_time() == pytest.approx(4.0)
        with pytest.raises(ValueError, match="piece of 0 bytes"):
            j.relay.rightward.trickle(0)


async def test_a_clean_cut_passes_on_what_is_held_and_then_ends_both_ways(autojump_clock: MockClock) -> None:
    async with joined() as j:
        j.relay.rightward.delay = 7.0
        await j.left.send_all(b"last words")
        await wait_all_tasks_blocked()
        await j.relay.cut(clean=True)
        assert trio.current_time() == pytest.approx(7.0)
        assert await read_all(j.right) == b"last words"
        assert await read_all(j.left) == b""
        assert j.relay.is_closed


async def test_an_abrupt_cut_loses_what_is_held(autojump_clock: MockClock) -> None:
    async with joined() as j:
        j.relay.rightward.delay = 7.0
        await j.left.send_all(b"lost words")
        await wait_all_tasks_blocked()
        await j.relay.cut()
        assert trio.current_time() == 0
        assert await read_all(j.right) == b""
        with pytest.raises(trio.BrokenResourceError):
            await j.left.send_all(b"x")


@pytest.mark.parametrize("clean", [True, False])
async def test_a_cut_comes_after_exactly_so_many_bytes(clean: bool, autojump_clock: MockClock) -> None:
    async with joined() as j:
        await j.left.send_all(b"0123456789")
        assert await read_exactly(j.right, 10) == b"0123456789"
        await wait_all_tasks_blocked()
        j.relay.rightward.cut_after(5, clean=clean)
        await j.left.send_all(b"abcdefghij")
        await j.relay.wait_closed()
        assert await read_all(j.right) == b"abcde"
        assert j.relay.rightward.forwarded == 15


async def test_a_cut_after_nothing_does_not_wait_for_a_byte(autojump_clock: MockClock) -> None:
    async with joined() as j:
        await wait_all_tasks_blocked()
        j.relay.leftward.cut_after(0)
        await j.relay.wait_closed()
        assert await read_all(j.left) == b""


async def test_a_party_that_closes_is_seen_by_the_other_behind_its_last_bytes(autojump_clock: MockClock) -> None:
    async with joined() as j:
        j.relay.rightward.delay = 2.0
        j.relay.leftward.stall()
        await j.right.send_all(b"never read")
        await j.left.send_all(b"bye")
        await j.left.aclose()
        assert await read_all(j.right) == b"bye"
        assert trio.current_time() == pytest.approx(2.0)
        await j.relay.wait_closed()


async def test_leaving_the_block_closes_both_streams_and_errors_leave_as_themselves() -> None:
    left, left_plug = memory_transports()
    right_plug, right = memory_transports()
    with pytest.raises(KeyError):
        async with open_relay(left_plug, right_plug):
            raise KeyError("the test's own")
    assert await read_all(left) == await read_all(right) == b""


async def test_over_tcp_a_half_close_passes_and_a_clean_cut_is_an_end_of_stream() -> None:
    with trio.fail_after(10):
        left, left_plug = await tcp_pair()
        right_plug, right = await tcp_pair()
        async with left, right, open_relay(left_plug, right_plug) as relay:
            await left.send_all(b"question")
            await left.send_eof()
            assert await read_all(right) == b"question"
            await right.send_all(b"answer")
            assert await read_exactly(left, 6) == b"answer"
            await relay.cut(clean=True)
            assert await read_all(left) == b""


async def test_over_tcp_an_abrupt_cut_is_a_reset() -> None:
    with trio.fail_after(10):
        left, left_plug = await tcp_pair()
        right_plug, right = await tcp_pair()
        async with left, right, open_relay(left_plug, right_plug) as relay:
            await relay.cut()
            with pytest.raises(trio.BrokenResourceError) as caught:
                await read_all(right)
            assert isinstance(caught.value.__cause__, OSError)
            assert caught.value.__cause__.errno == errno.ECONNRESET


async def test_a_source_that_breaks_as_the_relay_is_cut_is_a_cut() -> None:
    """Both at once is what a reset that comes from both sides looks like."""

    broken = trio.Event()

    async def breaks() -> None:
        await broken.wait()
        raise trio.BrokenResourceError

    source = trio.testing.MemoryReceiveStream(receive_some_hook=breaks)
    left, left_plug = memory_transports()
    _, deaf = memory_transports()
    async with open_relay(left_plug, trio.StapledStream(deaf, source)) as relay:
        await wait_all_tasks_blocked()
        broken.set()
        await relay.cut()
        assert relay.is_closed
    await left.aclose()


async def test_a_delay_is_kept_to_less_than_a_millisecond() -> None:
    """On the real clock: what an event loop's timer is late, in whole milliseconds, would add up over a ring."""
    near, plug = await tcp_pair()
    far_plug, far = await tcp_pair()
    late = []
    async with open_relay(plug, far_plug) as relay:
        relay.rightward.delay = 0.0052
        for _ in range(20):
            began = trio.current_time()
            await near.send_all(b"x")
            await far.receive_some(1)
            late.append(trio.current_time() - began - 0.0052)
    assert min(late) >= 0
    assert sorted(late)[4] < 0.0005  # not all of them: this machine may be busy
    for stream in (near, far):
        await trio.aclose_forcefully(stream)


async def test_a_rate_is_kept_to_over_a_long_time_and_may_change(autojump_clock: MockClock) -> None:
    async with joined() as pair, trio.open_nursery() as nursery:
        pair.relay.rightward.rate = 1000.0
        nursery.start_soon(pair.left.send_all, bytes(10_000))
        began = trio.current_time()
        await read_exactly(pair.right, 5000)
        assert trio.current_time() - began == pytest.approx(5.0, abs=0.02)
        pair.relay.rightward.rate = None
        await read_exactly(pair.right, 5000)
        assert trio.current_time() - began == pytest.approx(5.0, abs=0.02)
    with pytest.raises(ValueError, match="must be above 0"):
        pair.relay.rightward.rate = 0


async def test_a_direction_that_was_idle_saves_nothing_up(autojump_clock: MockClock) -> None:
    async with joined() as pair:
        pair.relay.rightward.rate = 100.0
        for _ in range(3):
            await trio.sleep(100)
            began = trio.current_time()
            await pair.left.send_all(bytes(200))
            await read_exactly(pair.right, 200)
            assert trio.current_time() - began == pytest.approx(2.0, abs=0.03)


async def test_turns_are_counted_where_bytes_go_the_other_way(autojump_clock: MockClock) -> None:
    async with joined() as pair:
        assert pair.relay.turns == 0
        for count in (1, 2, 3):
            for _ in range(count):  # in how many pieces does not matter
                await pair.left.send_all(b"question")
                await read_exactly(pair.right, 8)
            await pair.right.send_all(b"answer")
            await read_exactly(pair.left, 6)
            assert pair.relay.turns == 2 * count
