"""A pipeline over a made-up model, for tests of what is built on dgr: no file, no native code, no thread, milliseconds.

async with open_fake_pipeline("0:2,2:4,4:6") as offline:
    async with offline.pipeline.session() as session:
        ...                                  # the API of a real pipeline
        await offline.restart("stage-1")     # a stage dies and comes back, with no state
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from dgr.client.pipeline import Pipeline, open_pipeline_on
from dgr.cluster.local import LocalCluster, ShardPolicy, open_cluster
from dgr.core.route import LayerRange, Route, StageRef, parse_split
from dgr.core.values import ContextParams
from dgr.testing.engines.fake import FakeEngine, FakeModel, FakeVocabulary

__all__ = ["Offline", "open_fake_pipeline"]

_CONTEXT = ContextParams(n_ctx=1024, n_batch=64, n_ubatch=64, n_seq_max=4)


class Offline:
    """A pipeline over fake stages, and the stages by name: ``stage-0`` is the head. Made by :func:`open_fake_pipeline`."""

    def __init__(
        self, cluster: LocalCluster, route: Route, model: FakeModel, context: ContextParams, policy: ShardPolicy
    ) -> None:
        self.cluster = cluster
        self.route = route
        self.pipeline: Pipeline
        #: The engine of each stage: set ``faults``, read ``tokens_run``.
        self.engines: dict[str, FakeEngine] = {}
        self._model = model
        self._context = context
        self._policy = policy

    async def start(self, name: str, layers: LayerRange) -> None:
        """Start a stage."""
        engine = self.engines[name] = FakeEngine(layers, self._context, model=self._model)
        await self.cluster.start(name, engine, self._policy)

    async def restart(self, name: str) -> None:
        """A stage dies, and one without any state takes its place; sessions are re-prefilled when next used."""
        layers = self.engines[name].describe().layers
        self.cluster.stop(name)
        await self.start(name, layers)


@asynccontextmanager
async def open_fake_pipeline(
    split: str = "0:2,2:4,4:6",
    *,
    context: ContextParams | None = None,
    model: FakeModel | None = None,
    policy: ShardPolicy | None = None,
    **options: Any,
) -> AsyncIterator[Offline]:
    """Open a pipeline over stages of a :class:`~dgr.testing.engines.fake.FakeModel`; it knows bytes as token ids.

    ``options`` as of :func:`dgr.open_pipeline_on`: ``chunk``, ``chunk_seconds``, ``window``, ``retries``, ``timeouts``. It
    works under trio's autojump clock, where no timeout takes time.
    """
    model = model or FakeModel()
    ranges = parse_split(split, model.n_layers)
    route = Route(tuple(StageRef(f"stage-{index}", layers) for index, layers in enumerate(ranges)))
    # Text only where the ids are bytes.
    vocabulary = FakeVocabulary() if model.n_vocab == FakeVocabulary.n_vocab else None
    async with open_cluster() as cluster:
        offline = Offline(cluster, route, model, context or _CONTEXT, policy or ShardPolicy())
        for ref in route.stages:
            await offline.start(ref.address, ref.layers)
        async with open_pipeline_on(cluster.connect, route, vocabulary=vocabulary, **options) as offline.pipeline:
            yield offline
