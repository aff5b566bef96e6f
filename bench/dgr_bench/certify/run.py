"""The long-context certificate as a benchmark.

Its units, in the order in which they are measured:

    whole/L, threads-T/L        LengthRun: the bare engine of the whole model, on one thread and on T
    split/L, chunk-C/L          LengthRun: the stages, in the profile's chunks and in chunks of C
    re-prefilled/L              LengthRun: the stages, with a change of the route after half of the answer
    cancel/prefill, /decode     Cancellations
    clean-up                    CleanUp
    forked/L                    LengthRun: a copy of a session that stood one token before the prompt's end
    together/N                  Together: N sessions in the same native batches of the stages' engines
    distance/M/W                Distance: rows of logits of a model M, run in another way W than exact numerics
    memory/N                    MemoryAt: the stages at a context of N tokens
    refusals/I                  Refusals: everything that must fail, once

(structs of :mod:`~dgr_bench.certify.measurements`, :mod:`~dgr_bench.certify.refusals` and :mod:`dgr_bench.distance`). Metrics
and verdicts follow from these alone: :mod:`dgr_bench.certify.checks`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import trio
from attrs import field, frozen
from msgspec import UNSET
from msgspec.structs import replace

from dgr import (
    Artifact,
    ContextParams,
    DgrError,
    LayerRange,
    LinkPolicy,
    LlamaEngine,
    Numerics,
    ShardEngine,
    open_route,
)
from dgr.cli.options import link_policy_of
from dgr.cluster.route_file import RouteFile, read_route_file
from dgr.core.files.outputs import write_file
from dgr.core.route import parse_split
from dgr.errors import InputError
from dgr.selftest.fixture.cached import cached_fixture
from dgr.v4.state_map import ContextShape
from dgr_bench.benchmark import Group, Store, Unit, Units, cost_of, sweep
from dgr_bench.certify import report
from dgr_bench.certify.checks import verdicts
from dgr_bench.certify.measurements import (
    LengthRun,
    cancellations,
    clean_up,
    memory_at,
    run_forked,
    run_length,
    run_piped,
    run_together,
)
from dgr_bench.certify.metrics import metrics_of, rows_file
from dgr_bench.certify.profiles import QUICK, Profile, profile_of
from dgr_bench.certify.refusals import FOREIGN, REFUSALS_CONTEXT, RefusalCase, refusals
from dgr_bench.distance.measurements import DistancePlan, distance_units
from dgr_bench.plots import Plot
from dgr_bench.reports import Section
from dgr_bench.results import Kind, Result
from dgr_bench.subjects import PATIENCE, Bare, Stages, Wrap, open_bare, open_stages, whole_model
from dgr_bench.verdicts import Check

_SPLIT = "0:15,15:29,29:43"
#: Weights of the fixtures whose distances are measured beside those of the default model, which is mixed.
_FIXTURES = ("f32", "f16", "q8_0", "q4_k")
#: A run on several threads that takes this many times as long as one thread has no core to itself: ggml's threads spin.
_BUSY = 5.0
_BUSY_SECONDS = 20.0
#: Weights of units that are not a length, beside :func:`~dgr_bench.benchmark.cost_of`.
_MEMORY_COST, _REFUSALS_COST = 500.0, 600.0


@frozen
class CertifyJob:
    """The benchmark: what is certified."""

    plan: Profile
    artifact: Artifact
    ranges: tuple[LayerRange, ...]
    #: Stages in other processes; None: stages in this one.
    route: RouteFile | None = None
    policy: LinkPolicy | None = None
    #: What mutants stand in for: stages, and the whole model by its threads.
    wrap: Wrap | None = None
    wrap_whole: Callable[[int], Wrap] | None = None
    #: What is tried that must fail; None: everything.
    refusal_cases: Mapping[str, RefusalCase] | None = None
    #: Further facts for the result, of the real-model lane.
    facts: dict[str, Any] = field(factory=dict)
    kind: ClassVar[Kind] = "certify"

    @property
    def title(self) -> str:
        return f"Long-context certificate of {self.artifact.file.path.name}"

    @property
    def in_process(self) -> bool:
        return self.route is None

    def subject(self) -> dict[str, Any]:
        return {
            "model": self.artifact.file.path.name,
            "artifact": self.artifact.identity,
            "split": ",".join(map(str, self.ranges)),
            "split_digests": {str(layers): self._digest(layers) for layers in self.ranges},
            "in_process": self.in_process,
            "stages": [] if self.route is None else [ref.address for ref in self.route.route.stages],
            "hyper_parameters": msgspec.to_builtins(self.artifact.hp),
            **self.facts,
        }

    def _digest(self, layers: LayerRange) -> str:
        """Digest of the tensors that a stage of the range loads."""
        return self.artifact.manifest().digest_of(spec.name for spec in self.artifact.specs_of(layers))

    def metrics(self, units: Units, folder: Path) -> dict[str, Any]:
        return metrics_of(self.plan, self.subject(), units, folder)

    def checks(self, units: Units) -> list[Check]:
        return verdicts(self.plan, self.subject(), units)

    def tables(self, result: Result) -> list[Section]:
        return report.tables(result)

    def plots(self, result: Result) -> list[Plot]:
        return report.plots(result)

    # --- units ---

    def units(self, store: Store) -> Iterator[Group]:
        profile, job = self.plan, self
        if profile.whole:
            yield self._whole(store, 1)
        yield Group(list(self._stage_units(store)), self._open_stages)
        if profile.slots:
            yield Group(list(self._units_of_several(store)), partial(self._open_stages, profile.slots))
        for threads in profile.threads if profile.whole else ():
            yield self._whole(store, threads)
        if self.in_process:
            contexts = sorted({ContextShape(n_tokens).n_ctx_seq for n_tokens in (*profile.lengths, profile.n_ctx)})

            async def memory(n_ctx: int, _: None) -> Any:
                return await memory_at(job.artifact, job.ranges, replace(profile.context, n_ctx=n_ctx), job.wrap)

            async def refuse(stages: Stages) -> Any:
                return {"refusals": await refusals(stages, job.refusal_cases)}

            yield Group([Unit(f"memory/{n_ctx}", partial(memory, n_ctx), _MEMORY_COST) for n_ctx in contexts])
            tries = [Unit(f"refusals/{number}", refuse, _REFUSALS_COST) for number in range(profile.refusals)]
            yield Group(tries, self._open_refusals)
        if self.in_process and profile.distance is not UNSET:
            yield from self._distances(profile.distance)

    def _distances(self, plan: DistancePlan) -> Iterator[Group]:
        """Of the model that is certified, and of the plan's fixtures."""
        context = self.plan.context
        yield distance_units(plan, self.artifact.file.path.name, lambda: self.artifact, context)
        for weights in plan.fixtures:

            def fixture(weights: str = weights) -> Artifact:
                return Artifact.open(cached_fixture(weights, layers=plan.layers))

            yield distance_units(plan, weights, fixture, context)

    def _whole(self, store: Store, threads: int) -> Group:
        profile, name = self.plan, "whole" if threads == 1 else f"threads-{threads}"

        async def one(length: int, engine: ShardEngine) -> LengthRun:
            limit = _patience(store.units.get(f"whole/{length}")) if threads > 1 else math.inf
            talk = Bare(engine, profile.chunk, limit)
            run = LengthRun(variant=name, length=length)
            try:
                self._keep(store, run, await run_length(run, talk, profile, self.artifact.hp.n_vocab))
            except DgrError as error:
                run.error = f"{type(error).__name__}: {error}"
                if talk.gave_up:
                    run.error = f"a step on {threads} threads took over {limit:.0f} s: the CPUs are busy"
            finally:
                if not talk.gave_up:
                    engine.close(0)
            return run

        wrap = None if self.wrap_whole is None else self.wrap_whole(threads)
        opened = partial(open_bare, self.artifact, profile.context, threads, wrap)
        return Group(sweep(name, profile.lengths, one, 1 / threads), opened)

    def _stage_units(self, store: Store) -> Iterator[Unit]:
        profile, n_vocab = self.plan, self.artifact.hp.n_vocab
        variants = [("split", profile.chunk, max(profile.lengths), False)]
        variants += [(f"chunk-{one.chunk}", one.chunk, one.up_to, False) for one in profile.chunkings]
        variants += [("re-prefilled", profile.chunk, profile.reprefill_up_to, True)]

        async def one(variant: str, chunk: int, disturbed: bool, length: int, stages: Stages) -> LengthRun:
            run = LengthRun(variant=variant, length=length)
            try:
                self._keep(store, run, await run_piped(run, stages, profile, n_vocab, chunk, disturbed=disturbed))
            except DgrError as error:
                run.error = f"{type(error).__name__}: {error}"
            return run

        for variant, chunk, up_to, disturbed in variants:
            lengths = [length for length in profile.lengths if length <= up_to]
            weight = (2 if disturbed else 1) * max(0.5, min(4.0, 32 / chunk))
            yield from sweep(variant, lengths, partial(one, variant, chunk, disturbed), weight)

        async def cancel(during: str, stages: Stages) -> Any:
            return {"cancellations": await cancellations(stages, profile, n_vocab, during)}

        async def clean(stages: Stages) -> Any:
            return await clean_up(stages, profile, n_vocab)

        cost = cost_of(profile.cancel_length)
        for during in ("prefill", "decode") if profile.cancels else ():
            yield Unit(f"cancel/{during}", partial(cancel, during), profile.cancels * cost)
        if self.in_process:
            yield Unit("clean-up", clean, cost)

    def _units_of_several(self, store: Store) -> Iterator[Unit]:
        profile, n_vocab = self.plan, self.artifact.hp.n_vocab

        async def fork(length: int, stages: Stages) -> LengthRun:
            run = LengthRun(variant="forked", length=length)
            try:
                self._keep(store, run, await run_forked(run, stages, profile, n_vocab))
            except DgrError as error:
                run.error = f"{type(error).__name__}: {error}"
            return run

        async def together(sessions: int, stages: Stages) -> Any:
            return await run_together(sessions, stages, profile, n_vocab)

        yield from sweep("forked", profile.forked, fork)
        for sessions in profile.together if self.in_process else ():
            cost = sum(map(cost_of, profile.lengths_together(sessions)))
            yield Unit(f"together/{sessions}", partial(together, sessions), cost)

    def _keep(self, store: Store, run: LengthRun, rows: bytes) -> None:
        """Rows of logits are kept where distances will be asked for."""
        if self.plan.numerics is not Numerics.EXACT and store.folder is not None:
            path = rows_file(store.folder, run.variant, run.length)
            path.parent.mkdir(exist_ok=True)
            write_file(path, rows)

    @asynccontextmanager
    async def _open_stages(self, slots: int = 1) -> AsyncIterator[Stages]:
        route, context = self.route, replace(self.plan.context, n_seq_max=slots)
        if route is None:
            async with open_stages(self.artifact, self.ranges, context, self.wrap) as stages:
                yield stages
        else:
            opened = partial(open_route, route, policy=self.policy, model=self.artifact.file.path, timeouts=PATIENCE)
            async with opened() as pipeline:
                _check_context(pipeline.context, context)
            yield Stages((), route.route, lambda chunk: opened(chunk=chunk), None)

    @asynccontextmanager
    async def _open_refusals(self) -> AsyncIterator[Stages]:
        """The stages with a small context, for two sessions; beside them a stage of another model."""
        ranges = self.ranges if len(self.ranges) > 1 else _halves(self.ranges[0])
        context = replace(self.plan.context, n_ctx=REFUSALS_CONTEXT, n_batch=64, n_ubatch=64, n_seq_max=2)
        foreign = await trio.to_thread.run_sync(partial(cached_fixture, "mixed", preset="min", seed=1))
        async with open_stages(self.artifact, ranges, context, self.wrap) as stages:
            assert stages.cluster is not None
            other = await trio.to_thread.run_sync(partial(LlamaEngine, foreign, ranges[-1], context))
            await stages.cluster.start(FOREIGN, other)
            yield stages


