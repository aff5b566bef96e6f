"""``dgr-bench widths``: layers of the published widths on this machine, beside the machine's own limits.

A model of some layers is written (``dgr fixture --preset real``), which takes 3.4 GiB a layer, and removed at the end. One
layer of every kind is a stage of its own: it decodes and prefills after growing contexts, whole and operation by operation.
Short contexts are computed; for long ones the state is filled with random rows (``dgr.testing.native_measurements``), which
takes the time of the same work and means nothing. The range is run by one stage and by two, whose outputs must be equal to
the bit, and, when it is a whole model, by upstream's llama-bench. What memory and processor do at best is measured beside.

With one thread what is computed is timed by CPU time, which other work on the machine disturbs least; with several by the
clock on the wall, as loads and latencies always are.

Units:

``file``
    ``bytes``; ``write_s``: None when the file was there; ``digest_s``: reading all of it for its identity.
``roofs``
    Bytes and operations a second, by kind.
``KIND/N``
    A layer after N tokens: ``position``: where it really was; ``computed``: by a prompt, or filled; seconds of each token
    (``decode_s``) and of a chunk (``prefill_s``), and of the parts of both (``…_ops``, one operation at a time); of its state's
    digest (``frontier_s``) and of clearing it (``clear_s``); ``rows`` of each component, least and most, and ``rows_wanted``.
``load/KIND``
    Seconds of the arithmetic before a stage is admitted, of loading from the disk and from the system's cache; bytes.
``abort/KIND``
    Seconds until a stage that was told to stop in the midst of a chunk had stopped; None when the chunk was faster.
``output``
    Seconds of tokens with a row of logits, and of tokens without, in turn.
``whole``, ``split``
    The range on one stage and on two: seconds, and digests of all outputs.
``upstream``
    Seconds of llama-bench on the same file.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import trio
from attrs import frozen
from msgspec.structs import replace

from dgr import Numerics
from dgr.core.host import available_memory
from dgr.core.route import LayerRange
from dgr.core.units import human_bytes
from dgr.engine.budget import available_cpus
from dgr.engine.native import build_info
from dgr.errors import InputError
from dgr.gguf.writer import TensorForm
from dgr.selftest.fixture.presets import tensor_type
from dgr.v4.hyper_parameters import V4_FLASH
from dgr.v4.tensors import block_tensors, head_tensors, tail_tensors
from dgr_bench.benchmark import Group, Store, Unit, Units, benchmark_command, execute
from dgr_bench.plots import Plot
from dgr_bench.reports import Section
from dgr_bench.results import Kind, Result
from dgr_bench.upstream.llama_bench import LlamaBench
from dgr_bench.upstream.programs import add_program_argument, find_program
from dgr_bench.verdicts import Check
from dgr_bench.widths import report
from dgr_bench.widths.measurements import (
    Layer,
    cut,
    run_abort,
    run_context,
    run_file,
    run_load,
    run_output,
    run_range,
    run_roofs,
)
from dgr_bench.widths.metrics import checks, metrics
from dgr_bench.widths.plan import WidthsJob, WidthsPlan

_CONTEXTS = (1, 4096, 32768, 131072, 1048576)
_FULL: dict[str, Any] = {
    "preset": "real",
    "contexts": _CONTEXTS,
    "prefilled": 4096,
    "n_ctx": 1048576,
    "chunk": 512,
    "decode": 16,
    "roof_s": 1.0,
    "roof_bytes": 1 << 30,
}
#: The same on narrow layers: all of it runs, and its figures say nothing.
_QUICK: dict[str, Any] = {
    "preset": "tiny",
    "contexts": (1, 256, 2048),
    "prefilled": 256,
    "n_ctx": 2048,
    "chunk": 64,
    "decode": 4,
    "roof_s": 0.02,
    "roof_bytes": 1 << 24,
}
#: Bytes beside the weights of the whole range: buffers and state of a CSA layer for a million tokens, and the process.
_BESIDE = 2 << 30
_EXTENSION = "dgr.testing._probe"


@frozen
class Widths:
    """The benchmark."""

    job: WidthsJob
    kind: ClassVar[Kind] = "widths"
    title: ClassVar[str] = "Layers of the published widths"

    @property
    def plan(self) -> WidthsPlan:
        return self.job.plan

    def subject(self) -> dict[str, Any]:
        plan = self.plan
        return {"model": f"dgr fixture, preset {plan.preset}, layers {plan.layers}, weights {plan.weights}"}

    def units(self, _: Store) -> Iterator[Group]:
        job, plan = self.job, self.plan
        # Lengths of the bar: about seconds at the published widths.
        yield Group(
            [Unit("file", _off_thread(lambda _: run_file(job)), 60), Unit("roofs", _off_thread(_roofs(job)), 5)]
        )
        for kind, layer in plan.kinds.items():
            units = [Unit(f"load/{kind}", _off_thread(run_load), 15)]
            units += [Unit(f"{kind}/{at}", _off_thread(partial(run_context, at)), 20) for at in plan.contexts]
            if layer == plan.n_layers - 1:
                units.append(Unit("output", _off_thread(run_output), 5))
            yield Group([*units, Unit(f"abort/{kind}", _off_thread(run_abort), 5)], partial(_open_layer, job, layer))
        tail = plan.n_layers - 1
        if plan.range.end == plan.n_layers and tail not in plan.kinds.values():
            yield Group([Unit("output", _off_thread(run_output), 10)], partial(_open_layer, job, tail))
        if len(plan.range) > 1:
            ranges: dict[str, Sequence[LayerRange]] = {"whole": (plan.range,), "split": cut(plan.range)}
            yield Group([Unit(name, _off_thread(_ranges(job, of)), 30) for name, of in ranges.items()])
        if plan.upstream:
            yield Group([Unit("upstream", partial(_run_upstream, job), 60)])

    def metrics(self, units: Units, _: Path | None = None) -> dict[str, Any]:
        return metrics(self.plan, units, self.job.artifact() if self.job.path.exists() else None)

    def checks(self, units: Units) -> list[Check]:
        return checks(self.plan, units)

    def tables(self, result: Result) -> list[Section]:
        return report.tables(result, self.plan)

    def plots(self, result: Result) -> list[Plot]:
        return report.plots(result, self.plan)


def _off_thread(body: Callable[[Any], Any]) -> Callable[[Any], Awaitable[Any]]:
    """A unit that computes, beside the event loop."""
    return lambda opened: trio.to_thread.run_sync(body, opened)


def _roofs(job: WidthsJob) -> Callable[[Any], Any]:
    return lambda _: run_roofs(job)


def _ranges(job: WidthsJob, ranges: Sequence[LayerRange]) -> Callable[[Any], Any]:
    return lambda _: run_range(job, ranges)


@asynccontextmanager
async def _open_layer(job: WidthsJob, layer: int) -> AsyncIterator[Layer]:
    opened = Layer(job, layer)
    try:
        yield opened
    finally:
        opened.stop()


async def _run_upstream(job: WidthsJob, _: Any) -> dict[str, float]:
    """llama-bench's own test of a prompt, and of tokens from the start."""
    assert job.llama_bench is not None
    plan = job.plan
    await trio.to_thread.run_sync(job.artifact)
    theirs = LlamaBench(
        job.llama_bench,
        build_info()["llama_cpp_commit"],
        job.path,
        replace(job.context, n_ctx=plan.chunk, numerics=Numerics.NATIVE),
        plan.threads,
    )
    return {
        "decode_s": await theirs.seconds(decode=plan.decode),
        "prefill_s": await theirs.seconds(prefill=plan.chunk),
    }


