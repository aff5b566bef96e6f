"""Fake stages by name, and pipelines over them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import trio.testing

from dgr.client.events import Event, PrefillProgress
from dgr.client.pipeline import Pipeline, Timeouts, open_pipeline_on
from dgr.cluster.local import LocalCluster, ShardPolicy, open_cluster
from dgr.core.route import LayerRange, Route, StageRef, parse_split
from dgr.core.values import ContextParams
from dgr.stage.shard import Shard
from dgr.testing.engines.fake import FakeEngine, FakeModel

MODEL = FakeModel()
CONTEXT = ContextParams(n_ctx=96, n_batch=16, n_ubatch=8, n_seq_max=3)
#: One, two and three stages of the same model.
WHOLE, TWO, THREE = "0:6", "0:2,2:6", "0:1,1:4,4:6"
#: Short enough that a test which waits in vain shows it in its clock.
TIMEOUTS = Timeouts(reply=20.0, control=10.0, route=30.0)


class Stages:
    """A cluster of fake stages; a stage is named by its layers, so every split finds its own."""

    def __init__(self, cluster: LocalCluster, context: ContextParams, policy: ShardPolicy) -> None:
        self.cluster = cluster
        self.context = context
        self.policy = policy
        self.engines: dict[str, FakeEngine] = {}

    async def start(self, name: str, engine: FakeEngine | None = None) -> FakeEngine:
        """Start the stage ``A:B`` (or ``A:B#x``: another one of the same layers), again if it was stopped."""
        layers = LayerRange.parse(name.partition("#")[0])
        engine = engine or FakeEngine(layers, self.context)
        await self.cluster.start(name, engine, self.policy)
        self.engines[name] = engine
        return engine

    def route(self, split: str) -> Route:
        names = split.split(",")
        ranges = parse_split(",".join(name.partition("#")[0] for name in names), MODEL.n_layers)
        return Route(tuple(StageRef(name, layers) for name, layers in zip(names, ranges, strict=True)))

    def pipeline(
        self, split: str, *, timeouts: Timeouts = TIMEOUTS, **options: Any
    ) -> AbstractAsyncContextManager[Pipeline]:
        return open_pipeline_on(self.cluster.connect, self.route(split), timeouts=timeouts, **options)

    def shard(self, name: str) -> Shard:
        return self.cluster.shards[name]

    def tokens_run(self, split: str) -> list[int]:
        """Tokens that each stage of a split has run since it started."""
        return [self.engines[name].tokens_run for name in split.split(",")]

    async def assert_empty(self) -> None:
        """Nothing is held anywhere once everything has come to rest."""
        await trio.testing.wait_all_tasks_blocked()
        for name, shard in self.cluster.shards.items():
            seen = shard.statistics()
            assert (seen.routes, seen.sessions, seen.leased_bytes) == (0, 0, 0), f"{name}: {seen}"
            engine = self.engines[name]
            for slot in range(self.context.n_seq_max):
                frontier = engine.state_summary(slot)
                assert frontier.position == 0
                assert all(part.rows_max == 0 for part in frontier.components)

    def assert_consistent(self) -> None:
        """The ledger, the actors and the engines agree."""
        for name, shard in self.cluster.shards.items():
            seen = shard.statistics()
            per_slot = sum(self.engines[name].memory().state.values()) // self.context.n_seq_max
            assert seen.leased_bytes == seen.sessions * per_slot, f"{name}: {seen}"
            assert sum(seen.leased.values()) == seen.leased_bytes
            assert len(shard.ledger.leases) == seen.sessions
            held = {lease.slot for lease in shard.ledger.leases}
            for slot in set(range(self.context.n_seq_max)) - held:
                assert self.engines[name].position(slot) == 0, f"{name}: slot {slot} is free and not empty"


@asynccontextmanager
async def open_stages(
    *splits: str, context: ContextParams = CONTEXT, policy: ShardPolicy | None = None
) -> AsyncIterator[Stages]:
    """All stages of some splits; nothing may be left when the block ends."""
    async with open_cluster() as cluster:
        # Idle sessions make room at once, so that a test need not wait for it.
        stages = Stages(cluster, context, policy or ShardPolicy(min_idle=0))
        for name in dict.fromkeys(name for split in splits for name in split.split(",")):
            await stages.start(name)
        yield stages
        await stages.assert_empty()


def kinds(events: Sequence[Event]) -> list[str]:
    """What happened, without how far each prefill was in between."""
    return [type(event).__name__ for event in events if not isinstance(event, PrefillProgress)]


async def rest() -> None:
    """Until everything has come to rest."""
    await trio.testing.wait_all_tasks_blocked()