def _patience(whole: Mapping[str, Any] | None) -> float:
    """Seconds that a step on several threads may take, from the same length on one."""
    return _BUSY_SECONDS + (0.0 if whole is None else _BUSY * (whole["first_token_s"] + sum(whole["token_s"])))


def _check_context(has: ContextParams, wants: ContextParams) -> None:
    """Refuse stages that run with other parameters than the profile locks."""
    flags = f"--ctx {wants.n_ctx} --batch {wants.n_batch} --ubatch {wants.n_ubatch} --numerics {wants.numerics.value}"
    if has.n_seq_max < wants.n_seq_max:
        raise InputError(
            f"the stages have {has.n_seq_max} slots (n_seq_max), the profile runs {wants.n_seq_max} sessions at once; start"
            f" them with {flags} --sessions {wants.n_seq_max}"
        )
    for name in ("n_ctx", "n_batch", "n_ubatch", "type_k", "flash_attn", "numerics"):
        value, wanted = getattr(has, name), getattr(wants, name)
        rounded = ContextShape(wanted).n_ctx_seq if name == "n_ctx" else wanted
        if value != rounded:
            raise InputError(
                f"the stages run with {name} = {value}, the profile is for {rounded}; start them with {flags}"
            )


def _halves(layers: LayerRange) -> tuple[LayerRange, ...]:
    """A range cut in two; what has one layer stays whole."""
    middle = (layers.begin + layers.end) // 2
    return (LayerRange(layers.begin, middle), LayerRange(middle, layers.end)) if middle > layers.begin else (layers,)


