"""Who runs a prompt in a certificate: a pipeline over stages, or the bare engine of the whole model."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec
import psutil
import trio

from dgr import (
    Artifact,
    ClientSession,
    ContextParams,
    Generation,
    LayerRange,
    LlamaEngine,
    LocalCluster,
    Pipeline,
    Route,
    SamplingParams,
    ShardEngine,
    StageRef,
    Timeouts,
    open_cluster,
    open_pipeline_on,
)
from dgr.cli.progress import progress_bar
from dgr.cluster.local import load_engines
from dgr.core.prefix import PrefixDigest
from dgr.core.route import parse_split
from dgr.core.values import ComponentSummary, LogitsWanted
from dgr.engine.base import Work
from dgr.errors import NonFinite
from dgr.selftest.chain import cut_at, pieces
from dgr.selftest.fixture import cached_fixture
from dgr.stage.shard import Shard
from dgr.wire import frames
from dgr.wire.nurseries import open_nursery

#: What a mutant does to an engine: it stands in for the engine of the stage with that index.
Wrap: TypeAlias = Callable[[int, ShardEngine], ShardEngine]

#: Certificates wait for models of any size; what hangs is the caller's to interrupt.
PATIENCE = Timeouts(reply=3600, control=3600, route=600)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """``--model``, of a benchmark that measures the large fixture when it is given none."""
    parser.add_argument(
        "--model", type=Path, metavar="M", help="a GGUF (default: a V4 fixture of 649 M parameters in mixed weights)"
    )


def model_of(args: argparse.Namespace) -> Path:
    """The model of ``--model``, or the fixture in its place: a small one with ``--quick``."""
    if args.model:
        return Path(args.model)
    with progress_bar("the fixture to measure; written once"):
        return cached_fixture("mixed", preset=None if args.quick else "big")


def whole_model(path: str | Path) -> Artifact:
    """A model of which every layer is here. Raises :class:`~dgr.errors.ArtifactError` naming the file and what it lacks."""
    artifact = Artifact.open(path)
    artifact.check(artifact.hp.whole)
    with progress_bar("reading the model") as progress:
        artifact.manifest(progress)  # whose digests are kept: what asks for the identity later does not wait
    return artifact


class StageState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a conversation stands on one stage, as its state tensors say."""

    layers: str
    #: Tokens committed.
    position: int
    #: BLAKE2b-128 of the ids of those tokens, as the stage counted them, hex; empty where no stage counts.
    prefix: str
    components: tuple[ComponentSummary, ...]

    @classmethod
    def of(cls, layers: str, frame: frames.StateReport) -> StageState:
        """As a stage answers when it is asked."""
        state = frame.state
        return cls(layers=layers, position=state.position, prefix=frame.digest.hex(), components=state.components)


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What went over the boundary links, all of them together."""

    frames: int
    #: Packet headers, messages and payloads.
    bytes: int


class Conversation(Protocol):
    """One prompt and its answer. Token ids only; greedy; nothing ends it early."""

    async def start(self, prompt: Sequence[int]) -> int:
        """Prefill, and draw the first token."""
        ...

    async def next(self) -> int: ...

    async def states(self) -> list[StageState]:
        """Every stage, head first; possible whenever nothing is in flight."""
        ...

    async def rows(self, tokens: Sequence[int]) -> bytes:
        """Commit the last drawn token and ``tokens``; rows of float32 logits of each of ``tokens``."""
        ...


def asked_split(text: str | None, n_layers: int) -> tuple[LayerRange, ...]:
    """The layer ranges that ``--split`` asks for; three even ones without it. Raises :class:`~dgr.errors.InputError`."""
    return (
        cut_at(n_layers, sorted({n_layers // 3, 2 * n_layers // 3} - {0}))
        if text is None
        else parse_split(text, n_layers)
    )


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process(os.getpid()).memory_info().rss)


# --- stages behind a pipeline ---------------------------------------------------------------------------------------


class Piped:
    """A conversation through a pipeline's session."""

    def __init__(self, pipeline: Pipeline, session: ClientSession) -> None:
        self._pipeline = pipeline
        self.session = session
        self._answer: Generation | None = None

    async def start(self, prompt: Sequence[int]) -> int:
        self._answer = self.session.generate(prompt, sampling=SamplingParams(), stop=())
        return await self.next()

    async def next(self) -> int:
        assert self._answer is not None
        return (await anext(self._answer)).id

    async def states(self) -> list[StageState]:
        layers = {ref.address: str(ref.layers) for ref in self._pipeline.route.stages}
        return [
            StageState.of(layers[address], frame) for address, frame in (await self.session.state_summaries()).items()
        ]

    async def rows(self, tokens: Sequence[int]) -> bytes:
        found: dict[int, bytes] = {}
        await self.session.logits(tokens, lambda position, values: found.__setitem__(position, bytes(values)))
        return b"".join(found[position] for position in sorted(found))


class Resumed(Piped):
    """A conversation whose session has the beginning of the prompt already."""

    async def start(self, prompt: Sequence[int]) -> int:
        self._answer = self.session.generate(transcript=prompt, sampling=SamplingParams(), stop=())
        return await self.next()