# --- the command -----------------------------------------------------------------------------------------------------


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layers",
        default="4",
        metavar="N|A:B",
        help="first N layers as a whole model, or layers A to B - 1 as a slice, 3.4 GiB each (default: 4, which is all kinds)",
    )
    parser.add_argument("--contexts", metavar="N,…", help="tokens before what is timed, ascending")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of every stage (default: 1)")
    parser.add_argument(
        "--numerics", type=Numerics, choices=list(Numerics), default=Numerics.EXACT, metavar="{exact,native}"
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="where the model is written (default: that of --out)"
    )
    parser.add_argument("--keep", action="store_true", help="leave the model there")
    parser.add_argument("--upstream", action="store_true", help="also run upstream's llama-bench, on a whole model")
    add_program_argument(parser, "llama-bench")


def _contexts(text: str, n_ctx: int) -> tuple[int, ...]:
    try:
        contexts = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise InputError(f"--contexts is {text!r}; give numbers of tokens, such as 1,4096,32768") from None
    if list(contexts) != sorted(set(contexts)) or not 1 <= contexts[0] <= contexts[-1] <= n_ctx:
        raise InputError(f"--contexts is {text}; give numbers from 1 to {n_ctx} that ascend, each once")
    return contexts


def _plan(args: argparse.Namespace) -> WidthsPlan:
    settings = dict(_QUICK if args.quick else _FULL)
    if args.contexts is not None:
        settings["contexts"] = _contexts(args.contexts, settings["n_ctx"])
    if not (args.layers.isascii() and args.layers.isdigit()) and ":" not in args.layers:
        raise InputError(f"--layers is {args.layers!r}; give a number of layers, or a range A:B such as 2:4")
    cpus = available_cpus()
    if not 1 <= args.threads <= cpus:
        raise InputError(f"--threads {args.threads}: give 1 to {cpus}, the CPUs this process may use")
    if args.layers.isdigit() and not 1 <= int(args.layers[:9]) <= V4_FLASH.n_layers:
        raise InputError(f"--layers {args.layers}: the schedule has 1 to {V4_FLASH.n_layers}")
    plan = WidthsPlan(
        name="widths, quick" if args.quick else "widths",
        layers=args.layers,
        weights="mixed",
        threads=args.threads,
        numerics=args.numerics,
        upstream=args.upstream,
        **settings,
    )
    V4_FLASH.check_range(plan.range)
    if plan.upstream and plan.is_slice:
        raise InputError(
            f"llama-bench runs whole models, and --layers {args.layers} is a slice; give a number of layers"
        )
    if plan.upstream and "CSA" not in plan.kinds:
        raise InputError("llama-bench ends on a model without a CSA layer; give --layers 3 or more")
    return plan


