"""``dgr-bench frontier``: speed at growing contexts, through stages and in the whole model beside them.

Three subjects of the same model, one thread an engine: ``one``, a pipeline of one stage; ``whole``, the bare engine of the
whole model, which is llama.cpp's own run without a runtime around it; ``split``, a pipeline of several stages. For every
length each of them begins a fresh session, prefills the same prompt of exactly so many token ids in chunks, and then they
draw tokens in turns (one, whole, split, one, …), so that whatever else the machine does hits all alike. A fourth one, the
``baseline``, draws in turns with them: the bare engine again, after a short prompt at every length, so that its tokens tell
how fast the machine is at that time. End-of-text ends nothing. With ``--upstream`` a stage in native numerics and upstream's
llama-bench decode at the same depths.

Units:

``length/L``
    :class:`~dgr_bench.frontier.metrics.At`: every subject at a prompt of L tokens.
``upstream/L``
    :class:`~dgr_bench.frontier.metrics.BesideUpstream`: at a depth of L tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from attrs import frozen

from dgr import Numerics
from dgr.core.host import available_memory
from dgr.core.units import human_bytes
from dgr.engine.llama import estimate_memory
from dgr.errors import InputError
from dgr.selftest.fixture.cached import cached_fixture
from dgr_bench.benchmark import Group, Store, Units, benchmark_command, sweep
from dgr_bench.frontier import report
from dgr_bench.frontier.measurements import BLOCKS, FrontierJob, open_subjects, open_upstream, run_length, run_upstream
from dgr_bench.frontier.metrics import GOAL, SUBJECTS, FrontierPlan, checks, metrics
from dgr_bench.plots import Plot
from dgr_bench.reports import Section
from dgr_bench.results import Kind, Result
from dgr_bench.subjects import asked_split, whole_model
from dgr_bench.upstream.programs import add_program_argument, find_program
from dgr_bench.verdicts import Check

_LENGTHS, _QUICK_LENGTHS = (512, 1024, 2048, 4096, 8192), (64, 256, 512)
_DECODE, _QUICK_DECODE = 256, 16
#: Sizes of a native batch.
_CHUNKS = (32, 1 << 16)
#: Share of the machine's available memory that the subjects may take.
_MEMORY = 0.8


@frozen
class Frontier:
    """The benchmark."""

    job: FrontierJob
    kind: ClassVar[Kind] = "frontier"
    title: ClassVar[str] = "Speed over context"

    @property
    def plan(self) -> FrontierPlan:
        return self.job.plan

    def subject(self) -> dict[str, Any]:
        artifact = self.job.artifact
        return {"model": artifact.file.path.name, "artifact": artifact.identity, "split": self.plan.split}

    def units(self, _: Store) -> Iterator[Group]:
        lengths = self.plan.lengths
        yield Group(sweep("length", lengths, partial(run_length, self.job)), partial(open_subjects, self.job))
        if self.plan.upstream:
            yield Group(
                sweep("upstream", lengths, partial(run_upstream, self.job), 0.5), partial(open_upstream, self.job)
            )

    def metrics(self, units: Units, _: Path | None = None) -> dict[str, Any]:
        return metrics(self.plan, units)

    def checks(self, units: Units) -> list[Check]:
        return checks(self.plan, units)

    def tables(self, result: Result) -> list[Section]:
        return report.tables(result, self.plan)

    def plots(self, result: Result) -> list[Plot]:
        return report.plots(result, self.plan)


# --- the command -----------------------------------------------------------------------------------------------------


def _listed(lengths: Sequence[int]) -> str:
    return ",".join(map(str, lengths))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
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
    add_program_argument(parser, "llama-bench")


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
    if not BLOCKS <= decode <= 1 << 20:
        raise InputError(f"--decode is {decode}; give {BLOCKS} to {1 << 20} tokens")
    if not _CHUNKS[0] <= args.chunk <= _CHUNKS[1]:
        raise InputError(f"--chunk is {args.chunk}; give {_CHUNKS[0]} to {_CHUNKS[1]} tokens")
    ranges = asked_split(args.split, n_layers)
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


def _check_memory(job: FrontierJob) -> None:
    """Raise :class:`~dgr.errors.InputError` for lengths whose state, with the weights, fits no memory here."""
    subjects = job.plan.subjects
    needed = sum(
        estimate_memory(job.artifact, layers, job.context(name)).total
        for name in subjects
        for layers in job.layers(name)
    )
    limit = int(_MEMORY * available_memory())
    if needed > limit:
        raise InputError(
            f"--lengths up to {max(job.plan.lengths)} take {human_bytes(needed)} for {len(subjects)} subjects beside each"
            f" other, over {_MEMORY:.0%} of the available memory, {human_bytes(limit)}; give shorter lengths"
        )


def _frontier(args: argparse.Namespace) -> Frontier:
    artifact = whole_model(args.model or cached_fixture("mixed"))
    plan = _plan(args, artifact.hp.n_layers)
    _check_memory(FrontierJob(plan, artifact))
    return Frontier(
        FrontierJob(plan, artifact, find_program("llama-bench", args.llama_bench) if plan.upstream else None)
    )


COMMAND = benchmark_command(
    "frontier",
    "speed at growing contexts, through stages and in the whole model",
    "Prefill prompts of growing length and decode after them: through one stage, through several, and in the bare engine of"
    " the whole model, all drawing tokens in turns. Decode must grow with the context as it does in the whole model.",
    _add_arguments,
    _frontier,
)
