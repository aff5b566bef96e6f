"""The fake engine keeps the public contract, and every mutant of it breaks a check."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from msgspec.structs import replace

from dgr.core.route import LayerRange
from dgr.core.values import (
    ContextParams,
    LogitsWanted,
    Numerics,
    SamplingParams,
    StageIdentity,
    StateSummary,
    TopLogprob,
)
from dgr.engine.base import MemoryReport, Output, ShardEngine, Work
from dgr.errors import DgrError, EngineError, InputError, InvalidLayerRange
from dgr.testing.engines.contract import EngineContract
from dgr.testing.engines.fake import FakeEngine, FakeModel, FakeVocabulary, Fault, FaultKind, _Slot

CONTEXT = ContextParams(n_ctx=64, n_batch=16, n_ubatch=16, n_seq_max=2)


class TestFakeEngine(EngineContract):
    def make(self, layers: LayerRange | None, context: ContextParams) -> ShardEngine:
        return FakeEngine(layers, context)


class TestOtherShape(EngineContract):
    """Nothing depends on the default sizes."""

    context = ContextParams(n_ctx=100, n_batch=20, n_ubatch=10, n_seq_max=1)

    def make(self, layers: LayerRange | None, context: ContextParams) -> ShardEngine:
        return FakeEngine(layers, context, model=FakeModel(n_layers=2, n_vocab=80, width=5, seed=9))

    def cuts(self, n_layers: int) -> Sequence[int]:
        return range(1, n_layers)


# --- mutants: each breaks one promise ---


class SkipClear(FakeEngine):
    """Forgets the position, keeps the rows."""

    def close(self, slot: int) -> None:
        self._slot(slot).position = 0


class HalfClear(FakeEngine):
    """Clears the tape, not the tally."""

    def close(self, slot: int) -> None:
        kept = self._slot(slot).tally
        super().close(slot)
        self._slots[slot].tally = kept


class OffByOne(FakeEngine):
    """Counts the positions of a later chunk from one too far."""

    def _layer(self, layer: int, stream: list[int], position: int, slot: _Slot) -> list[int]:
        out = super()._layer(layer, stream, position, slot)
        return [(out[0] + (slot.position > 0)) % 16_777_213, *out[1:]]


class Leak(FakeEngine):
    """Mixes in the tape of the slot before."""

    def _layer(self, layer: int, stream: list[int], position: int, slot: _Slot) -> list[int]:
        out = super()._layer(layer, stream, position, slot)
        other = self._slots[self._slots.index(slot) - 1]
        out[0] = (out[0] + other.tape[layer][0]) % 16_777_213 if other is not slot else out[0]
        return out


class LayersCountFromZero(FakeEngine):
    """Takes a stage's first layer for the model's first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._weights = {
            layer: FakeEngine(model=self.model)._weights[layer - self._layers.start] for layer in self._layers
        }


class SkippedLayer(FakeEngine):
    """Leaves out the first layer of a stage that is not the head."""

    def _layer(self, layer: int, stream: list[int], position: int, slot: _Slot) -> list[int]:
        out = super()._layer(layer, stream, position, slot)
        return stream if layer == self._layers.start > 0 else out


class StaleRow(FakeEngine):
    """Hands on the row before the last."""

    def _run(self, work: Work) -> Output:
        output = super()._run(work)
        if output.residual is None or len(work.tokens) < 2:
            return output
        row = 4 * self.model.width
        residual = bytes(output.residual)
        return evolve(output, residual=residual[:-row] + residual[-2 * row : -row])


class LooksAtIds(FakeEngine):
    """Computes from ids that it says it does not need."""

    def _run(self, work: Work) -> Output:
        output = super()._run(work)
        if output.logits is None or work.residual is None:
            return output
        return evolve(output, logits=bytes(output.logits)[4 * (work.tokens[0] % 7) :] + bytes(4 * (work.tokens[0] % 7)))


