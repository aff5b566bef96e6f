"""``dgr-bench certify``: the long-context certificate of a model on a split or a route.

The units of its result, in the order in which they are measured:

    whole/L, threads-T/L        LengthRun: the bare engine of the whole model, on one thread and on T
    split/L, chunk-C/L          LengthRun: the stages, in the profile's chunks and in chunks of C
    re-prefilled/L              LengthRun: the stages, with a change of the route after half of the answer
    cancel/prefill, /decode     Cancellations
    clean-up                    CleanUp
    memory/N                    MemoryAt: the stages at a context of N tokens
    refusals/I                  Refusals: everything that must fail, once

(structs of :mod:`~dgr_bench.certify.measurements` and :mod:`~dgr_bench.certify.refusals`). Metrics and verdicts follow from
these alone: :mod:`dgr_bench.certify.checks`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio
from attrs import evolve, field, frozen

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
from dgr.cli.options import add_link_arguments, link_policy_of
from dgr.errors import InputError
from dgr.model.route import parse_split
from dgr.model.route_file import RouteFile, read_route_file
from dgr.model.state_map import ContextShape
from dgr.testing.models import cached_fixture
from dgr_bench.certify.checks import verdicts
from dgr_bench.certify.measurements import (
    CleanUp,
    LengthRun,
    MemoryAt,
    cancellations,
    clean_up,
    memory_at,
    run_length,
    run_piped,
)
from dgr_bench.certify.metrics import metrics_of, rows_file
from dgr_bench.certify.profiles import PROFILES, Profile, profile_of
from dgr_bench.certify.refusals import FOREIGN, REFUSALS_CONTEXT, RefusalCase, refusals
from dgr_bench.certify.report import write_certificate
from dgr_bench.options import add_run_arguments, add_subject_arguments, exit_code, say
from dgr_bench.progress import Progress
from dgr_bench.results import Journal, Result
from dgr_bench.subjects import PATIENCE, Bare, Stages, Wrap, open_bare, open_stages

__all__ = ["CertifyJob", "asked_profile", "certify", "measure", "open_job", "register"]

_SPLIT = "0:15,15:29,29:43"
#: A run on several threads that takes this many times as long as one thread has no core to itself: ggml's threads spin.
_BUSY = 5.0
_BUSY_SECONDS = 20.0


@frozen
class CertifyJob:
    """What is certified."""

    profile: Profile
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

    @property
    def in_process(self) -> bool:
        return self.route is None

    def subject(self) -> dict[str, Any]:
        """What a result says of it."""
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


@frozen
class _Unit:
    name: str
    weight: float
    measure: Callable[[Any], Awaitable[Any]]


@frozen
class _Group:
    """Units that share something slow to open."""

    open: Callable[[], AbstractAsyncContextManager[Any]]
    units: Sequence[_Unit]


class _Certificate:
    """A job under way."""

    def __init__(self, job: CertifyJob, journal: Journal | None) -> None:
        self.job = job
        self.profile = job.profile
        self._journal = journal
        #: Raw units by name: what the journal had, and what is measured.
        self.units: dict[str, dict[str, Any]] = {} if journal is None else dict(journal.result.units)
        self.n_vocab = job.artifact.hp.n_vocab

    # --- what there is to do ---

    def groups(self) -> Iterator[_Group]:
        profile = self.profile
        if profile.whole:
            yield self._whole(1)
        yield _Group(self._open_stages, list(self._stage_units()))
        for threads in profile.threads if profile.whole else ():
            yield self._whole(threads)
        if self.job.in_process:
            contexts = sorted({ContextShape(n_tokens).n_ctx_seq for n_tokens in (*profile.lengths, profile.n_ctx)})
            yield _Group(
                nullcontext, [_Unit(f"memory/{n_ctx}", 500, partial(self._memory, n_ctx)) for n_ctx in contexts]
            )
            tries = [_Unit(f"refusals/{index}", 600, self._refuse) for index in range(profile.refusals)]
            yield _Group(self._open_refusals, tries)

    def _whole(self, threads: int) -> _Group:
        name = "whole" if threads == 1 else f"threads-{threads}"
        wrap = None if self.job.wrap_whole is None else self.job.wrap_whole(threads)
        opened = partial(open_bare, self.job.artifact, self.profile.context, threads, wrap)
        lengths = self.profile.lengths
        return _Group(
            opened,
            [_Unit(f"{name}/{n}", _cost(n) / threads, partial(self._bare, name, n, threads)) for n in lengths],
        )

    async def _bare(self, name: str, length: int, threads: int, engine: ShardEngine) -> LengthRun:
        limit = self._patience(length) if threads > 1 else math.inf
        talk = Bare(engine, self.profile.chunk, limit)
        run = LengthRun(variant=name, length=length)
        try:
            rows = await run_length(run, talk, self.profile, self.n_vocab)
            self._keep(run, rows)
        except DgrError as error:
            run.error = f"{type(error).__name__}: {error}"
            if talk.gave_up:
                run.error = f"a step on {threads} threads took over {limit:.0f} s: the CPUs are busy"
        finally:
            if not talk.gave_up:
                engine.close(0)
        return run

    def _patience(self, length: int) -> float:
        whole = self.units.get(f"whole/{length}")
        took = 0.0 if whole is None else whole["first_token_s"] + sum(whole["token_s"])
        return _BUSY_SECONDS + _BUSY * took

    def _stage_units(self) -> Iterator[_Unit]:
        profile = self.profile
        variants = [("split", profile.chunk, max(profile.lengths), False)]
        variants += [(f"chunk-{one.chunk}", one.chunk, one.up_to, False) for one in profile.chunkings]
        variants += [("re-prefilled", profile.chunk, profile.reprefill_up_to, True)]
        for variant, chunk, up_to, disturbed in variants:
            for length in profile.lengths:
                if length <= up_to:
                    weight = _cost(length) * (2 if disturbed else 1) * max(0.5, min(4.0, 32 / chunk))
                    yield _Unit(f"{variant}/{length}", weight, partial(self._piped, variant, length, chunk, disturbed))
        for during in ("prefill", "decode") if profile.cancels else ():
            yield _Unit(f"cancel/{during}", profile.cancels * profile.cancel_length, partial(self._cancel, during))
        if self.job.in_process:
            yield _Unit("clean-up", profile.cancel_length, self._clean_up)

    async def _piped(self, variant: str, length: int, chunk: int, disturbed: bool, stages: Stages) -> LengthRun:
        run = LengthRun(variant=variant, length=length)
        try:
            rows = await run_piped(run, stages, self.profile, self.n_vocab, chunk, disturbed=disturbed)
            self._keep(run, rows)
        except DgrError as error:
            run.error = f"{type(error).__name__}: {error}"
        return run

    async def _cancel(self, during: str, stages: Stages) -> dict[str, Any]:
        return {"cancellations": await cancellations(stages, self.profile, self.n_vocab, during)}

    async def _clean_up(self, stages: Stages) -> CleanUp:
        return await clean_up(stages, self.profile, self.n_vocab)

    async def _refuse(self, stages: Stages) -> dict[str, Any]:
        return {"refusals": await refusals(stages, self.job.refusal_cases)}

    async def _memory(self, n_ctx: int, _: None) -> MemoryAt:
        context = evolve(self.profile.context, n_ctx=n_ctx)
        return await memory_at(self.job.artifact, self.job.ranges, context, self.job.wrap)

    def _keep(self, run: LengthRun, rows: bytes) -> None:
        """Rows of logits are kept where distances will be asked for."""
        if self.profile.numerics is not Numerics.EXACT and self._journal is not None:
            path = rows_file(self._journal.folder, run.variant, run.length)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(rows)

    # --- what is opened for it ---

    @asynccontextmanager
    async def _open_stages(self) -> AsyncIterator[Stages]:
        job, route = self.job, self.job.route
        if route is None:
            async with open_stages(job.artifact, job.ranges, self.profile.context, job.wrap) as stages:
                yield stages
        else:
            opened = partial(open_route, route, policy=job.policy, model=job.artifact.file.path, timeouts=PATIENCE)
            async with opened() as pipeline:
                _check_context(pipeline.context, self.profile.context)
            yield Stages((), route.route, lambda chunk: opened(chunk=chunk), None)

    @asynccontextmanager
    async def _open_refusals(self) -> AsyncIterator[Stages]:
        """The stages with a small context, for two sessions; beside them a stage of another model."""
        job = self.job
        ranges = job.ranges if len(job.ranges) > 1 else halves(job.ranges[0])
        context = evolve(self.profile.context, n_ctx=REFUSALS_CONTEXT, n_batch=64, n_ubatch=64, n_seq_max=2)
        foreign = await trio.to_thread.run_sync(partial(cached_fixture, "mixed", preset="min", seed=1))
        async with open_stages(job.artifact, ranges, context, job.wrap) as stages:
            assert stages.cluster is not None
            other = await trio.to_thread.run_sync(partial(LlamaEngine, foreign, ranges[-1], context))
            await stages.cluster.start(FOREIGN, other)
            yield stages

    # --- doing it ---

    async def measure(self) -> None:
        """Measure every unit that is not there yet."""
        groups = list(self.groups())
        total = sum(unit.weight for group in groups for unit in group.units)
        with Progress(f"certify {self.profile.name}", total) as progress:
            for group in groups:
                pending = [unit for unit in group.units if not self._is_done(unit)]
                progress.done(sum(unit.weight for unit in group.units if unit not in pending))
                if not pending:
                    continue
                async with group.open() as subject:
                    for unit in pending:
                        progress.begin(unit.name)
                        try:
                            raw = await unit.measure(subject)
                        except DgrError as error:
                            raw = {"error": f"{type(error).__name__}: {error}"}
                        self._put(unit.name, raw)
                        progress.done(unit.weight)

    def _put(self, name: str, raw: Any) -> None:
        kept = msgspec.json.decode(msgspec.json.encode(raw)) if self._journal is None else self._journal.put(name, raw)
        self.units[name] = kept

    def _is_done(self, unit: _Unit) -> bool:
        """Whether a unit was measured; what ended in an error is tried again."""
        found = self.units.get(unit.name)
        return found is not None and not found.get("error")


def _cost(length: int) -> float:
    """About what a prompt costs: every token looks at more compressed rows than the one before."""
    return 20 + length * (1 + length / 8192)


def _check_context(has: ContextParams, wants: ContextParams) -> None:
    """Refuse stages that run with other parameters than the profile locks."""
    flags = f"--ctx {wants.n_ctx} --batch {wants.n_batch} --ubatch {wants.n_ubatch} --numerics {wants.numerics.value}"
    for name in ("n_ctx", "n_batch", "n_ubatch", "type_k", "flash_attn", "numerics"):
        found, wanted = getattr(has, name), getattr(wants, name)
        rounded = ContextShape(wanted).n_ctx_seq if name == "n_ctx" else wanted
        if found != rounded:
            raise InputError(
                f"the stages run with {name} = {found}, the profile is for {rounded}; start them with {flags}"
            )


def halves(layers: LayerRange) -> tuple[LayerRange, ...]:
    """A range cut in two; what has one layer stays whole."""
    middle = (layers.begin + layers.end) // 2
    return (LayerRange(layers.begin, middle), LayerRange(middle, layers.end)) if middle > layers.begin else (layers,)


async def certify(job: CertifyJob, folder: Path, command: str, *, fresh: bool = False) -> Result:
    """Measure what is not measured yet, and judge."""
    journal = Journal.open(folder, "certify", msgspec.to_builtins(job.profile), job.subject(), command, fresh=fresh)
    if journal.result.complete:
        print(f"{folder} holds the whole result; nothing is measured, --fresh begins anew", file=sys.stderr)
    await _Certificate(job, journal).measure()
    units, subject = journal.result.units, journal.result.subject
    metrics = metrics_of(job.profile, subject, units, folder)
    return journal.finish(metrics, verdicts(job.profile, subject, units))


async def measure(job: CertifyJob) -> dict[str, dict[str, Any]]:
    """The raw units of a job, kept nowhere."""
    certificate = _Certificate(job, None)
    await certificate.measure()
    return certificate.units


# --- the command ------------------------------------------------------------------------------------------------------


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "certify",
        help="the long-context certificate of a model on a split or a route",
        description="Certify that a model's state stays correct at long contexts: run every length of a profile on the"
        " whole model and on the stages, in several chunkings, on several threads, cancelled and re-prefilled; compare"
        " tokens, logits and states bit for bit, and the states with their closed forms.",
    )
    parser.add_argument(
        "--profile", metavar="P", help=f"{', '.join(PROFILES)}, or a JSON file (default: fixture; with --quick: quick)"
    )
    add_subject_arguments(parser)
    parser.add_argument("--selftest", action="store_true", help="run the mutants that every check must catch")
    add_link_arguments(parser)
    add_run_arguments(parser, "dgr-bench-certify")
    parser.set_defaults(run=run)


def asked_profile(args: argparse.Namespace, default: str) -> Profile:
    """The profile that ``--profile`` and ``--quick`` ask for."""
    if args.quick and args.profile not in (None, "quick"):
        raise InputError(f"--quick is the profile quick, --profile asks for {args.profile}; give one of them")
    return profile_of("quick" if args.quick else args.profile or default)


def open_job(args: argparse.Namespace, profile: Profile) -> CertifyJob:
    """What the flags of :func:`dgr_bench.options.add_subject_arguments` ask for."""
    if args.route is None:
        artifact = Artifact.open(args.model or cached_fixture("mixed"))
        return CertifyJob(
            profile, artifact, parse_split(_SPLIT if args.split is None else args.split, artifact.hp.n_layers)
        )
    if args.split is not None:
        raise InputError("--split cuts a model in this process, --route names stages elsewhere; give one of them")
    route = read_route_file(args.route)
    model = args.model or route.model
    if model is None:
        raise InputError("the route file names no model; give --model GGUF: its header says what the stages must hold")
    ranges = tuple(ref.layers for ref in route.route.stages)
    return CertifyJob(profile, Artifact.open(model), ranges, route, link_policy_of(args, route.tls))


def run(args: argparse.Namespace) -> int:
    if args.selftest:
        from dgr_bench.certify import mutants

        return mutants.run(args)
    job = open_job(args, asked_profile(args, "fixture"))
    print(f"profile {job.profile.name}, digest {job.profile.digest}, n_ctx {job.profile.n_ctx}", file=sys.stderr)
    result = trio.run(lambda: certify(job, args.out, args.command_line, fresh=args.fresh))
    write_certificate(result, args.out)
    say(result, args.out, args.json)
    return exit_code(result)
