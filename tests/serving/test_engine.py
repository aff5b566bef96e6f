"""The engine between requests and a pipeline, without HTTP: under a clock that takes no time."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from conversations import reference
from trio.testing import MockClock, wait_all_tasks_blocked

from dgr.client.pipeline import Timeouts
from dgr.core.values import ContextParams, SamplingParams
from dgr.errors import (
    ContextLimitExceeded,
    InputError,
    InvalidToken,
    NonFinite,
    NotServing,
    QueueFull,
    RequestTimedOut,
    SessionError,
)
from dgr.serving.engine import Answer, Job, Phase, ServingEngine, ServingLimits, open_serving
from dgr.serving.line import Line
from dgr.testing.engines.fake import Fault, FaultKind
from dgr.testing.offline import Offline, open_fake_pipeline
from dgr.testing.pause import pause
from dgr.testing.waits import until

PROMPT = tuple(b"What is it that you would have me say?")
LIMITS = ServingLimits(deadline=100)


@asynccontextmanager
async def serving(
    limits: ServingLimits = LIMITS, sessions: int = 2, n_ctx: int = 1024
) -> AsyncIterator[tuple[ServingEngine, Offline]]:
    context = ContextParams(n_ctx=n_ctx, n_batch=32, n_ubatch=32, n_seq_max=sessions)
    async with open_fake_pipeline(context=context) as offline, open_serving(offline.pipeline, limits) as engine:
        yield engine, offline


async def drawn(engine: ServingEngine, job: Job) -> tuple[list[int], Answer]:
    async with engine.admit(job) as answer:
        return [token.id async for token in answer], answer


async def undisturbed(offline: Offline, job: Job) -> list[int]:
    """What the pipeline alone draws."""
    async with offline.pipeline.session() as session:
        generation = session.generate(
            job.prompt, max_tokens=job.max_tokens, sampling=job.sampling, stop=tuple(job.stop)
        )
        return [token.id async for token in generation]


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1, seed=5, choice=3)])
async def test_an_answer_is_that_of_the_pipeline_alone(autojump_clock: MockClock, sampling: SamplingParams) -> None:
    async with serving() as (engine, offline):
        job = Job(PROMPT, 20, sampling)
        tokens, answer = await drawn(engine, job)
        assert tokens == await undisturbed(offline, job)
        assert (answer.finish_reason, answer.phase) == ("length", Phase.ENDED)
        assert (answer.usage.prompt, answer.usage.cached, answer.usage.completion) == (len(PROMPT), 0, 20)


async def test_the_next_turn_evaluates_only_what_is_new(autojump_clock: MockClock) -> None:
    async with serving() as (engine, offline):
        tokens, _ = await drawn(engine, Job(PROMPT, 10))
        turn = Job((*PROMPT, *tokens, *b" And then?"), 10)
        before = offline.engines["stage-0"].tokens_run
        _, answer = await drawn(engine, turn)
        run = offline.engines["stage-0"].tokens_run - before
        assert answer.usage.cached == len(PROMPT) + 9  # the last token was drawn, and nothing was run on it
        assert run == len(turn.prompt) - answer.usage.cached + 9
        assert (engine.sessions.hits, dict(engine.sessions.misses)) == (1, {"new": 1})


@pytest.mark.parametrize("left_after", range(1, 12))
async def test_an_answer_that_was_left_goes_on_token_for_token(autojump_clock: MockClock, left_after: int) -> None:
    job = Job(PROMPT, 12, SamplingParams(temperature=1, seed=9))
    async with serving() as (engine, offline):
        with trio.CancelScope() as scope:
            async with engine.admit(job) as answer:
                async for _ in answer:
                    if answer.usage.completion == left_after:
                        scope.cancel()
                        await trio.lowlevel.checkpoint()
        assert engine.counters.cancelled == 1
        runs = offline.engines["stage-0"].runs
        tokens, answer = await drawn(engine, job)
        assert tokens == await undisturbed(offline, job)
        assert engine.sessions.resumed == 1
        assert answer.usage.cached == len(PROMPT)
        assert offline.engines["stage-0"].runs - runs <= 12 - left_after + 2 + 12  # theirs, and those of the comparison


async def test_an_answer_that_was_left_goes_on_after_its_state_was_lost_too(autojump_clock: MockClock) -> None:
    job = Job(PROMPT, 12, SamplingParams(temperature=1, seed=9))
    async with serving() as (engine, offline):
        async with engine.admit(job) as answer:
            await anext(answer)
            await anext(answer)
        await offline.restart("stage-1")
        await wait_all_tasks_blocked()
        await trio.sleep(1)
        tokens, answer = await drawn(engine, job)
        assert tokens == await undisturbed(offline, job)
        assert answer.usage.cached == 0


async def test_an_answer_with_candidates_is_not_kept_for_another_try(autojump_clock: MockClock) -> None:
    """They take kilobytes a token; what was evaluated is kept all the same, if nothing was drawn yet."""
    job = Job(PROMPT, 12, SamplingParams(top_logprobs=20))
    async with serving() as (engine, _):
        async with engine.admit(job) as answer:
            assert len((await anext(answer)).top) == 20
        tokens, _ = await drawn(engine, job)
        assert tokens == await undisturbed_elsewhere(job)
        assert engine.sessions.resumed == 0
        assert dict(engine.sessions.misses) == {"new": 1, "whole": 1}


async def test_a_complete_answer_is_drawn_anew(autojump_clock: MockClock) -> None:
    async with serving() as (engine, _):
        await drawn(engine, Job(PROMPT, 5, seeded=False))
        await drawn(engine, Job(PROMPT, 5, seeded=False))
        assert engine.sessions.resumed == 0


async def test_what_cannot_be_is_refused_before_anything_is_begun(autojump_clock: MockClock) -> None:
    async with serving(n_ctx=256) as (engine, offline):
        for job, error in (
            (Job((), 5), InputError),
            (Job(PROMPT, 0), InputError),
            (Job(PROMPT, 5, min_tokens=6), InputError),
            (Job((*PROMPT, 257), 5), InvalidToken),
            (Job((-1,), 5), InvalidToken),
            (Job(PROMPT, 256), ContextLimitExceeded),
            (Job(PROMPT, 5, SamplingParams(top_p=0)), InputError),
            (Job(PROMPT, 5, SamplingParams(temperature=float("nan"))), InputError),
        ):
            with pytest.raises(error):
                await drawn(engine, job)
        assert offline.engines["stage-0"].runs == 0
        assert engine.line.running == 0
        assert len((await drawn(engine, Job(PROMPT, 256 - len(PROMPT))))[0]) == 256 - len(PROMPT)


@pytest.mark.parametrize("limits", [{"sessions": 0}, {"sessions": 3}, {"max_waiting": -1}, {"deadline": 0}])
async def test_limits_that_cannot_be_are_refused(autojump_clock: MockClock, limits: dict[str, int]) -> None:
    with pytest.raises(InputError):
        async with serving(ServingLimits(**limits)):
            pytest.fail("it was opened")


async def test_the_deadline_counts_the_wait_too(autojump_clock: MockClock) -> None:
    async with serving(sessions=1) as (engine, _), engine.admit(Job(PROMPT, 5)) as first:
        await anext(first)
        async with engine.admit(Job(PROMPT, 5), deadline=3) as second:
            with pytest.raises(RequestTimedOut, match="in phase waiting with 0 tokens drawn"):
                await anext(second)
        assert trio.current_time() > 2
        assert engine.counters.cancelled == 0


@pytest.mark.parametrize("leaves", ["cancelled", "has enough", "complete", "out of time", "failed"])
async def test_an_answer_is_counted_when_its_slot_is_free(autojump_clock: MockClock, leaves: str) -> None:
    """In one step: whoever saw the slot come back while the reader still unwinds would miss it in the counters."""
    job = Job(PROMPT, 4 if leaves == "complete" else 100)
    async with serving(sessions=1) as (engine, offline):
        if leaves == "failed":
            offline.engines["stage-1"].faults.append(Fault(FaultKind.NON_FINITE, position=45))
        scope = trio.CancelScope()

        async def read() -> None:
            with scope:
                async with engine.admit(job, deadline=5 if leaves == "out of time" else None) as answer:
                    try:
                        with contextlib.suppress(NonFinite, RequestTimedOut):
                            async for _ in answer:
                                if answer.usage.completion == 4:
                                    if leaves in ("has enough", "complete"):
                                        break
                                    if leaves == "cancelled":
                                        scope.cancel()
                                    if leaves == "out of time":
                                        await trio.sleep(10)
                    finally:
                        engine.release(answer)
                        with trio.CancelScope(shield=True):
                            await trio.sleep(60)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            with trio.fail_after(50):
                await engine.line.wait_empty()
            assert engine.counters.cancelled == (leaves in ("cancelled", "has enough"))


async def test_an_answer_that_was_left_draws_nothing_from_its_successors_session(autojump_clock: MockClock) -> None:
    async with serving(sessions=1) as (engine, _):
        async with engine.admit(Job(PROMPT, 20)) as left:
            await anext(left)
        async with engine.admit(Job(PROMPT, 20)) as answer:
            first = [(await anext(answer)).id for _ in range(3)]
            with pytest.raises(SessionError, match="was left"):
                await anext(left)
            tokens = first + [token.id async for token in answer]
        assert tokens == await undisturbed_elsewhere(Job(PROMPT, 20))


async def test_a_failed_answer_frees_its_slot_and_the_next_one_is_right(autojump_clock: MockClock) -> None:
    async with serving(sessions=1) as (engine, offline):
        offline.engines["stage-1"].faults.append(Fault(FaultKind.NON_FINITE, position=45))
        with pytest.raises(NonFinite):
            await drawn(engine, Job(PROMPT, 20))
        assert (engine.line.running, engine.counters.cancelled) == (0, 0)
        tokens, _ = await drawn(engine, Job(PROMPT, 20))
        assert tokens == await undisturbed_elsewhere(Job(PROMPT, 20))


async def test_without_a_route_nobody_is_admitted_until_it_is_back(autojump_clock: MockClock) -> None:
    async with serving() as (engine, offline):
        offline.cluster.stop("stage-1")
        await wait_all_tasks_blocked()
        assert not engine.is_ready
        with pytest.raises(NotServing, match="the route is"):
            await drawn(engine, Job(PROMPT, 5))
        await offline.start("stage-1", offline.engines["stage-1"].describe().layers)
        await trio.sleep(2)
        assert engine.is_ready
        assert len((await drawn(engine, Job(PROMPT, 5)))[0]) == 5


async def test_a_drained_stage_without_a_spare_refuses_what_is_new_and_the_answer_under_way_ends(
    autojump_clock: MockClock,
) -> None:
    async with serving() as (engine, offline):
        async with engine.admit(Job(PROMPT, 20)) as answer, engine.admit(Job(PROMPT[1:], 20)) as late:
            tokens = [(await anext(answer)).id]
            offline.cluster.shards["stage-1"].draining.begin(60)
            await wait_all_tasks_blocked()
            assert not engine.is_ready
            why = (
                r"nothing new is admitted: stage stage-1 \(layers .*\) is being drained, and it has no spare; wait for"
            )
            with pytest.raises(NotServing, match=why) as refused:
                await drawn(engine, Job(PROMPT, 5))
            assert refused.value.retry_after == 1
            with pytest.raises(NotServing, match=why):  # it was admitted before, and had no session
                await anext(late)
            tokens += [token.id async for token in answer]
        assert tokens == await undisturbed_elsewhere(Job(PROMPT, 20))


async def test_an_answer_whose_route_does_not_come_back_says_so(autojump_clock: MockClock) -> None:
    async with serving(ServingLimits(deadline=1000)) as (engine, offline), engine.admit(Job(PROMPT, 5)) as answer:
        await anext(answer)
        offline.cluster.stop("stage-1")
        with pytest.raises(NotServing, match="was not live within 60 s"):
            await anext(answer)


async def test_draining_waits_for_answers_and_then_ends_them(autojump_clock: MockClock) -> None:
    async with serving() as (engine, _), trio.open_nursery() as nursery, engine.admit(Job(PROMPT, 500)) as answer:
        await anext(answer)
        nursery.start_soon(engine.drain, 10)
        await trio.sleep(5)
        with pytest.raises(NotServing, match="about to end"):
            await drawn(engine, Job(PROMPT, 5))
        await anext(answer)
        await trio.sleep(6)
        with pytest.raises(NotServing, match="ended before the answer was complete"):
            await anext(answer)


async def test_kept_sessions_are_as_many_as_slots_and_the_oldest_goes(autojump_clock: MockClock) -> None:
    async with serving(sessions=2) as (engine, offline):
        for text in (b"first conversation", b"second conversation", b"third conversation"):
            await drawn(engine, Job(tuple(text), 3))
            assert offline.pipeline.statistics().sessions <= 2
        for text, cached in (
            (b"third conversation", True),
            (b"second conversation", True),
            (b"first conversation", False),
        ):
            tokens = await undisturbed_elsewhere(Job(tuple(text), 3))
            _, answer = await drawn(engine, Job((*text, *tokens, *b" more"), 3))
            assert bool(answer.usage.cached) == cached, text
    assert engine.sessions.kept == 0


async def undisturbed_elsewhere(job: Job) -> list[int]:
    async with open_fake_pipeline() as offline:
        return await undisturbed(offline, job)


async def test_the_session_that_fits_may_be_busy(autojump_clock: MockClock) -> None:
    async with serving(sessions=2) as (engine, _), engine.admit(Job(PROMPT, 50)) as answer:
        tokens = [(await anext(answer)).id for _ in range(3)]
        _, other = await drawn(engine, Job((*PROMPT, *tokens, *b"!"), 3))
        assert other.usage.cached == 0
        assert dict(engine.sessions.misses) == {"new": 1, "busy": 1}


@pytest.mark.parametrize("seed", range(6))
async def test_clients_that_come_and_leave_at_will_get_what_the_pipeline_alone_draws(
    autojump_clock: MockClock, seed: int
) -> None:
    """Conversations grow turn by turn; clients leave at any moment and try again; stages die and come back."""
    dice = random.Random(seed)
    async with serving(ServingLimits(deadline=500, max_waiting=50), sessions=3) as (engine, offline):
        expected: dict[Job, list[int]] = {}

        async def talk(name: int) -> None:
            transcript = tuple(f"Conversation {name % 4} says".encode())
            for turn in range(3):
                sampling = SamplingParams(temperature=dice.choice([0, 1]), seed=dice.randrange(2), choice=name % 2)
                job = Job(transcript, dice.randint(1, 12), sampling, frozenset({256}))
                tokens: list[int] | None = None
                while tokens is None:
                    await trio.sleep(dice.random())
                    with trio.move_on_after(dice.choice([0.01, 0.1, 5])) as patience:
                        async with engine.admit(job) as answer:
                            found = []
                            async for token in answer:
                                found.append(token.id)
                                await trio.sleep(dice.choice([0, 0.02]))
                            tokens = found
                    assert (tokens is None) == patience.cancelled_caught
                assert expected.setdefault(job, tokens) == tokens
                transcript += (*tokens, *f" {turn}".encode())

        async with trio.open_nursery() as nursery:
            for name in range(8):
                nursery.start_soon(talk, name)
            for _ in range(dice.randrange(3)):
                await trio.sleep(1)
                await offline.restart(f"stage-{dice.randrange(3)}")
                await until(lambda: engine.is_ready)
        assert (engine.line.running, engine.line.waiting) == (0, 0)
        assert engine.sessions.kept <= 3
        assert not any(kept.in_use for kept in engine.sessions._kept)
    async with open_fake_pipeline(context=ContextParams(n_ctx=1024, n_batch=32, n_ubatch=32, n_seq_max=2)) as alone:
        for job, tokens in expected.items():
            assert tokens == await undisturbed(alone, job)


# --- the line ---


async def test_the_line_is_first_come_first_served(autojump_clock: MockClock) -> None:
    line = Line(2, 10, 1000)
    places = [line.enter(1) for _ in range(5)]
    assert [place.turn.is_set() for place in places] == [True, True, False, False, False]
    line.leave(places[2])  # it waited, and had enough
    line.leave(places[0])
    assert [place.turn.is_set() for place in places[3:]] == [True, False]
    assert (line.running, line.waiting) == (2, 1)
    for place in (places[1], places[3], places[4]):
        line.leave(place)
    await line.wait_empty()
    assert line.running == 0


async def test_a_full_line_takes_nobody_but_a_free_slot_anyone(autojump_clock: MockClock) -> None:
    line = Line(1, 0, 0)
    first = line.enter(10**6)
    with pytest.raises(QueueFull, match="0 choices wait, and no more than 0 may"):
        line.enter(1)
    line.leave(first)
    line.leave(line.enter(1))


async def test_the_hint_follows_how_long_slots_are_held(autojump_clock: MockClock) -> None:
    line = Line(2, 4, 1000)
    assert line.expected_wait() == 1
    for _ in range(30):
        place = line.enter(1)
        await trio.sleep(10)
        line.leave(place)
    held = [line.enter(1) for _ in range(6)]
    with pytest.raises(QueueFull) as refused:
        line.enter(1)
    assert refused.value.retry_after == pytest.approx(25)  # five rounds of ten seconds on two slots
    for place in held:
        line.leave(place)


@pytest.mark.parametrize("prefixes", [0, 1])
async def test_a_stage_that_hangs_holds_nobody_beyond_the_deadline(autojump_clock: MockClock, prefixes: int) -> None:
    """Not even where somebody else's session has to be closed first, or a copy be made."""
    limits = ServingLimits(sessions=1, prefixes=prefixes, deadline=5)
    async with serving(limits, sessions=1 + prefixes) as (engine, offline):
        opening = tuple(range(200))
        await drawn(engine, Job((*opening, 1), 2))
        await drawn(engine, Job((*opening, 2), 2))
        async with pause(offline.cluster.shards["stage-1"]):
            for prompt in (PROMPT, (*opening, 3)):
                began = trio.current_time()
                with pytest.raises(RequestTimedOut):
                    await drawn(engine, Job(prompt, 2))
                assert trio.current_time() - began == pytest.approx(5)
                with trio.move_on_after(1):
                    await drawn(engine, Job(prompt, 2))
                assert trio.current_time() - began == pytest.approx(6)
        said, _ = await drawn(engine, Job((*opening, 3), 2))
        assert said == reference((*opening, 3), 2)
    assert all(shard.statistics().sessions == 0 for shard in offline.cluster.shards.values())


async def test_a_stage_that_hangs_does_not_hold_the_end(autojump_clock: MockClock) -> None:
    """Whoever ends a serving waits for a farewell, however many sessions are kept; the stages drop them later."""
    limits = ServingLimits(sessions=2, prefixes=2)
    async with serving(limits, sessions=4) as (_, offline):
        block = open_serving(offline.pipeline, limits)
        engine = await block.__aenter__()
        for first in range(4):
            await drawn(engine, Job((first, *range(200)), 2))
        assert offline.pipeline.statistics().sessions > 1
        async with pause(offline.cluster.shards["stage-1"]):
            began = trio.current_time()
            await block.__aexit__(None, None, None)
            assert trio.current_time() - began == pytest.approx(Timeouts().farewell)
        await until(lambda: all(shard.statistics().sessions == 0 for shard in offline.cluster.shards.values()))
