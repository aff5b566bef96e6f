"""The load of a stage, put together from what its parts count."""

from __future__ import annotations

import itertools

import psutil

from dgr.core.load import ROUTES_MAX, StageLoad
from dgr.core.log_fields import short_route
from dgr.stage.ledger import Ledger
from dgr.stage.statistics import ShardStatistics
from dgr.stage.traffic import Traffic

__all__ = ["stage_load"]


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
        resident=psutil.Process().memory_info().rss,
        evictions=seen.evictions,
        unroutable_frames=seen.unroutable_frames,
        decode=seen.steps.decode,
        prefill=seen.steps.prefill,
        running_seconds=seen.steps.running_seconds,
        links=traffic.load(),
    )
