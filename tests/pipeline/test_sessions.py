"""The life of a session: cancelled, dropped, closed, expired, evicted. What is kept is right, what is lost is said."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from attrs import evolve
from conversations import held, reference, seen, take
from msgspec.structs import replace
from pipeline.harness import CONTEXT, THREE, TIMEOUTS, TWO, WHOLE, kinds, open_stages, rest

from dgr.client.events import Event, GenerationCancelled, RePrefilled, StateLost
from dgr.client.session import ClientSession
from dgr.cluster.local import ShardPolicy
from dgr.core.units import human_bytes
from dgr.core.values import SamplingParams
from dgr.errors import Overloaded, SessionError
from dgr.protocol.states import ClientState

PROMPT = list(b"In a hole in the ground there lived a hobbit.")


def reprefills(events: trio.MemoryReceiveChannel[Event]) -> list[tuple[int, str, int]]:
    return [(e.session, e.reason, e.tokens) for e in seen(events) if isinstance(e, RePrefilled)]


async def give_up(action: Callable[[], Awaitable[object]], *shards: Any) -> None:
    """Start something, let it come to rest behind held shards, and cancel it."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(action)
        await rest()
        nursery.cancel_scope.cancel()
    await rest()


# --- cancel keeps the session ---


@pytest.mark.parametrize("split", [WHOLE, TWO, THREE])
async def test_cancel_in_prefill_starts_nothing_queued_and_keeps_the_rest(
    autojump_clock: trio.abc.Clock, split: str
) -> None:
    async with (
        open_stages(split) as stages,
        stages.pipeline(split, window=5) as pipeline,
        pipeline.session() as session,
    ):
        events = pipeline.events()
        generation = session.generate(PROMPT, max_tokens=4)
        head = stages.shard(split.split(",")[0])
        async with held(head):
            await give_up(generation.__anext__)
            assert session.state is ClientState.DRAINING
            assert session.in_flight == 5
        await rest()
        # One chunk had begun; it drained through every stage, and nothing else was started.
        assert stages.tokens_run(split) == [8] * len(split.split(","))
        assert session.committed == 8
        assert await take(session.generate([1, 2], max_tokens=4)) == reference([*PROMPT, 1, 2], 4)
        assert stages.tokens_run(split) == [len(PROMPT) + 2 + 3] * len(split.split(","))
        happened = seen(events)
        assert [event.position for event in happened if isinstance(event, GenerationCancelled)] == [8]
        assert not [event for event in happened if isinstance(event, StateLost)]


async def test_cancel_in_the_middle_lets_every_stage_come_to_the_same_position(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(THREE) as stages, stages.pipeline(THREE) as pipeline, pipeline.session() as session:
        async with held(stages.shard("1:4")):
            await give_up(session.generate(PROMPT).__anext__)
        await rest()
        frontiers = await session.state_summaries()
        assert {frontier.state.position for frontier in frontiers.values()} == {session.committed}
        assert 0 < session.committed <= len(PROMPT)
        assert await take(session.generate([7], max_tokens=3)) == reference([*PROMPT, 7], 3)


async def test_a_token_whose_caller_gave_up_is_not_lost(autojump_clock: trio.abc.Clock) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3)
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        events = pipeline.events()
        generation = session.generate(PROMPT, sampling=sampling)
        begun = await take(generation, 2)
        async with held(stages.shard("2:6")):
            await give_up(generation.__anext__)
        await rest()
        assert session.committed == len(PROMPT) + 2
        before = stages.tokens_run(TWO)
        assert begun + await take(generation, 3) == reference(PROMPT, 5, sampling)
        assert stages.tokens_run(TWO) == [count + 2 for count in before]
        assert kinds(seen(events)) == ["Prefilled", "GenerationCancelled"]


async def test_a_token_drawn_for_another_wish_is_not_used(autojump_clock: trio.abc.Clock) -> None:
    first, other = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, seed=9)
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        generation = session.generate(PROMPT, sampling=first)
        said = await take(generation, 2)
        async with held(stages.shard("2:6")):
            await give_up(generation.__anext__)
        await rest()
        assert session.committed == len(session.transcript)
        prompt = [*PROMPT, *said]
        assert reference(prompt, 3, other) != reference(prompt, 3, first)
        assert await take(session.generate(sampling=other), 3) == reference(prompt, 3, other)


