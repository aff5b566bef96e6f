"""Answers whose tokens the stages draw ahead of their readers: the same text, and an ordinary end evaluates nothing twice."""

from __future__ import annotations

import pytest
import trio
from serving.test_engine import PROMPT, drawn, serving, undisturbed
from trio.testing import MockClock

from dgr.core.load import Side
from dgr.core.values import SamplingParams
from dgr.errors import InputError
from dgr.serving.engine import Job, ServingLimits
from dgr.serving.sessions import Miss
from dgr.testing.offline import Offline

AHEAD = ServingLimits(deadline=100, ahead=4)
SEEDED = SamplingParams(temperature=1, seed=9)


def said_to_head(offline: Offline) -> int:
    return offline.cluster.shards["stage-0"].traffic.statistics()[Side.PIPELINE, ""].frames_received


@pytest.mark.parametrize("ending", [None, 3, 7])
async def test_an_answer_ends_where_it_should_and_the_next_turn_evaluates_only_what_is_new(
    autojump_clock: MockClock, ending: int | None
) -> None:
    async with serving(AHEAD, sessions=4) as (engine, offline):
        plain = await undisturbed(offline, Job(PROMPT, 12, SEEDED))
        stop = frozenset(() if ending is None else (plain[ending],))
        due = plain if ending is None else plain[: plain.index(plain[ending])]
        tokens, answer = await drawn(engine, Job(PROMPT, 12, SEEDED, stop))
        assert tokens == due
        assert answer.finish_reason == ("length" if ending is None else "stop")
        turn = Job((*PROMPT, *tokens, *b" And then?"), 4)
        _, answer = await drawn(engine, turn)
        assert answer.usage.cached == len(PROMPT) + len(due) - (ending is None)
        assert not engine.sessions.misses[Miss.LOST]


@pytest.mark.parametrize("left_after", range(1, 12, 2))
async def test_an_answer_that_was_left_goes_on_token_for_token(autojump_clock: MockClock, left_after: int) -> None:
    job = Job(PROMPT, 12, SEEDED)
    async with serving(AHEAD, sessions=4) as (engine, offline):
        with trio.CancelScope() as scope:
            async with engine.admit(job) as answer:
                async for _ in answer:
                    if answer.usage.completion == left_after:
                        scope.cancel()
                        await trio.lowlevel.checkpoint()
        tokens, _ = await drawn(engine, job)
        assert tokens == await undisturbed(offline, job)
        assert engine.sessions.resumed == 1
        other = Job((*PROMPT, *tokens[:left_after], 7), 5)
        assert (await drawn(engine, other))[0] == await undisturbed(offline, other)


async def test_a_job_that_its_reader_may_end_is_asked_for_token_by_token(autojump_clock: MockClock) -> None:
    async with serving(AHEAD, sessions=4) as (engine, offline):
        await drawn(engine, Job(PROMPT, 8))
        frames = []
        for job in (Job(PROMPT, 11, ends_early=True), Job(PROMPT, 11, min_tokens=2), Job(PROMPT, 11)):
            before = said_to_head(offline)
            await drawn(engine, job)
            frames.append(said_to_head(offline) - before)
        assert frames[0] >= 11
        assert frames[1] >= 11
        assert frames[2] < 11


def test_a_grant_out_of_range_is_refused() -> None:
    with pytest.raises(InputError, match="ahead"):
        ServingLimits(ahead=-1)
