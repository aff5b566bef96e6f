"""``dgr-bench sessions``: many conversations on one pipeline, as ratios of speed measured side by side.

S sessions draw greedily, all at once; what is timed is all of their tokens together, from the moment each has its first.

* One stage against the bare engine that runs as many batches of S tokens: what scheduler, sessions and links cost.
* S sessions against one, on one stage and on two of one thread each: what more sessions bring.
* Two stages of one thread each against the whole model on two threads, S sessions on both.
* Exact numerics against native ones, S sessions on one stage.
* Two stage processes with a delay in every cable, S sessions against one.

Before them, the CPU time of the event loop's thread for a token, on one stage and on two: all that the runtime does itself, and
none of what engines compute in their own threads. After them, the pace of streams on two stages: the time between two tokens
of a stream, alone with the others and while a long prompt is prefilled beside them.

Units, beside the comparisons' own (``dgr-bench overhead --help``):

``event loop, S at once, WHERE, round N``
    ``tokens``, and the seconds of CPU time ``loop_s`` that the thread of the event loop took for them.
``pace, round N``
    ``alone_ms``, ``beside_ms``: between two tokens of a stream, of all streams; ``prefill_s`` and ``prefill_tokens``.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import trio
from attrs import frozen

from dgr import ContextParams, LinkPolicy, LlamaEngine, Numerics, Pipeline, open_pipeline, open_pipeline_on
from dgr.cluster.connect import RemoteConnector
from dgr.core.values import LogitsWanted
from dgr.engine.base import Work
from dgr.engine.budget import available_cpus
from dgr.errors import InputError
from dgr.selftest.chain import cut_at, some_tokens
from dgr.testing.network.processes import open_up, write_route
from dgr.testing.network.proxy import open_proxies
from dgr_bench.benchmark import Group, Store, Unit, Units, benchmark_command, no_error
from dgr_bench.overhead.ratios import Comparison, Ratios, Sides, Timed
from dgr_bench.plots import Plot
from dgr_bench.quartiles import Quartiles, quartiles_of
from dgr_bench.reports import Section, table
from dgr_bench.results import Kind, Result
from dgr_bench.subjects import add_model_argument, model_of, whole_model
from dgr_bench.verdicts import Check, Goal, judge

#: Tokens of a session's prompt.
_PROMPT = 8
#: Speed through a pipeline over the bare engine's; and of two stages over the whole model with as many threads.
_PIPELINE_GOAL, _SPLIT_GOAL = 0.95, 0.95
#: Sessions from which on the second goal is asked.
_FULL_RING = 4


class SessionsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared."""

    name: str
    sessions: tuple[int, ...]
    #: Layer ranges of the two stages.
    split: tuple[str, ...]
    #: Of every cable, each way.
    delays_ms: tuple[float, ...]
    #: Tokens of all sessions together in a run, and rounds.
    tokens: int
    rounds: int
    #: Streams whose pace is measured, their tokens alone, and tokens of the prompt beside them.
    streams: int
    paced: int
    prompt: int
    #: Whether anything is asked of the figures.
    judged: bool

    @property
    def context(self) -> ContextParams:
        """Of every side: one session may draw all tokens."""
        n_ctx = max(self.tokens + 2 * _PROMPT, 512)
        return ContextParams(n_ctx=n_ctx, n_seq_max=max(self.sessions))