class AcceptsAnyPosition(FakeEngine):
    """Believes the caller where a sequence stands."""

    def _check_work(self, work: Work, previous: int) -> None:
        self._slot(work.slot).position = work.position
        super()._check_work(work, previous)


class RefusesTooLate(FakeEngine):
    """Notices a bad item after it ran the ones before."""

    def run(self, batch: Sequence[Work]) -> list[Output]:
        if len(batch) < 2:
            return super().run(batch)
        return [super(RefusesTooLate, self).run([work])[0] for work in batch]


class TrustsResiduals(FakeEngine):
    """Lets NaN in."""

    def _check(self, batch: Sequence[Work]) -> None:
        super()._check([evolve(work, residual=work.residual and bytes(len(work.residual))) for work in batch])

    def _run(self, work: Work) -> Output:
        return super()._run(evolve(work, residual=work.residual and bytes(len(work.residual))))


class TrimsToContext(FakeEngine):
    """Drops what does not fit instead of refusing it."""

    def run(self, batch: Sequence[Work]) -> list[Output]:
        room = self._context.n_ctx
        return super().run(
            [
                evolve(w, tokens=list(w.tokens)[: max(1, room - w.position)] if w.position < room else w.tokens)
                for w in batch
            ]
        )


class WrongError(FakeEngine):
    """Calls a full context a native failure."""

    def run(self, batch: Sequence[Work]) -> list[Output]:
        try:
            return super().run(batch)
        except InputError as error:
            raise EngineError(str(error)) from error


class UnevenBytes(FakeEngine):
    """Counts bytes that no slot owns."""

    def memory(self) -> MemoryReport:
        memory = super().memory()
        return evolve(memory, state={**memory.state, "tape": memory.state["tape"] + 1})


class GrowingBytes(FakeEngine):
    """Allocates as it goes."""

    def memory(self) -> MemoryReport:
        memory = super().memory()
        return evolve(memory, state={**memory.state, "tape": memory.state["tape"] + 3 * 4 * self.tokens_run})


class EverythingEverywhere(FakeEngine):
    """Allocates the state of all layers on every stage."""

    def memory(self) -> MemoryReport:
        return FakeEngine(None, self._context, model=self.model)._measure()


class BlindFrontier(FakeEngine):
    """Reports where it was told to stand, not what it holds."""

    def state_summary(self, slot: int) -> StateSummary:
        seen = super().state_summary(slot)
        return replace(seen, position=0 if seen.position > 100 else seen.position)


class MovingSample(FakeEngine):
    """Draws anew each time it is asked."""

    draws = 0

    def sample(
        self, logits: memoryview | bytes, history: Sequence[int], params: SamplingParams
    ) -> tuple[int, tuple[TopLogprob, ...]]:
        self.draws += 1
        return super().sample(logits, history, replace(params, seed=params.seed + self.draws))


class DeafSample(FakeEngine):
    """Draws from the seed alone."""

    def sample(
        self, logits: memoryview | bytes, history: Sequence[int], params: SamplingParams
    ) -> tuple[int, tuple[TopLogprob, ...]]:
        return super().sample(logits, history[:3], params)


class OneRow(FakeEngine):
    """Gives the last row when all are wanted."""

    def _run(self, work: Work) -> Output:
        wanted = LogitsWanted.LAST if work.logits is LogitsWanted.ALL else work.logits
        return super()._run(evolve(work, logits=wanted))


class StopsTwice(FakeEngine):
    """Cannot be stopped again."""

    def stop(self) -> None:
        if self._stopped:
            raise EngineError("stopped already")
        super().stop()


class GoesOn(FakeEngine):
    """Runs after it was stopped or aborted."""

    def _check_running(self) -> None:
        return


class LastRowAlone(FakeEngine):
    """Computes the last row otherwise when it is the only one wanted."""

    def _run(self, work: Work) -> Output:
        output = super()._run(work)
        if work.logits is not LogitsWanted.LAST or output.logits is None:
            return output
        return evolve(output, logits=bytes(output.logits)[4:] + bytes(output.logits)[:4])


