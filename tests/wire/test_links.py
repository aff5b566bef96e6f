"""Links: order, room, and an end that everyone sees and nobody misreads."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
from attrs import evolve, frozen
from trio.testing import MockClock, check_two_way_stream, wait_all_tasks_blocked
from wire.wire_samples import DIGEST, FLASH, ROUTE, SMALL, boundary, key, logits, raw

from dgr.core.values import Expectation, Key, LogitsWanted, SamplingParams
from dgr.errors import ClosedError, FrameError, LinkBroken, Overloaded
from dgr.testing.network.relay import Relay, open_relay
from dgr.text import reason_of
from dgr.wire import links, outbox
from dgr.wire.frames import Boundary, Credit, Frame, Ping, Pong, Refusal, Refused, Token, Tokens
from dgr.wire.framing import HEADER_SIZE, Limits, Received
from dgr.wire.links import Link, open_link
from dgr.wire.memory import memory_transports

WIDE = evolve(SMALL, boundary_width=64, fragment=64, streams=8)


@frozen
class Pair:
    """Two ends of one link."""

    left: Link
    right: Link


@asynccontextmanager
async def linked(limits: Limits = SMALL, **options: Any) -> AsyncIterator[Pair]:
    near, far = memory_transports()
    async with (
        open_link(near, limits, name="left", **options) as left,
        open_link(far, limits, name="right") as right,
    ):
        yield Pair(left, right)


@asynccontextmanager
async def half_linked(limits: Limits = SMALL, **options: Any) -> AsyncIterator[tuple[Link, trio.abc.Stream]]:
    """A link, and the bare transport at its other end."""
    near, far = memory_transports()
    async with open_link(near, limits, name="left", **options) as left:
        yield left, far
        await trio.aclose_forcefully(far)


@asynccontextmanager
async def relayed(
    limits: Limits = SMALL, *, capacity: int = 1 << 20, **options: Any
) -> AsyncIterator[tuple[Pair, Relay]]:
    """Two ends of one link with a relay between them."""
    near, near_plug = memory_transports()
    far_plug, far = memory_transports()
    async with (
        open_relay(near_plug, far_plug, capacity=capacity) as relay,
        open_link(near, limits, name="left", **options) as left,
        open_link(far, limits, name="right", **options) as right,
    ):
        yield Pair(left, right), relay


async def take(link: Link, count: int) -> list[Received]:
    return [await anext(link) for _ in range(count)]


async def take_all(link: Link, into: list[Received]) -> None:
    async for received in link:
        into.append(received)  # noqa: PERF401  (what came before an error counts)


async def read_bytes(stream: trio.abc.Stream) -> bytes:
    """Everything up to the end of the stream, however it ended."""
    data = b""
    try:
        while part := await stream.receive_some():
            data += part
    except trio.BrokenResourceError:
        pass
    return data


def order_of(received: list[Received]) -> dict[int, list[int]]:
    """Sequence numbers in the order in which they came, by session."""
    order = defaultdict(list)
    for one in received:
        assert isinstance(one.frame, Boundary)
        order[one.frame.key.session].append(one.frame.seq)
    return order


# --- the transport under most tests ----------------------------------------------------------------------------------


async def test_memory_transports_are_proper_streams() -> None:
    async def make() -> tuple[trio.abc.Stream, trio.abc.Stream]:
        return memory_transports()

    with trio.fail_after(30):
        await check_two_way_stream(make, None)


async def test_memory_transports_share_no_buffer_and_hold_a_bounded_number_of_bytes(autojump_clock: MockClock) -> None:
    near, far = memory_transports()
    data = bytearray(b"before")
    await near.send_all(data)
    data[:] = b"behind"
    assert await far.receive_some() == b"before"
    sent = 0
    with trio.move_on_after(1):
        while True:
            await near.send_all(bytes(65536))
            sent += 65536
    assert sent <= 1 << 20


# --- frames arrive, in order -----------------------------------------------------------------------------------------


async def test_frames_and_payloads_arrive_both_ways(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        for sender, receiver in ((pair.left, pair.right), (pair.right, pair.left)):
            frame, payload = boundary(n_tokens=8)
            sender.send_nowait(Pong(1))
            await sender.send(frame, payload)
            await sender.send(Pong(2))
            got = {type(one.frame): one for one in await take(receiver, 3)}
            assert bytes(got[Boundary].payload or b"") == payload
            assert got[Boundary].frame == frame


async def _out_of_order() -> bool:
    """Whether a short last chunk overtakes the long ones of its session."""
    received: list[Received] = []
    async with linked(evolve(WIDE, n_batch=32)) as pair, trio.open_nursery() as nursery:
        sent = 0
        for seq, n_tokens in enumerate((16, 1, 8, 1), 1):
            for session in (1, 2):
                nursery.start_soon(pair.left.send, *boundary(session, seq, n_tokens, WIDE))
                await wait_all_tasks_blocked()
                sent += 1
        received += await take(pair.right, sent)
    return any(seqs != sorted(seqs) for seqs in order_of(received).values())


async def test_a_sessions_payloads_arrive_in_the_order_they_were_sent(autojump_clock: MockClock) -> None:
    assert not await _out_of_order()


async def test_without_one_payload_per_session_the_order_would_break(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    numbers = itertools.count(100)

    class Mutant(Link):
        def _prepare(self, frame: Frame, payload: bytes | bytearray | memoryview) -> outbox.Outgoing:
            outgoing = super()._prepare(frame, payload)
            outgoing.session = key(next(numbers))  # every payload passes for one of a session of its own
            return outgoing

    monkeypatch.setattr(links, "Link", Mutant)
    assert await _out_of_order()


async def test_a_control_frame_overtakes_the_fragments_of_a_payload(autojump_clock: MockClock) -> None:
    limits = evolve(WIDE, n_batch=1024)
    async with linked(limits) as pair:
        frame, payload = boundary(n_tokens=1024, limits=limits)
        await pair.left.send(frame, payload)
        await wait_all_tasks_blocked()  # the transport is full of fragments now
        assert pair.left.statistics().bytes_sent < len(payload) / 10
        pair.left.send_nowait(Pong(7))
        control, work = await take(pair.right, 2)
        assert control.frame == Pong(7)
        assert bytes(work.payload or b"") == payload


async def test_a_short_payload_of_another_session_does_not_wait_for_a_long_one(autojump_clock: MockClock) -> None:
    limits = evolve(WIDE, n_batch=1024)
    async with linked(limits) as pair:
        await pair.left.send(*boundary(1, 1, 1024, limits))
        await wait_all_tasks_blocked()
        await pair.left.send(*boundary(2, 1, 1, limits))
        assert list(order_of(await take(pair.right, 2))) == [2, 1]


async def test_more_sessions_than_streams_take_turns_and_never_break_the_link(autojump_clock: MockClock) -> None:
    async with linked(evolve(SMALL, streams=2)) as pair, trio.open_nursery() as nursery:
        for session in range(20):
            for seq in (1, 2):
                nursery.start_soon(pair.left.send, *boundary(session, seq))
                await wait_all_tasks_blocked()
        got = await take(pair.right, 40)
    assert order_of(got) == {session: [1, 2] for session in range(20)}


async def test_stream_numbers_are_used_again(monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    monkeypatch.setattr(outbox, "_LAST_STREAM", 4)
    async with linked() as pair:
        for seq in range(1, 20):
            await pair.left.send(*boundary(seq=seq))
            assert order_of(await take(pair.right, 1)) == {1: [seq]}


@pytest.mark.parametrize("seed", range(8))
async def test_any_mix_of_frames_from_many_senders_arrives_whole(seed: int, autojump_clock: MockClock) -> None:
    chance = random.Random(seed)
    sent: list[Frame] = []
    got: list[Received] = []
    async with trio.open_nursery() as outer, relayed(WIDE, capacity=500) as (pair, relay):
        relay.rightward.trickle(chance.randint(1, 200))
        outer.start_soon(take_all, pair.right, got)

        async def sender(session: int) -> None:
            for seq in range(1, chance.randint(2, 12)):
                if chance.random() < 0.5:
                    frame, payload = boundary(session, seq, chance.randint(1, 8), WIDE)
                    await pair.left.send(frame, payload)
                    sent.append(frame)
                else:
                    sent.append(Token(key(session), seq, 1, 1))
                    pair.left.send_nowait(sent[-1])
                if chance.random() < 0.3:
                    await trio.sleep(chance.random())

        async with trio.open_nursery() as senders:
            for session in range(5):
                senders.start_soon(sender, session)
        await pair.left.flush()
        await pair.left.aclose()
        await relay.wait_closed()
    assert sorted(map(repr, (one.frame for one in got))) == sorted(map(repr, sent))
    work = [one for one in got if isinstance(one.frame, Boundary)]
    assert all(seqs == sorted(seqs) for seqs in order_of(work).values())
    for one in work:
        assert isinstance(one.frame, Boundary)
        again = boundary(one.frame.key.session, one.frame.seq, len(one.frame.tokens), WIDE)
        assert bytes(one.payload or b"") == again[1]


# --- room ------------------------------------------------------------------------------------------------------------


async def test_send_waits_for_room_and_goes_on_when_there_is_some(autojump_clock: MockClock) -> None:
    async with relayed(WIDE, capacity=64) as (pair, relay), trio.open_nursery() as nursery:
        relay.rightward.stall()
        done: list[int] = []

        async def send(session: int) -> None:
            await pair.left.send(*boundary(session, 1, 8, WIDE))
            done.append(session)

        for session in range(1, 6):
            nursery.start_soon(send, session)
            await wait_all_tasks_blocked()
        assert done == [1, 2]
        assert pair.left.statistics().bytes_queued == WIDE.under_way
        await trio.sleep(1000)
        assert done == [1, 2]
        relay.rightward.resume()
        got = await take(pair.right, 5)
        await wait_all_tasks_blocked()
        assert done == [1, 2, 3, 4, 5]
        assert set(order_of(got)) == {1, 2, 3, 4, 5}
        assert pair.left.statistics().bytes_queued == 0


async def test_nothing_overtakes_a_payload_that_waits_for_bytes(autojump_clock: MockClock) -> None:
    """Or a long prefill would starve behind a stream of short ones."""
    async with relayed(WIDE, capacity=64) as (pair, relay), trio.open_nursery() as nursery:
        relay.rightward.stall()
        for session, n_tokens in ((1, 8), (2, 4), (3, 8), (4, 1)):
            nursery.start_soon(pair.left.send, *boundary(session, 1, n_tokens, WIDE))
            await wait_all_tasks_blocked()
        assert pair.left.statistics().bytes_queued == 12 * 4 * WIDE.boundary_width
        assert pair.left.statistics().frames_sent == 2
        relay.rightward.resume()
        assert len(order_of(await take(pair.right, 4))) == 4


async def test_the_bytes_queued_never_exceed_the_bound(autojump_clock: MockClock) -> None:
    highest = 0
    async with relayed(WIDE, capacity=100) as (pair, relay), trio.open_nursery() as nursery:
        relay.rightward.trickle(50, interval=0.001)
        for session in range(30):
            nursery.start_soon(pair.left.send, *boundary(session, 1, session % 8 + 1, WIDE))
        for _ in range(30):
            await anext(pair.right)
            highest = max(highest, pair.left.statistics().bytes_queued)
    assert WIDE.under_way / 2 < highest <= WIDE.under_way


async def test_a_payload_greater_than_the_bound_is_sent_alone(autojump_clock: MockClock) -> None:
    limits = evolve(SMALL, n_vocab=1000)
    async with linked(limits) as pair, trio.open_nursery() as nursery:
        for session in range(3):
            nursery.start_soon(pair.left.send, *logits(session, 1, 8, limits))
        for one in await take(pair.right, 3):
            assert len(one.payload or b"") == 32_000


async def test_a_send_that_is_refused_leaves_the_link_as_it_was(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        frame, payload = boundary()
        for bad in ((frame, payload[1:]), (Pong(1), b""), (Pong(1), b"x"), boundary(n_tokens=9), (Pong(-1), None)):
            with pytest.raises(FrameError):
                await pair.left.send(*bad)
        with pytest.raises(FrameError):
            pair.left.send_nowait(frame)
        await pair.left.send(frame, payload)
        assert order_of(await take(pair.right, 1)) == {1: [1]}
        await wait_all_tasks_blocked()
        assert pair.left.statistics().frames_sent == 1
        assert pair.left.statistics().bytes_queued == 0


# --- cancelling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(24))
async def test_a_send_cancelled_at_any_checkpoint_sent_all_or_nothing(steps: int, autojump_clock: MockClock) -> None:
    sent: list[tuple[int, int]] = []
    cancelled: list[tuple[int, int]] = []
    got: list[Received] = []
    limits = evolve(WIDE, streams=2)
    async with trio.open_nursery() as outer, relayed(limits, capacity=300) as (pair, relay):

        async def send(session: int) -> None:
            for seq in range(1, 6):
                cancelled.append((session, seq))
                await pair.left.send(*boundary(session, seq, seq, limits))
                sent.append(cancelled.pop(cancelled.index((session, seq))))

        outer.start_soon(take_all, pair.right, got)
        async with trio.open_nursery() as senders:
            for session in (1, 2, 3, 4):
                senders.start_soon(send, session)
            for _ in range(steps):
                await trio.lowlevel.checkpoint()
            senders.cancel_scope.cancel()
        # The link is as good as new.
        await pair.left.send(*boundary(9, 1, 8, limits))
        pair.left.send_nowait(Pong(1))
        sent.append((9, 1))
        await pair.left.flush()
        await pair.left.aclose()
        await relay.wait_closed()
    work = [one.frame for one in got if isinstance(one.frame, Boundary)]
    arrived = [(frame.key.session, frame.seq) for frame in work]
    assert len(arrived) == len(set(arrived)) == len(got) - 1
    # One that was cancelled as room came for it may have been sent, and then it was sent whole.
    assert set(sent) <= set(arrived) <= {*sent, *cancelled}


async def test_a_cancelled_send_makes_way_for_those_behind_it(autojump_clock: MockClock) -> None:
    async with relayed(WIDE, capacity=64) as (pair, relay), trio.open_nursery() as nursery:
        relay.rightward.stall()
        for session in (1, 2):
            await pair.left.send(*boundary(session, 1, 7, WIDE))
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as first:
                first.start_soon(pair.left.send, *boundary(3, 1, 8, WIDE))
                await wait_all_tasks_blocked()
                nursery.start_soon(pair.left.send, *boundary(4, 1, 2, WIDE))
                await wait_all_tasks_blocked()
                assert pair.left.statistics().frames_sent == 2
                scope.cancel()
        assert pair.left.statistics().frames_sent == 3
        relay.rightward.resume()
        assert set(order_of(await take(pair.right, 3))) == {1, 2, 4}


async def test_a_send_in_a_cancelled_scope_queues_nothing(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        for frame, payload in (boundary(), (Pong(1), None)):
            with trio.CancelScope() as scope:
                scope.cancel()
                await pair.left.send(frame, payload)
            assert scope.cancelled_caught
        assert pair.left.statistics().frames_sent == 0


async def test_a_cancelled_receive_loses_no_byte(autojump_clock: MockClock) -> None:
    async with relayed(WIDE) as (pair, relay):
        relay.rightward.trickle(7, interval=1.0)
        frame, payload = boundary(n_tokens=2, limits=WIDE)
        pair.left.send_nowait(Pong(1))
        await pair.left.send(frame, payload)
        got: list[Received] = []
        while len(got) < 2:
            with trio.move_on_after(0.7):
                got.append(await anext(pair.right))
        assert got[0].frame == Pong(1)
        assert bytes(got[1].payload or b"") == payload


async def test_reading_buffered_frames_is_a_checkpoint(autojump_clock: MockClock) -> None:
    async with half_linked() as (link, far):
        await far.send_all(b"".join(raw(Pong(nonce)) for nonce in range(1, 50)))
        await anext(link)
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(link)
        assert scope.cancelled_caught
        assert [one.frame for one in await take(link, 48)] == [Pong(nonce) for nonce in range(2, 50)]


# --- the end ---------------------------------------------------------------------------------------------------------


async def test_the_iteration_ends_when_the_other_side_closes_between_frames(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        pair.left.send_nowait(Pong(1))
        await pair.left.flush()
        await pair.left.aclose()
        assert [one.frame async for one in pair.right] == [Pong(1)]
        assert [one async for one in pair.right] == []


async def test_a_link_cut_at_any_byte_inside_a_frame_is_broken(autojump_clock: MockClock) -> None:
    frame, payload = boundary(n_tokens=2)
    data = raw(Pong(1)) + raw(frame, payload) + raw(Pong(2))
    whole = {0: 0, len(raw(Pong(1))): 1, len(raw(Pong(1)) + raw(frame, payload)): 2, len(data): 3}
    for cut in range(len(data) + 1):
        async with half_linked() as (link, far):
            await far.send_all(data[:cut])
            await far.aclose()
            got: list[Received] = []
            if cut in whole:
                await take_all(link, got)
                assert len(got) == whole[cut]
            else:
                with pytest.raises(LinkBroken, match="cut inside a frame"):
                    await take_all(link, got)
                with pytest.raises(LinkBroken, match="cut inside a frame"):
                    await anext(link)


async def test_garbage_is_a_frame_error_behind_the_frames_before_it_and_closes_the_link(
    autojump_clock: MockClock,
) -> None:
    async with half_linked() as (link, far):
        await far.send_all(raw(Pong(1)) + raw(Pong(2)) + b"\xff" * 64 + raw(Pong(3)))
        got: list[Received] = []
        with pytest.raises(FrameError, match="255"):
            await take_all(link, got)
        assert [one.frame for one in got] == [Pong(1), Pong(2)]
        with pytest.raises(LinkBroken, match="the other side broke the protocol"):
            link.send_nowait(Pong(4))
        with pytest.raises(FrameError):
            await anext(link)
        assert await read_bytes(far) == b""


async def test_sending_on_a_link_closed_here_is_closed_error(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        await pair.left.aclose()
        await pair.left.aclose()
        with pytest.raises(ClosedError, match="closed on this side"):
            pair.left.send_nowait(Pong(1))
        with pytest.raises(ClosedError):
            await pair.left.send(*boundary())
        assert [one async for one in pair.left] == []
        pair.left.grant(5)
        await pair.left.flush()


@pytest.mark.parametrize("words", ["[Errno 104] Connection reset by peer", ""])
async def test_what_a_link_broke_of_is_said(words: str) -> None:
    """Trio's own error is without a word; the socket's may be, too."""
    error = trio.BrokenResourceError()
    error.__cause__ = ConnectionResetError(words)
    assert reason_of(error) == (words or "ConnectionResetError")
    assert reason_of(trio.BrokenResourceError()) == "BrokenResourceError"


async def test_sending_on_a_link_closed_there_is_link_broken(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        await pair.right.aclose()
        assert [one async for one in pair.left] == []
        with pytest.raises(LinkBroken, match="closed by the other side"):
            pair.left.send_nowait(Pong(1))
        with pytest.raises(LinkBroken):
            await pair.left.send(*boundary())
        pair.left.grant(5)


async def test_a_write_that_fails_breaks_the_link_for_senders(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        await pair.right.aclose()
        pair.left.send_nowait(Pong(1))
        await wait_all_tasks_blocked()
        with pytest.raises(LinkBroken, match="cannot write"):
            pair.left.send_nowait(Pong(2))


async def test_last_words_are_read_after_a_failed_write(autojump_clock: MockClock) -> None:
    async with linked() as pair:
        pair.right.send_nowait(Refused(key(), 1, Refusal.PROTOCOL, "because"))
        await pair.right.flush()
        await pair.right.aclose()
        pair.left.send_nowait(Pong(1))
        await wait_all_tasks_blocked()
        assert [one.frame async for one in pair.left] == [Refused(key(), 1, Refusal.PROTOCOL, "because")]


async def _end_here(pair: Pair, relay: Relay) -> None:
    await pair.left.aclose()


async def _end_there(pair: Pair, relay: Relay) -> None:
    await relay.cut()


@pytest.mark.parametrize(("end", "error"), [(_end_here, ClosedError), (_end_there, LinkBroken)])
async def test_senders_that_wait_for_room_learn_of_the_end(
    end: Callable[[Pair, Relay], Awaitable[None]], error: type[Exception], autojump_clock: MockClock
) -> None:
    failed: list[Exception] = []
    async with relayed(WIDE, capacity=64) as (pair, relay), trio.open_nursery() as nursery:
        relay.rightward.stall()

        async def send(session: int) -> None:
            try:
                await pair.left.send(*boundary(session, 1, 8, WIDE))
            except (ClosedError, LinkBroken) as caught:
                failed.append(caught)

        for session in range(10):
            nursery.start_soon(send, session)
        await wait_all_tasks_blocked()
        nursery.start_soon(take_all, pair.left, [])
        await end(pair, relay)
    assert [type(one) for one in failed] == [error] * 8


async def flood(link: Link) -> None:
    for _ in range(100_000):
        link.send_nowait(Pong(1))
        await trio.lowlevel.checkpoint()


async def test_a_control_flood_breaks_the_link_and_closes_it(autojump_clock: MockClock) -> None:
    async with relayed(capacity=64) as (pair, relay), trio.open_nursery() as nursery:
        relay.rightward.stall()
        ended: list[str] = []

        async def read(link: Link) -> None:
            try:
                await take_all(link, [])
            except LinkBroken as error:
                ended.append(str(error))

        nursery.start_soon(read, pair.left)
        nursery.start_soon(read, pair.right)
        with pytest.raises(Overloaded, match="more than 4096 control messages wait"):
            await flood(pair.left)
        assert 4096 <= pair.left.statistics().frames_sent < 4200
        with pytest.raises(LinkBroken, match="more than 4096"):
            pair.left.send_nowait(Pong(1))
        relay.rightward.resume()
        await trio.sleep(1)
        assert relay.is_closed
        assert "more than 4096 control messages wait" in ended[0]


async def test_more_waiting_payloads_than_a_link_takes_are_refused(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(links, "_WAITING", 5)
    async with relayed(WIDE, capacity=64) as (pair, relay), trio.open_nursery() as nursery:
        relay.rightward.stall()
        for session in range(7):
            nursery.start_soon(pair.left.send, *boundary(session, 1, 8, WIDE))
        await wait_all_tasks_blocked()
        with pytest.raises(Overloaded, match="5 payloads wait for room already"):
            await pair.left.send(*boundary(99, 1, 8, WIDE))
        relay.rightward.resume()
        assert len(await take(pair.right, 7)) == 7


async def test_leaving_open_link_closes_the_transport_and_leaves_no_task(autojump_clock: MockClock) -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    near, far = memory_transports()
    async with open_link(near, SMALL) as link:
        assert trio.lowlevel.current_statistics().tasks_living == before + 1
        await link.send(*boundary())
        await link.flush()
    assert trio.lowlevel.current_statistics().tasks_living == before
    assert await read_bytes(far) == raw(*boundary())
    with pytest.raises(ClosedError):
        link.send_nowait(Pong(1))


async def test_leaving_open_link_does_not_wait_for_a_peer_that_does_not_read(autojump_clock: MockClock) -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    async with half_linked(WIDE) as (link, _far):
        for session in (1, 2):
            await link.send(*boundary(session, 1, 8, WIDE))
        await wait_all_tasks_blocked()
        began = trio.current_time()
    assert trio.current_time() == began
    assert trio.lowlevel.current_statistics().tasks_living == before


async def test_an_error_in_the_block_leaves_open_link_as_itself(autojump_clock: MockClock) -> None:
    near, far = memory_transports()
    with pytest.raises(KeyError) as caught:
        async with open_link(near, SMALL):
            raise KeyError("the caller's own")
    assert caught.value.__context__ is None
    assert await read_bytes(far) == b""


async def test_the_link_is_closed_even_when_its_block_is_cancelled(autojump_clock: MockClock) -> None:
    near, far = memory_transports()
    with trio.move_on_after(1):
        async with open_link(near, SMALL), open_link(memory_transports()[0], SMALL):
            await trio.sleep_forever()
    assert await read_bytes(far) == b""


# --- both directions at once -----------------------------------------------------------------------------------------


async def test_both_directions_at_once_through_small_buffers_do_not_deadlock(autojump_clock: MockClock) -> None:
    """A reader that is slow to come back must not stop its own writer, nor the other side's."""
    n_frames = 30
    async with relayed(WIDE, capacity=50) as (pair, _relay), trio.open_nursery() as nursery:
        counts = []

        async def write(link: Link) -> None:
            for seq in range(1, n_frames + 1):
                await link.send(*boundary(seq % 5, seq, 8, WIDE))

        async def read(link: Link) -> None:
            for _ in range(n_frames):
                await anext(link)
                await trio.sleep(0.5)
            counts.append(n_frames)

        with trio.fail_after(1000):
            async with trio.open_nursery() as inner:
                for link in (pair.left, pair.right):
                    inner.start_soon(write, link)
                    inner.start_soon(read, link)
        nursery.cancel_scope.cancel()
    assert counts == [n_frames, n_frames]