def _weight_bytes(plan: WidthsPlan) -> int:
    """Bytes of a range at the published widths."""
    layers = plan.range
    specs = [spec for layer in layers.layers for spec in block_tensors(V4_FLASH, layer)]
    specs += head_tensors(V4_FLASH) if layers.begin == 0 else ()
    specs += tail_tensors(V4_FLASH) if layers.end == plan.n_layers else ()
    return sum(
        TensorForm(spec.name, spec.ne, tensor_type(spec, plan.weights)).n_bytes for spec in specs if spec.required
    )


def _check_memory(plan: WidthsPlan) -> None:
    """Raise :class:`~dgr.errors.InputError` for a range that fits no memory here."""
    if plan.preset != "real":
        return
    needed, free = _weight_bytes(plan) + _BESIDE, available_memory()
    if needed > free:
        raise InputError(
            f"{len(plan.range)} layers on one stage take about {human_bytes(needed)}, over the available memory of"
            f" {human_bytes(free)}; give fewer (--layers A:B)"
        )


def _widths(args: argparse.Namespace) -> Widths:
    if importlib.util.find_spec(_EXTENSION) is None:
        raise InputError(
            f"this installation has no {_EXTENSION}, which times operations; install a checkout with `make build`, or with"
            " --config-settings=cmake.define.DGR_TEST_EXTENSION=ON"
        )
    plan = _plan(args)
    _check_memory(plan)
    folder = args.folder or args.out
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{plan.preset}-{plan.layers.replace(':', '-')}-{plan.weights}-{plan.seed}.gguf"
    return Widths(
        WidthsJob(plan, folder / name, find_program("llama-bench", args.llama_bench) if plan.upstream else None)
    )


def _run(args: argparse.Namespace) -> int:
    """Measure; the model stays when that was interrupted, so that the same command can go on."""
    benchmark = _widths(args)
    code = execute(benchmark, args)
    if not args.keep:
        benchmark.job.path.unlink(missing_ok=True)
    return code


COMMAND = benchmark_command(
    "widths",
    "layers of the published widths beside the machine's limits",
    __doc__ or "",
    _add_arguments,
    _widths,
    _run,
)
