"""Plans: which host owns which layers, so that weights, state and compute buffers of each fit its memory.

Stages follow the order of the hosts, head first. Among all ways to cut, a plan is one that fills the fullest host least (by
its share where memory sizes are given, otherwise by bytes), and of these the evenest. So it fits if any plan does. Where
the hosts' speeds are known, it is the fastest one that fits (:func:`propose_fast`).
"""

from __future__ import annotations

import bisect
import enum
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from attrs import frozen

from dgr.artifact.artifact import Artifact
from dgr.core.route import LayerRange
from dgr.core.units import human_bytes
from dgr.errors import BudgetExceeded, InputError
from dgr.v4.state_map import ContextShape, state_map

__all__ = ["Costs", "Goal", "Plan", "PlannedStage", "check_fits", "costs_of", "propose", "propose_fast", "refine"]

#: Bytes of compute buffers that a stage of these layers needs.
Compute = Callable[[LayerRange], int]

#: Proposes a plan for costs, a number of stages, memory and compute buffers.
Choose = Callable[["Costs", int, Sequence[int] | None, Compute], "Plan"]

#: Times this far apart are alike: measured ones are no better than that.
_ALIKE = 1.01
#: Plans tried before the buffers' sizes are taken as they are: neighbouring plans differ by a layer or two.
_MOST_TRIES = 12


class Goal(enum.Enum):
    """What a fast plan makes least."""

    #: The slowest stage: prefill, and many sessions at once.
    SLOWEST = enum.auto()
    #: The sum of all stages: the ring of one session.
    SUM = enum.auto()


@frozen
class Costs:
    """Bytes by main layer, and of what comes with the first and the last."""

    weights: tuple[int, ...]
    #: For all sessions.
    state: tuple[int, ...]
    head: int
    tail: int

    def weights_of(self, layers: LayerRange) -> int:
        ends = (self.head if layers.begin == 0 else 0) + (self.tail if layers.end == len(self.weights) else 0)
        return sum(self.weights[layers.begin : layers.end]) + ends

    def state_of(self, layers: LayerRange) -> int:
        return sum(self.state[layers.begin : layers.end])


@frozen
class PlannedStage:
    """One stage of a plan; sizes in bytes."""

    layers: LayerRange
    weights: int
    state: int
    compute: int
    #: Memory of its host; None when it was not said.
    memory: int | None

    @property
    def total(self) -> int:
        return self.weights + self.state + self.compute

    @property
    def missing(self) -> int:
        """Bytes by which the host is too small; 0 when the stage fits."""
        return 0 if self.memory is None else max(0, self.total - self.memory)


@frozen
class Plan:
    """Stages, head first."""

    stages: tuple[PlannedStage, ...]

    @property
    def fits(self) -> bool:
        return all(not stage.missing for stage in self.stages)


def costs_of(artifact: Artifact, shape: ContextShape) -> Costs:
    """What each layer of a model costs in a context."""
    hp = artifact.hp
    owned = state_map(hp, hp.whole, shape)
    return Costs(
        weights=tuple(artifact.block_bytes(layer) for layer in range(hp.n_layers)),
        state=tuple(owned.layer_bytes(layer) for layer in range(hp.n_layers)),
        head=artifact.head_bytes,
        tail=artifact.tail_bytes,
    )


def _memories(memory: Sequence[int] | None, n_stages: int) -> list[int | None]:
    if memory is None:
        return [None] * n_stages
    if len(memory) not in (1, n_stages):
        raise InputError(
            f"{len(memory)} memory sizes for {n_stages} stages; give one for all, or one per stage, head first"
        )
    if min(memory) < 1:
        raise InputError(f"a memory size is {min(memory)} bytes; give at least one byte")
    return [*memory] * (n_stages if len(memory) == 1 else 1)


def _stages(
    costs: Costs, n_stages: int, memory: Sequence[int] | None, compute: Compute
) -> Callable[[int, int, int], PlannedStage]:
    """The stage (index, begin, end)."""
    n_layers = len(costs.weights)
    if not 1 <= n_stages <= n_layers:
        raise InputError(f"{n_stages} stages asked for, but the model has {n_layers} layers: give 1 to {n_layers}")
    memories = _memories(memory, n_stages)

    @cache
    def stage(index: int, begin: int, end: int) -> PlannedStage:
        layers = LayerRange(begin, end)
        return PlannedStage(layers, costs.weights_of(layers), costs.state_of(layers), compute(layers), memories[index])

    return stage


def propose(costs: Costs, n_stages: int, memory: Sequence[int] | None, compute: Compute) -> Plan:
    """The plan that fills the fullest host least, and then the evenest, for given compute buffers; it may not fit."""
    n_layers = len(costs.weights)
    stage = _stages(costs, n_stages, memory, compute)

    def load(index: int, begin: int, end: int) -> float:
        found = stage(index, begin, end)
        return found.total / (found.memory or 1)

    fullest, _ = _best_cuts(n_layers, n_stages, load, max)
    # Among the plans that fill no host more than that, the evenest.
    limit = fullest * (1 + 1e-12)
    _, bounds = _best_cuts(
        n_layers, n_stages, lambda *part: square if (square := load(*part) ** 2) <= limit**2 else math.inf, operator.add
    )
    return Plan(tuple(stage(index, bounds[index], bounds[index + 1]) for index in range(n_stages)))


