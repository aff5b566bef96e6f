"""Choices of one prompt: it is evaluated once, whatever becomes of whoever does, and each is drawn as it would be alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
from serving.test_prefixes import SPLIT, drawn, expected_of, serving, text
from trio.testing import MockClock

from dgr.core.values import SamplingParams
from dgr.engine.base import Output, Work
from dgr.serving.engine import Job, ServingEngine
from dgr.serving.sessions import WORTH_A_COPY, SessionPool
from dgr.serving.shared import SharedPrompt
from dgr.testing.engines.fake import FakeEngine
from dgr.testing.offline import Offline

STAGES = [f"stage-{index}" for index in range(len(SPLIT.split(",")))]


def choices(prompt: tuple[int, ...], count: int, length: int = 5, *, top: int = 0) -> list[Job]:
    """Jobs as a request for several choices makes them."""
    shared = SharedPrompt()
    kinds = [SamplingParams(temperature=1, seed=7, choice=index, top_logprobs=top) for index in range(count)]
    return [Job(prompt, length, sampling, shared=shared) for sampling in kinds]


async def ask(engine: ServingEngine, jobs: Sequence[Job]) -> list[int]:
    """Tokens of each job's prompt that were not evaluated for it; every answer is right."""
    cached: dict[int, int] = {}

    async def one(job: Job) -> None:
        tokens, answer = await drawn(engine, job)
        assert tokens == expected_of(job)
        cached[job.sampling.choice] = answer.usage.cached

    async with trio.open_nursery() as nursery:
        for job in jobs:
            nursery.start_soon(one, job)
    return [cached[job.sampling.choice] for job in jobs]


def evaluated(offline: Offline) -> int:
    """Tokens that every stage has run."""
    (count,) = {offline.engines[name].tokens_run for name in STAGES}
    return count


@pytest.mark.parametrize("length", [2, 20, WORTH_A_COPY + 50])
@pytest.mark.parametrize("prefixes", [0, 2])
async def test_a_prompt_is_evaluated_once_for_all_its_choices(
    autojump_clock: MockClock, length: int, prefixes: int
) -> None:
    async with serving(4, prefixes, n_seq_max=4 + prefixes) as (engine, offline):
        prompt = text("prompt", length)
        cached = await ask(engine, choices(prompt, 4))
        assert sorted(cached) == [0, *[length - 1] * 3]
        assert evaluated(offline) == (length - 1) + 4 * 5
        assert engine.counters.prompt_tokens - engine.counters.cached_tokens == length - 1 + 4


async def test_choices_that_each_evaluate_the_prompt_would_be_seen(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody_else(_self: SharedPrompt, _pool: SessionPool) -> None:
        return None

    monkeypatch.setattr(SharedPrompt, "copy", nobody_else)
    async with serving(4, 0) as (engine, offline):
        await ask(engine, choices(text("prompt", 60), 4))
        assert evaluated(offline) == 4 * (59 + 5)


@pytest.mark.parametrize("sessions", [1, 2, 3])
@pytest.mark.parametrize("length", [30, WORTH_A_COPY + 50])
async def test_with_fewer_slots_than_choices_the_answers_are_the_same(
    autojump_clock: MockClock, sessions: int, length: int
) -> None:
    async with serving(sessions, 4 - sessions) as (engine, offline):
        await ask(engine, choices(text("prompt", length), 5))
        assert evaluated(offline) <= 5 * (length - 1 + 5)
        assert evaluated(offline) < 3 * length + 25 or length < WORTH_A_COPY, "a copy is kept for those that come later"


async def test_the_same_choices_asked_again_are_cached_as_one_is(autojump_clock: MockClock) -> None:
    async with serving(4, 2, n_seq_max=6) as (engine, offline):
        prompt = text("prompt", 200)
        await ask(engine, choices(prompt, 3))
        before = evaluated(offline)
        assert await ask(engine, choices(prompt, 3)) == [199] * 3
        assert evaluated(offline) - before == 3 * 5


async def test_stages_without_a_slot_for_a_copy_answer_all_the_same(autojump_clock: MockClock) -> None:
    """Two slots of the four are another pipeline's: whoever gets none says so, and the others are right."""
    async with serving(2, 2) as (engine, offline), offline.pipeline.session() as one, offline.pipeline.session() as two:
        await one.prefill([1])
        await two.prefill([2])
        assert sorted(await ask(engine, choices(text("prompt", 200), 2))) == [0, 199]


async def test_choices_that_were_left_are_gone_on_with(autojump_clock: MockClock) -> None:
    async with serving(3, 0) as (engine, offline):
        jobs = choices(text("prompt", 40), 3, length=8)

        async def leave(job: Job) -> None:
            async with engine.admit(job) as answer:
                for _ in range(3):
                    await anext(answer)

        async with trio.open_nursery() as nursery:
            for job in jobs:
                nursery.start_soon(leave, job)
        before = evaluated(offline)
        again = choices(text("prompt", 40), 3, length=8)
        assert await ask(engine, again) == [40] * 3
        assert engine.sessions.resumed == 3
        assert evaluated(offline) - before == 3 * 5


@pytest.mark.parametrize("who", range(3))
@pytest.mark.parametrize("steps", range(0, 40, 6))
async def test_a_choice_that_is_left_at_any_moment_takes_nobody_with_it(
    autojump_clock: MockClock, who: int, steps: int
) -> None:
    """Whoever evaluates may go, and whoever waits; places are given back, and the others are as they would be."""
    async with serving(3, 0, n_seq_max=3) as (engine, _):
        jobs = choices(text("prompt", 300), 3)

        async def leave(job: Job) -> None:
            with trio.CancelScope() as scope:
                nursery.start_soon(cancel_later, scope)
                await drawn(engine, job)

        async def cancel_later(scope: trio.CancelScope) -> None:
            for _ in range(steps):
                await trio.lowlevel.checkpoint()
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave, jobs[who])
            await ask(engine, [job for job in jobs if job is not jobs[who]])
        assert not any(kept.in_use for kept in engine.sessions._kept)
        assert engine.line.running == 0


async def test_an_evaluation_that_fails_is_somebody_elses(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first evaluation ends in the middle; another choice takes over, and the last one copies from it."""
    async with serving(3, 0, n_seq_max=3) as (engine, offline):
        jobs = choices(text("prompt", 300), 3)
        head, run = offline.engines["stage-0"], FakeEngine.run
        leader = trio.CancelScope()

        def stop_in_the_middle(batch: Sequence[Work]) -> list[Output]:
            if head.tokens_run > 100:
                leader.cancel()
            return run(head, batch)

        monkeypatch.setattr(head, "run", stop_in_the_middle)

        async def lead() -> None:
            with leader:
                await drawn(engine, jobs[0])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lead)
            while jobs[0].shared is not None and jobs[0].shared.evaluating is None:
                await trio.lowlevel.checkpoint()
            assert sorted(await ask(engine, jobs[1:])) in ([0, 299], [299, 299])
        assert leader.cancelled_caught
