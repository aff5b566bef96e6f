"""The units of ``dgr-bench frontier``: subjects that draw tokens in turns, and a stage beside upstream's llama-bench."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio
from attrs import field, frozen
from msgspec.structs import replace

from dgr import Artifact, ContextParams, Numerics, ShardEngine
from dgr.client.events import StateLost, drain
from dgr.core.route import LayerRange, parse_split
from dgr.engine.base import Output, Work
from dgr.engine.native import build_info
from dgr.selftest.chain import some_tokens
from dgr.testing.engines.mutants import Mutant
from dgr_bench.frontier.metrics import BASELINE, At, BesideUpstream, FrontierPlan, SubjectRun
from dgr_bench.subjects import Bare, Conversation, Wrap, open_bare, open_stages
from dgr_bench.upstream.llama_bench import LlamaBench

#: llama-bench says how long some tokens took together; in so many blocks the median of a token is told from the mean.
BLOCKS = 8


@frozen
class FrontierJob:
    """What is measured."""

    plan: FrontierPlan
    artifact: Artifact
    #: Upstream's llama-bench; None: it is not run.
    llama_bench: Path | None = None
    #: What mutants stand in for, by subject.
    wraps: Mapping[str, Wrap] = field(factory=dict)

    def layers(self, subject: str) -> tuple[LayerRange, ...]:
        """Layers of its stages."""
        n_layers = self.artifact.hp.n_layers
        return parse_split(self.plan.split, n_layers) if subject == "split" else (LayerRange(0, n_layers),)

    def context(self, subject: str) -> ContextParams:
        """Room for its longest prompt and the answer."""
        plan = self.plan
        return ContextParams(
            n_ctx=plan.prompt(subject, max(plan.lengths)) + plan.decode,
            n_batch=plan.chunk,
            n_ubatch=plan.chunk,
            type_k=plan.type_k,
            numerics=plan.numerics,
        )


class Watched(Mutant):
    """An engine that notes when each of its calls ended; it changes nothing."""

    def __init__(self, engine: ShardEngine, ended: list[float]) -> None:
        super().__init__(engine)
        self._ended = ended

    def run(self, batch: Sequence[Work]) -> list[Output]:
        outputs = super().run(batch)
        self._ended.append(time.perf_counter())
        return outputs


class Stopwatch:
    """Has the engine of the last layer :class:`Watched`; ``wrap`` stands in for engines before that."""

    def __init__(self, wrap: Wrap | None = None) -> None:
        #: When each of its calls ended, seconds of :func:`time.perf_counter`.
        self.ended: list[float] = []
        self._wrap = wrap

    def __call__(self, index: int, engine: ShardEngine) -> ShardEngine:
        if self._wrap is not None:
            engine = self._wrap(index, engine)
        return Watched(engine, self.ended) if engine.describe().is_tail else engine


@frozen
class Subject:
    """Who holds conversations: loaded once, for all lengths."""

    name: str
    stopwatch: Stopwatch
    #: A fresh session.
    conversation: Callable[[], AbstractAsyncContextManager[Conversation]]
    #: Of the pipeline; None for the bare engine.
    events: trio.MemoryReceiveChannel[Any] | None = None

    def lost(self) -> list[str]:
        """Reasons for which sessions lost their state since this was last asked."""
        events = [] if self.events is None else drain(self.events)
        return [event.reason for event in events if isinstance(event, StateLost)]


@asynccontextmanager
async def _open_subject(job: FrontierJob, name: str) -> AsyncIterator[Subject]:
    stopwatch, chunk = Stopwatch(job.wraps.get(name)), job.plan.chunk
    if name in ("whole", BASELINE):
        async with open_bare(job.artifact, job.context(name), wrap=stopwatch) as engine:

            @asynccontextmanager
            async def bare() -> AsyncIterator[Bare]:
                try:
                    yield Bare(engine, chunk)
                finally:
                    engine.close(0)

            yield Subject(name, stopwatch, bare)
    else:
        async with (
            open_stages(job.artifact, job.layers(name), job.context(name), stopwatch) as stages,
            stages.pipeline(chunk) as pipeline,
        ):
            yield Subject(name, stopwatch, partial(stages.conversation, pipeline), pipeline.events())


@asynccontextmanager
async def open_subjects(job: FrontierJob) -> AsyncIterator[list[Subject]]:
    """Load the subjects of a plan."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(_open_subject(job, name)) for name in job.plan.subjects]


async def run_length(job: FrontierJob, length: int, subjects: Sequence[Subject]) -> At:
    """Every subject prefills a prompt; then they draw tokens in turns."""
    plan, n_vocab = job.plan, job.artifact.hp.n_vocab
    at = At(length=length, runs={subject.name: SubjectRun() for subject in subjects})
    first = plan.lengths.index(length) % len(subjects)  # no subject is always the first to prefill
    async with AsyncExitStack() as stack:
        talks = [await stack.enter_async_context(subject.conversation()) for subject in subjects]
        both = [(talk, subject, at.runs[subject.name]) for talk, subject in zip(talks, subjects, strict=True)]
        for talk, subject, into in both[first:] + both[:first]:
            prompt = some_tokens(plan.prompt(subject.name, length), n_vocab, plan.seed)
            subject.stopwatch.ended.clear()
            began = time.perf_counter()
            into.tokens.append(await talk.start(prompt))
            into.first_token_s = time.perf_counter() - began
            before, last = [began, *subject.stopwatch.ended][-2:]
            into.last_chunk_s = last - before
        for _ in range(plan.decode):
            for talk, _, into in both:
                began = time.perf_counter()
                into.tokens.append(await talk.next())
                into.token_s.append(time.perf_counter() - began)
        for talk, subject, into in both:
            into.positions = [state.position for state in await talk.states()]
            into.lost = subject.lost()
    return at


@asynccontextmanager
async def open_upstream(job: FrontierJob) -> AsyncIterator[LlamaBench]:
    """llama-bench with the settings of one stage; a test of one token says whether it is of the same pin."""
    assert job.llama_bench is not None
    context = replace(job.context("one"), numerics=Numerics.NATIVE)
    commit = build_info()["llama_cpp_commit"]
    theirs = LlamaBench(job.llama_bench, commit, job.artifact.file.path, context, threads=1)
    await theirs.blocks(0, 1, 1)
    yield theirs


async def run_upstream(job: FrontierJob, length: int, theirs: LlamaBench) -> BesideUpstream:
    """One stage in native numerics, and llama-bench after it, at the same depth; a context as long as the test."""
    decode, artifact = job.plan.decode, job.artifact
    context = replace(theirs.context, n_ctx=length + decode)
    async with (
        open_stages(artifact, job.layers("one"), context) as stages,
        stages.pipeline(job.plan.chunk) as pipeline,
        stages.conversation(pipeline) as talk,
    ):
        await talk.start(some_tokens(length, artifact.hp.n_vocab, job.plan.seed))
        times = [time.perf_counter()]
        for _ in range(decode):
            await talk.next()
            times.append(time.perf_counter())
    ours, size = [after - before for before, after in pairwise(times)], decode // BLOCKS
    return BesideUpstream(
        length=length,
        ours_s=[sum(ours[at : at + size]) / size for at in range(0, size * BLOCKS, size)],
        theirs_s=await theirs.blocks(length, size, BLOCKS),
    )
