"""``dgr-bench frontier``: speed at growing contexts, through stages and in the whole model beside them.

Three subjects of the same model, one thread an engine: ``one``, a pipeline of one stage; ``whole``, the bare engine of the
whole model, which is llama.cpp's own run without a runtime around it; ``split``, a pipeline of several stages. For every
length each of them begins a fresh session, prefills the same prompt of exactly so many token ids in chunks, and then they
draw tokens in turns (one, whole, split, one, …), so that whatever else the machine does hits all alike. A fourth one,
the ``baseline``, draws in turns with them: the bare engine again, after a short prompt at every length, so that its tokens tell
how fast the machine is at that time. End-of-text ends nothing. With ``--upstream`` a stage in native numerics and upstream's
llama-bench decode at the same depths.

Units:

``length/L``
    :class:`At`: every subject at a prompt of L tokens.
``upstream/L``
    :class:`BesideUpstream`: at a depth of L tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil
import trio
from attrs import evolve, field, frozen

from dgr import Artifact, ContextParams, DgrError, Numerics, ShardEngine
from dgr.engine.base import Output, Work
from dgr.engine.llama import estimate_memory
from dgr.engine.native import build_info
from dgr.errors import EngineError, InputError
from dgr.model.route import LayerRange, parse_split
from dgr.model.units import human_bytes
from dgr.runtime.events import StateLost, so_far
from dgr.testing.chain import cut_at, some_tokens
from dgr.testing.models import cached_fixture
from dgr.testing.mutants import Mutant
from dgr_bench.frontier import report as frontier_report
from dgr_bench.frontier.metrics import (
    BASELINE,
    GOAL,
    SUBJECTS,
    At,
    BesideUpstream,
    FrontierPlan,
    SubjectRun,
    checks,
    metrics,
)
from dgr_bench.options import add_run_arguments, exit_code, say
from dgr_bench.progress import Progress
from dgr_bench.results import Journal
from dgr_bench.subjects import Bare, Conversation, Wrap, open_bare, open_stages
from dgr_bench.upstream import LlamaBench, find_llama_bench, parse_samples

__all__ = ["FrontierJob", "frontier", "measure", "register", "run"]

_LENGTHS, _QUICK_LENGTHS = (512, 1024, 2048, 4096, 8192), (64, 256, 512)
_DECODE, _QUICK_DECODE = 256, 16
#: Sizes of a native batch.
_CHUNKS = (32, 1 << 16)
#: Share of the machine's available memory that the subjects may take.
_MEMORY = 0.8
#: llama-bench says how long some tokens took together; in so many blocks the median of a token is told from the mean.
_BLOCKS = 8


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

    def check(self) -> None:
        """Raise :class:`~dgr.errors.InputError` for lengths whose state, with the weights, fits no memory here."""
        needed = sum(
            estimate_memory(self.artifact, layers, self.context(subject)).total
            for subject in self.plan.subjects
            for layers in self.layers(subject)
        )
        limit = int(_MEMORY * available_bytes())
        if needed > limit:
            raise InputError(
                f"--lengths up to {max(self.plan.lengths)} take {human_bytes(needed)} for {len(self.plan.subjects)} subjects"
                f" beside each other, over {_MEMORY:.0%} of the available memory, {human_bytes(limit)}; give shorter lengths"
            )


def available_bytes() -> int:
    """Memory that new processes could have."""
    return int(psutil.virtual_memory().available)


# --- subjects --------------------------------------------------------------------------------------------------------


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
        events = [] if self.events is None else so_far(self.events)
        return [event.reason for event in events if isinstance(event, StateLost)]


@asynccontextmanager
async def open_subject(job: FrontierJob, name: str) -> AsyncIterator[Subject]:
    """Load one of :data:`SUBJECTS`."""
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


async def run_length(job: FrontierJob, subjects: Sequence[Subject], length: int) -> At:
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


# --- beside upstream -------------------------------------------------------------------------------------------------


async def run_upstream(job: FrontierJob, length: int) -> BesideUpstream:
    """One stage in native numerics, and llama-bench after it, at the same depth; a context as long as the test."""
    decode, artifact = job.plan.decode, job.artifact
    assert job.llama_bench is not None
    context = evolve(job.context("one"), n_ctx=length + decode, numerics=Numerics.NATIVE)
    ours: list[float] = []
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
        ours = [after - before for before, after in pairwise(times)]
    size = decode // _BLOCKS
    theirs = LlamaBench(job.llama_bench, build_info()["llama_cpp_commit"], artifact.file.path, context, threads=1)
    return BesideUpstream(
        length=length,
        ours_s=[sum(ours[at : at + size]) / size for at in range(0, size * _BLOCKS, size)],
        theirs_s=await seconds_per_token(theirs, length, size),
    )


async def seconds_per_token(theirs: LlamaBench, depth: int, tokens: int) -> list[float]:
    """Blocks of that many tokens drawn by llama-bench after ``depth`` tokens: seconds a token, of each block.

    Raises :class:`~dgr.errors.InputError` for a binary of another pin, :class:`~dgr.errors.EngineError` when it fails.
    """
    command = [*theirs.command(decode=tokens), "-d", str(depth), "-r", str(_BLOCKS)]
    process = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    if process.returncode != 0:
        words = process.stderr.decode(errors="replace").strip()[-400:]
        raise EngineError(f"{theirs.binary.name} ended with exit status {process.returncode}: {words}")
    sample = parse_samples(process.stdout)
    if not sample.build_commit or not theirs.commit.startswith(sample.build_commit):
        raise InputError(
            f"{theirs.binary} was built from llama.cpp {sample.build_commit}, dgr from {theirs.commit[:9]}; build one of"
            " the same pin"
        )
    if (sample.n_depth, sample.n_gen, sample.n_threads) != (depth, tokens, theirs.threads):
        raise EngineError(
            f"llama-bench drew {sample.n_gen} tokens at a depth of {sample.n_depth} on {sample.n_threads} threads, not"
            f" {tokens} at {depth} on {theirs.threads}; nothing can be compared"
        )
    return [nanoseconds / 1e9 / tokens for nanoseconds in sample.samples_ns]


# --- measuring -------------------------------------------------------------------------------------------------------


async def measure(job: FrontierJob, journal: Journal) -> None:
    """Measure the lengths that are missing in the journal; those that ended in an error are tried again."""
    plan = job.plan
    steps = [(f"length/{length}", _cost(length)) for length in plan.lengths]
    steps += [(f"upstream/{length}", _cost(length) / 2) for length in plan.lengths if plan.upstream]
    with Progress("frontier", sum(weight for _, weight in steps)) as progress:

        async def each(what: str, one: Callable[[int], Awaitable[At | BesideUpstream]]) -> None:
            for length in plan.lengths:
                unit = f"{what}/{length}"
                progress.begin(unit)
                if _is_missing(journal, unit):
                    try:
                        raw: Any = await one(length)
                    except InputError:
                        raise  # such as a llama-bench of another pin: it would fail at every length
                    except DgrError as error:
                        raw = {"length": length, "error": f"{type(error).__name__}: {error}"}
                    journal.put(unit, raw)
                progress.done(dict(steps)[unit])

        async with AsyncExitStack() as stack:
            subjects: list[Subject] = []
            if any(_is_missing(journal, f"length/{length}") for length in plan.lengths):
                subjects = [await stack.enter_async_context(open_subject(job, name)) for name in plan.subjects]
            await each("length", partial(run_length, job, subjects))
        if plan.upstream:
            await each("upstream", partial(run_upstream, job))


def _is_missing(journal: Journal, unit: str) -> bool:
    return bool((journal.get(unit) or {"error": "not measured"}).get("error"))


def _cost(length: int) -> float:
    """About what a length costs: every token looks at more compressed rows than the one before."""
    return 200 + length * (1 + length / 8192)


async def frontier(job: FrontierJob, journal: Journal) -> None:
    """Measure what is missing, and judge."""
    await measure(job, journal)
    units = journal.result.units
    journal.finish(metrics(job.plan, units), checks(job.plan, units))


# --- the command -----------------------------------------------------------------------------------------------------


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "frontier",
        help="speed at growing contexts, through stages and in the whole model",
        description="Prefill prompts of growing length and decode after them: through one stage, through several, and in"
        " the bare engine of the whole model, all drawing tokens in turns. Decode must grow with the context as it does in"
        " the whole model.",
    )
    parser.add_argument("--model", type=Path, metavar="GGUF", help="default: the small model of dgr fixture")
    parser.add_argument("--split", metavar="A:B,…", help="layer ranges of the stages (default: three even ones)")
    parser.add_argument(
        "--lengths",
        metavar="N,…",
        help=f"prompts, tokens, ascending (default: {_listed(_LENGTHS)}; with --quick {_listed(_QUICK_LENGTHS)})",
    )
    parser.add_argument(
        "--decode",
        type=int,
        metavar="N",
        help=f"timed tokens after each prompt (default: {_DECODE}; with --quick {_QUICK_DECODE})",
    )
    parser.add_argument("--chunk", type=int, default=512, metavar="N", help="tokens of a prefill chunk (default: 512)")
    parser.add_argument(
        "--numerics",
        type=Numerics,
        choices=list(Numerics),
        default=Numerics.EXACT,
        metavar="{exact,native}",
        help="with exact ones all subjects must draw the same tokens (default)",
    )
    parser.add_argument(
        "--upstream", action="store_true", help="also decode in upstream's llama-bench, both sides in native numerics"
    )
    parser.add_argument(
        "--llama-bench",
        type=Path,
        metavar="PATH",
        help="its binary, of the same pin (default: built from the pin, which takes minutes once)",
    )
    add_run_arguments(parser, "dgr-bench-frontier")
    parser.set_defaults(run=run)


def _listed(lengths: Sequence[int]) -> str:
    return ",".join(map(str, lengths))


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise InputError(f"--lengths is {text!r}; give numbers of tokens, such as {_listed(_LENGTHS)}") from None
    if lengths[0] < 1 or any(after <= before for before, after in pairwise(lengths)):
        raise InputError(f"--lengths is {text}; give lengths from 1 on that ascend, each once")
    if len(lengths) < 2:
        raise InputError(f"--lengths is {text}; give two or more: growth over context takes two contexts")
    return lengths


def _plan(args: argparse.Namespace, n_layers: int) -> FrontierPlan:
    lengths = _lengths(args.lengths) if args.lengths is not None else _QUICK_LENGTHS if args.quick else _LENGTHS
    decode = args.decode if args.decode is not None else _QUICK_DECODE if args.quick else _DECODE
    if not _BLOCKS <= decode <= 1 << 20:
        raise InputError(f"--decode is {decode}; give {_BLOCKS} to {1 << 20} tokens")
    if not _CHUNKS[0] <= args.chunk <= _CHUNKS[1]:
        raise InputError(f"--chunk is {args.chunk}; give {_CHUNKS[0]} to {_CHUNKS[1]} tokens")
    if args.split is None:
        ranges = cut_at(n_layers, sorted({n_layers // 3, 2 * n_layers // 3} - {0}))
    else:
        ranges = parse_split(args.split, n_layers)
    return FrontierPlan(
        name="frontier, quick" if args.quick else "frontier",
        lengths=lengths,
        decode=decode,
        chunk=args.chunk,
        split=",".join(map(str, ranges)),
        subjects=SUBJECTS if len(ranges) > 1 else tuple(name for name in SUBJECTS if name != "split"),
        numerics=args.numerics,
        goal=None if args.quick else GOAL,
        upstream=args.upstream,
    )


def run(args: argparse.Namespace) -> int:
    """Measure, report, judge."""
    artifact = Artifact.open(args.model or cached_fixture("mixed"))
    plan = _plan(args, artifact.hp.n_layers)
    job = FrontierJob(plan, artifact)
    job.check()
    if plan.upstream:
        job = evolve(job, llama_bench=find_llama_bench(args.llama_bench))
    subject = {"model": artifact.file.path.name, "artifact": artifact.identity, "split": plan.split}
    journal = Journal.open(
        args.out, "frontier", msgspec.to_builtins(plan), subject, args.command_line, fresh=args.fresh
    )
    trio.run(frontier, job, journal)
    frontier_report.write(journal.result, plan, journal.folder)
    say(journal.result, journal.folder, args.json)
    return exit_code(journal.result)