# --- what it costs ---------------------------------------------------------------------------------------------------


async def test_statistics_count_frames_and_bytes_exactly(autojump_clock: MockClock) -> None:
    work = [boundary(session, 1, session, WIDE) for session in (1, 2, 3)]
    answers: list[Frame] = [Pong(1), Refused(key(), 1, Refusal.INPUT, "no")]
    expected = sum(len(raw(*one, limits=WIDE)) for one in work)
    async with linked(WIDE) as pair:
        for frame, payload in work:
            await pair.left.send(frame, payload)
        for answer in answers:
            pair.right.send_nowait(answer)
        await take(pair.right, 3)
        await take(pair.left, 2)
        await wait_all_tasks_blocked()
        left, right = pair.left.statistics(), pair.right.statistics()
    assert (left.frames_sent, left.frames_received) == (right.frames_received, right.frames_sent) == (3, 2)
    assert left.bytes_sent == right.bytes_received == expected
    assert right.bytes_sent == left.bytes_received == sum(len(raw(answer)) for answer in answers)
    assert left.bytes_queued == right.bytes_queued == 0


@pytest.mark.parametrize("n_tokens", [1, 4])
async def test_a_boundary_costs_its_payload_and_at_most_320_bytes(n_tokens: int, autojump_clock: MockClock) -> None:
    sampling = SamplingParams(0.7, 2**31 - 1, 0.9, 0.1, 1.1, 0.1, 0.1, 2**31 - 1, 2**63 - 1, 2**32 - 1, 64)
    size = 4 * n_tokens * FLASH.boundary_width
    whose = Key(ROUTE, 2**63 - 1, 2**63 - 1)
    tokens = (2**31 - 1,) * n_tokens
    frame = Boundary(whose, 2**63 - 1, Expectation(2**32 - 1, DIGEST), tokens, LogitsWanted.ALL, sampling, size)
    async with linked(FLASH) as pair:
        await pair.left.send(frame, bytes(size))
        [got] = await take(pair.right, 1)
        await wait_all_tasks_blocked()
        cost = pair.left.statistics().bytes_sent
    assert got.frame == frame
    assert size < cost <= size + 320
    assert cost <= size + 256 + 5 * n_tokens + HEADER_SIZE * -(-size // FLASH.fragment)


async def test_what_is_between_stages_is_payload_and_a_header_that_does_not_grow(autojump_clock: MockClock) -> None:
    overheads = []
    async with half_linked(FLASH) as (link, far), trio.open_nursery() as nursery:
        nursery.start_soon(read_bytes, far)
        for seq, position in enumerate((0, 127, 128, 4096, 1_000_000), 1):
            before = link.statistics().bytes_sent
            size = 4 * FLASH.boundary_width
            await link.send(
                Boundary(key(), seq, Expectation(position, DIGEST), (3,), LogitsWanted.LAST, None, size),
                random.Random(seq).randbytes(size),
            )
            await link.flush()
            overheads.append(link.statistics().bytes_sent - before - size)
        await link.aclose()
    assert max(overheads) - min(overheads) <= 4
    assert max(overheads) <= 100


# --- credits ---------------------------------------------------------------------------------------------------------


async def test_without_credit_payloads_wait_and_control_frames_do_not(autojump_clock: MockClock) -> None:
    async with linked(credit=40) as pair, trio.open_nursery() as nursery:
        done: list[int] = []

        async def send(session: int) -> None:
            await pair.left.send(*boundary(session))
            done.append(session)

        nursery.start_soon(take_all, pair.left, [])
        for session in (1, 2, 3, 4):
            nursery.start_soon(send, session)
            await wait_all_tasks_blocked()
        pair.left.send_nowait(Pong(1))
        assert {type(one.frame) for one in await take(pair.right, 3)} == {Boundary, Pong}
        assert done == [1, 2]
        pair.right.grant(7)
        await trio.sleep(1)
        assert done == [1, 2]
        pair.right.grant(1)
        assert order_of(await take(pair.right, 1)) == {3: [1]}
        pair.right.grant(16)
        assert order_of(await take(pair.right, 1)) == {4: [1]}
        await wait_all_tasks_blocked()  # the bytes may be there before their sender wakes
        assert done == [1, 2, 3, 4]
        nursery.cancel_scope.cancel()


async def test_the_time_that_payloads_wait_is_counted(autojump_clock: MockClock) -> None:
    async with linked(credit=16) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(take_all, pair.left, [])
        await pair.left.send(*boundary(1))
        assert pair.left.statistics().seconds_waited == 0
        for session in (2, 3):
            nursery.start_soon(pair.left.send, *boundary(session))
        await trio.sleep(3)
        pair.right.grant(16)
        await wait_all_tasks_blocked()
        assert pair.left.statistics().seconds_waited == pytest.approx(3)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert pair.left.statistics().seconds_waited == pytest.approx(3 + 4)  # a wait that was given up counts


@pytest.mark.parametrize("excess", [1, 2**40, 2**63 - 1])
async def test_more_credit_than_was_used_breaks_the_protocol(autojump_clock: MockClock, excess: int) -> None:
    async with linked(credit=40) as pair:
        await pair.left.send(*boundary(1))
        await take(pair.right, 1)
        pair.right.grant(16)
        pair.right.grant(excess)
        with pytest.raises(FrameError, match=f"{excess} bytes of credit came back; 0 bytes"):
            await take(pair.left, 1)
        with pytest.raises(LinkBroken):
            pair.left.send_nowait(Pong(1))


async def test_a_cancelled_wait_for_credit_uses_none(autojump_clock: MockClock) -> None:
    async with linked(credit=16) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(take_all, pair.left, [])
        await pair.left.send(*boundary(1))
        with trio.move_on_after(1) as scope:
            await pair.left.send(*boundary(2))
        assert scope.cancelled_caught
        pair.right.grant(16)
        await pair.left.send(*boundary(3))
        assert order_of(await take(pair.right, 2)) == {1: [1], 3: [1]}
        nursery.cancel_scope.cancel()


async def test_a_peer_that_sends_beyond_what_was_granted_breaks_the_protocol(autojump_clock: MockClock) -> None:
    async with half_linked(granted=32) as (link, far):
        for seq in (1, 2):
            await far.send_all(raw(*boundary(seq=seq)))
            await anext(link)
        link.grant(16)
        await far.send_all(raw(*boundary(seq=3)))
        await anext(link)
        await far.send_all(raw(*boundary(seq=4)))
        with pytest.raises(FrameError, match="only 0 bytes of credit were left"):
            await anext(link)


async def test_an_honest_pair_never_runs_over_its_credit(autojump_clock: MockClock) -> None:
    limits = WIDE
    near, far = memory_transports()
    async with (
        open_link(near, limits, credit=limits.under_way) as left,
        open_link(far, limits, granted=limits.under_way) as right,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(take_all, left, [])
        for session in range(12):
            for seq in (1, 2):
                nursery.start_soon(left.send, *boundary(session, seq, session % 8 + 1, limits))
        held: list[int] = []
        for count in range(24):
            received = await anext(right)
            held.append(len(received.payload or b""))
            if count % 2:
                right.grant(held.pop())
                right.grant(held.pop())
        nursery.cancel_scope.cancel()
    assert not held


async def test_credit_that_is_held_back_keeps_no_payload_waiting(autojump_clock: MockClock) -> None:
    """Credits are gathered; but whoever keeps one of the largest payloads must still get the next one."""
    limits = WIDE
    near, far = memory_transports()
    async with (
        open_link(near, limits, credit=limits.under_way) as left,
        open_link(far, limits, granted=limits.under_way) as right,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(take_all, left, [])
        await left.send(*boundary(1, 1, 1, limits))
        right.grant(len((await anext(right)).payload or b""))
        for session in (2, 3):
            nursery.start_soon(left.send, *boundary(session, 1, limits.n_batch, limits))
        with trio.fail_after(5):
            taken = [len((await anext(right)).payload or b"") for _ in (2, 3)]
        nursery.cancel_scope.cancel()
    assert taken == [limits.under_way // 2] * 2


async def test_limits_and_credits_settled_by_a_handshake_hold_from_then_on(autojump_clock: MockClock) -> None:
    tiny = Limits(n_batch=1, boundary_width=1, n_vocab=1)
    async with AsyncExitStack() as stack:
        near, far = memory_transports()
        left = await stack.enter_async_context(open_link(near, tiny))
        right = await stack.enter_async_context(open_link(far, tiny))
        with pytest.raises(FrameError):
            await left.send(*boundary(n_tokens=8))
        left.apply_limits(SMALL, 128)
        right.apply_limits(SMALL, None, 128)
        await left.send(*boundary(n_tokens=8))
        assert order_of(await take(right, 1)) == {1: [1]}
        with trio.move_on_after(1) as scope:
            await left.send(*boundary(2))
        assert scope.cancelled_caught


# --- signs of life ---------------------------------------------------------------------------------------------------


async def test_a_silent_peer_is_given_up_after_three_heartbeats(autojump_clock: MockClock) -> None:
    async with half_linked(heartbeat=2.0) as (link, _far):
        with pytest.raises(LinkBroken, match="silent for 6 s"):
            await anext(link)
        assert trio.current_time() == pytest.approx(6.0)
        with pytest.raises(LinkBroken, match="silent"):
            link.send_nowait(Pong(1))


async def test_a_stalled_cable_is_noticed_on_both_sides(autojump_clock: MockClock) -> None:
    async with relayed(heartbeat=1.0) as (pair, relay), trio.open_nursery() as nursery:
        ended: list[float] = []

        async def read(link: Link) -> None:
            with pytest.raises(LinkBroken, match="silent"):
                await take_all(link, [])
            ended.append(trio.current_time())

        for link in (pair.left, pair.right):
            nursery.start_soon(read, link)
        await trio.sleep(100)
        assert not ended
        relay.leftward.stall()
        relay.rightward.stall()
        await trio.sleep(4)
        assert len(ended) == 2


async def test_idle_links_with_a_heartbeat_stay_up_and_say_nothing_else(autojump_clock: MockClock) -> None:
    async with relayed(heartbeat=1.0) as (pair, _relay), trio.open_nursery() as nursery:
        got: list[Received] = []
        for link in (pair.left, pair.right):
            nursery.start_soon(take_all, link, got)
        await trio.sleep(1000)
        assert not got
        beats = 1001
        assert pair.left.statistics().bytes_sent <= beats * (len(raw(Ping(1 << 62))) + len(raw(Pong(1 << 62))))
        pair.left.send_nowait(Pong(5))
        await trio.sleep(0.1)
        assert [one.frame for one in got] == [Pong(5)]
        nursery.cancel_scope.cancel()


async def test_any_byte_counts_as_life(autojump_clock: MockClock) -> None:
    async with half_linked(WIDE, heartbeat=1.0) as (link, far), trio.open_nursery() as nursery:
        frame, payload = boundary(n_tokens=1, limits=WIDE)

        async def trickle() -> None:
            for byte in raw(frame, payload, limits=WIDE):
                await far.send_all(bytes([byte]))
                await trio.sleep(2.5)

        nursery.start_soon(trickle)
        got = await anext(link)
        assert bytes(got.payload or b"") == payload
        assert trio.current_time() > 500


async def test_a_ping_with_a_nonce_is_answered_and_not_given_out(autojump_clock: MockClock) -> None:
    async with linked() as pair, trio.open_nursery() as nursery:
        got: list[Received] = []
        nursery.start_soon(take_all, pair.right, got)
        pair.left.send_nowait(Ping(0))
        pair.left.send_nowait(Ping(77, bytes(1000)))
        pair.left.send_nowait(Credit(5))
        assert (await anext(pair.left)).frame == Pong(77)
        assert got == []
        nursery.cancel_scope.cancel()


async def test_a_link_closed_here_with_pings_still_unread_just_ends(autojump_clock: MockClock) -> None:
    async with half_linked() as (link, far):
        await far.send_all(raw(Pong(1)) + raw(Ping(5)) + raw(Ping(0)))
        await anext(link)
        await link.aclose()
        assert [one async for one in link] == []


@pytest.mark.parametrize("how", ["close", "end"])
async def test_a_link_that_ends_as_its_heartbeat_is_due_just_ends(how: str, autojump_clock: MockClock) -> None:
    async with half_linked(heartbeat=5.0) as (link, far), trio.open_nursery() as nursery:
        nursery.start_soon(take_all, link, [])
        await trio.sleep_until(5.0)
        if how == "close":
            await link.aclose()
        else:
            await far.aclose()
        await trio.sleep(1)


# --- flush -----------------------------------------------------------------------------------------------------------


async def test_flush_waits_until_everything_is_written(autojump_clock: MockClock) -> None:
    async with relayed(WIDE, capacity=64) as (pair, relay), trio.open_nursery() as nursery:
        relay.rightward.trickle(64, interval=1.0)
        nursery.start_soon(take, pair.right, 2)
        frame, payload = boundary(n_tokens=8, limits=WIDE)
        await pair.left.send(frame, payload)
        pair.left.send_nowait(Pong(1))
        await pair.left.flush()
        expected = len(raw(frame, payload, limits=WIDE)) + len(raw(Pong(1)))
        assert pair.left.statistics().bytes_sent == expected
        assert pair.left.statistics().bytes_queued == 0
        await pair.left.flush()


async def test_flush_ends_with_the_link(autojump_clock: MockClock) -> None:
    async with relayed(WIDE, capacity=64) as (pair, relay), trio.open_nursery() as nursery:
        relay.rightward.stall()
        for session in (1, 2):
            await pair.left.send(*boundary(session, 1, 8, WIDE))
        nursery.start_soon(pair.left.flush)
        await trio.sleep(10)
        await relay.cut()


async def test_tokens_take_the_control_lane(autojump_clock: MockClock) -> None:
    async with linked(credit=0) as pair:
        work = Tokens(key(), 1, Expectation(0, DIGEST), (1, 2, 3), LogitsWanted.LAST, None)
        await pair.left.send(work)
        assert (await anext(pair.right)).frame == work