# --- what flags ask for ----------------------------------------------------------------------------------------------


def add_subject_arguments(parser: argparse.ArgumentParser) -> None:
    """``--model``, ``--split`` and ``--route``."""
    parser.add_argument(
        "--model", metavar="GGUF", help="the model (default: the route's, or the small one of dgr fixture)"
    )
    parser.add_argument("--split", metavar="A:B,...", help=f"layer ranges of the stages (default: {_SPLIT})")
    parser.add_argument("--route", metavar="TOML", help="stages in other processes, instead of --split")


def native_profile(args: argparse.Namespace, profile: Profile) -> Profile:
    """The profile in native numerics: distances of the model that is given, or of fixtures of several types."""
    if args.route is not None:
        raise InputError(
            "--numerics native measures distances from exact numerics in this process; stages of a route run as they were"
            " started: give a profile whose numerics are native, such as v4-flash"
        )
    if profile.numerics is Numerics.NATIVE:
        raise InputError(f"the profile {profile.name} is of native numerics by itself; leave out --numerics")
    return profile.in_native(() if args.model is not None else _FIXTURES)


def asked_profile(args: argparse.Namespace, default: str) -> Profile:
    """The profile that ``--profile`` and ``--quick`` ask for."""
    if args.quick and args.profile not in (None, QUICK):
        raise InputError(f"--quick is the profile {QUICK}, --profile asks for {args.profile}; give one of them")
    return profile_of(QUICK if args.quick else args.profile or default)


def open_job(args: argparse.Namespace, profile: Profile) -> CertifyJob:
    """What the flags of :func:`add_subject_arguments` ask for."""
    if args.route is None:
        artifact = whole_model(args.model or cached_fixture("mixed"))
        try:
            split = parse_split(_SPLIT if args.split is None else args.split, artifact.hp.n_layers)
        except InputError as error:
            raise InputError(f"{artifact.file.path}, of {artifact.hp.n_layers} layers: {error}") from error
        return CertifyJob(profile, artifact, split)
    if args.split is not None:
        raise InputError("--split cuts a model in this process, --route names stages elsewhere; give one of them")
    route = read_route_file(args.route)
    model = args.model or route.model
    if model is None:
        raise InputError("the route file names no model; give --model GGUF: its header says what the stages must hold")
    ranges = tuple(ref.layers for ref in route.route.stages)
    return CertifyJob(profile, Artifact.open(model), ranges, route, link_policy_of(args, route.tls))