class Stages:
    """Stages of a model, loaded once; pipelines of any chunk size are opened over them."""

    def __init__(
        self,
        engines: Sequence[ShardEngine],
        route: Route,
        pipeline: Callable[[int | None], AbstractAsyncContextManager[Pipeline]],
        cluster: LocalCluster | None,
    ) -> None:
        #: Empty for stages in other processes.
        self.engines = tuple(engines)
        self.route = route
        self.cluster = cluster
        self._pipeline = pipeline

    @property
    def n_ctx(self) -> int:
        """Tokens that a session can hold."""
        return self.engines[0].describe().context.n_ctx

    @property
    def n_vocab(self) -> int:
        return self.engines[0].describe().n_vocab

    def shard(self, address: str) -> Shard:
        """A stage of this process by its name in the route."""
        assert self.cluster is not None
        return self.cluster.shards[address]

    def pipeline(self, chunk: int | None) -> AbstractAsyncContextManager[Pipeline]:
        """A pipeline that prefills ``chunk`` tokens at a time; None: as it does by itself."""
        return self._pipeline(chunk)

    @asynccontextmanager
    async def conversation(self, pipeline: Pipeline) -> AsyncIterator[Piped]:
        async with pipeline.session() as session:
            yield Piped(pipeline, session)

    def traffic(self) -> Traffic | None:
        """Everything that went over the links between stages so far; None for stages in other processes."""
        if self.cluster is None:
            return None
        links = self.cluster.leaving.values()
        return Traffic(frames=sum(one.frames_sent for one in links), bytes=sum(one.bytes_sent for one in links))

    def leased_bytes(self) -> int | None:
        """State leased to sessions on all stages; None for stages in other processes."""
        if self.cluster is None:
            return None
        return sum(shard.statistics().leased_bytes for shard in self.cluster.shards.values())


async def load_wrapped(
    artifact: Artifact, ranges: Sequence[LayerRange], context: ContextParams, wrap: Wrap | None
) -> list[ShardEngine]:
    """The engines of stages, or what stands in for them."""
    engines = await load_engines(artifact, ranges, context)
    return [engine if wrap is None else wrap(index, engine) for index, engine in enumerate(engines)]


@asynccontextmanager
async def open_stages(
    artifact: Artifact, ranges: Sequence[LayerRange], context: ContextParams, wrap: Wrap | None = None
) -> AsyncIterator[Stages]:
    """Stages in this process, one thread each."""
    engines = await load_wrapped(artifact, ranges, context, wrap)
    route = Route(tuple(StageRef(f"stage-{index}", layers) for index, layers in enumerate(ranges)))
    async with open_cluster() as cluster:
        for ref, engine in zip(route.stages, engines, strict=True):
            await cluster.start(ref.address, engine)
        yield Stages(
            engines,
            route,
            lambda chunk: open_pipeline_on(cluster.connect, route, chunk=chunk, timeouts=PATIENCE),
            cluster,
        )


# --- the whole model, with nothing around it --------------------------------------------------------------------------


class Bare:
    """A conversation with one engine that owns every layer: what llama.cpp draws when nothing is split."""

    def __init__(self, engine: ShardEngine, chunk: int, patience: float = math.inf) -> None:
        self._engine = engine
        self._chunk = chunk
        self._last = 0
        self._patience = patience
        self._committed: list[int] = []
        #: Whether the engine was stopped because a call took more than ``patience`` seconds.
        self.gave_up = False

    async def start(self, prompt: Sequence[int]) -> int:
        logits = b""
        for begin, end in pieces(len(prompt), self._chunk):
            logits = await self._run(prompt[begin:end], LogitsWanted.LAST if end == len(prompt) else LogitsWanted.NONE)
        return self._draw(logits)

    async def next(self) -> int:
        return self._draw(await self._run((self._last,), LogitsWanted.LAST))

    async def states(self) -> list[StageState]:
        state = self._engine.state_summary(0)
        return [
            StageState(
                layers=str(self._engine.describe().layers),
                position=state.position,
                prefix=PrefixDigest(self._committed).digest().hex(),
                components=state.components,
            )
        ]

    async def rows(self, tokens: Sequence[int]) -> bytes:
        await self._run((self._last,), LogitsWanted.NONE)
        return await self._run(tokens, LogitsWanted.ALL)

    async def _run(self, tokens: Sequence[int], logits: LogitsWanted) -> bytes:
        work = Work(0, len(self._committed), tuple(tokens), logits=logits)
        # Beside the event loop, so that Ctrl-C and the deadline are heard.
        async with open_nursery() as nursery:
            nursery.start_soon(self._lose_patience)
            output = (await trio.to_thread.run_sync(self._engine.run, [work]))[0]
            nursery.cancel_scope.cancel()
        if not output.finite:
            raise NonFinite(f"NaN or Inf in the logits from position {work.position} on")
        self._committed += tokens
        return bytes(output.logits or b"")

    async def _lose_patience(self) -> None:
        await trio.sleep(self._patience)
        self.gave_up = True
        self._engine.abort()

    def _draw(self, logits: bytes) -> int:
        self._last, _ = self._engine.sample(logits, (), SamplingParams())
        return self._last


@asynccontextmanager
async def open_bare(
    artifact: Artifact, context: ContextParams, threads: int = 1, wrap: Wrap | None = None
) -> AsyncIterator[ShardEngine]:
    """The engine of the whole model."""
    engine: ShardEngine = await trio.to_thread.run_sync(lambda: LlamaEngine(artifact, None, context, threads=threads))
    if wrap is not None:
        engine = wrap(0, engine)
    try:
        yield engine
    finally:
        engine.stop()