class Barrier:
    """Lets as many tasks on together as wait for it."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._open = trio.Event()
        #: When the last one came; and the CPU time of this thread until then.
        self.passed = self.cpu = 0.0

    async def wait(self) -> None:
        self._missing -= 1
        if not self._missing:
            self.passed, self.cpu = trio.current_time(), time.thread_time()
            self._open.set()
        await self._open.wait()


# --- one run of one side ---------------------------------------------------------------------------------------------


async def drawn_seconds(pipeline: Pipeline, sessions: int, tokens: int) -> float:
    """Seconds in which ``sessions`` draw ``tokens`` together, after the first of each."""
    began, ended = await _draw(pipeline, sessions, tokens)
    return ended.passed - began.passed


async def loop_seconds(sessions: int, tokens: int, pipeline: Pipeline) -> dict[str, Any]:
    """CPU time of the thread of the event loop meanwhile."""
    began, ended = await _draw(pipeline, sessions, tokens)
    return {"tokens": tokens, "loop_s": ended.cpu - began.cpu}


async def _draw(pipeline: Pipeline, sessions: int, tokens: int) -> tuple[Barrier, Barrier]:
    counts = [tokens // sessions + (index < tokens % sessions) for index in range(sessions)]
    ready, done = Barrier(sessions), Barrier(sessions)

    async def draw(index: int) -> None:
        async with pipeline.session() as session:
            prompt = some_tokens(_PROMPT, pipeline.n_vocab, seed=index)
            answer = session.generate(prompt, max_tokens=1 + counts[index], stop=())
            await anext(answer)
            await ready.wait()
            async for _ in answer:
                pass
            await done.wait()  # no session is closed while another draws

    async with trio.open_nursery() as nursery:
        for index in range(sessions):
            nursery.start_soon(draw, index)
    return ready, done


async def bare_seconds(engine: LlamaEngine, sessions: int, tokens: int) -> float:
    """Seconds of the batches of ``sessions`` tokens that make ``tokens``, in an engine that nobody stands before."""
    n_vocab = engine.describe().n_vocab
    ids = some_tokens(tokens, n_vocab)

    def run() -> float:
        for slot in range(sessions):
            engine.close(slot)
            engine.run([Work(slot, 0, some_tokens(_PROMPT, n_vocab, seed=slot), logits=LogitsWanted.LAST)])
        began = time.perf_counter()
        for step, at in enumerate(range(0, tokens, sessions)):
            batch = enumerate(ids[at : at + sessions])
            engine.run([Work(slot, _PROMPT + step, [token], logits=LogitsWanted.LAST) for slot, token in batch])
        return time.perf_counter() - began

    return await trio.to_thread.run_sync(run)


# --- comparisons -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _over_cables(model: Path, plan: SessionsPlan, delay_ms: float) -> AsyncIterator[Pipeline]:
    """Two stage processes, every cable of which takes a while."""
    context = msgspec.structs.asdict(plan.context) | {"numerics": plan.context.numerics.value}
    with tempfile.TemporaryDirectory() as folder:
        file = write_route(Path(folder) / "route.toml", model, plan.split, **context)
        async with (
            open_up(file),
            open_proxies(file.route) as (route, cables),
            open_pipeline_on(RemoteConnector(LinkPolicy()), route) as pipeline,
        ):
            for cable in cables:
                cable.delay = delay_ms / 1e3
            yield pipeline


def comparisons(model: Path, plan: SessionsPlan) -> list[Comparison]:
    """Everything that a plan compares."""
    found: list[Comparison] = []
    split = ",".join(plan.split)

    def add(name: str, goal: float | None, sides: Callable[[], AbstractAsyncContextManager[Sides]]) -> None:
        asked = None if goal is None or not plan.judged else Goal("at least", goal)
        found.append(Comparison(name, plan.tokens, plan.rounds, asked, sides))

    def run(pipeline: Pipeline, sessions: int) -> Timed:
        return partial(drawn_seconds, pipeline, sessions, plan.tokens)

    def opened(numerics: Numerics = Numerics.EXACT, **options: Any) -> AbstractAsyncContextManager[Pipeline]:
        context = msgspec.structs.replace(plan.context, numerics=numerics)
        return open_pipeline(model, context=context, **options)

    @asynccontextmanager
    async def against_the_engine(sessions: int) -> AsyncIterator[Sides]:
        engine = await trio.to_thread.run_sync(partial(LlamaEngine, model, context=plan.context))
        try:
            async with opened() as pipeline:
                yield run(pipeline, sessions), partial(bare_seconds, engine, sessions, plan.tokens)
        finally:
            engine.stop()

    @asynccontextmanager
    async def against_one(sessions: int, cut: str | None) -> AsyncIterator[Sides]:
        async with opened(split=cut) as pipeline:
            yield run(pipeline, sessions), run(pipeline, 1)

    @asynccontextmanager
    async def against_the_whole(sessions: int) -> AsyncIterator[Sides]:
        async with opened(split=split) as two, opened(threads=2) as whole:
            yield run(two, sessions), run(whole, sessions)

    @asynccontextmanager
    async def against_native(sessions: int) -> AsyncIterator[Sides]:
        async with opened() as exact, opened(Numerics.NATIVE) as native:
            yield run(exact, sessions), run(native, sessions)

    @asynccontextmanager
    async def with_delay(sessions: int, delay_ms: float) -> AsyncIterator[Sides]:
        async with _over_cables(model, plan, delay_ms) as pipeline:
            yield run(pipeline, sessions), run(pipeline, 1)

    for sessions in plan.sessions:
        add(f"{sessions} at once, one stage / bare engine", _PIPELINE_GOAL, partial(against_the_engine, sessions))
    for sessions in plan.sessions:
        goal = _SPLIT_GOAL if sessions >= _FULL_RING else None
        name = f"{sessions} at once, two stages of 1 thread / whole model on 2"
        add(name, goal, partial(against_the_whole, sessions))
    for sessions in plan.sessions:
        add(f"{sessions} at once, exact / native numerics", None, partial(against_native, sessions))
    for cut, where in ((None, "one stage"), (split, "two stages")):
        for sessions in plan.sessions[1:]:
            add(f"{sessions} at once / one, {where}", None, partial(against_one, sessions, cut))
    for delay in plan.delays_ms:
        for sessions in plan.sessions[1:]:
            name = f"{sessions} at once / one, two processes, {delay:g} ms in every cable"
            add(name, None, partial(with_delay, sessions, delay))
    return found


# --- the pace of streams ---------------------------------------------------------------------------------------------


async def pace(plan: SessionsPlan, pipeline: Pipeline) -> dict[str, Any]:
    """Streams draw alone, and then while a long prompt is prefilled beside them."""
    alone: list[float] = []
    beside: list[float] = []
    paced, prefilled = Barrier(plan.streams + 1), trio.Event()

    async def stream(index: int) -> None:
        async with pipeline.session() as session:
            answer = session.generate(some_tokens(_PROMPT, pipeline.n_vocab, seed=index), stop=())
            times = [trio.current_time() async for _ in _first(answer, plan.paced)]
            alone.extend(1e3 * (after - before) for before, after in itertools.pairwise(times[1:]))
            await paced.wait()
            await anext(answer)
            times = [trio.current_time()]
            while not prefilled.is_set():
                await anext(answer)
                times.append(trio.current_time())
            beside.extend(1e3 * (after - before) for before, after in itertools.pairwise(times))

    async with trio.open_nursery() as nursery:
        for index in range(plan.streams):
            nursery.start_soon(stream, index)
        await paced.wait()
        async with pipeline.session() as session:
            began = trio.current_time()
            await session.prefill(some_tokens(plan.prompt, pipeline.n_vocab, seed=99))
            seconds = trio.current_time() - began
        prefilled.set()
    rounded = {name: [round(ms, 2) for ms in gaps] for name, gaps in (("alone_ms", alone), ("beside_ms", beside))}
    return {**rounded, "prefill_s": seconds, "prefill_tokens": plan.prompt}


async def _first(answer: Any, count: int) -> AsyncIterator[Any]:
    for _ in range(count):
        yield await anext(answer)


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


# --- the benchmark ---------------------------------------------------------------------------------------------------


@frozen
class Sessions:
    """The benchmark."""

    model: Path
    plan: SessionsPlan
    ratios: Ratios
    about: dict[str, Any]
    kind: ClassVar[Kind] = "sessions"
    title: ClassVar[str] = "Many sessions"

    def subject(self) -> dict[str, Any]:
        return self.about

    def units(self, _: Store) -> Iterator[Group]:
        for where, cut in self._layouts:
            counts = [
                Unit(self._loop_unit(where, sessions, number), partial(loop_seconds, sessions, self.plan.tokens))
                for sessions in self.plan.sessions
                for number in range(self.plan.rounds)
            ]
            yield Group(counts, partial(open_pipeline, self.model, cut, context=self.plan.context))
        yield from (each.group() for each in self.ratios.compared)
        rounds = [Unit(f"pace, round {number}", partial(pace, self.plan)) for number in range(self.plan.rounds)]
        yield Group(rounds, self._open_paced)

    @property
    def _layouts(self) -> Sequence[tuple[str, str | None]]:
        return (("one stage", None), ("two stages", ",".join(self.plan.split)))

    def _loop_unit(self, where: str, sessions: int, number: int) -> str:
        return f"event loop, {sessions} at once, {where}, round {number}"

    def _loop_times(self, units: Units) -> dict[str, Quartiles]:
        """Microseconds of the event loop's thread for a token, by what was run."""
        found = {}
        for sessions, (where, _) in itertools.product(self.plan.sessions, self._layouts):
            rounds = [units.get(self._loop_unit(where, sessions, number), {}) for number in range(self.plan.rounds)]
            if took := [1e6 * unit["loop_s"] / unit["tokens"] for unit in rounds if "loop_s" in unit]:
                found[f"{sessions} at once, {where}"] = quartiles_of(took)
        return found

    def _open_paced(self) -> AbstractAsyncContextManager[Pipeline]:
        n_ctx = self.plan.prompt + _PROMPT
        context = msgspec.structs.replace(self.plan.context, n_ctx=n_ctx, n_seq_max=self.plan.streams + 1)
        return open_pipeline(self.model, ",".join(self.plan.split), context=context)

    def metrics(self, units: Units, _: Path | None = None) -> dict[str, Any]:
        """The ratios; and milliseconds between two tokens of a stream, over all rounds."""
        measured = [unit for name, unit in units.items() if name.startswith("pace") and "alone_ms" in unit]
        paces = {}
        for when in ("alone", "beside"):
            if gaps := [gap for unit in measured for gap in unit[f"{when}_ms"]]:
                middle, high, most = _quantile(gaps, 0.5), _quantile(gaps, 0.99), max(gaps)
                paces[when] = {"tokens": len(gaps), "median_ms": middle, "p99_ms": high, "max_ms": most}
        rates = [unit["prefill_tokens"] / unit["prefill_s"] for unit in measured]
        prefill = {"prefill_tokens_per_s": quartiles_of(rates)} if rates else {}
        return {
            "loop_us": self._loop_times(units),
            "speed": self.ratios.metrics(units),
            "pace": paces,
            **prefill,
        }

    def checks(self, units: Units) -> list[Check]:
        """Every goal; and that streams go on while a prompt is prefilled."""
        went_on = judge(
            "streams go on beside a prefill",
            "every stream drew tokens meanwhile",
            (
                (name, "" if len(unit["beside_ms"]) >= self.plan.streams else f"{len(unit['beside_ms'])} tokens")
                for name, unit in units.items()
                if "beside_ms" in unit
            ),
        )
        return [no_error(units, "unit"), went_on, *self.ratios.checks(units)]

    def tables(self, result: Result) -> list[Section]:
        heads = ("streams", "tokens", "median, ms", "p99, ms", "most, ms")
        rows = [
            (when, row["tokens"], f"{row['median_ms']:.1f}", f"{row['p99_ms']:.1f}", f"{row['max_ms']:.1f}")
            for when, row in result.metrics["pace"].items()
        ]
        said = f"Milliseconds between two tokens of {self.plan.streams} streams, with a prompt of {self.plan.prompt} beside."
        loop = msgspec.convert(result.metrics["loop_us"], dict[str, Quartiles])
        took = table(("sessions", "CPU time of the event loop, µs a token"), list(loop.items()))
        return [
            Section("Event loop", ("Medians, with quartiles in brackets.", took)),
            self.ratios.section(result.metrics["speed"]),
            Section("Pace", (said, table(heads, rows))),
        ]

    def plots(self, result: Result) -> list[Plot]:
        return [self.ratios.plot(result.metrics["speed"], "sessions", "Speed of many sessions")]


