"""Fast plans against every way to cut; what a host's speeds say of a range; predictions that can be worked out by hand."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from dgr.artifact.artifact import Artifact
from dgr.artifact.pace import HopSpeed, RoutePace, Workload
from dgr.artifact.plan import Costs, Goal, Plan, propose, propose_fast, refine
from dgr.artifact.speeds import FORMAT, HostSpeed, Timing, layer_kinds, read_speed, stage_seconds
from dgr.core.route import LayerRange
from dgr.errors import InputError
from dgr.selftest.chain import cut_at

#: Nine layers of three kinds.
KINDS = ("swa", "swa", *("csa", "hca") * 3, "csa")
COSTS = Costs(weights=(9, 1, 4, 4, 7, 2, 8, 1, 1), state=(0, 3, 1, 0, 2, 0, 1, 5, 0), head=6, tail=11)
N = len(KINDS)


def timing(sequences: int, tokens: int, scale: float = 1.0, **ends: float) -> Timing:
    layers = {"swa": scale, "csa": 3 * scale, "hca": 2 * scale}
    return Timing(sequences=sequences, tokens=tokens, layers=layers, **{"call": 0.5, "head": 0.25, "tail": 2.0, **ends})


def host(scale: float = 1.0, **ends: float) -> HostSpeed:
    decode = (timing(1, 1, scale, **ends), timing(4, 1, 2 * scale, **ends))
    prefill = (timing(1, 64, 10 * scale, **ends), timing(1, 512, 60 * scale, **ends))
    return HostSpeed(
        format=FORMAT,
        host="h",
        model="m",
        threads=1,
        numerics="exact",
        n_ubatch=512,
        depth=0,
        decode=decode,
        prefill=prefill,
    )


def nothing(_: LayerRange) -> int:
    return 0


# --- plans -----------------------------------------------------------------------------------------------------------


def _aims(plan: Plan, seconds: Callable[[int, LayerRange], float]) -> tuple[float, float]:
    """(slowest, sum), infinite when it does not fit."""
    times = [math.inf if one.missing else seconds(index, one.layers) for index, one in enumerate(plan.stages)]
    return max(times), sum(times)


def _every(n_stages: int, memory: list[int] | None) -> list[tuple[LayerRange, ...]]:
    return [cut_at(N, cuts) for cuts in itertools.combinations(range(1, N), n_stages - 1)]


def wrong(
    plan: Plan, n_stages: int, memory: list[int] | None, seconds: Callable[[int, LayerRange], float], goal: Goal
) -> str:
    """What is wrong with a plan, by looking at all of them; empty when nothing is."""
    sizes = memory or [10**9] * n_stages

    def aims(cuts: tuple[LayerRange, ...]) -> tuple[float, float]:
        fits = all(COSTS.weights_of(c) + COSTS.state_of(c) <= size for c, size in zip(cuts, sizes, strict=True))
        times = [seconds(index, c) if fits else math.inf for index, c in enumerate(cuts)]
        return max(times), sum(times)

    first = 0 if goal is Goal.SLOWEST else 1
    every = [aims(cuts) for cuts in _every(n_stages, memory)]
    best = min(each[first] for each in every)
    if best == math.inf:
        return "" if not plan.fits else "it fits though none does"
    has = _aims(plan, seconds)
    if has[first] > best * 1.01:
        return f"first aim {has[first]}, not {best}"
    other = min(each[1 - first] for each in every if each[first] <= best * 1.01)
    return "" if has[1 - first] <= other * (1 + 1e-9) else f"second aim {has[1 - first]}, not {other}"


def _cases() -> list[tuple[int, list[int] | None, list[HostSpeed], Goal]]:
    draw = random.Random(15)
    cases: list[tuple[int, list[int] | None, list[HostSpeed], Goal]] = []
    for n_stages, goal in itertools.product(range(1, 7), Goal):
        for _ in range(6):
            memory = None if draw.random() < 0.4 else [draw.choice((15, 25, 40, 80)) for _ in range(n_stages)]
            hosts = [host(draw.choice((1.0, 1.0, 1.004, 2.5)), call=draw.random()) for _ in range(n_stages)]
            cases.append((n_stages, memory, hosts, goal))
    return cases


def _faults(plan_of: Callable[..., Plan]) -> list[str]:
    found = []
    for n_stages, memory, hosts, goal in _cases():

        def seconds(index: int, layers: LayerRange, hosts: list[HostSpeed] = hosts) -> float:
            return stage_seconds(hosts[index], KINDS, layers)

        plan = plan_of(COSTS, n_stages, memory, nothing, seconds, goal)
        found.append(wrong(plan, n_stages, memory, seconds, goal))
    return found


def test_no_other_plan_is_faster() -> None:
    assert not any(_faults(propose_fast))


@pytest.mark.parametrize(
    "mutant",
    [
        lambda costs, n, memory, compute, _seconds, _goal: propose(costs, n, memory, compute),
        lambda costs, n, _memory, compute, seconds, goal: propose_fast(costs, n, None, compute, seconds, goal),
        lambda costs, n, memory, compute, seconds, _goal: propose_fast(costs, n, memory, compute, seconds, Goal.SUM),
        lambda costs, n, memory, compute, seconds, _goal: propose_fast(
            costs, n, memory, compute, seconds, Goal.SLOWEST
        ),
        lambda costs, n, memory, compute, seconds, goal: propose_fast(
            costs, n, memory, compute, lambda index, layers: len(layers), goal
        ),
    ],
    ids=["by memory", "without memory", "sum alone", "slowest alone", "all layers alike"],
)
def test_a_slower_plan_would_be_seen(mutant: Callable[..., Plan]) -> None:
    assert any(_faults(mutant))


def test_a_faster_host_takes_more_layers_as_far_as_its_memory_goes() -> None:
    even = Costs((1,) * 12, (0,) * 12, 0, 0)

    def cuts(memory: list[int] | None, goal: Goal) -> list[int]:
        plan = propose_fast(even, 2, memory, nothing, lambda index, layers: len(layers) * (1.0, 3.0)[index], goal)
        assert plan.fits
        return [len(stage.layers) for stage in plan.stages]

    assert cuts(None, Goal.SLOWEST) == [9, 3]
    assert cuts(None, Goal.SUM) == [11, 1]
    assert cuts([8, 12], Goal.SLOWEST) == cuts([8, 12], Goal.SUM) == [8, 4]
    # Hosts alike: no cut has a smaller sum, and the evenest is taken.
    plan = propose_fast(even, 3, None, nothing, lambda _, layers: len(layers), Goal.SUM)
    assert [len(stage.layers) for stage in plan.stages] == [4, 4, 4]


def test_measured_buffers_count() -> None:
    """Whose compute buffers leave no room for a layer does not get it."""
    even = Costs((1,) * 6, (0,) * 6, 0, 0)

    choose = partial(propose_fast, seconds=lambda index, layers: len(layers) * (1.0, 9.0)[index], goal=Goal.SLOWEST)

    plan = refine(even, 2, [6, 6], lambda layers: 2 if layers.begin == 0 else 0, choose)
    assert [len(stage.layers) for stage in plan.stages] == [4, 2]


# --- speeds ----------------------------------------------------------------------------------------------------------


def test_seconds_of_a_range_are_those_of_its_layers_and_ends() -> None:
    one = host()
    assert stage_seconds(one, KINDS, LayerRange(2, 4)) == 0.5 + 3 + 2
    assert stage_seconds(one, KINDS, LayerRange(0, 3)) == 0.5 + 0.25 + 1 + 1 + 3
    assert stage_seconds(one, KINDS, LayerRange(8, 9)) == 0.5 + 3 + 2
    assert stage_seconds(one, KINDS, LayerRange(2, 3), sequences=4) == 0.5 + 6
    assert stage_seconds(one, KINDS, LayerRange(2, 3), sequences=3) == pytest.approx(0.5 + 5)  # between 1 and 4
    assert stage_seconds(one, KINDS, LayerRange(2, 3), sequences=7) == pytest.approx(0.5 + 9)  # as between 1 and 4
    assert stage_seconds(one, KINDS, LayerRange(2, 3), tokens=64) == 0.5 + 30
    assert stage_seconds(one, KINDS, LayerRange(2, 3), tokens=288) == pytest.approx(0.5 + 105)
    with pytest.raises(InputError, match="layers of kind other were not measured on h"):
        stage_seconds(one, ("other",) * 9, LayerRange(2, 3))


def test_kinds_are_told_apart_by_what_makes_them_cost_more(tiny: Path) -> None:
    kinds = layer_kinds(Artifact.open(tiny))
    assert kinds[:5] == ("SWA# F32", "SWA# F32", "CSA# F32", "HCA F32", "CSA F32")
    assert {*kinds[3:]} == {"HCA F32", "CSA F32"}


def _changed(**fields: object) -> bytes:
    return json.dumps({**msgspec.to_builtins(host()), **fields}).encode()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is not what `dgr benchmark` writes"),
        (b"[" * 100_000, "is not what `dgr benchmark` writes"),
        (b"\xff{}", "is not what `dgr benchmark` writes"),
        (_changed(format=9), "has format 9, this dgr reads 1"),
        (_changed(decode=[]), "at `\\$.decode`"),
        (_changed(threads="1"), "at `\\$.threads`"),
        (_changed(threads=0), "at `\\$.threads`"),
        (
            _changed(decode=[msgspec.to_builtins(timing(2, 1)), msgspec.to_builtins(timing(1, 1))]),
            r"sizes of decode are \[2, 1\]",
        ),
        (_changed(prefill=[{**msgspec.to_builtins(timing(1, 64)), "call": -1}]), "at `\\$.prefill\\[0\\].call`"),
        (_changed(prefill=[{**msgspec.to_builtins(timing(1, 64)), "call": 10**400}]), "prefill"),
        (b" " * ((1 << 20) + 1), "a host's speeds"),
    ],
)
def test_a_file_that_is_none_is_refused(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=complaint):
        read_speed(path)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "host.json").write_bytes(msgspec.json.encode(host()))
    assert read_speed(tmp_path / "host.json") == host()
    with pytest.raises(InputError, match="cannot read"):
        read_speed(tmp_path / "none.json")


# --- predictions by hand ---------------------------------------------------------------------------------------------

CUTS = cut_at(N, [3, 6])
#: 20 ms to the head and back, 10 ms between stages, where a token's boundary takes 100 s.
HOPS = [HopSpeed(0.020, 1.0), HopSpeed(0.010, 1.0), HopSpeed(0.010, 1.0), HopSpeed(0.020, 1.0)]


def pace(hops: list[HopSpeed] | None = None, boundary: int = 100) -> RoutePace:
    return RoutePace([host()] * 3, hops or [HopSpeed(0, math.inf)] * 4, KINDS, boundary)


def test_a_ring_is_its_stages_and_its_hops() -> None:
    compute = sum(stage_seconds(host(), KINDS, layers) for layers in CUTS)
    assert pace().ring(CUTS) == compute
    assert pace(HOPS).ring(CUTS) == pytest.approx(compute + 0.030 + 2 * 100)
    assert pace(HOPS).ring(CUTS, 2) == pytest.approx(
        0.030 + 2 * 200 + sum(pace().step(i, c, 2) for i, c in enumerate(CUTS))
    )


def test_many_sessions_go_as_fast_as_the_slowest_stage_or_link() -> None:
    def slowest(size: int) -> float:
        return max(pace().step(index, layers, size) for index, layers in enumerate(CUTS))

    assert pace().rate(CUTS, 1) == 1 / pace().ring(CUTS)
    assert pace().rate(CUTS, 300) == pytest.approx(300 / min(pace().ring(CUTS, 300), 3 * slowest(100)), rel=0.05)
    assert pace(HOPS).rate(CUTS, 8) == pytest.approx(1 / 100)  # 100 s of wire for every token, whatever else


def test_a_prompt_goes_through_chunk_behind_chunk() -> None:
    chunk = [pace().chunk(index, layers, 64) for index, layers in enumerate(CUTS)]
    assert pace().first_token(CUTS, 64, 64) == sum(chunk)
    assert pace().first_token(CUTS, 640, 64) == pytest.approx(sum(chunk) + 9 * max(chunk))
    last = [pace().chunk(index, layers, 1) for index, layers in enumerate(CUTS)]
    assert pace().first_token(CUTS, 65, 64) >= sum(chunk) + last[-1]
    # A link that takes longer than any stage is what a prompt waits for: 6400 s a chunk.
    assert pace(HOPS).first_token(CUTS, 640, 64) == pytest.approx(0.030 + sum(chunk) + 11 * 6400, rel=0.01)
    # Over a long way the window is too small to keep the stages at work.
    far = [HopSpeed(1000.0, math.inf), *[HopSpeed(0, math.inf)] * 2, HopSpeed(1000.0, math.inf)]
    assert pace(far).first_token(CUTS, 640, 64) > pace().first_token(CUTS, 640, 64) + 1000 * (10 // 4)


def test_a_timely_chunk_is_no_longer_than_asked() -> None:
    asked = 90.0
    tokens = pace().timely_chunk(CUTS, 512, asked)
    slowest = [max(pace().chunk(index, layers, n) for index, layers in enumerate(CUTS)) for n in (tokens, tokens + 16)]
    assert slowest[0] <= asked < slowest[1]
    assert pace().timely_chunk(CUTS, 512, 1e-9) == 32
    assert pace().timely_chunk(CUTS, 512, 1e9) == 512
    assert pace().timely_chunk(CUTS, 8, 1e-9) == 8
    load = Workload(sessions=4, prompt=100, chunk=tokens)
    assert pace().predict(CUTS, load).chunk[0] == pace().chunk(0, CUTS[0], tokens)
