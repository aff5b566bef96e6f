"""What a stage counts: its sessions and leases, and its batches, how large they were, how long they took, how long their
work had waited; and its load, put together from that.

Batches are counted in the event loop between two of them, where nothing may be slow: a value finds its bucket, and two
numbers change.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence

from attrs import field, frozen

from dgr.core.host import resident_memory
from dgr.core.load import ROUTES_MAX, BatchLoad, Distribution, StageLoad
from dgr.core.log_fields import short_route
from dgr.stage.ledger import Ledger
from dgr.stage.traffic import Traffic

__all__ = ["BatchCounts", "Counts", "SchedulerStatistics", "ShardStatistics", "stage_load"]

#: Seconds of a batch, or of a wait for one: a decoded token on a fast stage to a long chunk on a slow one.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
#: Tokens of a batch.
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Counts:
    """A :class:`Distribution` that grows."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Distribution:
        return Distribution(tuple(self._bounds), tuple(self._counts), self._total)


@frozen
class BatchCounts:
    """:class:`BatchLoad` that grow."""

    tokens: Counts = field(factory=lambda: Counts(TOKENS))
    seconds: Counts = field(factory=lambda: Counts(SECONDS))
    waits: Counts = field(factory=lambda: Counts(SECONDS))

    def snapshot(self) -> BatchLoad:
        return BatchLoad(self.tokens.snapshot(), self.seconds.snapshot(), self.waits.snapshot())


@frozen
class SchedulerStatistics:
    """Counters since the shard started."""

    #: Native batches run.
    batches: int
    #: Work items in them; more than ``batches`` when sessions were merged.
    items: int
    tokens: int
    #: The same by kind, with their sizes and times.
    decode: BatchLoad
    prefill: BatchLoad
    #: For how long the batch under way has been running; 0.0 when none is.
    running_seconds: float
    #: Seconds of the longest batch.
    longest_seconds: float


@frozen
class ShardStatistics:
    """A snapshot of a shard."""

    #: Route sessions it serves.
    routes: int
    #: Their epochs.
    epochs: dict[bytes, int]
    #: Live sessions over all routes.
    sessions: int
    #: Bytes of state leased to them.
    leased_bytes: int
    #: The same by component.
    leased: dict[str, int]
    #: Sessions ended to make room for others.
    evictions: int
    #: Frames dropped because their route session is not known here.
    unroutable_frames: int
    #: Whether it takes nobody new.
    draining: bool
    steps: SchedulerStatistics


def stage_load(seen: ShardStatistics, ledger: Ledger, traffic: Traffic, seconds: float, *, ready: bool) -> StageLoad:
    """What a shard tells of itself, ``seconds`` after it started."""
    # Ids are the pipelines' own choice: two may begin alike.
    epochs: dict[str, int] = {}
    for route, epoch in itertools.islice(seen.epochs.items(), ROUTES_MAX):
        epochs[short_route(route)] = max(epoch, epochs.get(short_route(route), 0))
    memory = ledger.memory
    return StageLoad(
        seconds=seconds,
        ready=ready,
        routes=seen.routes,
        epochs=epochs,
        sessions=seen.sessions,
        slots=ledger.n_slots,
        slots_leased=len(ledger.leases),
        weights=memory.weights,
        compute=memory.compute,
        state=dict(memory.state),
        state_leased=seen.leased,
        resident=resident_memory(),
        evictions=seen.evictions,
        unroutable_frames=seen.unroutable_frames,
        decode=seen.steps.decode,
        prefill=seen.steps.prefill,
        running_seconds=seen.steps.running_seconds,
        links=traffic.load(),
    )