async def test_next_turn_after_a_cancelled_decode_prefills_only_what_is_new(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        generation = session.generate(PROMPT)
        begun = await take(generation, 3)
        async with held(stages.shard("0:2")):
            await give_up(generation.__anext__)
        assert await take(session.generate([1, 2, 3], max_tokens=2)) == reference([*PROMPT, *begun, 1, 2, 3], 2)
        assert stages.tokens_run(TWO) == [len(PROMPT) + 3 + 3 + 1] * 2


async def test_a_dropped_iterator_keeps_the_session(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        said = []
        async for token in session.generate(PROMPT):
            said.append(token.id)
            if len(said) == 3:
                break
        assert session.state is ClientState.READY
        assert await take(session.generate([9], max_tokens=2)) == reference([*PROMPT, *said, 9], 2)
        assert stages.tokens_run(TWO) == [len(PROMPT) + 2 + 2 + 1] * 2


async def test_cancel_again_and_again(autojump_clock: trio.abc.Clock) -> None:
    """Each try gets one chunk further; nothing is run twice."""
    async with (
        open_stages(TWO) as stages,
        stages.pipeline(TWO, window=3) as pipeline,
        pipeline.session() as session,
    ):
        for _ in range(5):
            async with held(stages.shard("0:2")):
                await give_up(lambda: session.prefill([]) if session.transcript else session.prefill(PROMPT))
        await rest()
        assert session.committed == 40
        await session.prefill([])
        assert stages.tokens_run(TWO) == [len(PROMPT)] * 2
        assert await take(session.generate([1], max_tokens=1)) == reference([*PROMPT, 1], 1)


async def test_prefill_cancelled_at_its_end_runs_nothing_again(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        async with held(stages.shard("2:6")):
            await give_up(lambda: session.prefill(PROMPT[:6]))
        await session.prefill([])
        assert session.committed == 6
        assert stages.tokens_run(TWO) == [6, 6]


@pytest.mark.parametrize("keep", [0, 5, 8, 9, 24])
async def test_a_turn_that_differs_after_a_cancel_keeps_what_it_shares(
    autojump_clock: trio.abc.Clock, keep: int
) -> None:
    """One chunk of eight tokens had been run, whatever else had been sent."""
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        events = pipeline.events()
        async with held(stages.shard("0:2")):
            await give_up(session.generate(PROMPT).__anext__)
            for middle in ([7, 7, 7], [1, 2]):  # the first of them is overruled before it is asked for
                session.generate(transcript=[*PROMPT[:keep], *middle])
        other = [*PROMPT[:keep], 1, 2]
        assert await take(session.generate(max_tokens=3)) == reference(other, 3)
        again = [] if keep >= 8 else [(session.id, "diverged", keep + 2)]
        assert reprefills(events) == again
        assert stages.tokens_run(TWO) == [(8 if again else 0) + keep + 2 + 2] * 2


async def test_a_callers_error_in_rows_leaves_the_session_usable(autojump_clock: trio.abc.Clock) -> None:
    class Mine(Exception):
        pass

    def refuse(_position: int, _values: memoryview) -> None:
        raise Mine

    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        events = pipeline.events()
        for tokens in (PROMPT, PROMPT[:1]):
            with pytest.raises(Mine):
                await session.logits(tokens, refuse)
            assert session.state in (ClientState.DRAINING, ClientState.READY)
        assert await take(session.generate([4], max_tokens=2)) == reference([*PROMPT, *PROMPT[:1], 4], 2)
        assert not [event for event in seen(events) if isinstance(event, StateLost)]


# --- close releases ---


async def test_close_gives_slots_and_bytes_back(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(THREE) as stages, stages.pipeline(THREE) as pipeline:
        for _ in range(3):
            async with pipeline.session() as session:
                await session.prefill(PROMPT)
                for name in THREE.split(","):
                    statistics = stages.shard(name).statistics()
                    assert statistics.sessions == 1
                    assert statistics.leased_bytes == sum(stages.engines[name].memory().state.values()) // 3
            for name in THREE.split(","):
                assert stages.shard(name).statistics().leased_bytes == 0
                assert stages.engines[name].position(0) == 0


async def test_close_in_the_middle_of_work(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline:
        for where in TWO.split(","):
            async with pipeline.session() as session, trio.open_nursery() as nursery, held(stages.shard(where)):
                nursery.start_soon(session.generate(PROMPT).__anext__)
                await rest()
                nursery.cancel_scope.cancel()
            await rest()
            stages.assert_consistent()
            assert stages.shard(where).statistics().sessions == 0
        async with pipeline.session() as session:
            assert await take(session.generate(PROMPT, max_tokens=2)) == reference(PROMPT, 2)


async def test_a_step_that_waits_behind_another_dies_with_its_session(autojump_clock: trio.abc.Clock) -> None:
    """Its slot is cleared, and the step must not run into it afterwards."""
    async with (
        open_stages(WHOLE) as stages,
        stages.pipeline(WHOLE) as pipeline,
        pipeline.session() as one,
        trio.open_nursery() as outer,
    ):
        async with held(stages.shard(WHOLE)):
            outer.start_soon(one.prefill, PROMPT[:3])
            await rest()
            async with pipeline.session() as two, trio.open_nursery() as nursery:
                nursery.start_soon(two.prefill, PROMPT[:4])
                await rest()
                nursery.cancel_scope.cancel()
                pipeline._client.timeouts = evolve(TIMEOUTS, control=0.0)  # its Close is answered after the hold
            await rest()
        await rest()
        stages.assert_consistent()
        assert one.committed == 3
        assert stages.engines[WHOLE].tokens_run == 3


@pytest.mark.parametrize("when", ["before", "meanwhile", "never"])
async def test_who_is_cancelled_waits_for_a_stage_that_hangs_for_a_farewell(
    autojump_clock: trio.abc.Clock, when: str
) -> None:
    """And the stage drops the session all the same, once it hangs no more."""
    timeouts = evolve(TIMEOUTS, control=60.0, farewell=3.0)
    async with open_stages(TWO) as stages, stages.pipeline(TWO, timeouts=timeouts) as pipeline:
        async with held(stages.shard("2:6")):
            with trio.CancelScope() as scope:
                async with pipeline.session() as session:
                    with trio.move_on_after(1):
                        await session.prefill(PROMPT)
                    began = trio.current_time()
                    if when == "before":
                        scope.cancel()
                    elif when == "meanwhile":
                        scope.deadline = began + 20
            assert trio.current_time() - began == {"before": 3.0, "meanwhile": 23.0, "never": 60.0}[when]
            assert pipeline.statistics().sessions == 0
        await rest()
        stages.assert_consistent()
        assert stages.shard("2:6").statistics().sessions == 0


async def test_close_while_it_is_being_opened(autojump_clock: trio.abc.Clock) -> None:
    """Open and Close reach a stage back to back; the Open must not win after the Close."""
    async with open_stages(THREE) as stages, stages.pipeline(THREE) as pipeline:
        for steps in range(12):
            async with pipeline.session() as session, trio.open_nursery() as nursery:
                nursery.start_soon(session.prefill, PROMPT)
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            await rest()
            for name in THREE.split(","):
                assert stages.shard(name).statistics().sessions == 0, steps


async def test_close_while_an_open_waits_for_a_slot(autojump_clock: trio.abc.Clock) -> None:
    context = replace(CONTEXT, n_seq_max=1)
    async with (
        open_stages(WHOLE, context=context) as stages,
        stages.pipeline(WHOLE) as pipeline,
        pipeline.session() as old,
    ):
        await old.prefill(PROMPT)
        async with (
            held(stages.shard(WHOLE)),
            pipeline.session() as session,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(session.prefill, PROMPT)  # evicts the old one, whose slot is not cleared yet
            await rest()
            nursery.cancel_scope.cancel()
        await rest()
        assert stages.shard(WHOLE).statistics().sessions == 0
        stages.assert_consistent()
        assert await take(old.generate([1], max_tokens=1)) == reference([*PROMPT, 1], 1)


async def test_closing_from_another_task_ends_the_answer(autojump_clock: trio.abc.Clock) -> None:
    """Whatever the session is doing when it is closed: its caller gets a typed error, the stages get their slots back."""
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline:
        outcomes: list[object] = []

        async def ask(session: ClientSession) -> None:
            try:
                outcomes.append(await take(session.generate(PROMPT, max_tokens=3)))
            except SessionError as error:
                outcomes.append(str(error))

        for steps in range(40):
            async with trio.open_nursery() as nursery, pipeline.session() as session:
                nursery.start_soon(ask, session)
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
            await rest()
            closed = f"session {session.id} is closed; open another one"
            assert outcomes.pop() in (closed, reference(PROMPT, 3))
            assert stages.shard("0:2").statistics().sessions == 0, steps
            assert stages.shard("2:6").statistics().sessions == 0, steps


# --- expiry ---


async def test_an_idle_session_expires_and_comes_back(autojump_clock: trio.abc.Clock) -> None:
    async with (
        open_stages(TWO, policy=ShardPolicy(idle_timeout=50.0)) as stages,
        stages.pipeline(TWO) as pipeline,
        pipeline.session() as session,
    ):
        events = pipeline.events()
        first = await take(session.generate(PROMPT, max_tokens=2))
        await trio.sleep(49)
        assert stages.shard("0:2").statistics().sessions == 1
        await trio.sleep(2)
        for name in TWO.split(","):
            assert stages.shard(name).statistics().sessions == 0
        assert await take(session.generate(max_tokens=2)) == reference([*PROMPT, *first], 2)
        assert reprefills(events) == [(session.id, "expired", len(PROMPT) + 2)]


async def test_use_keeps_a_session_from_expiring(autojump_clock: trio.abc.Clock) -> None:
    async with (
        open_stages(TWO, policy=ShardPolicy(idle_timeout=50.0)) as stages,
        stages.pipeline(TWO) as pipeline,
        pipeline.session() as session,
    ):
        events = pipeline.events()
        for _ in range(4):
            await session.prefill([1, 2])
            await trio.sleep(40)
        assert reprefills(events) == []
        assert session.committed == 8


async def test_work_that_comes_as_a_session_expires_is_answered(autojump_clock: trio.abc.Clock) -> None:
    """Taken or refused as expired, but not forgotten: a lost frame would cost its sender the whole deadline."""
    async with (
        open_stages(TWO, policy=ShardPolicy(idle_timeout=50.0)) as stages,
        stages.pipeline(TWO) as pipeline,
        pipeline.session() as session,
    ):
        for round_ in range(20):
            await session.prefill([round_])
            last = trio.current_time()
            await trio.sleep_until(last + 50.0)
            began = trio.current_time()
            await session.prefill([round_, round_])
            assert trio.current_time() == began


# --- eviction ---


async def test_the_session_idle_for_longest_makes_room(autojump_clock: trio.abc.Clock) -> None:
    context = replace(CONTEXT, n_seq_max=2)
    async with open_stages(TWO, context=context) as stages, stages.pipeline(TWO) as pipeline:
        events = pipeline.events()
        async with pipeline.session() as one, pipeline.session() as two, pipeline.session() as three:
            said: dict[int, list[int]] = {}
            for session in (one, two, one, three):  # two has rested longest when three comes
                said[session.id] = [
                    *said.get(session.id, []),
                    *await take(session.generate([session.id], max_tokens=2)),
                ]
                await trio.sleep(1)
            assert await take(one.generate([5], max_tokens=1)) == reference([1, *said[1][:2], 1, *said[1][2:], 5], 1)
            assert reprefills(events) == []
            assert await take(two.generate([5], max_tokens=1)) == reference([2, *said[2], 5], 1)
            assert reprefills(events) == [(two.id, "evicted", 4)]
            assert [stages.shard(name).statistics().evictions for name in TWO.split(",")] == [2, 2]
            stages.assert_consistent()


async def test_sessions_that_take_turns_in_one_slot(autojump_clock: trio.abc.Clock) -> None:
    context = replace(CONTEXT, n_seq_max=1)
    async with (
        open_stages(THREE, context=context) as stages,
        stages.pipeline(THREE) as pipeline,
        pipeline.session() as one,
        pipeline.session() as two,
    ):
        for _ in range(4):
            for session in (one, two):
                before = list(session.transcript)
                assert await take(session.generate([3], max_tokens=2)) == reference([*before, 3], 2)
                stages.assert_consistent()


async def test_busy_sessions_are_not_evicted_and_the_refusal_shows_the_arithmetic(
    autojump_clock: trio.abc.Clock,
) -> None:
    context = replace(CONTEXT, n_seq_max=1)
    async with open_stages(WHOLE, context=context) as stages, stages.pipeline(WHOLE) as pipeline:
        per_session = human_bytes(sum(stages.engines[WHOLE].memory().state.values()))
        async with pipeline.session() as one, pipeline.session() as two, trio.open_nursery() as nursery:
            answers = []

            async def ask() -> None:
                answers.append(await take(one.generate(PROMPT, max_tokens=2)))

            async with held(stages.shard(WHOLE)):
                nursery.start_soon(ask)
                await rest()
                arithmetic = f"all 1 sequence slots are leased (1 sessions x {per_session} = {per_session})"
                with pytest.raises(Overloaded, match=re.escape(arithmetic)):
                    await anext(two.generate(PROMPT))
            await rest()
            assert answers == [reference(PROMPT, 2)]
            assert stages.shard(WHOLE).statistics().evictions == 0
            # Once the first one rests there is room.
            assert await take(two.generate(max_tokens=2)) == reference(PROMPT, 2)


async def test_two_answers_on_one_slot_do_not_evict_each_other_token_by_token(autojump_clock: trio.abc.Clock) -> None:
    context = replace(CONTEXT, n_seq_max=1)
    policy = ShardPolicy(min_idle=1.0)
    async with (
        open_stages(TWO, context=context, policy=policy) as stages,
        stages.pipeline(TWO) as pipeline,
        pipeline.session() as one,
        pipeline.session() as two,
    ):
        events = pipeline.events()
        answer = one.generate(PROMPT, max_tokens=6)
        said = []
        for _ in range(6):
            said += await take(answer, 1)  # and rests until the next token is asked for
            with pytest.raises(Overloaded, match="none has been idle for long enough"):
                await take(two.generate(transcript=PROMPT, max_tokens=1))
            await trio.sleep(0.5)
        assert said == reference(PROMPT, 6)
        assert not any(isinstance(event, RePrefilled) for event in seen(events))
        await trio.sleep(0.5)  # a second since its last token
        assert await take(two.generate(transcript=PROMPT, max_tokens=2)) == reference(PROMPT, 2)
        assert stages.shard("0:2").statistics().evictions == 1


async def test_an_answer_on_its_way_out_is_not_idleness(autojump_clock: trio.abc.Clock) -> None:
    """A session whose residual waits for room on the link has done its step and is not done: evicting it would lose it."""
    context = replace(CONTEXT, n_seq_max=1, n_batch=8)
    async with (
        open_stages(TWO, context=context) as stages,
        stages.pipeline(TWO, window=3) as pipeline,  # two chunks wait at the tail, one on the head's way out
        pipeline.session() as one,
        trio.open_nursery() as nursery,
    ):
        answers = []

        async def ask() -> None:
            answers.append(await take(one.generate(PROMPT, max_tokens=2)))

        async with held(stages.shard("2:6")):
            nursery.start_soon(ask)
            await rest()
            (actor,) = stages.shard("0:2").actors()
            assert not actor.is_idle
            async with pipeline.session() as two:
                with pytest.raises(Overloaded):
                    await two.prefill([1])
        await rest()
        assert answers == [reference(PROMPT, 2)]


# --- many ---


async def test_slots_are_reused_for_many_rounds(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as keeper:
        kept = await take(keeper.generate(PROMPT, max_tokens=1))
        for round_ in range(60):
            prompt = [round_, *PROMPT[: round_ % 20]]
            async with pipeline.session() as session:
                assert await take(session.generate(prompt, max_tokens=1 + round_ % 2)) == reference(
                    prompt, 1 + round_ % 2
                )
            stages.assert_consistent()
        assert await take(keeper.generate(max_tokens=3)) == reference([*PROMPT, *kept], 3)


async def test_sessions_side_by_side_are_merged_and_do_not_notice(autojump_clock: trio.abc.Clock) -> None:
    async with (
        open_stages(TWO) as stages,
        stages.pipeline(TWO) as pipeline,
        pipeline.session() as one,
        pipeline.session() as two,
        pipeline.session() as three,
    ):
        answers: dict[int, list[int]] = {}
        prompts = {one: PROMPT, two: PROMPT[5:], three: PROMPT[::-1]}
        widest = dict.fromkeys(stages.engines, 0)
        for name, engine in stages.engines.items():
            engine.watch = lambda batch, name=name: widest.update({name: max(widest[name], len(batch))})

        async def ask(session: ClientSession) -> None:
            answers[session.id] = await take(session.generate(prompts[session][-1:], max_tokens=10))

        for session, prompt in prompts.items():
            await session.prefill(prompt[:-1])
        # The engine is instant: let work gather, as behind a real one.
        async with trio.open_nursery() as nursery, held(stages.shard("0:2")):
            for session in prompts:
                nursery.start_soon(ask, session)
            await rest()
        for session, prompt in prompts.items():
            assert answers[session.id] == reference(prompt, 10)
        steps = stages.shard("0:2").statistics().steps
        assert steps.items > steps.batches
        assert widest["0:2"] > 1
