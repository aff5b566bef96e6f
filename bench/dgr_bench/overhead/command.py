"""``dgr-bench overhead``: what dgr costs on top of llama.cpp, as ratios of speed measured side by side.

Four comparisons on one artifact with equal settings (batch, sub-batch, context, flash attention, K-cache type):

* a pipeline of one stage against upstream's llama-bench of the same pin, both in native numerics with as many threads;
* two stage processes of one thread each on loopback against the whole model on one thread: decoding of one session;
* exact numerics against native ones;
* a hop of one token's boundary, in process and over loopback TLS, beyond its wire (see ``dgr_bench.overhead.hops``).

The two sides of a comparison alternate round by round, and so does who begins. Prefill is timed from the prompt to the first
token; decoding from an answer's first token to its last, drawn greedily. llama-bench draws no token and its metrics hold no
start, load or warm-up; its tests are as many tokens at the same positions.

Units, beside those of ``dgr_bench.overhead.hops``:

``COMPARISON, round N``
    ``tokens``; ``ours_s`` and ``theirs_s``: seconds that each side took for them; ``began``: the side that began.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import trio
from attrs import asdict, evolve, frozen

from dgr import Artifact, ContextParams, Numerics, Pipeline, open_pipeline, open_route
from dgr.engine.budget import available_cpus
from dgr.engine.native import build_info
from dgr.errors import InputError
from dgr.testing.chain import cut_at, some_tokens
from dgr.testing.models import cached_fixture
from dgr.testing.processes import open_up, write_route
from dgr_bench import reports
from dgr_bench.options import add_run_arguments, exit_code, say
from dgr_bench.overhead import hops
from dgr_bench.plots import BLUE, GREY, RED, draw
from dgr_bench.progress import Progress
from dgr_bench.quartiles import Goal, Quartiles, quartiles_of
from dgr_bench.results import Check, Journal, Result
from dgr_bench.upstream import LlamaBench, find_llama_bench

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Comparison", "checks", "comparisons", "measure", "metrics", "register"]

#: Seconds that one run of one side took.
Timed: TypeAlias = Callable[[], Awaitable[float]]

#: Speed of ours over speed of theirs.
_GOAL = Goal("at least", 0.97)
#: A token of the small model is all overhead: ``--quick`` shows that everything runs.
_QUICK_GOAL = Goal("at least", 0.2)
#: Tokens of a run, and rounds.
_FULL = {"tokens": {"prefill": 512, "decode": 64}, "rounds": {"prefill": 6, "decode": 20}}
_QUICK = {"tokens": {"prefill": 64, "decode": 16}, "rounds": {"prefill": 2, "decode": 2}}


# --- one run of one side ---------------------------------------------------------------------------------------------


async def prefill_seconds(pipeline: Pipeline, tokens: int) -> float:
    """From a prompt of that many tokens to the first token of the answer."""
    async with pipeline.session() as session:
        began = trio.current_time()
        async for _ in session.generate(some_tokens(tokens, pipeline.n_vocab), max_tokens=1, stop=()):
            pass
        return trio.current_time() - began


async def decode_seconds(pipeline: Pipeline, tokens: int) -> float:
    """From the first token of an answer to that many later."""
    async with pipeline.session() as session:
        answer = session.generate(some_tokens(1, pipeline.n_vocab), max_tokens=tokens + 1, stop=())
        await anext(answer)
        began = trio.current_time()
        async for _ in answer:
            pass
        return trio.current_time() - began


# --- comparisons -----------------------------------------------------------------------------------------------------


@frozen
class Comparison:
    """Two sides that do the same work."""

    name: str
    #: Tokens of one run.
    tokens: int
    rounds: int
    #: For the median of the ratios; None: it is shown, and nothing is asked of it.
    goal: Goal | None
    #: Both sides, ready to run: ours first.
    open: Callable[[], AbstractAsyncContextManager[tuple[Timed, Timed]]]


def _runs(pipeline: Pipeline, phase: str, tokens: int) -> Timed:
    seconds = prefill_seconds if phase == "prefill" else decode_seconds
    return lambda: seconds(pipeline, tokens)


def comparisons(model: Path, locked: Mapping[str, Any], llama_bench: Path) -> list[Comparison]:
    """Everything that a plan compares, hops aside."""
    goal = Goal("at least", locked["goal"])
    found: list[Comparison] = []

    def context(phase: str, numerics: Numerics) -> ContextParams:
        # As llama-bench does, a context as long as the test.
        return ContextParams(n_ctx=locked["tokens"][phase], numerics=numerics, **locked["settings"])

    def against_upstream(phase: str, threads: int) -> Comparison:
        tokens, native = locked["tokens"][phase], context(phase, Numerics.NATIVE)
        theirs = LlamaBench(llama_bench, build_info()["llama_cpp_commit"], model, native, threads)

        @asynccontextmanager
        async def sides() -> AsyncIterator[tuple[Timed, Timed]]:
            async with open_pipeline(model, context=native, threads=threads) as pipeline:
                yield _runs(pipeline, phase, tokens), lambda: theirs.seconds(**{phase: tokens})

        name = f"{phase}, one stage / llama-bench, {threads} thread{'s' * (threads > 1)}"
        return Comparison(name, tokens, locked["rounds"][phase], goal, sides)

    def in_two_processes() -> Comparison:
        tokens, native = locked["tokens"]["decode"], context("decode", Numerics.NATIVE)
        # A stage takes no batch longer than its context, and would not be the one that the route asks for.
        native = evolve(native, n_ctx=max(native.n_ctx, native.n_batch))

        @asynccontextmanager
        async def sides() -> AsyncIterator[tuple[Timed, Timed]]:
            with tempfile.TemporaryDirectory() as folder:
                settings = asdict(native) | {"numerics": native.numerics.value}
                file = write_route(Path(folder) / "route.toml", model, locked["split"], **settings)
                async with open_up(file), open_route(file) as two, open_pipeline(model, context=native) as whole:
                    yield _runs(two, "decode", tokens), _runs(whole, "decode", tokens)

        name = "decode, two processes / whole, 1 thread each"
        return Comparison(name, tokens, locked["rounds"]["decode"], goal, sides)

    def of_numerics(phase: str) -> Comparison:
        tokens = locked["tokens"][phase]

        @asynccontextmanager
        async def sides() -> AsyncIterator[tuple[Timed, Timed]]:
            async with (
                open_pipeline(model, context=context(phase, Numerics.EXACT)) as exact,
                open_pipeline(model, context=context(phase, Numerics.NATIVE)) as native,
            ):
                yield _runs(exact, phase, tokens), _runs(native, phase, tokens)

        asked = None if phase == "prefill" else goal
        name = f"{phase}, exact / native numerics, 1 thread"
        return Comparison(name, tokens, locked["rounds"][phase], asked, sides)

    for threads in locked["threads"]:
        found += [against_upstream(phase, threads) for phase in ("prefill", "decode")]
    return [*found, in_two_processes(), of_numerics("prefill"), of_numerics("decode")]


async def measure(journal: Journal, compared: Sequence[Comparison], bar: Progress) -> None:
    """Measure the rounds that are missing in the journal."""
    for comparison in compared:
        units = [f"{comparison.name}, round {number}" for number in range(comparison.rounds)]
        missing = [number for number, unit in enumerate(units) if journal.get(unit) is None]
        bar.begin(comparison.name)
        bar.done(comparison.rounds - len(missing))
        if not missing:
            continue
        async with comparison.open() as sides:
            for side in sides:
                await side()  # warm-up
            for number in missing:
                order = (0, 1) if number % 2 == 0 else (1, 0)
                seconds = {side: await sides[side]() for side in order}
                raw = {"tokens": comparison.tokens, "ours_s": seconds[0], "theirs_s": seconds[1]}
                journal.put(units[number], {**raw, "began": ("ours", "theirs")[order[0]]})
                bar.done()


# --- metrics and verdicts --------------------------------------------------------------------------------------------


def ratios(units: Mapping[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Comparison -> speed of ours over speed of theirs, for each round."""
    found: dict[str, list[float]] = {}
    for name, unit in units.items():
        if "ours_s" in unit:
            found.setdefault(name.rpartition(", round ")[0], []).append(unit["theirs_s"] / unit["ours_s"])
    return found