class CannotDecode(FakeEngine):
    """Says that it does not execute what an engine is for."""

    def describe(self) -> StageIdentity:
        return replace(super().describe(), capabilities={"decode": "reserved"})


class HalfPromise(FakeEngine):
    """Offers a capability with a status that nobody knows."""

    def describe(self) -> StageIdentity:
        return replace(super().describe(), capabilities={"decode": "executable", "telepathy": "perhaps"})


class SharedFork(FakeEngine):
    """A copy that is its source by another name."""

    def _copy(self, slot: _Slot) -> _Slot:
        return slot


class ShallowFork(FakeEngine):
    """Copies the position; the rows are shared."""

    def _copy(self, slot: _Slot) -> _Slot:
        return copy.copy(slot)


class HalfFork(FakeEngine):
    """Copies the tape, not the tally."""

    def _copy(self, slot: _Slot) -> _Slot:
        made = super()._copy(slot)
        made.tally = self._new_slot().tally
        return made


class WrongFork(FakeEngine):
    """Copies the last slot, whichever was asked for."""

    def _copy(self, slot: _Slot) -> _Slot:
        return super()._copy(self._slots[-1])


class ForkOffByOne(FakeEngine):
    """The copy stands one token too far."""

    def _copy(self, slot: _Slot) -> _Slot:
        made = super()._copy(slot)
        made.position += 1
        return made


