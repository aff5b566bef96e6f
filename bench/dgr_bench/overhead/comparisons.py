"""What ``dgr-bench overhead`` compares: two sides that do the same work, round by round."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from dgr import ContextParams, Numerics, Pipeline, open_pipeline, open_route
from dgr.engine.native import build_info
from dgr.testing.network.processes import open_up, write_route
from dgr_bench.links.hops import HopsPlan
from dgr_bench.overhead.ratios import Comparison, Sides, Timed
from dgr_bench.timed import decode_seconds, prefill_seconds
from dgr_bench.upstream.llama_bench import LlamaBench
from dgr_bench.verdicts import Goal


class OverheadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared."""

    name: str
    #: Tokens of a run, and rounds, of ``prefill`` and ``decode``.
    tokens: dict[str, int]
    rounds: dict[str, int]
    #: Of a stage and of llama-bench.
    threads: tuple[int, ...]
    #: Layer ranges of the two stage processes.
    split: tuple[str, ...]
    #: Context parameters of both sides.
    settings: dict[str, Any]
    goal: float
    hops: HopsPlan

    def context(self, phase: str, numerics: Numerics) -> ContextParams:
        """As llama-bench does, a context as long as the test."""
        return ContextParams(n_ctx=self.tokens[phase], numerics=numerics, **self.settings)


# --- one run of one side ---------------------------------------------------------------------------------------------


def _runs(pipeline: Pipeline, phase: str, tokens: int) -> Timed:
    return partial(prefill_seconds if phase == "prefill" else decode_seconds, pipeline, tokens)


# --- comparisons -----------------------------------------------------------------------------------------------------


def comparisons(model: Path, plan: OverheadPlan, llama_bench: Path) -> list[Comparison]:
    """Everything that a plan compares, hops aside."""
    found: list[Comparison] = []

    def add(phase: str, name: str, sides: Callable[[], AbstractAsyncContextManager[Sides]], goal: bool = True) -> None:
        asked = Goal("at least", plan.goal) if goal else None
        found.append(Comparison(f"{phase}, {name}", plan.tokens[phase], plan.rounds[phase], asked, sides))

    @asynccontextmanager
    async def against_upstream(phase: str, threads: int) -> AsyncIterator[Sides]:
        tokens, native = plan.tokens[phase], plan.context(phase, Numerics.NATIVE)
        theirs = LlamaBench(llama_bench, build_info()["llama_cpp_commit"], model, native, threads)
        async with open_pipeline(model, context=native, threads=threads) as pipeline:
            yield _runs(pipeline, phase, tokens), partial(theirs.seconds, **{phase: tokens})

    @asynccontextmanager
    async def in_two_processes(against_whole: bool) -> AsyncIterator[Sides]:
        tokens, native = plan.tokens["decode"], plan.context("decode", Numerics.NATIVE)
        # A stage takes no batch longer than its context, and would not be the one that the route asks for.
        native = replace(native, n_ctx=max(native.n_ctx, native.n_batch))
        with tempfile.TemporaryDirectory() as folder:
            settings = msgspec.structs.asdict(native) | {"numerics": native.numerics.value}
            file = write_route(Path(folder) / "route.toml", model, plan.split, **settings)
            async with open_up(file), open_route(file) as two, AsyncExitStack() as stack:
                if against_whole:
                    whole = await stack.enter_async_context(open_pipeline(model, context=native))
                    yield _runs(two, "decode", tokens), _runs(whole, "decode", tokens)
                else:
                    yield _runs(two, "decode", tokens), partial(decode_seconds, two, tokens, 0)

    @asynccontextmanager
    async def of_numerics(phase: str) -> AsyncIterator[Sides]:
        async with (
            open_pipeline(model, context=plan.context(phase, Numerics.EXACT)) as exact,
            open_pipeline(model, context=plan.context(phase, Numerics.NATIVE)) as native,
        ):
            yield _runs(exact, phase, plan.tokens[phase]), _runs(native, phase, plan.tokens[phase])

    for threads in plan.threads:
        for phase in ("prefill", "decode"):
            words = f"one stage / llama-bench, {threads} thread{'s' * (threads > 1)}"
            add(phase, words, partial(against_upstream, phase, threads))
    add("decode", "two processes / whole, 1 thread each", partial(in_two_processes, True))
    add("decode", "two processes, runs / a request a token", partial(in_two_processes, False), goal=False)
    for phase in ("prefill", "decode"):
        add(phase, "exact / native numerics, 1 thread", partial(of_numerics, phase), goal=phase == "decode")
    return found
