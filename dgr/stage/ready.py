"""Work that is ready, and which of it makes the next native batch.

Decode steps and chunks of prefill go in batches of their own: upstream cuts a mixed batch into sub-batches of equal length
anyway, so that mixing saves nothing, and a decode step would wait for the chunk beside it. They take turns: one batch of
prefill, then every decode step that waits by then. So neither kind starves, and no stream meets more than one batch of
prefill a stage between two tokens. Within a kind whoever waits longest goes first; a session has one request at a time.

*How many groups.* Sessions whose decode steps share a batch come back together, and would share it for ever: with one
group all stages but one are idle, with as many as there are sessions every step costs what a batch would. S sessions in G
groups on a ring of K stages take, for a token each, the longer of what one stage needs for all groups and what one group
needs for all stages; :func:`best_groups` takes the G for which that is shortest, from the measured time of a batch over
its size. The groups are blocks of the range of slots: only adjacent slots share a native sub-batch, and any other pair costs
what two batches cost.

*How groups come about.* Replies to a batch come back one after another, and whoever takes the first at once splits the
group for ever. So a group of which some are missing waits, for a tenth of a step at most, for those that should be here by
then: those that left together with one that is back, and those whose last time away has passed. With no such session it
starts at once. While more groups are under way than there should be, it waits for a step and a half: one merge is worth one
wait. Where nobody came in time (a long way round, a client that thinks) it does not try again for a while.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

from attrs import define, field

from dgr.engine.base import Work

__all__ = ["ReadyRequest", "ReadyWork", "StepTime", "best_groups", "is_decode"]

#: Of a decode step's time, how long an unfilled batch waits at most; and that in seconds.
_PATIENCE, _MOST_PATIENCE = 0.1, 0.02
#: Steps that a batch waits for another group to merge with; and batches for which it does not, after one wait in vain and
#: at most: twice as many after each.
_MERGE_STEPS, _FIRST_REST, _LAST_REST = 1.5, 8, 256
#: How far from the shortest round another number of groups may be, for a number nearer to that of the stages.
_NEAR = 1.04
#: Weight of what a step took, against that of the one before it, in :class:`StepTime`.
_OLDER = 0.98
#: Decode batches after which times are known well enough to look at groups anew only after as many more.
_SETTLED = 16
#: Mean times away after which a session that has not come back is not counted as decoding any more.
_OVERDUE = 3.0


class ReadyRequest(Protocol):
    """What waits for the engine."""

    work: Work
    #: Stages of its ring.
    ring: int
    #: Whoever asked has gone.
    abandoned: bool


class StepTime:
    """Seconds of a decode batch over its size: a straight line through what was measured, older steps counting less."""

    def __init__(self) -> None:
        self._weight = self._n = self._nn = self._t = self._nt = 0.0
        #: A point of the line, and its slope.
        self._line = 0.0, 0.0, 0.0

    def add(self, n: int, seconds: float) -> None:
        """A batch of ``n`` steps took so long."""
        self._weight = weight = _OLDER * self._weight + 1.0
        self._n = _OLDER * self._n + n
        self._nn = _OLDER * self._nn + n * n
        self._t = _OLDER * self._t + seconds
        self._nt = _OLDER * self._nt + n * seconds
        mean_n, mean_t, slope = self._n / weight, self._t / weight, 0.0
        spread = self._nn / weight - mean_n * mean_n
        if (
            spread >= 1e-6 * self._nn / weight
        ):  # else all of one size: as if size cost nothing, until a larger one tells
            slope = min(max((self._nt / weight - mean_n * mean_t) / spread, 0.0), mean_t / mean_n)
        self._line = mean_n, mean_t, slope

    def __call__(self, n: int) -> float:
        """Seconds that a batch of ``n`` should take; 0 before the first."""
        mean_n, mean_t, slope = self._line
        return max(mean_t + slope * (n - mean_n), 0.0)


def best_groups(sessions: int, stages: int, seconds: Callable[[int], float]) -> int:
    """Groups in which ``sessions`` get a token each round a ring of ``stages`` in the shortest time, nearly: as times are
    not known to a per cent, a number near that of the stages is preferred. ``seconds``: of a batch over its size."""
    periods = []
    for groups in range(1, sessions + 1):
        size, larger = divmod(sessions, groups)
        one_stage = larger * seconds(size + 1) + (groups - larger) * seconds(size)
        periods.append(max(one_stage, stages * seconds(size + bool(larger))))
    shortest = min(periods)
    if not shortest:
        return min(sessions, stages)  # nothing was measured yet
    good = (groups for groups, period in enumerate(periods, 1) if period <= _NEAR * shortest)
    return min(good, key=lambda groups: abs(groups - stages))


R = TypeVar("R", bound=ReadyRequest)


@define(eq=False)
class _Group:
    """Sessions whose decode steps ran as one batch, and come back together."""

    #: When the first of them came back; NaN before.
    back: float = math.nan


@define
class _Away:
    """A session whose decode step has run here."""

    since: float
    group: _Group
    #: Seconds it was away the last time; NaN if this is the first.
    last: float

    def due(self) -> float:
        """When it should be back; NaN where nothing tells."""
        return self.group.back if not math.isnan(self.group.back) else self.since + self.last


@define
class ReadyWork(Generic[R]):
    """The requests that wait for one engine."""

    #: Most tokens of a decode batch, and of a batch of prefill chunks (but for a single chunk that is larger).
    n_batch: int
    n_ubatch: int
    _decode: deque[R] = field(factory=deque)
    _prefill: deque[R] = field(factory=deque)
    #: Sessions between two decode steps, by slot.
    _away: dict[int, _Away] = field(factory=dict)
    #: Seconds a session was away, by slot.
    _last_away: dict[int, float] = field(factory=dict)
    _step_time: StepTime = field(factory=StepTime)
    #: Groups that there should be; and what was found for numbers of sessions and stages, by the times known then.
    _groups: int = 1
    _best: dict[tuple[int, int], int] = field(factory=dict)
    #: Decode batches that have run.
    _decoded: int = 0
    #: Since when an unfilled batch waits; NaN when none does. And of how many steps it was then.
    _waiting_since: float = math.nan
    _waiting_with: int = 0
    #: Batches that still do not wait for another group, and how many it will be after the next wait in vain.
    _rest: int = 0
    _next_rest: int = _FIRST_REST
    #: Decode steps that go before the next batch of prefill.
    _first: int = 0

    def __len__(self) -> int:
        return len(self._decode) + len(self._prefill)

    def add(self, request: R, now: float) -> None:
        """A request came."""
        slot = request.work.slot
        if not is_decode(request):
            self.forget(slot)
            self._prefill.append(request)
            return
        if (away := self._away.pop(slot, None)) is not None:
            self._last_away[slot] = now - away.since
            if math.isnan(away.group.back):
                away.group.back = now
        self._decode.append(request)

    def forget(self, slot: int) -> None:
        """The slot is another session's from now on, or its session does something else than decode."""
        self._away.pop(slot, None)
        self._last_away.pop(slot, None)

    def next(self, now: float) -> list[R] | float:
        """The next batch, by ascending slot; or until when to wait, unless more comes (infinity: nothing is ready)."""
        for waiting in (self._decode, self._prefill):
            for gone in [request for request in waiting if request.abandoned]:
                waiting.remove(gone)
        self._first = min(self._first, len(self._decode))
        if self._prefill and not self._first:
            return self._take_prefill()
        if not self._decode:
            self._waiting_since = math.nan
            return math.inf
        self._forget_overdue(now)
        group, missing = self._next_group()
        if missing and now < (until := self._worth_waiting(now, group, missing)):
            return until
        self._learn_from_wait(now, group, missing)
        self._waiting_since = math.nan
        for request in group:
            self._decode.remove(request)
        self._first -= min(self._first, len(group))
        return group

    def _next_group(self) -> tuple[list[R], list[_Away]]:
        """Those of a group that are ready, and those that are away: of the first that is complete, else of whoever waits
        longest."""
        ready = {request.work.slot: request for request in self._decode}
        slots = ready.keys() | self._away.keys()
        self._groups = self._best_groups(len(slots), max(request.ring for request in self._decode))
        blocks = _blocks(slots, self._groups)
        found: tuple[list[R], list[_Away]] | None = None
        for slot in ready:
            block = next(block for block in blocks if slot in block)
            here = [ready[each] for each in block if each in ready][: self.n_batch]
            away = [self._away[each] for each in block if each not in ready]
            if not away:
                return here, away
            found = found or (here, away)
        assert found is not None
        return found

    def _best_groups(self, sessions: int, stages: int) -> int:
        """:func:`best_groups`, which is not asked again for every token."""
        if (known := self._best.get((sessions, stages))) is None:
            known = self._best[sessions, stages] = best_groups(sessions, stages, self._step_time)
        return known

    def ran(self, batch: list[R], began: float, now: float) -> None:
        """A batch has run; what was decoded is on its way round the ring."""
        if not is_decode(batch[0]):
            self._first = len(self._decode)
            return
        self._step_time.add(len(batch), now - began)
        self._decoded += 1
        if self._decoded < _SETTLED or not self._decoded % _SETTLED:
            self._best.clear()
        group = _Group()
        for slot in (request.work.slot for request in batch):
            self._away[slot] = _Away(now, group, self._last_away.get(slot, math.nan))

    def _take_prefill(self) -> list[R]:
        self._waiting_since = math.nan
        taken = [self._prefill.popleft()]
        room = self.n_ubatch - len(taken[0].work.tokens)
        while self._prefill and (room := room - len(self._prefill[0].work.tokens)) >= 0:
            taken.append(self._prefill.popleft())
        return _by_slot(taken)

    def _worth_waiting(self, now: float, group: list[R], missing: list[_Away]) -> float:
        """Until when a group should wait for those that are missing; the past, if it should not."""
        if math.isnan(self._waiting_since):
            self._waiting_since, self._waiting_with = now, len(group)
        late = min(_PATIENCE * self._step_time(len(group)), _MOST_PATIENCE)
        latest = self._waiting_since + late
        dues = [due for away in missing if now < (due := away.due()) + late and due <= latest]
        until = min(dues, default=-math.inf) + late
        out = {id(away.group) for away in self._away.values() if math.isnan(away.group.back)}
        if len(out) >= self._groups and len(group) == self._waiting_with and not self._rest:
            until = max(until, self._end_of_wait(group, missing))
        return until

    def _end_of_wait(self, group: list[R], missing: list[_Away]) -> float:
        return self._waiting_since + _MERGE_STEPS * self._step_time(len(group) + len(missing))

    def _learn_from_wait(self, now: float, group: list[R], missing: list[_Away]) -> None:
        """Whether a batch that begins now has waited in vain for another group."""
        self._rest = max(self._rest - 1, 0)
        if math.isnan(self._waiting_since):
            return
        if len(group) > self._waiting_with:
            self._next_rest = _FIRST_REST
        elif missing and now >= self._end_of_wait(group, missing):
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LAST_REST)

    def _forget_overdue(self, now: float) -> None:
        """Those that do not decode any more: their answer has ended, or their client is slow."""
        least = _OVERDUE * self._step_time(1)
        for slot, away in [each for each in self._away.items() if now - each[1].since > least]:
            known = max(self._last_away.values(), default=math.inf) if math.isnan(away.last) else away.last
            if now - away.since > _OVERDUE * known:
                self.forget(slot)


def _blocks(slots: Collection[int], groups: int) -> list[list[int]]:
    """Slots by ascending blocks that do not move when one of them is left: each covers as much of the range."""
    first, last = min(slots), max(slots)
    found: list[list[int]] = [[] for _ in range(groups)]
    for slot in sorted(slots):
        found[(slot - first) * groups // (last - first + 1)].append(slot)
    return found


def is_decode(request: ReadyRequest) -> bool:
    """Whether it is a decode step; all of a batch are, or none."""
    return len(request.work.tokens) == 1


def _by_slot(batch: list[R]) -> list[R]:
    """Only adjacent ascending slots share a native sub-batch."""
    return sorted(batch, key=lambda request: request.work.slot)
