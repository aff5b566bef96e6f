"""Real stages under the real runtime, in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from e2e.running import Mutate, Open, Running

import dgr
from dgr.artifact.artifact import Artifact
from dgr.cluster.local import ShardPolicy
from dgr.core.route import Route, StageRef, parse_split
from dgr.core.values import ContextParams
from dgr.testing.state_inspector import InspectedEngine


@pytest.fixture(scope="session")
def open_stages() -> Open:
    """``async with open_stages(model, split, context, mutate={stage: wrapper}) as running``: probed stages, a pipeline."""

    @asynccontextmanager
    async def opened(
        path: Path,
        split: str,
        context: ContextParams,
        *,
        mutate: Mapping[int, Mutate] | None = None,
        policy: ShardPolicy | None = None,
        **options: Any,
    ) -> AsyncIterator[Running]:
        artifact = Artifact.open(path)
        ranges = parse_split(split, artifact.hp.n_layers)
        engines = [await trio.to_thread.run_sync(InspectedEngine, artifact, layers, context) for layers in ranges]
        route = Route(tuple(StageRef(f"stage-{index}", layers) for index, layers in enumerate(ranges)))
        async with dgr.open_cluster() as cluster:
            for index, engine in enumerate(engines):
                change = (mutate or {}).get(index)
                await cluster.start(f"stage-{index}", change(engine) if change else engine, policy)
            async with dgr.open_pipeline_on(cluster.connect, route, **options) as pipeline:
                yield Running(pipeline, cluster, engines)

    return opened
