"""A pipeline over stages behind sockets is a pipeline: the same text, the same rules, whatever becomes of a stage."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import pytest
import trio
from attrs import evolve
from cluster.remote_stages import (
    CONTEXT,
    HANDSHAKE,
    PROMPT,
    THREE,
    TIMEOUTS,
    TWO,
    WHOLE,
    Authority,
    Host,
    answer_of,
    assert_closed,
    greeted,
    next_event,
    open_hosts,
    reference,
    stage,
)
from conversations import held, seen, take

from dgr.client.events import RePrefilled, RouteChanged, RouteDown
from dgr.client.pipeline import Timeouts, open_pipeline_on
from dgr.cluster.connect import LinkPolicy
from dgr.core.prefix import PrefixDigest
from dgr.core.route import Route, StageRef
from dgr.core.values import Expectation, Key, LogitsWanted, StageIdentity
from dgr.errors import DeadlineExceeded, LinkBroken, PeerRefused, PrefillFailed
from dgr.protocol.states import EpochState
from dgr.testing.engines.fake import FakeEngine
from dgr.testing.network.proxy import open_proxy
from dgr.testing.waits import until
from dgr.wire import frames
from dgr.wire.frames import Fence, Ping, Welcome
from dgr.wire.links import Link

#: Seconds; three of them are still far below what a healthy exchange may take on a busy machine.
BEAT = 0.3


@pytest.mark.parametrize("split", [WHOLE, TWO, THREE], ids=["whole", "two", "three"])
async def test_the_text_is_that_of_one_machine(policy: LinkPolicy, split: tuple[str, ...]) -> None:
    async with open_hosts(policy) as hosts:
        stages = await hosts.start_all(split)
        async with hosts.pipeline(stages) as pipeline, pipeline.session() as session:
            answer = await take(session.generate(PROMPT, max_tokens=12))
            assert answer == reference()
            again = await take(session.generate(list(b" And"), max_tokens=8))
            assert again == reference([*PROMPT, *answer, *b" And"], 8)
            frontier = await session.state_summaries()
            assert {frame.state.position for frame in frontier.values()} == {len(PROMPT) + 12 + 4 + 7}
        await hosts.assert_empty()


def _keep(rows: bytearray, _position: int, values: memoryview) -> None:
    rows.extend(values)


async def test_rows_of_logits_come_back_whole(policy: LinkPolicy) -> None:
    async with open_hosts(policy) as hosts:
        results = []
        for split in (WHOLE, THREE):
            rows = bytearray()
            async with hosts.pipeline(await hosts.start_all(split)) as pipeline, pipeline.session() as session:
                await session.logits(PROMPT, partial(_keep, rows))
            results.append(bytes(rows))
        assert len(results[0]) == len(PROMPT) * 257 * 4
        assert results[0] == results[1]
        await hosts.assert_empty()


async def test_readiness_flows_from_tail_to_head() -> None:
    async with open_hosts() as hosts:
        head, middle, tail = await hosts.start_all(THREE)
        connect, route = hosts.connector(), hosts.route([head, middle, tail])
        ready: list[str] = []

        async def read_fenced(link: Link, who: str) -> None:
            async for received in link:
                assert isinstance(received.frame, frames.Fenced)
                ready.append(who)
                return

        async with (
            connect(head.address) as (to_head, _),
            connect(middle.address) as (to_middle, _),
            connect(tail.address) as (to_tail, _),
            trio.open_nursery() as nursery,
        ):
            route_id = b"r" * 16
            links = to_head, to_middle, to_tail
            for link, who in zip(links, ("head", "middle", "tail"), strict=True):
                nursery.start_soon(read_fenced, link, who)

            def fence(index: int) -> None:
                links[index].send_nowait(
                    Fence(route_id, 1, route.stages[index].address, route.predecessor(index), route.successor(index))
                )

            fence(0)
            fence(1)
            # Head and middle have reached the stage after them, and it told neither that it is ready.
            await until(lambda: len(middle.shard._awaited) and len(tail.shard._awaited))
            assert [host.shard._routes[route_id].state for host in (head, middle)] == [EpochState.FENCING] * 2
            assert ready == []
            fence(2)
            await until(lambda: len(ready) == 3)
            assert [host.shard._routes[route_id].state for host in (head, middle, tail)] == [EpochState.LIVE] * 3
            assert not any(len(host.shard._awaited) for host in (head, middle, tail))
        await hosts.assert_empty()


async def test_two_clients_share_stages_and_do_not_disturb_each_other(policy: LinkPolicy) -> None:
    async with open_hosts(policy) as hosts:
        stages = await hosts.start_all(THREE)
        async with hosts.pipeline(stages) as one, one.session() as session:
            mine = session.generate(PROMPT, max_tokens=12)
            answer = await take(mine, 3)
            events = one.events()
            async with hosts.pipeline(stages) as other:
                assert all(host.shard.statistics().routes == 2 for host in stages)
                theirs = list(b"Call me Ishmael.")
                async with other.session() as beside:
                    their_answer = await take(beside.generate(theirs, max_tokens=3))
                    answer += await take(mine, 3)
                    await other.change_route(other.route)  # a fence of one route session touches no other
                    their_answer += await take(beside.generate(max_tokens=3))
                assert their_answer == reference(theirs, 6)
                with trio.CancelScope() as gone:
                    async with other.session() as beside:
                        async for _ in beside.generate(theirs, max_tokens=12):
                            gone.cancel()
            await until(lambda: all(host.shard.statistics().routes == 1 for host in stages))
            answer += await take(mine)
            assert answer == reference()
            assert seen(events) == []
        await hosts.assert_empty()


async def test_clients_at_the_same_time_get_each_their_own_text(policy: LinkPolicy) -> None:
    prompts = [list(text) for text in (b"One day", b"The other day, the same", b"Never")]
    answers: dict[int, list[int]] = {}

    async def ask(index: int, stages: Sequence[Host]) -> None:
        async with hosts.pipeline(stages) as pipeline:
            answers[index] = await answer_of(pipeline, prompts[index], 20)

    async with open_hosts(policy) as hosts:
        stages = await hosts.start_all(TWO)
        async with trio.open_nursery() as nursery:
            for index in range(len(prompts)):
                nursery.start_soon(ask, index, stages)
        assert answers == {index: reference(prompt, 20) for index, prompt in enumerate(prompts)}
        await hosts.assert_empty()


@pytest.mark.parametrize("index", [0, 1, 2], ids=["head", "middle", "tail"])
async def test_a_restarted_stage_has_no_state_and_says_so(policy: LinkPolicy, index: int) -> None:
    async with open_hosts(policy) as hosts:
        stages = await hosts.start_all(THREE)
        async with hosts.pipeline(stages) as pipeline, pipeline.session() as session:
            events = pipeline.events()
            generation = session.generate(PROMPT, max_tokens=12)
            answer = await take(generation, 5)
            stages[index] = await hosts.restart(stages[index])
            answer += await take(generation)
            assert answer == reference()
            down = await next_event(events, RouteDown)
            changed = await next_event(events, RouteChanged)
            again = await next_event(events, RePrefilled)
            assert stages[index].address in down.why
            assert (changed.epoch, changed.sessions_dropped) == (2, 2)  # the two that lived gave their state back
            assert again.tokens == len(PROMPT) + 5
            assert stages[index].engine.tokens_run == len(PROMPT) + 11  # everything, and nothing twice
        await hosts.assert_empty()


@pytest.mark.parametrize(("losses", "goes_on"), [(2, True), (3, False)])
async def test_losses_in_a_row_are_survived_a_bounded_number_of_times(losses: int, goes_on: bool) -> None:
    """A tail that dies of the re-prefill itself: every try is a loss, and the tries are counted."""
    async with open_hosts() as hosts, trio.open_nursery() as nursery:
        head, tail = await hosts.start_all(TWO)
        left = losses

        def die(_: object) -> None:
            nonlocal left
            if left:
                left -= 1
                victim = next(host for host in hosts.running if host.address == tail.address)
                victim.engine.watch = None
                nursery.start_soon(again, victim)

        async def again(victim: Host) -> None:
            await victim.kill()
            engine = FakeEngine(tail.layers, CONTEXT)
            engine.watch = die
            await hosts.start("", address=tail.address, engine=engine)

        async def tell() -> None:
            async for token in generation:
                answer.append(token.id)

        async with hosts.pipeline([head, tail], retries=2) as pipeline, pipeline.session() as session:
            generation = session.generate(PROMPT, max_tokens=12)
            answer = await take(generation, 4)
            tail.engine.watch = die
            if goes_on:
                assert answer + await take(generation) == reference()
            else:
                with pytest.raises(PrefillFailed, match="was lost 3 times"):
                    await tell()  # the tail may have told the token that it died of first
                assert answer + await take(generation) == reference()  # asked again, it is tried again
        assert left == 0
        await hosts.assert_empty()


async def test_a_stage_that_does_not_come_back_is_a_typed_error_within_the_deadline() -> None:
    async with open_hosts() as hosts:
        stages = await hosts.start_all(THREE)
        timeouts = evolve(TIMEOUTS, route=0.6)
        async with hosts.pipeline(stages, timeouts=timeouts) as pipeline, pipeline.session() as session:
            generation = session.generate(PROMPT, max_tokens=12)
            answer = await take(generation, 2)
            await stages[1].kill()
            with pytest.raises(DeadlineExceeded, match=r"was not live within 0\.6 s") as caught:
                await anext(generation)
            assert f"cannot connect to {stages[1].address}" in str(caught.value)
            await hosts.start("1:4", address=stages[1].address)
            assert answer + await take(generation) == reference()
        await hosts.assert_empty()


async def test_a_fence_fails_with_the_stage_that_fails_and_not_with_the_one_that_waits_for_it() -> None:
    """The head waits for the middle for as long as half a minute; the middle knows at once that it has no next stage."""
    async with open_hosts() as hosts:
        head, middle, tail = await hosts.start_all(THREE)
        gone = await hosts.start("4:6")
        await gone.kill()
        route = hosts.route([head, middle, tail])
        route = Route((*route.stages[:2], StageRef(gone.address, tail.layers)))

        def connect(address: str) -> AbstractAsyncContextManager[tuple[Link, StageIdentity]]:
            return hosts.connector()(tail.address if address == gone.address else address)

        began = trio.current_time()
        with pytest.raises(PeerRefused, match=f"stage {middle.address}: cannot reach the next stage {gone.address}"):
            async with open_pipeline_on(connect, route):
                pass
        assert trio.current_time() - began < 5.0
        await hosts.assert_serving([head, middle, tail])


async def test_a_route_change_moves_the_work_and_frees_what_was_left(policy: LinkPolicy) -> None:
    async with open_hosts(policy) as hosts:
        old, new = await hosts.start_all(THREE), await hosts.start_all(TWO)
        async with hosts.pipeline(old) as pipeline, pipeline.session() as session:
            events = pipeline.events()
            generation = session.generate(PROMPT, max_tokens=12)
            answer = await take(generation, 4)
            await pipeline.change_route(hosts.route(new))
            await until(lambda: all(host.shard.statistics().routes == 0 for host in old))
            assert all(host.shard.statistics().leased_bytes == 0 for host in old)
            answer += await take(generation, 4)
            await pipeline.change_route(hosts.route([old[0], *old[1:]]))
            answer += await take(generation)
            assert answer == reference()
            again = [event for event in seen(events) if isinstance(event, RePrefilled)]
            assert [(event.reason, event.tokens) for event in again] == [
                ("route change", len(PROMPT) + 4), ("route change", len(PROMPT) + 8),
            ]  # fmt: skip
        await hosts.assert_empty()


async def test_a_route_that_cannot_be_leaves_the_old_one(policy: LinkPolicy) -> None:
    async with open_hosts(policy) as hosts:
        stages = await hosts.start_all(TWO)
        async with hosts.pipeline(stages) as pipeline, pipeline.session() as session:
            generation = session.generate(PROMPT, max_tokens=12)
            answer = await take(generation, 4)
            gone = await hosts.start("2:6")
            await gone.kill()
            with pytest.raises(LinkBroken, match="cannot connect"):
                await pipeline.change_route(hosts.route([stages[0], gone]))
            assert answer + await take(generation) == reference()
            assert pipeline.epoch == 1
        await hosts.assert_empty()


async def test_links_between_stages_are_shared_and_dropped_when_no_route_uses_them() -> None:
    async with open_hosts() as hosts:
        head, tail = await hosts.start_all(TWO)
        other_tail = await hosts.start("2:6")
        async with hosts.pipeline([head, tail]) as one, hosts.pipeline([head, tail]) as two:
            assert await answer_of(one) == await answer_of(two) == reference()
            assert list(head.server.statistics().leaving) == [(head.address, tail.address)]
            assert tail.server.statistics().links == 3  # of two clients and one stage
            await one.change_route(hosts.route([head, other_tail]))
            assert len(head.server.statistics().leaving) == 2
            await two.change_route(hosts.route([head, other_tail]))
            assert await answer_of(one) == await answer_of(two) == reference()
            back = await hosts.start("2:6")
            await two.change_route(hosts.route([head, back]))
            assert set(head.server.statistics().leaving) == {
                (head.address, other_tail.address), (head.address, back.address),
            }  # fmt: skip
            await until(lambda: tail.server.statistics().links == 0)
        await hosts.assert_empty()


async def test_links_count_what_they_carry(policy: LinkPolicy) -> None:
    async with open_hosts(policy) as hosts:
        head, tail = await hosts.start_all(TWO)
        async with hosts.pipeline([head, tail]) as pipeline:
            (before,) = head.server.statistics().leaving.values()
            assert await answer_of(pipeline) == reference()
            (after,) = head.server.statistics().leaving.values()
            prefill, tokens = -(-len(PROMPT) // CONTEXT.n_ubatch), 11
            assert after.frames_sent - before.frames_sent >= prefill + tokens
            boundary = (len(PROMPT) + tokens) * 3 * 4
            headers = (prefill + tokens) * 256 + 5 * (len(PROMPT) + tokens)
            assert boundary < after.bytes_sent - before.bytes_sent <= boundary + headers
            assert after.bytes_queued == 0
            assert (head.server.statistics().accepted, tail.server.statistics().accepted) == (1, 2)


# --- credits ---


async def test_a_slow_stage_holds_back_its_sender(policy: LinkPolicy) -> None:
    async with open_hosts(policy) as hosts:
        head, tail = await hosts.start_all(TWO)
        async with hosts.pipeline([head, tail], window=64, chunk=4) as pipeline:
            prompt = (PROMPT * 3)[:80]
            async with trio.open_nursery() as nursery, held(tail.shard):
                answers: list[list[int]] = []

                async def ask() -> None:
                    answers.append(await answer_of(pipeline, prompt, 4))

                nursery.start_soon(ask)
                # Two full boundaries of 16 tokens, and one chunk of 4 that waits for credit; of 20 chunks no more.
                await until(lambda: head.engine.tokens_run == 36)
                (link,) = head.server._next.values()
                for _ in range(50):  # as much time for more as fifty exchanges with the head take
                    async with hosts.connector()(head.address) as (control, _):
                        control.send_nowait(Ping(7))
                        answer = (await anext(control)).frame
                        assert isinstance(answer, frames.Pong)
                        assert answer.nonce == 7
                assert head.engine.tokens_run == 36
                assert (tail.engine.tokens_run, link._outbox.credit, link.statistics().bytes_queued) == (0, 0, 0)
                (actor,) = tail.shard.actors()
                assert actor._undone == 8
            assert answers == [reference(prompt, 4)]
        await hosts.assert_empty()


async def test_a_sender_beyond_its_credit_breaks_the_protocol() -> None:
    async with open_hosts() as hosts:
        tail = await hosts.start("2:6")
        async with (
            hosts.connector()(tail.address) as (control, _),
            greeted(tail.address, stage("127.0.0.1:1")) as (link, welcome),
            held(tail.shard),
        ):
            assert isinstance(welcome, Welcome)
            assert welcome.credit == 2 * 16 * 3 * 4
            key = Key(b"r" * 16, 1, 1)
            control.send_nowait(Fence(key.route, 1, tail.address, "127.0.0.1:1", ""))
            assert isinstance((await anext(control)).frame, frames.Fenced)
            control.send_nowait(frames.Open(key, 1))
            assert isinstance((await anext(control)).frame, frames.Opened)
            for seq in (2, 3, 4):  # the link takes no part in credits on this side
                expect = Expectation(0, PrefixDigest().digest())
                boundary = frames.Boundary(key, seq, expect, (1,) * 16, LogitsWanted.NONE, None, 192)
                await link.send(boundary, bytes(192))
            await assert_closed(link)
        await hosts.assert_serving([await hosts.start("0:2"), tail])


# --- heartbeats ---


async def test_a_silent_stage_is_noticed_within_three_heartbeats() -> None:
    async with open_hosts(LinkPolicy(handshake=HANDSHAKE, heartbeat=2 * BEAT)) as hosts:
        head, tail = await hosts.start_all(TWO)
        async with open_proxy(tail.address) as proxy:
            route = Route((StageRef(head.address, head.layers), StageRef(proxy.address, tail.layers)))
            connect = hosts.connector(policy=evolve(hosts.policy, heartbeat=BEAT))
            async with open_pipeline_on(connect, route, timeouts=TIMEOUTS) as pipeline:
                assert await answer_of(pipeline) == reference()
                events = pipeline.events()
                proxy.stall()
                began = trio.current_time()
                down = await next_event(events, RouteDown)
                assert 2 * BEAT < trio.current_time() - began < 3 * BEAT + 1.0
                assert f"stage {proxy.address}" in down.why
                assert f"silent for {3 * BEAT:g} s" in down.why
                # The proxy's connections are silent, not its address: the route comes back.
                await next_event(events, RouteChanged)
                assert await answer_of(pipeline) == reference()
        await until(lambda: head.shard.statistics().routes == 0)


async def test_a_silent_next_stage_is_noticed_by_the_stage_before_it() -> None:
    async with open_hosts(LinkPolicy(handshake=HANDSHAKE, heartbeat=BEAT)) as hosts:
        head, tail = await hosts.start_all(TWO)
        async with open_proxy(tail.address) as proxy:
            route = Route((StageRef(head.address, head.layers), StageRef(proxy.address, tail.layers)))
            patient = hosts.connector(policy=evolve(hosts.policy, heartbeat=60.0))
            async with open_pipeline_on(patient, route, timeouts=TIMEOUTS) as pipeline:
                events = pipeline.events()
                proxy.stall()
                began = trio.current_time()
                down = await next_event(events, RouteDown)
                assert 2 * BEAT < trio.current_time() - began < 3 * BEAT + 1.0
                assert "the link to the next stage ended" in down.why
                assert f"silent for {3 * BEAT:g} s" in down.why


@pytest.mark.slow
async def test_a_stage_drops_what_a_silent_client_holds() -> None:
    async with open_hosts(LinkPolicy(handshake=HANDSHAKE, heartbeat=BEAT)) as hosts:
        whole = await hosts.start("0:6")
        async with open_proxy(whole.address) as proxy:
            route = Route((StageRef(proxy.address, whole.layers),))
            patient = hosts.connector(policy=evolve(hosts.policy, heartbeat=60.0))
            async with (
                open_pipeline_on(patient, route, timeouts=Timeouts(control=0.1)) as pipeline,
                pipeline.session() as session,
            ):
                assert await take(session.generate(PROMPT, max_tokens=3)) == reference(count=3)
                assert whole.shard.statistics().sessions == 1
                proxy.stall()
                began = trio.current_time()
                await until(lambda: whole.shard.statistics().routes == 0)
                assert 2 * BEAT < trio.current_time() - began < 3 * BEAT + 1.0
        await hosts.assert_empty()


async def test_an_end_is_noticed_at_once_whatever_the_heartbeat() -> None:
    async with open_hosts(LinkPolicy(handshake=HANDSHAKE, heartbeat=3600.0)) as hosts:
        stages = await hosts.start_all(TWO)
        async with hosts.pipeline(stages) as pipeline:
            events = pipeline.events()
            began = trio.current_time()
            await stages[1].kill()
            await next_event(events, RouteDown)
            assert trio.current_time() - began < 1.0


@pytest.mark.slow
async def test_sides_of_different_heartbeats_get_on(authority: Authority) -> None:
    """Who is patient lives beside who is not: whoever doubts asks."""
    links: list[Link] = []

    @asynccontextmanager
    async def connect(address: str) -> AsyncIterator[tuple[Link, StageIdentity]]:
        async with hasty(address) as (link, description):
            links.append(link)
            yield link, description

    async with open_hosts(authority.policy("127.0.0.1", heartbeat=3600.0)) as hosts:
        hasty = hosts.connector(policy=evolve(hosts.policy, heartbeat=0.1))
        async with hosts.pipeline(await hosts.start_all(TWO), connect=connect) as pipeline:
            events = pipeline.events()
            before = [link.statistics().bytes_received for link in links]
            # Each answer to a question is 19 bytes: twelve heartbeats are four times what silence may last.
            goal = [count + 12 * 19 for count in before]
            await until(
                lambda: all(link.statistics().bytes_received >= count for link, count in zip(links, goal, strict=True))
            )
            assert seen(events) == []
            assert await answer_of(pipeline) == reference()


async def test_a_cut_connection_between_stages_is_mended() -> None:
    async with open_hosts() as hosts:
        head, middle, tail = await hosts.start_all(THREE)
        async with open_proxy(tail.address) as proxy:
            route = Route(
                (*hosts.route([head, middle]).stages, StageRef(proxy.address, tail.layers)),
            )
            async with (
                open_pipeline_on(hosts.connector(), route, timeouts=TIMEOUTS) as pipeline,
                pipeline.session() as session,
            ):
                generation = session.generate(PROMPT, max_tokens=12)
                answer = await take(generation, 4)
                await proxy.cut()
                answer += await take(generation, 4)
                await proxy.cut()
                answer += await take(generation)
                assert answer == reference()
            await hosts.assert_empty()
