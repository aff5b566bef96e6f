"""Many sessions on a ring of stages: every stage is kept at work, by a clock that knows what a batch costs.

Engines take no time of their own here; a batch of n tokens takes ``fixed + each * n`` seconds of the mock clock. What a
ring can give at most follows from that alone: S sessions in G groups take, for a token each, the longer of what one stage
needs for all groups and what the largest group needs for all stages, for the best G.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import trio
from timed_engines import CPU, DEVICE, TimedEngine, time_engines
from trio.testing import MockClock

from dgr.core.values import ContextParams, Numerics
from dgr.stage import ready
from dgr.testing.offline import Offline, open_fake_pipeline

SPLITS = {1: "0:6", 2: "0:3,3:6", 3: "0:2,2:4,4:6", 4: "0:1,1:2,2:4,4:6"}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> type[TimedEngine]:
    return time_engines(monkeypatch)


def most(sessions: int, stages: int, cost: tuple[float, float]) -> float:
    """Tokens a second that a ring can give: every partition into groups of sizes as equal as may be."""

    def batch(n: int) -> float:
        return cost[0] + cost[1] * n

    best = 0.0
    for groups in range(1, sessions + 1):
        sizes = [sessions // groups + (index < sessions % groups) for index in range(groups)]
        best = max(best, sessions / max(sum(map(batch, sizes)), stages * batch(max(sizes))))
    return best


async def tokens_per_second(pipeline: Any, sessions: int, tokens: int) -> float:
    """Of all sessions together, once their groups have formed."""
    times: list[float] = []

    async def go(index: int) -> None:
        async with pipeline.session() as session:
            answer = session.generate([1 + index] * (3 + index), max_tokens=tokens, stop=())
            times.extend([trio.current_time() async for _ in answer])

    async with trio.open_nursery() as nursery:
        for index in range(sessions):
            nursery.start_soon(go, index)
    times.sort()
    first, last = len(times) // 2, 9 * len(times) // 10
    return (last - first) / (times[last] - times[first])


async def share(sessions: int, stages: int, cost: tuple[float, float]) -> float:
    """Of what the ring could give."""
    TimedEngine.cost = cost
    context = ContextParams(n_ctx=256, n_batch=64, n_ubatch=64, n_seq_max=sessions)
    async with open_fake_pipeline(SPLITS[stages], context=context) as offline:
        return await tokens_per_second(offline.pipeline, sessions, 60 + 5 * sessions) / most(sessions, stages, cost)


@pytest.mark.parametrize(
    ("sessions", "stages", "cost"), [(8, 1, CPU), (3, 2, CPU), (8, 2, DEVICE), (5, 4, CPU), (5, 4, DEVICE), (8, 4, CPU)]
)
async def test_a_ring_gives_what_its_stages_can(
    timed: type[TimedEngine], autojump_clock: MockClock, sessions: int, stages: int, cost: tuple[float, float]
) -> None:
    assert await share(sessions, stages, cost) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("stages", SPLITS)
@pytest.mark.parametrize(
    ("sessions", "cost"), [(2, CPU), (4, CPU), (6, CPU), (7, CPU), (12, CPU), (16, CPU), (16, DEVICE)]
)
async def test_every_ring_gives_what_its_stages_can(
    timed: type[TimedEngine], autojump_clock: MockClock, sessions: int, stages: int, cost: tuple[float, float]
) -> None:
    assert await share(sessions, stages, cost) > 0.95


def _as_many_as_are_ready(sessions: int, stages: int, seconds: object) -> int:
    return 1


async def test_a_convoy_would_be_seen(
    timed: type[TimedEngine], autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "best_groups", _as_many_as_are_ready)
    assert await share(8, 4, DEVICE) < 0.8


@pytest.mark.parametrize(("sessions", "stages"), [(4, 2), (8, 2)])
async def test_crumbs_would_be_seen(
    timed: type[TimedEngine],
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    sessions: int,
    stages: int,
) -> None:
    """A stage that takes whatever is there the moment it is free."""
    monkeypatch.setattr(ready.ReadyWork, "_worth_waiting", lambda *_: float("-inf"))
    assert await share(sessions, stages, DEVICE) < 0.9


async def test_groups_of_slots_that_are_not_adjacent_would_be_seen(
    timed: type[TimedEngine], autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream runs them one after another, whoever waits longest first."""
    monkeypatch.setattr(
        ready, "_blocks", lambda slots, groups: [sorted(slots)[first::groups] for first in range(groups)]
    )
    assert await share(8, 2, DEVICE) < 0.7


