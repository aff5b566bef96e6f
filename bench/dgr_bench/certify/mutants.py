"""``dgr-bench certify --selftest``: mistakes on purpose, each of which the check that is named must catch.

A mutant stands in for the engine of a stage, for the whole model, for an act that must fail, or for a raw measurement. The
certificate of the unchanged stages must pass.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from attrs import evolve, field, frozen
from msgspec.structs import replace

from dgr import Artifact, SamplingParams, ShardEngine
from dgr.core.route import parse_split
from dgr.core.values import LogitsWanted, StateSummary, TopLogprob
from dgr.engine.base import MemoryReport, Output, Work
from dgr.selftest.fixture.cached import cached_fixture
from dgr.testing.engines.mutants import Mutant, OffByOne, StaleChunk, StaleRow, SwappedSideband
from dgr_bench.benchmark import Group, Scratch, Store, Unit, Units, measure
from dgr_bench.certify.checks import verdicts
from dgr_bench.certify.profiles import Chunking, Profile, Several
from dgr_bench.certify.refusals import REFUSAL_CASES, RefusalCase
from dgr_bench.certify.run import CertifyJob
from dgr_bench.plots import Plot
from dgr_bench.reports import Section
from dgr_bench.results import Kind, Result
from dgr_bench.subjects import Wrap
from dgr_bench.verdicts import Check, judge

_LAYERS = 7
#: The middle stage has a layer of each kind, the first of them routed by token id.
_SPLIT = "0:2,2:5,5:7"
_MIDDLE, _TAIL = 1, 2

#: So small that a certificate takes a second or two.
PROFILE = Profile(
    name="selftest",
    lengths=(5, 129, 200),
    decode=4,
    continuation=4,
    chunk=64,
    chunkings=(Chunking(chunk=33, up_to=200),),
    reprefill_up_to=200,
    threads=(2,),
    n_batch=64,
    n_ubatch=64,
    cancels=2,
    cancel_length=70,
    cancel_chunk=16,
    refusals=2,
    rerun=(5,),
    several=Several(up_to=200, together=(4,)),
)


# --- engines that do wrong --------------------------------------------------------------------------------------------


class ChunkDependent(Mutant):
    """One value depends on the size of the chunk, by a hundredth, as with kernels that are chosen by it."""

    def change(self, work: Work) -> Work:
        if len(work.tokens) % 33 or not work.residual:
            return work
        return _flipped(work)


class LeakedRow(Mutant):
    """A cleared slot hands a row of its former life to the next session."""

    def __init__(self, engine: ShardEngine) -> None:
        super().__init__(engine)
        self._row = b""
        self._leaks = b""

    def close(self, slot: int) -> None:
        self._leaks = self._row
        self.engine.close(slot)

    def change(self, work: Work) -> Work:
        rows = bytearray(work.residual or b"")
        self._row = bytes(rows[-self.width :])
        if work.position == 0 and self._leaks:
            rows[: self.width] = self._leaks
        return evolve(work, residual=bytes(rows))


class KeptEpoch(Mutant):
    """A slot is not cleared, and says that it was."""

    def __init__(self, engine: ShardEngine) -> None:
        super().__init__(engine)
        self._closed = True

    def close(self, slot: int) -> None:
        del slot
        self._closed = True

    def position(self, slot: int) -> int:
        return 0 if self._closed else self.engine.position(slot)

    def run(self, batch: Sequence[Work]) -> list[Output]:
        self._closed = False
        return super().run(batch)


class KeptRows(KeptEpoch):
    """The same, but it clears the slot at last, when it is used again."""

    def run(self, batch: Sequence[Work]) -> list[Output]:
        for work in batch:
            if work.position == 0:
                self.engine.close(work.slot)
        return super().run(batch)


class OtherLogits(Mutant):
    """The last bit of one logit in each row is another."""

    def run(self, batch: Sequence[Work]) -> list[Output]:
        return [self.spoil(work, output) for work, output in zip(batch, super().run(batch), strict=True)]

    def spoil(self, _: Work, output: Output) -> Output:
        if not output.logits:
            return output
        logits = bytearray(output.logits)
        logits[0] ^= 1
        return evolve(output, logits=bytes(logits))


class SilentNan(OtherLogits):
    """A logit is NaN, and nobody says so."""

    def spoil(self, work: Work, output: Output) -> Output:
        if not output.logits or work.logits is not LogitsWanted.ALL:
            return output
        logits = bytearray(output.logits)
        struct.pack_into("<f", logits, 0, float("nan"))
        return evolve(output, logits=bytes(logits))


class MissingRow(Mutant):
    """One row of a component is not there."""

    def state_summary(self, slot: int) -> StateSummary:
        frontier = self.engine.state_summary(slot)
        first, *others = frontier.components
        return replace(frontier, components=(replace(first, rows_min=max(0, first.rows_min - 1)), *others))


class OtherPosition(Mutant):
    """A stage says that it holds one token more."""

    def state_summary(self, slot: int) -> StateSummary:
        frontier = self.engine.state_summary(slot)
        return replace(frontier, position=frontier.position + 1)


class MoreMemory(Mutant):
    """A component takes more than it should."""

    def memory(self) -> MemoryReport:
        report = self.engine.memory()
        first = next(iter(report.state))
        return evolve(report, state={**report.state, first: report.state[first] + 256})


class Tired(Mutant):
    """Once the prompt that is cancelled has been answered, a tail draws the token after the right one."""

    def __init__(self, engine: ShardEngine) -> None:
        super().__init__(engine)
        self._draws = 0

    def sample(
        self, logits: memoryview | bytes, history: Sequence[int], params: SamplingParams
    ) -> tuple[int, tuple[TopLogprob, ...]]:
        token, top = self.engine.sample(logits, history, params)
        if 0 <= len(history) - PROFILE.cancel_length < PROFILE.decode:
            self._draws += 1
        if self._draws > PROFILE.decode:
            token = (token + 1) % self.engine.describe().n_vocab
        return token, top


class UnlikeCopy(Mutant):
    """A copied slot is not quite its source: it reads one value of the residual otherwise."""

    def __init__(self, engine: ShardEngine) -> None:
        super().__init__(engine)
        self._copies: set[int] = set()

    def fork(self, source: int, target: int) -> None:
        self.engine.fork(source, target)
        self._copies.add(target)

    def close(self, slot: int) -> None:
        self._copies.discard(slot)
        self.engine.close(slot)

    def change(self, work: Work) -> Work:
        return _flipped(work) if work.slot in self._copies else work


class NeedsCompany(Mutant):
    """Sessions that share a batch read one value of the residual otherwise, as with kernels that are chosen by its size."""

    def run(self, batch: Sequence[Work]) -> list[Output]:
        return self.engine.run([_flipped(work) for work in batch] if len(batch) > 1 else batch)


def _flipped(work: Work) -> Work:
    rows = bytearray(work.residual or b"")
    rows[2] ^= 1  # of a mantissa: smaller changes vanish where activations are quantised
    return evolve(work, residual=bytes(rows))


# --- what they are for ------------------------------------------------------------------------------------------------


@frozen
class MutantCase:
    """A mistake, and the check that must catch it."""

    name: str
    check: str
    #: Stands in for the engine of one stage.
    engine: type[Mutant] | None = None
    stage: int = _MIDDLE
    #: Stands in for the whole model on two threads.
    whole: type[Mutant] | None = None
    #: Stands in for an act that must fail.
    refusal_cases: Mapping[str, RefusalCase] | None = None
    #: Changes the raw units.
    tamper: Callable[[dict[str, dict[str, Any]]], None] | None = None

    def job(self, job: CertifyJob) -> CertifyJob:
        """The job with the mistake in it."""
        if self.engine is not None:
            job = evolve(job, wrap=partial(_at, self.stage, self.engine))
        if self.whole is not None:
            job = evolve(job, wrap_whole=partial(_on_threads, self.whole))
        return evolve(job, refusal_cases=self.refusal_cases)

    def reaches(self, unit: str) -> bool:
        """Whether a unit runs with the mistake in it; the others are what they are without it."""
        variant = unit.partition("/")[0]
        threads = variant.startswith("threads-")
        if self.engine is not None:
            return variant != "whole" and not threads
        if self.whole is not None:
            return threads
        return self.refusal_cases is not None and variant == "refusals"


def _at(stage: int, mutant: type[Mutant], index: int, engine: ShardEngine) -> ShardEngine:
    return mutant(engine) if index == stage else engine


def _on_threads(mutant: type[Mutant], threads: int) -> Wrap:
    return partial(_at, 0 if threads > 1 else -1, mutant)


def _smuggle(units: dict[str, dict[str, Any]]) -> None:
    """Every decode frame between the stages carries a row of a cache."""
    for unit in units.values():
        if unit.get("variant") == "split":
            unit["decode_traffic"]["bytes"] += 512 * unit["decode_traffic"]["frames"]


def _other_tokens(units: dict[str, dict[str, Any]]) -> None:
    """One stage has counted other tokens than were sent."""
    units["split/129"]["at_end"][_MIDDLE]["prefix"] = units["split/5"]["at_end"][_MIDDLE]["prefix"]


def _one_try_differs(units: dict[str, dict[str, Any]]) -> None:
    units["refusals/1"]["refusals"][0]["message"] += " (this time)"


def _state_lost(units: dict[str, dict[str, Any]]) -> None:
    units["refusals/0"]["refusals"][3]["state_kept"] = False


_RIGHT_FRAME = {**REFUSAL_CASES, "cache mismatch": REFUSAL_CASES["context limit n"]}

MUTANTS = (
    MutantCase("token ids of neighbours swapped", "split equals whole", SwappedSideband),
    MutantCase("a row of the boundary sent twice", "split equals whole", StaleRow),
    MutantCase("a chunk of the boundary sent twice", "split equals whole", StaleChunk),
    MutantCase("positions off by one", "every run finished", OffByOne),
    MutantCase("kernels that depend on the chunk", "chunkings agree", ChunkDependent),
    MutantCase("a row leaked by the slot's former session", "re-prefilled equals cold", LeakedRow),
    MutantCase("a copy unlike its source", "forked equals cold", UnlikeCopy),
    MutantCase("kernels that depend on the company", "batched equals alone", NeedsCompany),
    MutantCase("an epoch kept", "every run finished", KeptEpoch),
    MutantCase("a clear skipped", "nothing is left", KeptRows),
    MutantCase("kernels that depend on the threads", "threads agree", whole=OtherLogits),
    MutantCase("a row missing", "states stand where the closed forms say", MissingRow),
    MutantCase("a stage one token ahead", "every run finished", OtherPosition),
    MutantCase("a stage that counted other tokens", "stages agree", tamper=_other_tokens),
    MutantCase("NaN that nobody reports", "all logits are finite", SilentNan, stage=_TAIL),
    MutantCase("state beyond the formula", "memory equals the formula", MoreMemory),
    MutantCase("a cache row in every frame", "wire carries the boundary", tamper=_smuggle),
    MutantCase("another answer after a cancellation", "cancelled answers go on", Tired, stage=_TAIL),
    MutantCase("an act that does not fail", "what must fail fails, always alike", refusal_cases=_RIGHT_FRAME),
    MutantCase("an act that fails in another way once", "what must fail fails, always alike", tamper=_one_try_differs),
    MutantCase("an act that changes the state", "what must fail fails, always alike", tamper=_state_lost),
)


class SelftestPlan(Profile, frozen=True, kw_only=True):
    """The profile, and each mutant with the check that must catch it."""

    mutants: tuple[tuple[str, str], ...]


@frozen
class Selftest:
    """The benchmark: a certificate of unchanged stages, which must pass, and one for each mutant."""

    job: CertifyJob
    #: Units without a mistake, which mutants share as far as theirs does not reach.
    right: Scratch = field(factory=Scratch, init=False, eq=False)
    kind: ClassVar[Kind] = "selftest"
    title: ClassVar[str] = "Self-test of the certificate"

    @property
    def plan(self) -> SelftestPlan:
        return SelftestPlan(
            **msgspec.structs.asdict(PROFILE), mutants=tuple((case.name, case.check) for case in MUTANTS)
        )

    def subject(self) -> dict[str, Any]:
        return self.job.subject()

    def units(self, _: Store) -> Iterator[Group]:
        """Names of the checks that fail."""

        async def failed(case: MutantCase | None, _: None) -> dict[str, list[str]]:
            await measure("certificate", self.job.units(self.right), self.right)
            job, store = self.job if case is None else case.job(self.job), Scratch()
            for name, raw in self.right.units.items():
                if case is None or not case.reaches(name):
                    store.put(name, raw)
            await measure("certificate", job.units(store), store)
            if case is not None and case.tamper is not None:
                case.tamper(store.units)
            return {
                "failed": [check.name for check in verdicts(job.plan, job.subject(), store.units) if not check.passed]
            }

        cases = {"no mistake": None, **{case.name: case for case in MUTANTS}}
        yield Group([Unit(name, partial(failed, case)) for name, case in cases.items()])

    def metrics(self, _units: Units, _folder: Path) -> dict[str, Any]:
        return {"mutants": len(MUTANTS)}

    def checks(self, units: Units) -> list[Check]:
        def fault(name: str, check: str) -> str:
            unit = units.get(name, {"error": "not run"})
            if "failed" not in unit:
                return str(unit["error"])
            caught = check in unit["failed"] if check else not unit["failed"]
            return "" if caught else f"failed: {', '.join(unit['failed']) or 'no check'}"

        wanted = {"no mistake": "", **{case.name: case.check for case in MUTANTS}}
        return [
            judge(
                name,
                f"caught by: {check}" if check else "every check passes",
                [(f"wanted: {check}", fault(name, check))],
            )
            for name, check in wanted.items()
        ]

    def tables(self, _: Result) -> list[Section]:
        return []

    def plots(self, _: Result) -> list[Plot]:
        return []


def open_selftest() -> Selftest:
    """The self-test on its own small model."""
    artifact = Artifact.open(cached_fixture("mixed", layers=_LAYERS))
    return Selftest(CertifyJob(PROFILE, artifact, parse_split(_SPLIT, _LAYERS)))
