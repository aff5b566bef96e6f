"""Which stages a route is made of, where a layer range has several: pure choice, with given times.

What failed, a stage or the way from one to the next, is left alone for a while that grows each time. The chosen route is the
one with the least of that left, and among equals the first in the order in which the stages were named.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

from attrs import frozen

from dgr.core.route import Route, StageRef
from dgr.errors import InvalidRoute, NoCandidate, StageDraining

__all__ = ["Candidates"]

#: Seconds for which something that failed is left alone: at first, and at most.
_FIRST_REST = 1.0
_LAST_REST = 60.0
#: As if one were to be left alone for longer than anything that failed.
_AVOIDED = 1e6


@frozen
class _Trouble:
    """What failed, how often in a row, until when it is left alone, and why."""

    times: int
    until: float
    why: str


#: Seconds of rest left on a way, which candidate of each range it takes, and these.
_Way: TypeAlias = tuple[float, tuple[int, ...], tuple[StageRef, ...]]


class Candidates:
    """The stages of a route, and those that may take their places.

    Raises :class:`~dgr.errors.InvalidRoute` for a spare whose layers no stage of the route has, or that is named twice.
    """

    def __init__(self, route: Route, spares: Sequence[StageRef] = ()) -> None:
        ranges = {ref.layers for ref in route.stages}
        seen = {ref.address for ref in route.stages}
        for ref in spares:
            if ref.layers not in ranges:
                known = ", ".join(str(one.layers) for one in route.stages)
                raise InvalidRoute(
                    f"spare stage {ref.address} owns layers {ref.layers}; the route's ranges are {known}"
                )
            if ref.address in seen:
                raise InvalidRoute(f"stage {ref.address} is named twice; a stage has one place")
            seen.add(ref.address)
        self._ranges = [[one, *(ref for ref in spares if ref.layers == one.layers)] for one in route.stages]
        #: Addresses of stages that wish to be left: taken only where there is nobody else.
        self.avoided: set[str] = set()
        #: By (address,), or by (address, next address) for the way between two.
        self._troubles: dict[tuple[str, ...], _Trouble] = {}

    @property
    def has_spares(self) -> bool:
        return any(len(refs) > 1 for refs in self._ranges)

    def fail(self, *what: str, now: float, why: str) -> None:
        """A stage (its address), or the way from a stage to the next (both addresses), failed."""
        known = self._troubles.get(what)
        times = 1 if known is None else known.times + 1
        rest = min(_FIRST_REST * 2.0 ** min(times - 1, 16), _LAST_REST)
        self._troubles[what] = _Trouble(times, now + rest, why)

    def serves(self, route: Route) -> None:
        """A route is live: what it is made of is well."""
        addresses = [ref.address for ref in route.stages]
        for what in [(address,) for address in addresses] + list(itertools.pairwise(addresses)):
            self._troubles.pop(what, None)

    def choose(self, now: float) -> Route:
        """The route to try now."""
        return self._best(now)[1]

    def rest(self, now: float) -> float:
        """Seconds for which what the chosen route is made of is still to be left alone, all together; 0: it is worth a try."""
        return self._best(now)[0]

    def leaves_drained(self, now: float) -> bool:
        """Whether the route to try now has no stage that wishes to be left: it would refuse what is to be prefilled again."""
        return self.avoided.isdisjoint(ref.address for ref in self.choose(now).stages)

    def drained(self, route: Route) -> StageDraining:
        """That ``route`` takes nobody new: which of its stages wish to be left, and what keeps it there."""
        said = []
        for refs, taken in zip(self._ranges, route.stages, strict=True):
            if taken.address not in self.avoided:
                continue
            others = {ref.address: self._why(ref.address) for ref in refs if ref != taken}
            if not others:
                spare = ", and it has no spare"
            elif all(others.values()):
                spare = f", and no spare can be had ({'; '.join(f'{one}: {why}' for one, why in others.items())})"
            else:
                spare = ""
            said.append(f"stage {taken.address} (layers {taken.layers}) is being drained{spare}")
        return StageDraining(
            f"{', and '.join(said)}; wait for its restart, name a spare, or have it take sessions again (dgr drain --undo)"
        )

    def _best(self, now: float) -> tuple[float, Route]:
        # The cheapest way to each stage of a range, from that to each of the range before.
        ways: list[_Way] = [(0.0, (), ())]
        for refs in self._ranges:
            longer = []
            for index, ref in enumerate(refs):
                longer.append(min(self._longer(now, way, index, ref) for way in ways))
            ways = longer
        cost, _, stages = min(ways)
        return cost, Route(stages)

    def _longer(self, now: float, way: _Way, index: int, ref: StageRef) -> _Way:
        cost, order, path = way
        cost += self._left(now, ref.address)
        if path:
            cost += self._left(now, path[-1].address, ref.address)
        return cost, (*order, index), (*path, ref)

    def _left(self, now: float, *what: str) -> float:
        trouble = self._troubles.get(what)
        rest = 0.0 if trouble is None else max(0.0, trouble.until - now)
        return rest + _AVOIDED if len(what) == 1 and what[0] in self.avoided else rest

    def error(self) -> NoCandidate:
        """That none is to be had, naming the candidates of each range that has none, and what each of them failed with."""
        said = []
        for refs in self._ranges:
            why = [self._why(ref.address) for ref in refs]
            if all(why):
                each = [f"{ref.address}: {one}" for ref, one in zip(refs, why, strict=True)]
                said.append(f"no stage of layers {refs[0].layers} can be had ({'; '.join(each)})")
        if not said:
            ways = [f"{' -> '.join(what)}: {one.why}" for what, one in self._troubles.items()]
            said = [f"no stages reach each other ({'; '.join(ways)})"]
        return NoCandidate(f"{', and '.join(said)}; start one of them, or name another in the route file")

    def _why(self, address: str) -> str:
        if (trouble := self._troubles.get((address,))) is not None:
            return trouble.why
        return "it is being drained" if address in self.avoided else ""
