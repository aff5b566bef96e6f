"""How far numerics are apart: the figures of a row, the reference that must be exact, and what is shown of them."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
from fixture_types import Model

from dgr import Artifact, ContextParams
from dgr.errors import InputError
from dgr_bench.benchmark import Scratch, measure
from dgr_bench.certify.mutants import PROFILE
from dgr_bench.certify.profiles import PROFILES
from dgr_bench.certify.run import native_profile
from dgr_bench.distance.measurements import CONTROL, DistancePlan, distance_of, distance_units
from dgr_bench.distance.report import distance_metrics, distance_plots, distance_sections, reference_check
from dgr_bench.plots import draw

PLAN = DistancePlan(tokens=48, chunk=32, threads=())


@pytest.fixture(scope="module")
def units(model: Model) -> dict[str, Any]:
    artifact, store = Artifact.open(model("f16", layers=5)), Scratch()
    trio.run(measure, "distance", [distance_units(PLAN, "small", lambda: artifact, ContextParams())], store)
    return store.units


def test_a_row_that_is_the_same_is_at_no_distance() -> None:
    rows = np.array([[1.0, 2.0, 3.0], [0.0, -5.0, 4.0]], np.float32)
    assert distance_of(rows, rows) == ([0.0, 0.0], [0.0, 0.0], [True, True])
    shifted = rows + np.float32(2)  # another softmax it is not
    difference, divergence, same_top = distance_of(rows, shifted)
    assert difference == [2.0, 2.0]
    assert max(divergence) < 1e-12
    assert same_top == [True, True]


def test_figures_of_a_row_are_those_of_their_definitions() -> None:
    exact = np.log(np.array([[0.5, 0.25, 0.25]])).astype(np.float32)
    other = np.log(np.array([[0.25, 0.5, 0.25]])).astype(np.float32)
    difference, divergence, same_top = distance_of(exact, other)
    assert difference == pytest.approx([np.log(2)], rel=1e-6)
    assert divergence == pytest.approx([0.25 * np.log(2)], rel=1e-6)
    assert same_top == [False]


def test_exact_numerics_are_at_no_distance_and_native_ones_are(units: dict[str, Any]) -> None:
    rows = {row["way"]: row for row in distance_metrics(units)}
    assert {CONTROL, "native", "native, one by one"} <= rows.keys()
    assert rows[CONTROL]["difference"]["p100"] == 0
    assert rows[CONTROL]["same_top"] == rows[CONTROL]["rows"] == PLAN.tokens
    for way in ("native", "native, one by one"):
        figures = rows[way]["difference"]
        assert 0 < figures["p50"] <= figures["p90"] <= figures["p99"] <= figures["p100"]
        assert rows[way]["divergence"]["p100"] > 0
        assert 0 < rows[way]["same_top"] <= PLAN.tokens
        assert [device.split()[0] for device in rows[way]["devices"]] == ["CPU"]
    assert reference_check(units).passed


def test_a_reference_that_is_not_exact_is_caught(units: dict[str, Any]) -> None:
    off = msgspec.json.decode(msgspec.json.encode(units))
    off[f"distance/small/{CONTROL}"]["difference"][7] = 1e-7
    found = reference_check(off)
    assert not found.passed
    assert "small: is off by 1e-07" in found.detail
    assert not reference_check({}).passed
    failed = {f"distance/small/{CONTROL}": {"error": "NumericsRefused: not here"}}
    assert "NumericsRefused" in reference_check(failed).detail


def test_the_report_shows_every_way(units: dict[str, Any], tmp_path: Any) -> None:
    rows = distance_metrics(units)
    (section,) = distance_sections(rows)
    for row in rows:
        assert f"| small | {row['way']} | {PLAN.tokens} |" in section.parts[1]
    plots = distance_plots(rows, units)
    assert [plot.stem for plot in plots] == ["distance-native", "distance-native-one-by-one"]
    draw(tmp_path, plots[:1])
    assert (tmp_path / "plots" / "distance-native.png").stat().st_size > 1000
    assert distance_sections([]) == []


def test_a_profile_in_native_numerics_is_another_profile() -> None:
    given = argparse.Namespace(route=None, model=None)
    native = native_profile(given, PROFILE)
    assert (native.name, native.numerics) == (f"{PROFILE.name}-native", "native")
    assert native.digest != PROFILE.digest
    assert msgspec.json.decode(msgspec.json.encode(native), type=type(native)) == native
    given.model = "model.gguf"
    assert native_profile(given, PROFILE).distance.fixtures == ()  # type: ignore[union-attr]
    with pytest.raises(InputError, match="native numerics by itself"):
        native_profile(given, PROFILES["v4-flash"])
    given.route = "route.toml"
    with pytest.raises(InputError, match="as they were started"):
        native_profile(given, PROFILE)
