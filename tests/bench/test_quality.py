"""dgr-bench quality: its verdicts over a small run, and mistakes that each of them must catch."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from dgr.selftest.learned.cached import cached_learned
from dgr_bench.benchmark import Scratch, measure
from dgr_bench.plots import draw
from dgr_bench.quality import report
from dgr_bench.quality.command import Learned, plan_of
from dgr_bench.quality.damage import DAMAGES
from dgr_bench.quality.measurements import CHANGES
from dgr_bench.quality.ways import REFERENCE, ways

#: Some forty pipelines are opened.
pytestmark = pytest.mark.slow

_PLAN = plan_of(5, quick=True, text_tokens=96, threads=())
_EQUALS = {way.name: way.equals for way in ways(_PLAN, ()) if way.equals}


@pytest.fixture(scope="module")
def units() -> dict[str, Any]:
    benchmark, store = Learned(_PLAN, cached_learned, "learned"), Scratch()
    trio.run(partial(measure, "quality", list(benchmark.units(store)), store))
    return store.units


def _named(units: dict[str, Any], name: str, lost: bool = True) -> Any:
    return next(check for check in report.checks(units, _EQUALS, lost) if check.name == name)


def test_every_verdict_holds(units: dict[str, Any]) -> None:
    assert {f"damage/{damage.name}" for damage in DAMAGES} | {f"change/{change}" for change in CHANGES} <= set(units)
    for check in report.checks(units, _EQUALS, lost=True):
        assert check.passed, f"{check.name}: {check.detail}"


def test_what_promises_no_bits_has_a_distance(units: dict[str, Any]) -> None:
    rows = {row["way"]: row for row in report.metrics(units)["ways"]}
    assert rows[REFERENCE]["divergence"]["max"] == 0
    for name in ("native", "K f16", "weights mixed", "wire bf16"):
        ours, theirs = ([one["digest"] for one in units[f"quality/{way}"]["recalled"]] for way in (name, REFERENCE))
        assert ours != theirs, name
        assert rows[name]["same_top"] > 0.5, name
    for name in ("K f32, no flash attention", "K f16, no flash attention", "wire bf16"):
        assert rows[name]["divergence"]["max"] > 0, name  # of what is far below the choice of the indexer
    assert rows["weights mixed"]["divergence"]["max"] > 0


@pytest.mark.parametrize("way", _EQUALS)
def test_one_other_bit_is_caught(units: dict[str, Any], way: str) -> None:
    for where in ("digest", "recalled"):
        off = copy.deepcopy(units)
        unit = off[f"quality/{way}"]
        (unit if where == "digest" else unit["recalled"][-1])["digest"] = "0" * 32
        found = _named(off, "what promises equal bits gives them")
        assert not found.passed
        assert way in found.detail
    assert not _named({}, "what promises equal bits gives them").passed


@pytest.mark.parametrize("change", CHANGES[1:])
def test_a_change_that_is_not_the_same_is_caught(units: dict[str, Any], change: str) -> None:
    off = copy.deepcopy(units)
    off[f"change/{change}"]["recalled"][0]["digest"] = "0" * 32
    assert not _named(off, "a changed state recalls the same").passed
    del off[f"change/{change}"]
    assert change in _named(off, "a changed state recalls the same").detail


@pytest.mark.parametrize("damage", [damage.name for damage in DAMAGES])
def test_a_damage_that_loses_nothing_is_caught(units: dict[str, Any], damage: str) -> None:
    off = copy.deepcopy(units)
    off[f"damage/{damage}"]["damaged"] = off[f"damage/{damage}"]["undamaged"]
    for lost in (True, False):
        found = _named(off, "a damaged component is seen", lost)
        assert not found.passed
        assert damage in found.detail
    off[f"damage/{damage}"]["untouched"]["digest"] = "0" * 32
    assert not _named(off, "a state written back as it was loses nothing").passed


def test_the_report_shows_it(units: dict[str, Any], tmp_path: Path) -> None:
    from types import SimpleNamespace

    found = report.metrics(units)
    titles = [section.title for section in report.sections(found)]
    assert titles == ["Text", "Recall", "Changes of state", "Damaged state"]
    draw(tmp_path, report.plots(SimpleNamespace(metrics=found)))  # type: ignore[arg-type]
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == {"recall-pair", "recall-mark", "divergence"}
