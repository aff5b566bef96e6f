"""A made-up pipeline whose stages are far away: each link has a delay, each stage a clock of its own and a known speed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import timed_engines
import trio
from attrs import define, field
from msgspec.structs import replace
from timed_engines import TimedEngine, TimedThread

from dgr.cluster.local import LocalCluster
from dgr.core.load import Side
from dgr.core.trace import WorkRecord
from dgr.core.values import StageIdentity
from dgr.engine.base import Output, Work
from dgr.protocol.limits import limits_of
from dgr.stage.shard import Shard
from dgr.testing import offline as offline_module
from dgr.testing.network.relay import open_relay
from dgr.wire.links import Link, open_link
from dgr.wire.memory import memory_transports
from dgr.wire.nurseries import open_nursery

#: Seconds of a batch by the layers of its stage: fixed, and for each token.
SPEEDS = {"0:2": (0.010, 0.001), "2:4": (0.030, 0.002), "4:6": (0.020, 0.0)}


class FarEngine(TimedEngine):
    """Its batches take what :data:`SPEEDS` says."""

    def run(self, batch: Sequence[Work]) -> list[Output]:
        outputs = super().run(batch)
        fixed, each = SPEEDS[str(self.describe().layers)]
        TimedThread.owed = fixed + each * sum(len(work.tokens) for work in batch)
        return outputs


@define
class Distances:
    """Seconds of every link, and how the clocks of stages are set."""

    #: Stage -> from the pipeline to it, and back.
    control: dict[str, tuple[float, float]] = field(factory=dict)
    #: Stage -> from it to the next one.
    boundary: dict[str, float] = field(factory=dict)
    #: Stage -> by how much its clock is ahead of the pipeline's.
    clocks: dict[str, float] = field(factory=dict)


class FarCluster(LocalCluster):
    """Links of a cluster go through relays."""

    def __init__(self, nursery: trio.Nursery, distances: Distances) -> None:
        super().__init__(nursery)
        self._distances = distances

    async def start(self, name: str, *args: object, **options: object) -> Shard:
        shard = await super().start(name, *args, **options)  # type: ignore[arg-type]
        ahead, add = self._distances.clocks.get(name, 0.0), shard.traces.add

        def shifted(route: bytes, record: WorkRecord) -> None:
            times = {one: getattr(record, one) + ahead for one in ("came", "ready", "began", "ended", "sent")}
            add(route, replace(record, **times))

        shard.traces.add = shifted  # type: ignore[method-assign]
        return shard

    @asynccontextmanager
    async def connect(self, address: str) -> AsyncIterator[tuple[Link, StageIdentity]]:
        shard = self._get(address)
        limits = limits_of(shard.description)
        (near, left), (right, far) = memory_transports(), memory_transports()
        async with (
            open_relay(left, right) as relay,
            open_link(far, limits, name=f"{address}<-pipeline") as arriving,
            open_link(near, limits, name=f"pipeline->{address}") as leaving,
        ):
            relay.rightward.delay, relay.leftward.delay = self._distances.control.get(address, (0.0, 0.0))
            ahead = self._distances.clocks.get(address, 0.0)
            arriving.clock = lambda: trio.current_time() + ahead
            shard.start_soon(shard.serve_control, arriving)
            yield leaving, shard.description

    async def _join(
        self, before: Shard, after: Shard, *, task_status: trio.TaskStatus[Link] = trio.TASK_STATUS_IGNORED
    ) -> None:
        limits = limits_of(after.description)
        (near, left), (right, far) = memory_transports(), memory_transports()
        async with (
            open_relay(left, right) as relay,
            open_link(far, limits, granted=limits.under_way) as arriving,
            open_link(near, limits, credit=limits.under_way) as leaving,
        ):
            relay.rightward.delay = self._distances.boundary.get(before.name, 0.0)
            after.start_soon(after.serve_boundary, arriving, before.name)
            self._boundaries[before, after] = leaving
            task_status.started(leaving)
            try:
                with before.traffic.counting(Side.NEXT, after.name, leaving):
                    await before.watch_successor(leaving)
            finally:
                del self._boundaries[before, after]


def put_far_away(monkeypatch: pytest.MonkeyPatch, distances: Distances) -> None:
    """Every made-up pipeline is of such stages from now on."""

    @asynccontextmanager
    async def open_cluster() -> AsyncIterator[FarCluster]:
        async with open_nursery() as nursery:
            try:
                yield FarCluster(nursery, distances)
            finally:
                nursery.cancel_scope.cancel()

    timed_engines.time_engines(monkeypatch)
    monkeypatch.setattr(offline_module, "FakeEngine", FarEngine)
    monkeypatch.setattr(offline_module, "open_cluster", open_cluster)
