"""``dgr-bench plan``: what it makes of its units, and that it says when a prediction does not hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dgr.artifact.speeds import FORMAT, HostSpeed, Timing
from dgr_bench.cli import main
from dgr_bench.overhead.predictions import Predictions, PredictionsPlan

EVEN, LOPSIDED = "0:3,3:6", "0:1,1:6"
PLAN = PredictionsPlan(
    name="a plan", splits=(EVEN, LOPSIDED), delays_ms=(10,), sessions=2, tokens=20, prompt=128, chunk=64, rounds=2, judged=True
)  # fmt: skip
BENCHMARK = Predictions(Path("model"), PLAN, ("any",) * 6, 1000, {})


def _timing(sequences: int, tokens: int, layer: float) -> Timing:
    return Timing(sequences=sequences, tokens=tokens, call=0.0, layers={"any": layer}, head=0.0, tail=0.0)


#: A layer takes 10 ms of a step and 100 ms of a chunk, whatever goes together.
SPEED = msgspec.to_builtins(
    HostSpeed(
        format=FORMAT, host="h", model="m", threads=1, numerics="exact", n_ubatch=64, depth=1,
        decode=(_timing(1, 1, 0.010), _timing(2, 1, 0.010)), prefill=(_timing(1, 64, 0.100),),
    )
)  # fmt: skip
#: There and back 20 ms, and a megabyte a second: 1 ms for a token's boundary.
CABLES = {"round_trips": [0.020, 0.020], "bandwidths": [1e6, 1e6]}
#: Seconds that follow: a ring of 60 ms of layers, three hops of 10 ms and one boundary; two sessions in two groups; two chunks,
#: the second of which waits for the second stage.
ONE, MANY, FIRST = 20 * 0.091, 20 * 0.091 / 2, {EVEN: 0.994, LOPSIDED: 1.194}


def _units(**changed: float) -> dict[str, dict[str, Any]]:
    units: dict[str, dict[str, Any]] = {"speed": SPEED}
    for split in PLAN.splits:
        units[f"{split}, 10 ms, cables"] = CABLES
        for number in range(PLAN.rounds):
            units[f"{split}, 10 ms, round {number}"] = {"one_s": ONE, "many_s": MANY, "first_token_s": FIRST[split]}
    for name, factor in changed.items():
        for number in range(PLAN.rounds):
            unit = units[f"{EVEN}, 10 ms, round {number}"]
            unit[name] *= factor
    return units


def _failed(units: dict[str, dict[str, Any]]) -> set[str]:
    return {check.name for check in BENCHMARK.checks(units) if not check.passed}


def test_predictions_follow_from_the_host_and_the_cables() -> None:
    row = BENCHMARK.metrics(_units())[f"{EVEN}, 10 ms"]
    assert {name: each["predicted_s"] for name, each in row.items()} == pytest.approx(
        {"one": ONE, "many": MANY, "first_token": FIRST[EVEN]}
    )
    assert all(math.isclose(each["ratio"].median, 1) for each in row.values())
    assert _failed(_units()) == set()


@pytest.mark.parametrize(
    ("changed", "failed"),
    [
        ({"one_s": 1.5}, {"prediction of one session", "choice by one session"}),
        ({"one_s": 0.5}, {"prediction of one session"}),
        ({"many_s": 1.1}, {"choice by all sessions"}),
        ({"first_token_s": 1.4}, {"prediction of first token", "choice by first token"}),
    ],
)
def test_what_does_not_hold_is_said(changed: dict[str, float], failed: set[str]) -> None:
    """The even cut comes first among cuts alike, so it is the one chosen."""
    assert _failed(_units(**changed)) == failed


def test_a_route_that_was_not_measured_is_left_out() -> None:
    units = _units()
    units[f"{LOPSIDED}, 10 ms, cables"] = {"error": "it hung"}
    assert [*BENCHMARK.metrics(units)] == [f"{EVEN}, 10 ms"]
    assert "every unit is measured" in _failed(units)


@pytest.mark.slow
def test_the_command_measures_and_predicts_on_a_small_model(small: Path, tmp_path: Path) -> None:
    assert main(["plan", "--quick", "--model", str(small), "--out", str(tmp_path / "out")]) == 0
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| 0:3,3:7, 2 ms | first token |" in report
    assert (tmp_path / "out" / "plots" / "predictions.png").exists()