async def churn() -> float:
    """Seconds of answers of 5 to 40 tokens, each followed by another's, over what eight sessions without an end would take."""
    context = ContextParams(n_ctx=256, n_batch=64, n_ubatch=64, n_seq_max=8)
    async with open_fake_pipeline(SPLITS[2], context=context) as offline:
        drawn = 0

        async def go(index: int) -> None:
            nonlocal drawn
            for turn in range(12):
                async with offline.pipeline.session() as session:
                    length = 5 + (7 * index + 11 * turn) % 36
                    async for _ in session.generate([1 + index, turn], max_tokens=length, stop=()):
                        drawn += 1

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for index in range(8):
                nursery.start_soon(go, index)
        prefills = 8 * 12 * (CPU[0] + 2 * CPU[1])
        return (trio.current_time() - began) / (drawn / most(8, 2, CPU) + prefills)


@pytest.mark.slow
async def test_sessions_that_come_and_go_are_grouped_anew(timed: type[TimedEngine], autojump_clock: MockClock) -> None:
    assert await churn() < 1.4


@pytest.mark.slow
async def test_coming_and_going_without_groups_would_be_seen(
    timed: type[TimedEngine], autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stage takes what is there."""
    monkeypatch.setattr(ready, "best_groups", _as_many_as_are_ready)
    monkeypatch.setattr(ready.ReadyWork, "_worth_waiting", lambda *_: float("-inf"))
    assert await churn() > 1.4


async def test_streams_keep_their_pace_while_a_long_prompt_is_prefilled(
    timed: type[TimedEngine], autojump_clock: MockClock
) -> None:
    """Between two tokens of a running stream lies one chunk of prefill on each stage at most; and the prompt gets on."""
    TimedEngine.cost = (0.02, 0.002)
    context = ContextParams(n_ctx=1024, n_batch=64, n_ubatch=64, n_seq_max=4)
    async with open_fake_pipeline(SPLITS[2], context=context) as offline:
        gaps: list[float] = []
        prefilled = trio.Event()

        async def stream(offline: Offline, index: int) -> None:
            async with offline.pipeline.session() as session:
                times = []
                async for _ in session.generate([1 + index], stop=()):
                    times.append(trio.current_time())
                    if prefilled.is_set():
                        break
                gaps.extend(after - before for before, after in itertools.pairwise(times))

        async with trio.open_nursery() as nursery:
            for index in range(3):
                nursery.start_soon(stream, offline, index)
            await trio.sleep(2)
            gaps.clear()
            async with offline.pipeline.session() as session:
                began = trio.current_time()
                await session.prefill([3] * 960)
                took = trio.current_time() - began
            prefilled.set()
        chunk, step = 0.02 + 0.002 * 64, 0.02 + 0.002 * 3
        assert max(gaps) <= 2 * (chunk + 2 * step) + 0.01
        assert took <= (960 / 64 + 1) * (chunk + 2 * step) + 0.01


@pytest.mark.parametrize(
    ("numerics", "options", "longest"),
    [(Numerics.EXACT, {}, 0.6), (Numerics.EXACT, {"chunk": 256}, 2.6), (Numerics.NATIVE, {}, 5.2)],
)
async def test_chunks_fit_their_time_where_the_answer_does_not_depend_on_it(
    timed: type[TimedEngine], autojump_clock: MockClock, numerics: Numerics, options: dict[str, Any], longest: float
) -> None:
    """100 tokens a second on the slower stage. Native numerics would give other bits for other chunks, so there they stay."""
    TimedEngine.cost = (0.0, 0.01)
    context = ContextParams(n_ctx=4096, n_batch=512, n_ubatch=512, n_seq_max=2, numerics=numerics)
    async with (
        open_fake_pipeline(SPLITS[2], context=context, **options) as offline,
        offline.pipeline.session() as session,
    ):
        await session.prefill([1] * 600)
        batches: list[float] = []
        offline.engines["stage-0"].watch = lambda batch: batches.append(0.01 * sum(len(work.tokens) for work in batch))
        await session.prefill([2] * 2000)
        assert sum(batches) == pytest.approx(20)
        assert 0.7 * longest < max(batches) < longest


async def test_a_cancelled_prompt_stops_within_a_chunk_on_each_stage(
    timed: type[TimedEngine], autojump_clock: MockClock
) -> None:
    TimedEngine.cost = (0.0, 0.01)
    context = ContextParams(n_ctx=4096, n_batch=512, n_ubatch=512, n_seq_max=2)
    async with open_fake_pipeline(SPLITS[2], context=context) as offline, offline.pipeline.session() as session:
        head, tail = offline.engines["stage-0"], offline.engines["stage-1"]
        with trio.move_on_after(5):
            await session.prefill([1] * 4000)
        begun = head.tokens_run
        assert begun < 600
        await trio.sleep(1)
        assert head.tokens_run == tail.tokens_run == begun
