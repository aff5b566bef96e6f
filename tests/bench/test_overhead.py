"""Overhead: who begins, what is resumed, what is judged and refused; and every comparison once, on a small model."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dgr import open_pipeline
from dgr.engine.native import build_info
from dgr.errors import EngineError
from dgr_bench import benchmark
from dgr_bench.cli import main
from dgr_bench.links import hops
from dgr_bench.links.hops import Hops
from dgr_bench.overhead import command as overhead
from dgr_bench.overhead.command import Overhead
from dgr_bench.overhead.comparisons import OverheadPlan, comparisons
from dgr_bench.overhead.ratios import Comparison, Timed
from dgr_bench.quartiles import quartiles_of
from dgr_bench.results import Journal
from dgr_bench.timed import decode_seconds, prefill_seconds
from dgr_bench.verdicts import Goal

GOAL = Goal("at least", 0.97)


class Sides:
    """Two sides that take the seconds they are told to, and who ran when."""

    def __init__(self, ours: float, theirs: float, fails_after: int = 1000) -> None:
        self.seconds = {"ours": ours, "theirs": theirs}
        self.ran: list[str] = []
        self.opened = 0
        self._fails_after = fails_after

    def _side(self, name: str) -> Timed:
        async def run() -> float:
            if len(self.ran) == self._fails_after:
                raise EngineError("told to fail")
            self.ran.append(name)
            return self.seconds[name]

        return run

    @asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Timed, Timed]]:
        self.opened += 1
        yield self._side("ours"), self._side("theirs")

    def comparison(self, name: str = "decode, a / b", goal: Goal | None = GOAL, rounds: int = 3) -> Comparison:
        return Comparison(name, tokens=64, rounds=rounds, goal=goal, open=self.open)


async def measured(folder: Path, *sides: Comparison) -> dict[str, Any]:
    """The units that are there once the rounds of some comparisons are measured."""
    with Journal.open(folder, "overhead", {"name": "a plan"}, {}, "dgr-bench overhead") as journal:
        await benchmark.measure("overhead", [each.group() for each in sides], journal)
        return journal.units


def of(*compared: Comparison) -> Overhead:
    """A benchmark of some comparisons, without hops."""
    no_hops = hops.plan(True, (), ())
    plan = OverheadPlan(name="a plan", tokens={}, rounds={}, threads=(), split=(), settings={}, goal=0.97, hops=no_hops)
    return Overhead(plan, compared, {})


async def test_the_sides_take_turns_to_begin(tmp_path: Path) -> None:
    sides = Sides(2.0, 1.0)
    units = await measured(tmp_path, sides.comparison())
    warm_up, *rounds = [sides.ran[at : at + 2] for at in range(0, len(sides.ran), 2)]
    assert warm_up == ["ours", "theirs"]
    assert rounds == [["ours", "theirs"], ["theirs", "ours"], ["ours", "theirs"]]
    assert [unit["began"] for unit in units.values()] == ["ours", "theirs", "ours"]
    assert units["decode, a / b, round 0"] == {
        "tokens": 64, "ours_s": 2.0, "theirs_s": 1.0, "began": "ours",
    }  # fmt: skip


async def test_only_missing_rounds_are_measured(tmp_path: Path) -> None:
    sides = Sides(1.0, 1.0, fails_after=2 + 2 * 2)
    units = await measured(tmp_path, sides.comparison())
    (failed,) = (check for check in of(sides.comparison()).checks(units) if not check.passed)
    assert failed.detail == "1 of 3 fail; decode, a / b, round 2: EngineError: told to fail"
    again = Sides(1.0, 1.0)
    units = await measured(tmp_path, again.comparison())
    assert len(again.ran) == 2 + 2  # the warm-up and the third round
    assert len(units) == 3
    assert await measured(tmp_path, again.comparison()) == units
    assert again.opened == 1


async def test_a_ratio_is_one_of_speeds(tmp_path: Path) -> None:
    slow, fast = Sides(2.0, 1.9).comparison("slow / fast"), Sides(1.0, 1.25).comparison("fast / slow", None)
    units = await measured(tmp_path, slow, fast)
    both = of(slow, fast)
    speed = both.metrics(units)["speed"]
    assert (speed["slow / fast"]["ratio"].median, speed["fast / slow"]["ratio"].median) == (0.95, 1.25)
    _, verdict = both.checks(units)
    assert (verdict.name, verdict.passed, verdict.cases) == ("speed of slow / fast", False, 3)
    assert verdict.detail == "median 0.950 (0.950 to 0.950), quartiles in brackets; goal at least 0.97"
    assert speed["slow / fast"]["theirs_tokens_per_s"].median == pytest.approx(64 / 1.9)


def test_a_spread() -> None:
    assert quartiles_of([3.0, 1.0, 2.0, 5.0, 4.0]) == quartiles_of([1.0, 2.0, 3.0, 4.0, 5.0])
    found = quartiles_of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.median, found.low, found.high, found.count) == (3.0, 2.0, 4.0, 5)
    assert (quartiles_of([7.0]).low, quartiles_of([7.0]).high) == (7.0, 7.0)


@pytest.mark.parametrize(("bound", "passes"), [("at least", [False, True, True]), ("at most", [True, True, False])])
def test_a_goal(bound: str, passes: list[bool]) -> None:
    goal = Goal(bound, 0.5, "ms")
    assert [goal.check("x", quartiles_of([value])).passed for value in (0.49, 0.5, 0.51)] == passes
    assert goal.check("x", quartiles_of([0.4])).detail.endswith(f"goal {bound} 0.5 ms")


def llama_bench(folder: Path) -> Path:
    """A program that says what llama-bench says to its command line, with a second for every test."""
    path = folder / "llama-bench"
    path.write_text(
        f"""#!{sys.executable}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print(json.dumps([{{
    "build_commit": "{build_info()["llama_cpp_commit"]}", "n_prompt": int(given["-p"]), "n_gen": int(given["-n"]),
    "n_depth": 0, "n_threads": int(given["-t"]), "n_batch": int(given["-b"]), "n_ubatch": int(given["-ub"]),
    "type_k": given["-ctk"], "flash_attn": int(given["-fa"]), "load_mode": given["-lm"], "samples_ns": [10**9],
}}]))
"""
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("ours", "code", "verdict"), [(1.0, 0, "PASSED"), (1.1, 1, "NOT PASSED")])
def test_the_command(
    tmp_path: Path,
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ours: float,
    code: int,
    verdict: str,
) -> None:
    compared = [
        Sides(ours, 1.0).comparison("decode, one stage / llama-bench, 1 thread"),
        Sides(1.5, 1.0).comparison("prefill, exact / native numerics, 1 thread", None),
    ]
    monkeypatch.setattr(overhead, "comparisons", lambda *_: compared)
    monkeypatch.setattr(Hops, "units", lambda *_: ())
    arguments = ["overhead", "--model", str(small), "--llama-bench", str(llama_bench(tmp_path))]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == code
    assert f"\n{verdict}: " in capsys.readouterr().out
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| prefill, exact / native numerics, 1 thread | 42.7 | 64.0 | 0.667 (0.667 to 0.667) |  |" in report
    assert str(tmp_path) not in report.split("| commands |")[0]
    assert (tmp_path / "out" / "plots" / "overhead.png").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--threads", "0"], "--threads 0: give 1 to"),
        (["--threads", "1", "4097"], "--threads 4097: give 1 to"),
        (["--llama-bench", "/nowhere"], "--llama-bench /nowhere is not a program"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["overhead", "--model", str(small), "--out", str(tmp_path / "out"), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out" / "result.json").exists()


async def test_seconds_of_a_pipeline(small: Path) -> None:
    async with open_pipeline(small) as pipeline:
        assert await prefill_seconds(pipeline, 40) > 0
        assert await decode_seconds(pipeline, 4) > 0


@pytest.mark.slow
async def test_every_comparison_runs(tmp_path: Path, small: Path) -> None:
    plan = OverheadPlan(
        name="a plan",
        tokens={"prefill": 32, "decode": 4},
        rounds={"prefill": 1, "decode": 1},
        threads=(1,),
        split=("0:3", "3:7"),
        settings={"n_batch": 32, "n_ubatch": 32, "type_k": "f16", "flash_attn": True},
        goal=0.97,
        hops=hops.plan(True, (), ()),
    )
    compared = comparisons(small, plan, llama_bench(tmp_path))
    units = await measured(tmp_path / "out", *compared)
    assert len(units) == len(compared) == 6
    for name, unit in units.items():
        assert unit["ours_s"] > 0, name
        assert (unit["theirs_s"] == 1.0) is ("llama-bench" in name), name
