"""Stages in this process: shards by name, joined by memory links that carry the same encoded frames as any other."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import trio
from attrs import field, frozen

from dgr.artifact.artifact import Artifact
from dgr.client.pace import CHUNK_SECONDS
from dgr.client.pipeline import Pipeline, Timeouts, open_pipeline_on
from dgr.core.arguments import check_callable, check_flag, check_instance, check_whole, number, optional, whole
from dgr.core.load import Side
from dgr.core.mtp import refuse_value
from dgr.core.route import LayerRange, Route, StageRef, parse_split
from dgr.core.values import ContextParams, StageIdentity
from dgr.engine.base import ShardEngine
from dgr.engine.budget import check_budget, parse_budget
from dgr.engine.devices import ALL_DEVICES, Placement
from dgr.engine.llama import MOST_THREADS, LlamaEngine, estimate_memory
from dgr.engine.opening import warn_beyond_training
from dgr.engine.vocab import LlamaVocabulary
from dgr.errors import DgrError, InputError, LinkBroken
from dgr.protocol.limits import limits_of
from dgr.stage.shard import MIN_IDLE, Shard, open_shard
from dgr.wire.links import Link, LinkStatistics, open_link
from dgr.wire.memory import memory_transports
from dgr.wire.nurseries import cancelled_first, open_nursery

__all__ = ["LocalCluster", "ShardPolicy", "load_engines", "open_cluster", "open_pipeline"]


@frozen
class ShardPolicy:
    """How a shard treats its sessions."""

    #: Seconds after which an idle session is dropped.
    idle_timeout: float = field(default=math.inf, validator=number(0))
    #: Seconds without work after which a session may have to make room for another. Between two tokens a session is idle
    #: for a moment: without this, two conversations on one slot would evict each other at every token.
    min_idle: float = field(default=MIN_IDLE, validator=number(0))
    #: Bytes of weights, state and compute buffers a stage may take; None: no limit.
    memory_budget: int | None = field(default=None, validator=optional(whole(1)))


class LocalCluster:
    """Named shards in one process. Made by :func:`open_cluster`."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._shards: dict[str, Shard] = {}
        self._scopes: dict[str, trio.CancelScope] = {}
        #: Names of shards that are being started.
        self._starting: set[str] = set()
        #: (stage, next stage) -> the link between them. Keyed by the shards themselves: a name may be taken over.
        self._boundaries: dict[tuple[Shard, Shard], Link] = {}
        self._dialing = trio.Lock()

    @property
    def shards(self) -> Mapping[str, Shard]:
        return self._shards

    @property
    def leaving(self) -> Mapping[tuple[str, str], LinkStatistics]:
        """Counters of the boundary links that are open: (stage, next stage) -> what went over since it was opened."""
        return {(pair[0].name, pair[1].name): link.statistics() for pair, link in self._boundaries.items()}

    async def start(self, name: str, engine: ShardEngine, policy: ShardPolicy | None = None) -> Shard:
        """Start a shard on an engine. The engine is stopped with the shard."""
        if name in self._shards or name in self._starting:
            engine.stop()
            raise InputError(f"a stage {name!r} runs here already; stop it first, or take another name")
        policy = ShardPolicy() if policy is None else policy
        self._starting.add(name)
        try:
            async with cancelled_first():
                shard: Shard = await self._nursery.start(self._run, name, engine, policy)
                return shard
        finally:
            self._starting.discard(name)

    async def _run(
        self,
        name: str,
        engine: ShardEngine,
        policy: ShardPolicy,
        *,
        task_status: trio.TaskStatus[Shard] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        shard: Shard | None = None
        with trio.CancelScope() as scope:
            try:
                async with open_shard(
                    engine,
                    self._dial,
                    name=name,
                    idle_timeout=policy.idle_timeout,
                    min_idle=policy.min_idle,
                    memory_budget=policy.memory_budget,
                ) as shard:
                    self._shards[name], self._scopes[name] = shard, scope
                    task_status.started(shard)
                    try:
                        await trio.sleep_forever()
                    finally:
                        engine.abort()  # a step under way ends early; the shard then clears its slots
            finally:
                if shard is not None and self._shards.get(name) is shard:
                    del self._shards[name], self._scopes[name]
                with trio.CancelScope(shield=True):
                    for link in [link for pair, link in self._boundaries.items() if shard in pair]:
                        await link.aclose()
                engine.stop()

    def stop(self, name: str) -> None:
        """End a shard as a crash would: its links close, its state is gone. The name is free at once."""
        if name not in self._shards:
            raise InputError(f"no stage {name!r} runs here; running: {', '.join(self._shards) or 'none'}")
        del self._shards[name]
        self._scopes.pop(name).cancel()

    async def _dial(self, source: str, target: str) -> Link:
        """The boundary link from one shard to another, made at first use."""
        async with self._dialing:
            pair = self._get(source), self._get(target)
            link = self._boundaries.get(pair)
            if link is None:
                link = await self._nursery.start(self._join, *pair)
            return link

    async def _join(
        self, before: Shard, after: Shard, *, task_status: trio.TaskStatus[Link] = trio.TASK_STATUS_IGNORED
    ) -> None:
        limits = limits_of(after.description).unbroken()
        near, far = memory_transports()
        async with (
            open_link(far, limits, name=f"{after.name}<-{before.name}", granted=limits.under_way) as arriving,
            open_link(near, limits, name=f"{before.name}->{after.name}", credit=limits.under_way) as leaving,
        ):
            after.start_soon(after.serve_boundary, arriving, before.name)
            self._boundaries[before, after] = leaving
            task_status.started(leaving)
            try:
                with (
                    after.traffic.counting(Side.PREVIOUS, before.name, arriving),
                    before.traffic.counting(Side.NEXT, after.name, leaving),
                ):
                    await before.watch_successor(leaving)
            finally:
                del self._boundaries[before, after]

    def _get(self, name: str) -> Shard:
        shard = self._shards.get(name)
        if shard is None:
            raise LinkBroken(f"no stage {name!r} runs here; running: {', '.join(self._shards) or 'none'}")
        return shard

    @asynccontextmanager
    async def connect(self, address: str) -> AsyncIterator[tuple[Link, StageIdentity]]:
        """A control link to a shard; the :class:`~dgr.client.pipeline.Connector` of this process."""
        shard = self._get(address)
        limits = limits_of(shard.description).unbroken()
        near, far = memory_transports()
        async with (
            open_link(far, limits, name=f"{address}<-pipeline") as arriving,
            open_link(near, limits, name=f"pipeline->{address}") as leaving,
        ):
            shard.start_soon(shard.serve_control, arriving)
            with shard.traffic.counting(Side.PIPELINE, "", arriving):
                yield leaving, shard.description


@asynccontextmanager
async def open_cluster() -> AsyncIterator[LocalCluster]:
    """A place for shards in this process; leaving the block ends them and stops their engines."""
    async with open_nursery() as nursery:
        try:
            yield LocalCluster(nursery)
        finally:
            nursery.cancel_scope.cancel()


async def load_engines(
    model: str | Path | Artifact | Sequence[Artifact],
    ranges: Sequence[LayerRange],
    context: ContextParams,
    *,
    threads: int = 1,
    mmap: bool = False,
    mlock: bool = False,
    placement: Placement = ALL_DEVICES,
) -> list[LlamaEngine]:
    """Load one engine per range, side by side; when one fails, none stays behind.

    ``model``: what all of them load, or one artifact (a slice, say) per range. ``placement``: of each of them.
    """
    check_whole("threads", threads, 1, MOST_THREADS)
    check_flag("mmap", mmap)
    check_flag("mlock", mlock)
    if isinstance(model, str | Path):
        model = await trio.to_thread.run_sync(Artifact.open, model)
    artifacts = [model] * len(ranges) if isinstance(model, Artifact) else list(model)
    engines: dict[int, LlamaEngine] = {}
    failures: list[DgrError] = []

    async def load(index: int, layers: LayerRange) -> None:
        try:
            engines[index] = await trio.to_thread.run_sync(
                lambda: LlamaEngine(
                    artifacts[index], layers, context, threads=threads, mmap=mmap, mlock=mlock, placement=placement
                )
            )
        except DgrError as error:
            failures.append(error)  # the others usually fail for the same reason: one is enough to report

    try:
        async with open_nursery() as nursery:
            for index, layers in enumerate(ranges):
                nursery.start_soon(load, index, layers)
        if failures:
            raise failures[0]
    except BaseException:
        for engine in engines.values():
            engine.stop()
        raise
    return [engines[index] for index in range(len(ranges))]


def _models(model: object) -> list[str | Path]:
    models: list[str | Path] = []
    for path in model if isinstance(model, Iterable) and not isinstance(model, str | bytes) else (model,):
        if not isinstance(path, str | Path):
            raise InputError(f"model is {path!r}; give the path of a GGUF, or one slice per stage")
        models.append(path)
    if not models:
        raise InputError("no model was given; give a GGUF, or one slice per stage")
    return models


def _ranges(split: object) -> tuple[LayerRange, ...]:
    ranges = tuple(split) if isinstance(split, Iterable) else (split,)
    for layers in ranges:
        if not isinstance(layers, LayerRange):
            raise InputError(f"split has {layers!r}; give a text like '0:15,15:29', or layer ranges")
    return ranges


def _check_fits(
    artifacts: Sequence[Artifact], route: Route, context: ContextParams, placement: Placement, budget: int
) -> None:
    reports = {
        f"{ref.address} ({ref.layers})": estimate_memory(artifact, ref.layers, context, placement)
        for artifact, ref in zip(artifacts, route.stages, strict=True)
    }
    check_budget(reports, context.n_seq_max, budget)


@asynccontextmanager
async def open_pipeline(
    model: str | Path | Sequence[str | Path],
    split: str | Sequence[LayerRange] | None = None,
    *,
    context: ContextParams | None = None,
    threads: int = 1,
    mmap: bool = False,
    mlock: bool = False,
    memory_budget: int | str | None = None,
    placement: Placement = ALL_DEVICES,
    policy: ShardPolicy | None = None,
    chunk: int | None = None,
    chunk_seconds: float = CHUNK_SECONDS,
    window: int | None = None,
    retries: int = 2,
    ahead: int = 0,
    timeouts: Timeouts | None = None,
    on_shard: Callable[[Shard], None] | None = None,
    mtp: None = None,
) -> AsyncIterator[Pipeline]:
    """A model as a pipeline of stages in this process; leaving the block frees everything.

    ``model``: a GGUF (the first, if in parts), or a slice per stage, head first. ``split``: ``"0:15,15:29,29:43"`` or layer
    ranges; by default the whole model, or the layers of each slice. ``context``: tokens, batches, sequence slots and
    numerics of every stage (default: :class:`~dgr.core.values.ContextParams`). ``threads``: compute threads of each stage;
    all together should not exceed the cores. ``mmap``: map the weights instead of reading them; ``mlock``: lock them in
    memory. ``memory_budget``: bytes, ``"24GiB"`` or ``"50%"`` of the machine for weights, state and compute buffers of all
    stages together, as far as they lie in the host's memory. ``placement``: the devices of each stage, and how many of its
    layers they hold. ``policy``: how
    stages treat their sessions. ``chunk``, ``chunk_seconds``, ``window``, ``retries``, ``ahead``, ``timeouts``: as in
    :func:`~dgr.client.pipeline.open_pipeline_on`. ``on_shard`` is called with every shard as it starts, to watch it.
    ``mtp`` is reserved: None.

    Raises :class:`~dgr.errors.ArtifactError` for a bad file, :class:`~dgr.errors.UnsupportedModel` for another model,
    :class:`~dgr.errors.InvalidRoute` or :class:`~dgr.errors.InvalidLayerRange` for a split that does not cover the model,
    :class:`~dgr.errors.BudgetExceeded` before anything is allocated, :class:`~dgr.errors.NumericsRefused` for types that are
    not known to be exact here, :class:`~dgr.errors.MtpNotExecutable`, :class:`~dgr.errors.InputError` for any other value,
    and :class:`~dgr.errors.EngineError` when a stage cannot be loaded.
    """
    refuse_value("mtp", mtp)
    check_whole("threads", threads, 1, MOST_THREADS)
    context = ContextParams() if context is None else context
    policy = ShardPolicy() if policy is None else policy
    check_instance("context", context, ContextParams)
    check_instance("policy", policy, ShardPolicy)
    check_instance("placement", placement, Placement)
    if on_shard is not None:
        check_callable("on_shard", on_shard)
    models = _models(model)
    artifacts = [await trio.to_thread.run_sync(Artifact.open, path) for path in models]
    n_layers = artifacts[0].hp.n_layers
    if split is not None:
        ranges = parse_split(split, n_layers) if isinstance(split, str) else _ranges(split)
    else:
        ranges = (LayerRange(0, n_layers),) if len(artifacts) == 1 else tuple(each.layers for each in artifacts)
    if len(artifacts) == 1:
        artifacts *= len(ranges)
    if len(artifacts) != len(ranges):
        raise InputError(
            f"{len(artifacts)} slices for {len(ranges)} stages; give one slice per stage, or the whole model"
        )
    route = Route(tuple(StageRef(f"stage-{index}", layers) for index, layers in enumerate(ranges)))
    route.check(n_layers)
    warn_beyond_training(artifacts[0].hp, context.n_ctx)
    if memory_budget is not None:
        if not isinstance(memory_budget, str):
            check_whole("memory_budget", memory_budget, 1)
        await trio.to_thread.run_sync(_check_fits, artifacts, route, context, placement, parse_budget(memory_budget))
    with ExitStack() as loaded:
        engines = await load_engines(
            artifacts, ranges, context, threads=threads, mmap=mmap, mlock=mlock, placement=placement
        )
        for engine in engines:
            loaded.callback(engine.stop)  # a shard stops its engine; not every engine may come to have one
        vocabulary = loaded.enter_context(LlamaVocabulary(artifacts[0]))
        async with open_cluster() as cluster:
            for ref, engine in zip(route.stages, engines, strict=True):
                shard = await cluster.start(ref.address, engine, policy)
                if on_shard is not None:
                    on_shard(shard)
            async with open_pipeline_on(
                cluster.connect,
                route,
                vocabulary=vocabulary,
                chunk=chunk,
                chunk_seconds=chunk_seconds,
                window=window,
                retries=retries,
                ahead=ahead,
                timeouts=timeouts,
            ) as pipeline:
                yield pipeline
