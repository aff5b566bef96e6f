"""Real stages under the real runtime, in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import frozen

import dgr
from dgr.artifact.artifact import Artifact
from dgr.client.pipeline import Pipeline
from dgr.client.session import ClientSession
from dgr.cluster.local import LocalCluster, ShardPolicy
from dgr.core.route import Route, StageRef, parse_split
from dgr.core.values import ContextParams
from dgr.engine.base import ShardEngine
from dgr.testing.state_inspector import InspectedEngine


@frozen
class Running:
    """A pipeline, and what stands behind it."""

    pipeline: Pipeline
    cluster: LocalCluster
    #: The stages' engines, head first, without their mutations.
    engines: Sequence[InspectedEngine]

    def slot_of(self, session: ClientSession, stage: int = 0) -> int:
        """The slot a session holds on a stage."""
        shard = self.cluster.shards[f"stage-{stage}"]
        (slot,) = [
            lease.slot
            for lease in shard.ledger.leases
            if self._key(lease.owner) == self.pipeline._client.key(session.id)
        ]
        return slot

    @staticmethod
    def _key(owner: Any) -> Any:
        return owner[0]  # (key, sequence number of the Open)

    def images(self, session: ClientSession) -> list[dict[Any, bytes]]:
        """Every byte of state that a session has, per stage."""
        return [engine.image(self.slot_of(session, stage)) for stage, engine in enumerate(self.engines)]

    def assert_slots_empty(self) -> None:
        """What no session holds is zero, on every stage."""
        for stage, engine in enumerate(self.engines):
            held = {lease.slot for lease in self.cluster.shards[f"stage-{stage}"].ledger.leases}
            for slot in set(range(engine.describe().context.n_seq_max)) - held:
                image = engine.image(slot)
                assert set(engine.raw_positions(slot)) == {-1}
                assert not any(any(image[key]) for key in engine.owned()), f"slot {slot} of stage {stage} is not empty"


Open = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture(scope="session")
def open_stages() -> Open:
    """``async with open_stages(model, split, context, mutate={stage: wrapper}) as running``: probed stages, a pipeline."""

    @asynccontextmanager
    async def opened(
        path: Path,
        split: str,
        context: ContextParams,
        *,
        mutate: dict[int, Callable[[ShardEngine], ShardEngine]] | None = None,
        policy: ShardPolicy | None = None,
        **options: Any,
    ) -> AsyncIterator[Running]:
        artifact = Artifact.open(path)
        ranges = parse_split(split, artifact.hp.n_layers)
        engines = [await trio.to_thread.run_sync(InspectedEngine, artifact, layers, context) for layers in ranges]
        route = Route(tuple(StageRef(f"stage-{index}", layers) for index, layers in enumerate(ranges)))
        async with dgr.open_cluster() as cluster:
            for index, engine in enumerate(engines):
                change = (mutate or {}).get(index, lambda one: one)
                await cluster.start(f"stage-{index}", change(engine), policy)
            async with dgr.open_pipeline_on(cluster.connect, route, **options) as pipeline:
                yield Running(pipeline, cluster, engines)

    return opened
