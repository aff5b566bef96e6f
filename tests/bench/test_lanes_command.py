"""Short behind long: what is counted and judged, and a run in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dgr_bench.cli import main
from dgr_bench.links.lanes import Lanes, LanesPlan, goal_of

LANES = Lanes(LanesPlan(name="a plan", tokens=64, rounds=2, rates=(10.0,), judged=True))


def unit(kib: float) -> dict[str, Any]:
    """Messages behind so many KiB each way, at ten megabits."""
    ms = 2e3 * kib * 1024 / 1.25e6
    alone = {"control": [2.0, 4.0], "decode": [110.0, 112.0]}
    beside = {"control": [3.0 + ms, 3.0 + ms], "decode": [111.0 + ms, 111.0 + ms]}
    return {"rate": 10.0, "chunk_bytes": 4 << 20, "chunks": 1, "alone_ms": alone, "beside_ms": beside}


def test_what_stands_before_a_message_is_told_in_bytes_of_one_way() -> None:
    found = LANES.metrics({"10 Mbit/s": unit(200)})
    assert list(found) == ["10 Mbit/s, control", "10 Mbit/s, decode"]
    for row in found.values():
        assert row["before_kib"].median == pytest.approx(200)


@pytest.mark.parametrize("share", [0.99, 1.01])
def test_it_is_not_a_chunk(share: float) -> None:
    error, *verdicts = LANES.checks({"10 Mbit/s": unit(share * goal_of(10.0).value / 1e3 * 1.25e6 / 1024)})
    assert error.passed
    assert [check.passed for check in verdicts] == [share < 1] * 2
    assert goal_of(10.0).value < 500 < 1e3 * (32 << 20) / 1.25e6


def test_a_rate_that_failed_is_told() -> None:
    [error] = LANES.checks({"10 Mbit/s": {"error": "LinkBroken: gone"}})
    assert not error.passed


def test_a_rate_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["lanes", "--quick", "--rates", "0", "--out", str(tmp_path)]) == 2
    assert "--rates 0: give megabits a second" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["lanes", "--quick", "--rates", "200", "--json", "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)["figures"]
    assert list(found) == ["200 Mbit/s, control", "200 Mbit/s, decode"]
    report = (tmp_path / "report.md").read_text("utf-8")
    assert "Chunks of 64 tokens, 4096 KiB" in report
    assert "| 200 Mbit/s | control |" in report