# --- the command -----------------------------------------------------------------------------------------------------


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)


def _sessions(args: argparse.Namespace) -> Sessions:
    cpus = available_cpus()
    if cpus < 2:
        raise InputError(f"this process may use {cpus} CPU; two stages of one thread each need 2")
    model = model_of(args)
    artifact = whole_model(model)
    n_layers = artifact.hp.n_layers
    plan = SessionsPlan(
        name="sessions, quick" if args.quick else "sessions",
        sessions=(1, 2) if args.quick else (1, 2, 4, 8),
        split=tuple(str(layers) for layers in cut_at(n_layers, [n_layers // 2])),
        delays_ms=(2,) if args.quick else (10, 40),
        tokens=24 if args.quick else 96,
        rounds=1 if args.quick else 3,
        streams=2 if args.quick else 3,
        paced=8 if args.quick else 24,
        prompt=256 if args.quick else 2048,
        judged=not args.quick,
    )
    about = {"model": model.name, "artifact": artifact.identity}
    return Sessions(model, plan, Ratios(comparisons(model, plan)), about)


_HELP = "many sessions on one pipeline against the bare engine, one session, the whole model; and the pace of streams"
COMMAND = benchmark_command("sessions", _HELP, __doc__ or "", _add_arguments, _sessions)