def metrics(units: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Spreads of the ratios; and tokens a second of both sides, for a feeling of the size."""
    found: dict[str, Any] = {}
    for name, values in ratios(units).items():
        rounds = [unit for key, unit in units.items() if key.rpartition(", round ")[0] == name]
        found[name] = {
            "ratio": quartiles_of(values),
            "ours_tokens_per_s": quartiles_of([unit["tokens"] / unit["ours_s"] for unit in rounds]),
            "theirs_tokens_per_s": quartiles_of([unit["tokens"] / unit["theirs_s"] for unit in rounds]),
        }
    return {"speed": found, "hops": hops.metrics(units)}


def checks(units: Mapping[str, dict[str, Any]], compared: Sequence[Comparison]) -> list[Check]:
    """Every goal."""
    found = ratios(units)
    verdicts = [
        each.goal.check(f"speed of {each.name}", quartiles_of(found[each.name]))
        for each in compared
        if each.goal is not None
    ]
    return [*verdicts, *hops.checks(units)]


# --- the command -----------------------------------------------------------------------------------------------------


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "overhead",
        help="dgr against upstream's llama-bench, exact against native, processes against one, a hop against its wire",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", type=Path, metavar="M", help="a GGUF (default: a V4 fixture of 649 M parameters in mixed weights)"
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1], metavar="N", help="of a stage and of llama-bench (default: 1)"
    )
    parser.add_argument(
        "--llama-bench",
        type=Path,
        metavar="PATH",
        help="upstream's binary, of the same pin (default: built from the pin, which takes minutes once)",
    )
    add_run_arguments(parser, "dgr-bench-overhead")
    parser.set_defaults(run=run)


def _check_arguments(args: argparse.Namespace) -> None:
    cpus = available_cpus()
    for threads in args.threads:
        if not 1 <= threads <= cpus:
            raise InputError(f"--threads {threads}: give 1 to {cpus}, the CPUs this process may use")
    if cpus < 2:
        raise InputError(f"this process may use {cpus} CPU; two stage processes of one thread each need 2")


def run(args: argparse.Namespace) -> int:
    """Measure, report, judge."""
    _check_arguments(args)
    sizes = _QUICK if args.quick else _FULL
    model = args.model or cached_fixture("mixed", preset=None if args.quick else "big")
    artifact = Artifact.open(model)
    settings, n_layers = ContextParams(), artifact.hp.n_layers
    hop_plan = hops.plan(args.quick, ("memory", "tls"), ("decode",))
    locked: dict[str, Any] = {
        "name": "overhead, quick" if args.quick else "overhead",
        **sizes,
        "threads": sorted(set(args.threads)),
        "split": [str(layers) for layers in cut_at(n_layers, [n_layers // 2])],
        "settings": {name: getattr(settings, name) for name in ("n_batch", "n_ubatch", "type_k", "flash_attn")},
        "goal": (_QUICK_GOAL if args.quick else _GOAL).value,
        "hops": hop_plan,
    }
    binary = find_llama_bench(args.llama_bench)
    subject = {"model": Path(model).name, "artifact": artifact.identity}
    journal = Journal.open(args.out, "overhead", locked, subject, args.command_line, fresh=args.fresh)
    compared = comparisons(Path(model), locked, binary)
    with Progress("overhead", sum(each.rounds for each in compared) + len(hop_plan["transports"])) as bar:
        trio.run(measure, journal, compared, bar)
        trio.run(hops.measure, journal, hop_plan, bar)
    units = journal.result.units
    result = journal.finish(metrics(units), checks(units, compared))
    _report(result, journal, compared)
    say(result, args.out, args.json)
    return exit_code(result)


def _report(result: Result, journal: Journal, compared: Sequence[Comparison]) -> None:
    speed = metrics(result.units)["speed"]
    rows = [
        (
            each.name,
            f"{speed[each.name]['ours_tokens_per_s'].median:.1f}",
            f"{speed[each.name]['theirs_tokens_per_s'].median:.1f}",
            str(speed[each.name]["ratio"]),
            each.goal or "",
        )
        for each in compared
    ]
    heads = ("ours / theirs", "ours, tokens/s", "theirs, tokens/s", "ratio", "goal")
    reports.write_report(
        journal.folder,
        reports.heading(result, "Overhead"),
        reports.verdicts(result),
        "## Speed\n\nMedians, with quartiles in brackets; ratios of speed are per round, above 1 dgr's side is faster.",
        reports.table(heads, rows),
        reports.picture(_plot(journal.folder, compared, speed), "Ratios of speed by comparison"),
        hops.report_part(result, journal),
        reports.machine(result),
    )


def _plot(folder: Path, compared: Sequence[Comparison], speed: Mapping[str, Mapping[str, Quartiles]]) -> str:
    """Bars of ratios with their quartiles; the goal as a line."""

    def paint(axes: Axes) -> None:
        for place, each in enumerate(reversed(compared)):
            ratio = speed[each.name]["ratio"]
            errors = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
            axes.barh(place, ratio.median, 0.6, color=BLUE, xerr=errors, ecolor=GREY, capsize=4)
        axes.set_yticks(range(len(compared)), [each.name.replace(", ", "\n", 1) for each in reversed(compared)])
        goal = next(each.goal for each in compared if each.goal is not None)
        axes.axvline(goal.value, color=RED, linestyle="--", label=f"goal {goal}")

    return draw(folder, "overhead", "Speed of dgr's side over the other's", "ratio of speed", "", paint)
