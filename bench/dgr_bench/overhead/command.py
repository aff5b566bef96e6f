"""``dgr-bench overhead``: what dgr costs on top of llama.cpp, as ratios of speed measured side by side.

Four comparisons on one artifact with equal settings (batch, sub-batch, context, flash attention, K-cache type):

* a pipeline of one stage against upstream's llama-bench of the same pin, both in native numerics with as many threads;
* two stage processes of one thread each on loopback against the whole model on one thread: decoding of one session;
* exact numerics against native ones;
* a hop of one token's boundary, in process and over loopback TLS, beyond its wire (see ``dgr_bench.links.hops``).

The two sides of a comparison alternate round by round, and so does who begins. Prefill is timed from the prompt to the first
token; decoding from an answer's first token to its last, drawn greedily. llama-bench draws no token and its times hold no
start, load or warm-up; its tests are as many tokens at the same positions.

Units, beside those of ``dgr_bench.links.hops``:

``COMPARISON, round N``
    ``tokens``; ``ours_s`` and ``theirs_s``: seconds that each side took for them; ``began``: the side that began.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from attrs import frozen

from dgr import ContextParams
from dgr.engine.budget import available_cpus
from dgr.errors import InputError
from dgr.selftest.chain import cut_at
from dgr_bench.benchmark import Group, Store, Units, benchmark_command
from dgr_bench.links import hops
from dgr_bench.links.hops import Hops
from dgr_bench.overhead.comparisons import OverheadPlan, comparisons
from dgr_bench.overhead.ratios import Comparison, Ratios
from dgr_bench.plots import Plot
from dgr_bench.reports import Section
from dgr_bench.results import Kind, Result
from dgr_bench.subjects import add_model_argument, model_of, whole_model
from dgr_bench.upstream.programs import add_program_argument, find_program
from dgr_bench.verdicts import Check

#: Speed of ours over speed of theirs. A token of the small model is all overhead: ``--quick`` shows that everything runs.
_GOAL, _QUICK_GOAL = 0.97, 0.2
#: Tokens of a run, and rounds.
_FULL: dict[str, Any] = {"tokens": {"prefill": 512, "decode": 64}, "rounds": {"prefill": 6, "decode": 20}}
_QUICK: dict[str, Any] = {"tokens": {"prefill": 64, "decode": 16}, "rounds": {"prefill": 2, "decode": 2}}


@frozen
class Overhead:
    """The benchmark."""

    plan: OverheadPlan
    compared: Sequence[Comparison]
    about: dict[str, Any]
    kind: ClassVar[Kind] = "overhead"
    title: ClassVar[str] = "Overhead"

    @property
    def hops(self) -> Hops:
        """The part that measures hops."""
        return Hops(self.plan.hops)

    def subject(self) -> dict[str, Any]:
        return self.about

    def units(self, store: Store) -> Iterator[Group]:
        yield from (each.group() for each in self.compared)
        yield from self.hops.units(store)

    @property
    def ratios(self) -> Ratios:
        """The part that compares."""
        return Ratios(self.compared)

    def metrics(self, units: Units, _: Path | None = None) -> dict[str, Any]:
        return {"speed": self.ratios.metrics(units), "hops": self.hops.metrics(units)}

    def checks(self, units: Units) -> list[Check]:
        """Every goal."""
        return [*self.hops.checks(units), *self.ratios.checks(units)]

    def tables(self, result: Result) -> list[Section]:
        own = self.ratios.section(result.metrics["speed"])
        return [own, *self.hops.sections(result.metrics["hops"], result.units)]

    def plots(self, result: Result) -> list[Plot]:
        own = self.ratios.plot(result.metrics["speed"], "overhead", "Speed of dgr's side over the other's")
        return [own, self.hops.plot(result.metrics["hops"])]


# --- the command -----------------------------------------------------------------------------------------------------


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1], metavar="N", help="of a stage and of llama-bench (default: 1)"
    )
    add_program_argument(parser, "llama-bench")


def _check_arguments(args: argparse.Namespace) -> None:
    cpus = available_cpus()
    for threads in args.threads:
        if not 1 <= threads <= cpus:
            raise InputError(f"--threads {threads}: give 1 to {cpus}, the CPUs this process may use")
    if cpus < 2:
        raise InputError(f"this process may use {cpus} CPU; two stage processes of one thread each need 2")


def _overhead(args: argparse.Namespace) -> Overhead:
    _check_arguments(args)
    model = model_of(args)
    artifact = whole_model(model)
    settings, n_layers = ContextParams(), artifact.hp.n_layers
    plan = OverheadPlan(
        name="overhead, quick" if args.quick else "overhead",
        **(_QUICK if args.quick else _FULL),
        threads=tuple(sorted(set(args.threads))),
        split=tuple(str(layers) for layers in cut_at(n_layers, [n_layers // 2])),
        settings={name: getattr(settings, name) for name in ("n_batch", "n_ubatch", "type_k", "flash_attn")},
        goal=_QUICK_GOAL if args.quick else _GOAL,
        hops=hops.plan(args.quick, ("memory", "tls"), ("decode",)),
    )
    compared = comparisons(model, plan, find_program("llama-bench", args.llama_bench))
    return Overhead(plan, compared, {"model": model.name, "artifact": artifact.identity})


_HELP = "dgr against upstream's llama-bench, exact against native, processes against one, a hop against its wire"
COMMAND = benchmark_command("overhead", _HELP, __doc__ or "", _add_arguments, _overhead)
