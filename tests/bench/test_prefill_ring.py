"""``dgr-bench prefill``: what a ring could do at least, from the calls of its stages; and a small one measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dgr import Artifact
from dgr_bench.benchmark import Scratch, measure
from dgr_bench.cli import main
from dgr_bench.overhead.prefill import Bound, Prefill, PrefillPlan

PLAN = PrefillPlan(name="a plan", split=("0:2", "2:4", "4:7"), prompt=120, chunk=30, rounds=1, judged=True)


def timeline(took: Sequence[float], *, chunks: int = 4, one_at_a_time: bool = False) -> dict[str, Any]:
    """A prefill of equal chunks on stages that each take so many seconds for one."""
    stages: list[list[dict[str, float]]] = [[] for _ in took]
    free = [0.0] * len(took)
    through = 0.0
    for _ in range(chunks):
        ready = through if one_at_a_time else 0.0
        for index, seconds in enumerate(took):
            began = max(ready, free[index])
            free[index] = ready = began + seconds
            stages[index].append({"tokens": 30, "began": began, "ended": ready})
        through = ready
    return {"seconds": through, "stages": stages}


@pytest.mark.parametrize(("took", "slowest", "fill"), [((1, 3, 2), 1, 3), ((3, 1, 1), 0, 2), ((1, 1, 4), 2, 2)])
def test_a_ring_that_never_waits_takes_fill_and_slowest_stage(took: Sequence[float], slowest: int, fill: float) -> None:
    unit = timeline(took)
    bound = Bound.of(unit["stages"])
    assert (bound.slowest, bound.fill, bound.busy) == (slowest, fill, 4 * took[slowest])
    assert unit["seconds"] == bound.seconds


@pytest.mark.parametrize(("one_at_a_time", "ratio"), [(False, 1.0), (True, 2.0)])
def test_chunks_that_wait_for_each_other_miss_the_goal(one_at_a_time: bool, ratio: float) -> None:
    units = {"prefill, round 0": timeline((1, 1, 1), one_at_a_time=one_at_a_time)}
    benchmark = Prefill(Path("no artifact"), PLAN)  # type: ignore[arg-type]
    assert benchmark.metrics(units)["ratio"].median == ratio
    verdicts = {check.name: check.passed for check in benchmark.checks(units)}
    assert verdicts == {
        "every round is measured": True,
        "every stage runs the prompt once": True,
        "time over fill and slowest stage": not one_at_a_time,
    }


def test_a_chunk_that_a_stage_did_not_run_is_seen() -> None:
    unit = timeline((1, 1, 1))
    del unit["stages"][1][-1]
    checks = Prefill(Path("no artifact"), PLAN).checks({"prefill, round 0": unit})  # type: ignore[arg-type]
    assert [check.name for check in checks if not check.passed] == ["every stage runs the prompt once"]


async def test_a_small_ring_is_measured(small: Path) -> None:
    benchmark, store = Prefill(Artifact.open(small), PLAN), Scratch()
    await measure("prefill", benchmark.units(store), store)
    (unit,) = store.units.values()
    assert [[call["tokens"] for call in calls] for calls in unit["stages"]] == [[30] * 4] * 3
    assert all(0 <= call["began"] < call["ended"] <= unit["seconds"] for calls in unit["stages"] for call in calls)
    assert (
        benchmark.metrics(store.units)["ratio"].median >= 0.99
    )  # a chunk begins on a stage when it has left the one before


@pytest.mark.parametrize(
    ("flag", "words"), [("--stages=8", "give 1 to 7"), ("--stages=0", "give 1 to 7"), ("--tokens=0", "give 1 or more")]
)
def test_what_is_refused(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, words: str
) -> None:
    assert main(["prefill", "--model", str(small), "--out", str(tmp_path / "out"), flag]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_measures_everything_on_a_small_model(small: Path, tmp_path: Path) -> None:
    assert main(["prefill", "--quick", "--model", str(small), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "plots" / "prefill.png").exists()
