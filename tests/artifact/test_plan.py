"""Plans: the best cuts by brute force, memory per host, and what is said when nothing fits."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from dgr.artifact.artifact import Artifact
from dgr.artifact.plan import Costs, Plan, check_fits, costs_of, propose, refine
from dgr.core.route import LayerRange, check_cover
from dgr.errors import BudgetExceeded, InputError
from dgr.selftest.chain import cut_at
from dgr.selftest.fixture import write_fixture
from dgr.v4.state_map import ContextShape, state_map

GIB = 1 << 30


def nothing(_layers: LayerRange) -> int:
    return 0


def ranges(plan: Plan) -> list[str]:
    return [str(stage.layers) for stage in plan.stages]


COSTS = Costs(weights=(9, 1, 4, 4, 7, 2, 8, 1, 1), state=(0, 3, 1, 0, 2, 0, 1, 5, 0), head=6, tail=11)


@pytest.mark.parametrize("n_stages", range(1, 10))
@pytest.mark.parametrize("memory", [None, [40], "uneven"])
def test_no_other_plan_fills_its_fullest_host_less(n_stages: int, memory: list[int] | str | None) -> None:
    sizes = [10 + 7 * (index * 5 % 4) for index in range(n_stages)] if isinstance(memory, str) else memory
    hosts = [None] * n_stages if sizes is None else (sizes if len(sizes) == n_stages else sizes * n_stages)

    def compute(layers: LayerRange) -> int:
        return 3 if 4 in layers.layers else 1

    def worst(parts: tuple[LayerRange, ...]) -> float:
        loads = (COSTS.weights_of(part) + COSTS.state_of(part) + compute(part) for part in parts)
        return max(load / (host or 1) for load, host in zip(loads, hosts, strict=True))

    plan = propose(COSTS, n_stages, sizes, compute)
    parts = tuple(stage.layers for stage in plan.stages)
    check_cover(parts, 9)
    assert worst(parts) == min(worst(cut_at(9, cuts)) for cuts in itertools.combinations(range(1, 9), n_stages - 1))
    assert plan.fits == (sizes is None or worst(parts) <= 1)
    assert all(stage.total == stage.weights + stage.state + stage.compute for stage in plan.stages)


def test_equal_layers_are_dealt_evenly() -> None:
    even = Costs((1,) * 12, (1,) * 12, 0, 0)
    assert ranges(propose(even, 4, None, nothing)) == ["0:3", "3:6", "6:9", "9:12"]
    assert ranges(propose(even, 2, [100, 50], nothing)) == ["0:8", "8:12"]
    # A heavy embedding makes the head shorter; what is left is dealt evenly all the same.
    assert ranges(propose(Costs((1,) * 12, (0,) * 12, 6, 0), 3, None, nothing)) == ["0:1", "1:6", "6:12"]
    assert ranges(propose(Costs((1,) * 12, (0,) * 12, 0, 9), 3, None, nothing)) == ["0:5", "5:11", "11:12"]


@pytest.mark.parametrize(
    ("n_stages", "memory", "message"),
    [
        (0, None, "0 stages asked for, but the model has 9 layers"),
        (10, None, "10 stages asked for"),
        (3, [1, 2], "2 memory sizes for 3 stages; give one for all, or one per stage"),
        (2, [1, 2, 3], "3 memory sizes for 2 stages"),
        (2, [5, 0], "a memory size is 0 bytes"),
    ],
)
def test_bad_asks(n_stages: int, memory: list[int] | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        propose(COSTS, n_stages, memory, nothing)


def test_what_does_not_fit_is_told_by_host_and_bytes() -> None:
    plan = propose(COSTS, 2, [20, 40], nothing)
    assert not plan.fits
    with pytest.raises(BudgetExceeded) as caught:
        check_fits(plan, ["10.0.0.1:7701", "10.0.0.2:7701"])
    said = str(caught.value)
    lacking = [stage for stage in plan.stages if stage.missing]
    for stage in lacking:
        assert f"(layers {stage.layers}): weights {stage.weights} B + state {stage.state} B + compute 0 B" in said
        assert f"{stage.total - (stage.memory or 0)} B" in said
        assert f"over its memory of {stage.memory} B" in said
    check_fits(propose(COSTS, 2, [100], nothing), ["a", "b"])


def test_a_plan_that_just_fits_and_one_byte_less() -> None:
    fullest = max(stage.total for stage in propose(COSTS, 3, None, nothing).stages)
    assert propose(COSTS, 3, [fullest], nothing).fits
    less = propose(COSTS, 3, [fullest - 1], nothing)
    assert {stage.missing for stage in less.stages} == {0, 1}


def test_few_ranges_are_measured() -> None:
    costs = Costs((10,) * 43, (1,) * 43, 5, 5)
    measured: list[LayerRange] = []

    def measure(layers: LayerRange) -> int:
        measured.append(layers)
        return 3 + len(layers) % 2

    plan = refine(costs, 4, None, measure)
    assert len(measured) == len(set(measured)) <= 16
    assert [stage.compute for stage in plan.stages] == [3 + len(stage.layers) % 2 for stage in plan.stages]


def test_measurements_that_never_settle_still_give_a_measured_plan() -> None:
    sizes = itertools.count(0, 1000)
    plan = refine(Costs((10,) * 43, (0,) * 43, 0, 0), 3, None, lambda _layers: next(sizes) % 7000)
    check_cover([stage.layers for stage in plan.stages], 43)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """V4 Flash's own widths, 284 G parameters as a hole in a file."""
    path = tmp_path_factory.mktemp("real") / "real.gguf"
    write_fixture(path, preset="real", weights="mixed", sparse=True)
    return Artifact.open(path)


def test_costs_are_those_of_artifact_and_state_map(real: Artifact) -> None:
    shape = ContextShape(1048576)
    costs = costs_of(real, shape)
    for text in ("0:43", "0:11", "11:22", "40:43"):
        layers = LayerRange.parse(text)
        assert costs.weights_of(layers) == real.weight_bytes(layers)
        assert costs.state_of(layers) == state_map(real.hp, layers, shape).total_bytes


def test_plans_for_v4_flash(real: Artifact) -> None:
    costs = costs_of(real, ContextShape(1048576))

    def bound(_layers: LayerRange) -> int:
        return 2 * GIB

    plan = propose(costs, 4, [64 * GIB, 24 * GIB, 48 * GIB, 48 * GIB], bound)
    assert plan.fits
    assert ranges(plan) == ["0:16", "16:21", "21:32", "32:43"]
    tight = propose(costs, 4, [40 * GIB], bound)
    assert not tight.fits
    assert propose(costs, 5, [40 * GIB], bound).fits
    assert not propose(costs, 2, [24 * GIB], bound).fits


def test_a_hole_is_enough_to_plan_with(real: Artifact) -> None:
    assert real.known_manifest() is None
    assert Path(real.file.path).stat().st_blocks * 512 < 8 << 20
