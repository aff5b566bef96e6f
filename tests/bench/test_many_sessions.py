"""``dgr-bench sessions``: what it times, and what it makes of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from dgr.core.values import ContextParams
from dgr.testing.offline import open_fake_pipeline
from dgr_bench.cli import main
from dgr_bench.overhead import sessions
from dgr_bench.overhead.ratios import Ratios
from dgr_bench.overhead.sessions import Sessions, SessionsPlan, drawn_seconds, loop_seconds, pace
from dgr_bench.quartiles import quartiles_of

PLAN = SessionsPlan(
    name="a plan",
    sessions=(1, 3),
    split=("0:3", "3:6"),
    delays_ms=(),
    tokens=20,
    rounds=1,
    streams=3,
    paced=5,
    prompt=200,
    judged=True,
)


@pytest.mark.parametrize("count", [1, 3])
async def test_all_sessions_draw_the_same_number_of_tokens_together(autojump_clock: MockClock, count: int) -> None:
    context = ContextParams(n_ctx=256, n_batch=64, n_ubatch=64, n_seq_max=3)
    async with open_fake_pipeline("0:3,3:6", context=context) as offline:
        tail = offline.engines["stage-1"]
        assert await drawn_seconds(offline.pipeline, count, 20) == 0
        assert tail.tokens_run == count * sessions._PROMPT + 20
        assert offline.pipeline.statistics().sessions == 0


async def test_the_event_loops_time_is_of_those_tokens(autojump_clock: MockClock) -> None:
    context = ContextParams(n_ctx=256, n_batch=64, n_ubatch=64, n_seq_max=3)
    async with open_fake_pipeline("0:3,3:6", context=context) as offline:
        before = time.thread_time()
        found = await loop_seconds(3, 20, offline.pipeline)
        assert 0 < found["loop_s"] < time.thread_time() - before
        assert found["tokens"] == 20


async def test_the_pace_is_that_of_every_stream(autojump_clock: MockClock) -> None:
    context = ContextParams(n_ctx=512, n_batch=32, n_ubatch=32, n_seq_max=4)
    async with open_fake_pipeline("0:3,3:6", context=context) as offline:
        found = await pace(PLAN, offline.pipeline)
    assert len(found["alone_ms"]) == PLAN.streams * (PLAN.paced - 2)
    assert len(found["beside_ms"]) >= PLAN.streams
    assert (found["prefill_s"], found["prefill_tokens"]) == (0, 200)


def unit(alone: list[float], beside: list[float]) -> dict[str, Any]:
    return {"alone_ms": alone, "beside_ms": beside, "prefill_s": 2.0, "prefill_tokens": 200}


def test_metrics_follow_from_the_units_of_all_rounds() -> None:
    benchmark = Sessions(Path("model"), PLAN, Ratios([]), {})
    units = {
        "pace, round 0": unit([1.0] * 50, [5.0] * 99),
        "pace, round 1": unit([3.0] * 50, [7.0]),
        "pace, round 2": {"error": "it hung"},
        "event loop, 3 at once, two stages, round 0": {"tokens": 20, "loop_s": 0.001},
    }
    metrics = benchmark.metrics(units)
    assert metrics["loop_us"] == {"3 at once, two stages": quartiles_of([50.0])}
    assert metrics["pace"]["alone"] == {"tokens": 100, "median_ms": 3.0, "p99_ms": 3.0, "max_ms": 3.0}
    assert metrics["pace"]["beside"] == {"tokens": 100, "median_ms": 5.0, "p99_ms": 7.0, "max_ms": 7.0}
    assert metrics["prefill_tokens_per_s"].median == 100
    verdicts = {check.name: check.passed for check in benchmark.checks(units)}
    assert verdicts == {"every unit is measured": False, "streams go on beside a prefill": False}


def test_the_goals_are_asked_of_the_comparisons_they_are_for() -> None:
    compared = {each.name: each.goal for each in sessions.comparisons(Path("model"), PLAN)}
    assert str(compared["3 at once, one stage / bare engine"]) == "at least 0.95"
    assert compared["3 at once, two stages of 1 thread / whole model on 2"] is None  # a ring of two is full with four
    assert compared["3 at once / one, two stages"] is None


@pytest.mark.slow
def test_the_command_measures_everything_on_a_small_model(small: Path, tmp_path: Path) -> None:
    arguments = ["sessions", "--quick", "--model", str(small), "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    report = (tmp_path / "out" / "report.md").read_text()
    assert "2 at once / one, two processes, 2 ms in every cable" in report
    assert (tmp_path / "out" / "plots" / "sessions.png").exists()