class LateFork(FakeEngine):
    """Puts the copying of rows off until something runs, as llama.cpp does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waiting: list[tuple[int, int]] = []

    def fork(self, source: int, target: int) -> None:
        super().fork(source, target)
        position = self._slots[target].position
        self._slots[target] = self._new_slot()
        self._slots[target].position = position
        self.waiting.append((source, target))

    def run(self, batch: Sequence[Work]) -> list[Output]:
        for source, target in self.waiting:
            self._slots[target].tape = super()._copy(self._slots[source]).tape
            self._slots[target].tally = super()._copy(self._slots[source]).tally
        self.waiting.clear()
        return super().run(batch)

    def state_summary(self, slot: int) -> StateSummary:
        return super().state_summary({target: source for source, target in self.waiting}.get(slot, slot))


class ForkMoves(FakeEngine):
    """Leaves nothing in the source."""

    def fork(self, source: int, target: int) -> None:
        super().fork(source, target)
        self.close(source)


class ForkOverwrites(FakeEngine):
    """Copies into a slot that holds something."""

    def fork(self, source: int, target: int) -> None:
        if source != target and self._slot(source).position:
            self.close(target)
        super().fork(source, target)


class ForksNothing(FakeEngine):
    """Takes an empty slot for one that can be copied."""

    def fork(self, source: int, target: int) -> None:
        if self._slot(source).position or self._slot(target).position:
            super().fork(source, target)


MUTANTS = [
    SharedFork,
    ShallowFork,
    HalfFork,
    WrongFork,
    ForkOffByOne,
    LateFork,
    ForkMoves,
    ForkOverwrites,
    ForksNothing,
    SkipClear,
    HalfClear,
    OffByOne,
    Leak,
    LayersCountFromZero,
    SkippedLayer,
    StaleRow,
    LooksAtIds,
    AcceptsAnyPosition,
    RefusesTooLate,
    TrustsResiduals,
    TrimsToContext,
    WrongError,
    UnevenBytes,
    GrowingBytes,
    EverythingEverywhere,
    BlindFrontier,
    MovingSample,
    DeafSample,
    OneRow,
    StopsTwice,
    GoesOn,
    LastRowAlone,
    CannotDecode,
    HalfPromise,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_contract_catches(mutant: type[FakeEngine]) -> None:
    class Contract(EngineContract):
        def make(self, layers: LayerRange | None, context: ContextParams) -> ShardEngine:
            return mutant(layers, context)

    assert Contract.failures(first_only=True)


# --- what is not promised is skipped, not passed ---


class Native(FakeEngine):
    """Does not promise that other batches have the same bits."""

    def describe(self) -> StageIdentity:
        about = super().describe()
        return replace(about, context=replace(about.context, numerics=Numerics.NATIVE))


class Sideband(FakeEngine):
    """Says that every stage needs the ids."""

    def describe(self) -> StageIdentity:
        return replace(super().describe(), token_sideband=True)


class NoForks(FakeEngine):
    """Does not say that it copies slots."""

    def describe(self) -> StageIdentity:
        return replace(super().describe(), capabilities={"decode": "executable"})

    def fork(self, source: int, target: int) -> None:
        raise InputError("this engine copies no slots")


EXACT = {
    "test_chunks_do_not_matter",
    "test_companions_do_not_matter",
    "test_the_last_row_is_the_same_alone_and_among_all",
}
FORKS = {
    "test_a_fork_goes_on_as_a_cold_run_does",
    "test_a_fork_outlives_its_source",
    "test_forks_that_cannot_be_are_refused",
}
SLOTS = {"test_companions_do_not_matter", "test_slots_do_not_touch", "test_a_batch_is_refused_as_a_whole", *FORKS}
#: Checks that put nothing but a whole model together.
WHOLE = {
    "test_describes_itself",
    "test_memory_is_accounted_for",
    "test_refuses_ranges_that_are_not_there",
    "test_sampling_repeats_itself",
    "test_sampling_refuses_nonsense",
    "test_stop_is_final_and_idempotent",
    "test_abort_fails_later_runs",
    "test_forks_that_cannot_be_are_refused",
}
CHECKS = {name for name in dir(EngineContract) if name.startswith("test_")}


@pytest.mark.parametrize(
    ("engine", "model", "n_seq_max", "skipped", "reason"),
    [
        (FakeEngine, FakeModel(), 2, set(), ""),
        (Native, FakeModel(), 2, EXACT, "numerics = native"),
        (FakeEngine, FakeModel(), 1, SLOTS, "n_seq_max = 1"),
        (NoForks, FakeModel(), 2, FORKS, "capability fork is not offered"),
        (Sideband, FakeModel(), 2, {"test_ids_are_needed_as_described"}, "token_sideband"),
        (FakeEngine, FakeModel(n_layers=1), 2, CHECKS - WHOLE, "a model of 1 layers that is cut nowhere"),
    ],
    ids=["all", "numerics", "slots", "forks", "sideband", "layers"],
)
def test_what_an_engine_does_not_promise_is_skipped_with_the_reason(
    engine: type[FakeEngine], model: FakeModel, n_seq_max: int, skipped: set[str], reason: str
) -> None:
    class Contract(EngineContract):
        context = replace(CONTEXT, n_ctx=200, n_seq_max=n_seq_max)

        def make(self, layers: LayerRange | None, context: ContextParams) -> ShardEngine:
            return engine(layers, context, model=model)

    report = Contract.report()
    assert report.failed == {}
    assert set(report.skipped) == skipped
    assert all(reason in why for why in report.skipped.values())
    assert set(report.passed) == CHECKS - skipped


ONE_SLOT = """
from msgspec.structs import replace

from dgr.testing import EngineContract, FakeEngine


class TestOneSlot(EngineContract):
    def make(self, layers, context):
        return FakeEngine(layers, context)

    context = replace(EngineContract.context, n_seq_max=1)