def _best_cuts(
    n_layers: int,
    n_stages: int,
    cost: Callable[[int, int, int], float],
    joined: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The bounds of the stages whose costs, ``joined``, are least; ``cost`` takes (stage, begin, end)."""
    # One row per number of stages: where they end -> (cost of them all, where the last of them begins).
    rows: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for index in range(n_stages):
        before, left = rows[-1], n_stages - index - 1
        ends = range(index + 1, n_layers - left + 1) if left else (n_layers,)
        rows.append(
            {
                end: min((joined(before[begin][0], cost(index, begin, end)), begin) for begin in before if begin < end)
                for end in ends
            }
        )
    bounds = [n_layers]
    for row in reversed(rows[1:]):
        bounds.append(row[bounds[-1]][1])
    return rows[-1][n_layers][0], bounds[::-1]


def propose_fast(
    costs: Costs,
    n_stages: int,
    memory: Sequence[int] | None,
    compute: Compute,
    seconds: Callable[[int, LayerRange], float],
    goal: Goal,
) -> Plan:
    """The plan that is fastest among those that fit, for given compute buffers; where none fits, that of :func:`propose`.

    ``seconds`` of a stage, by its place and its layers. Of the plans whose first aim is within a hundredth of the best, it is
    the best one by the other aim: for :attr:`Goal.SLOWEST` the slowest stage comes first and the sum of all second, for
    :attr:`Goal.SUM` the other way round.
    """
    n_layers = len(costs.weights)
    stage = _stages(costs, n_stages, memory, compute)

    @cache
    def time_of(index: int, begin: int, end: int) -> float:
        return math.inf if stage(index, begin, end).missing else seconds(index, LayerRange(begin, end))

    def within(limit: float) -> tuple[float, list[int]]:
        """The least sum, of plans in which no stage takes longer."""
        return _best_cuts(
            n_layers, n_stages, lambda *part: found if (found := time_of(*part)) <= limit else math.inf, operator.add
        )

    slowest, _ = _best_cuts(n_layers, n_stages, time_of, max)
    if slowest == math.inf:
        return propose(costs, n_stages, memory, compute)
    if goal is Goal.SLOWEST:
        _, bounds = within(slowest * _ALIKE)
    else:
        most, bounds = within(math.inf)
        every = {time_of(index, begin, end) for index in range(n_stages) for begin, end in _ranges(n_layers)}
        limits = sorted(limit for limit in every if slowest <= limit < math.inf)
        # The least limit under which a sum as good is found: the sums fall as the limit grows.
        first = bisect.bisect_left(limits, True, key=lambda limit: within(limit)[0] <= most * _ALIKE)
        _, bounds = within(limits[first])
    return Plan(tuple(stage(index, bounds[index], bounds[index + 1]) for index in range(n_stages)))


def _ranges(n_layers: int) -> Iterator[tuple[int, int]]:
    return itertools.combinations(range(n_layers + 1), 2)


def refine(
    costs: Costs, n_stages: int, memory: Sequence[int] | None, measure: Compute, choose: Choose = propose
) -> Plan:
    """A plan of ``choose`` whose compute buffers are ``measure``'d, with few measurements.

    A range that was not measured is taken to need what the largest measured one does: buffers depend on the kinds of layers
    and on head and tail far more than on the number of layers.
    """
    measured: dict[LayerRange, int] = {}

    def compute(layers: LayerRange) -> int:
        return measured.get(layers, max(measured.values(), default=0))

    for _ in range(_MOST_TRIES):
        plan = choose(costs, n_stages, memory, compute)
        unknown = [stage.layers for stage in plan.stages if stage.layers not in measured]
        if not unknown:
            return plan
        for layers in unknown:
            measured[layers] = measure(layers)
    known = [stage.layers for stage in plan.stages]
    return Plan(
        tuple(
            PlannedStage(layers, costs.weights_of(layers), costs.state_of(layers), measured[layers], stage.memory)
            for layers, stage in zip(known, plan.stages, strict=True)
        )
    )


def check_fits(plan: Plan, hosts: Sequence[str]) -> None:
    """Raise :class:`~dgr.errors.BudgetExceeded` saying on which hosts a plan does not fit, and by how many bytes."""
    lines = [
        f"{host} (layers {stage.layers}): weights {stage.weights} B + state {stage.state} B + compute {stage.compute} B ="
        f" {stage.total} B ({human_bytes(stage.total)}), {stage.missing} B ({human_bytes(stage.missing)}) over its memory"
        f" of {stage.memory} B"
        for host, stage in zip(hosts, plan.stages, strict=True)
        if stage.missing
    ]
    if lines:
        raise BudgetExceeded(
            "no plan fits; in the best one, "
            + "; ".join(lines)
            + ": lower --ctx or --sessions, add a stage, or more memory"
        )