"""


def test_pytest_reports_a_skipped_check_as_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_one_slot.py").write_text(ONE_SLOT, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", str(tmp_path)]
    plain = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False)
    assert f"{len(CHECKS) - len(SLOTS)} passed, {len(SLOTS)} skipped" in done.stdout
    assert "n_seq_max = 1: the check needs 2 sequence slots" in done.stdout


# --- what the fake offers beyond the seam ---


def run(engine: FakeEngine, position: int, tokens: Sequence[int], slot: int = 0) -> Output:
    return engine.run([Work(slot, position, tokens, logits=LogitsWanted.LAST)])[0]


def test_fault_by_step_loses_every_sequence_of_the_batch() -> None:
    engine = FakeEngine(None, CONTEXT)
    engine.faults.append(Fault(FaultKind.ERROR, step=2))
    run(engine, 0, [1, 2])
    with pytest.raises(EngineError, match="run 2 fails on purpose"):
        engine.run([Work(0, 2, [3]), Work(1, 0, [4])])
    for slot in (0, 1):
        with pytest.raises(InputError, match="clear it first"):
            run(engine, engine.position(slot), [5], slot)
        engine.close(slot)
        assert run(engine, 0, [5], slot).finite


def test_fault_by_position_poisons_one_sequence() -> None:
    engine = FakeEngine(None, CONTEXT)
    engine.faults.append(Fault(FaultKind.NON_FINITE, position=3, slot=1))
    mine, theirs = engine.run([Work(0, 0, [1] * 4), Work(1, 0, [1] * 4, logits=LogitsWanted.LAST)])
    assert mine.finite
    assert not theirs.finite
    assert theirs.logits is not None
    assert all(math.isnan(value) for value in memoryview(theirs.logits).cast("f"))
    assert not run(engine, 4, [1], slot=1).finite, "poison stays until the slot is cleared"
    engine.close(1)
    assert run(engine, 0, [1], slot=1).finite
    assert engine.faults == []


def test_watch_sees_every_batch_and_runs_are_counted() -> None:
    engine, seen = FakeEngine(None, CONTEXT), []
    engine.watch = lambda batch: seen.append([work.position for work in batch])
    run(engine, 0, [1, 2, 3])
    run(engine, 3, [1])
    with pytest.raises(InputError):
        run(engine, 3, [1])
    assert seen == [[0], [3]]
    assert (engine.runs, engine.tokens_run) == (2, 4)


def test_models_differ_by_seed_and_say_so() -> None:
    one, other = FakeEngine(None, CONTEXT), FakeEngine(None, CONTEXT, model=FakeModel(seed=1))
    assert one.describe().artifact != other.describe().artifact
    assert run(one, 0, [1, 2, 3]).logits != run(other, 0, [1, 2, 3]).logits


def test_a_tally_is_owned_by_some_layers_only() -> None:
    assert FakeEngine(LayerRange(0, 2), CONTEXT).describe().components == ("tape",)
    assert FakeEngine(LayerRange(0, 3), CONTEXT).describe().components == ("tape", "tally")


def test_greedy_text_is_printable_and_ends() -> None:
    engine, vocabulary = FakeEngine(None, ContextParams(n_ctx=512, n_batch=512)), FakeVocabulary()
    history = vocabulary.encode("Once upon a time")
    output = run(engine, 0, history)
    while len(history) < 500:
        assert output.logits is not None
        token, _ = engine.sample(output.logits, history, SamplingParams())
        if token == vocabulary.eos:
            break
        output = run(engine, len(history), [token])
        history.append(token)
    assert token == vocabulary.eos
    text = b"".join(vocabulary.piece(token) for token in history).decode()
    assert text.isprintable()
    assert len(text) > 20
    assert vocabulary.piece(256) == b""


@pytest.mark.parametrize(
    ("layers", "context", "error"),
    [
        (LayerRange(3, 9), CONTEXT, InvalidLayerRange),
        (None, replace(CONTEXT, n_ubatch=17), InputError),
    ],
)
def test_refuses_what_it_cannot_load(layers: LayerRange | None, context: ContextParams, error: type[DgrError]) -> None:
    with pytest.raises(error):
        FakeEngine(layers, context)


def test_a_zeroed_slot_is_zero() -> None:
    engine = FakeEngine(None, CONTEXT)
    run(engine, 0, [9] * 16)
    engine.close(0)
    slot = engine._slots[0]
    rows = [*slot.tape.values(), *slot.tally.values()]
    assert all(row == array("I", bytes(row.itemsize * len(row))) for row in rows)
