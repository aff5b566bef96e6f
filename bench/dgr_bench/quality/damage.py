"""Damage to one component of the state, between a statement and its question: recall must be lost, or it saw nothing.

The state is that of the test extension's engine, every layer of it. Rows are cleared, or put back as they were before the
statement (a ring), or as they are after the same text with other values (compressed rows): a stale state, which answers with
what was never said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np
from attrs import frozen

from dgr import Artifact, ContextParams
from dgr.core.values import LogitsWanted
from dgr.engine.base import Work
from dgr.errors import NonFinite
from dgr.selftest.learned.model import held_out_text
from dgr.selftest.learned.recall import Kind, Question, Recital, make_recital
from dgr.testing.state_inspector import InspectedEngine
from dgr.v4.state_map import Component
from dgr_bench.quality.measurements import Recalled, Rows, context_of, recalled
from dgr_bench.quality.ways import QualityPlan, Way

__all__ = ["DAMAGES", "Damage", "Damaged", "When", "damaged"]


class When(StrEnum):
    """At which moment the state is damaged."""

    #: Once, when everything is stated and nothing is asked yet.
    BEFORE_QUESTIONS = "before the questions"
    #: Each time a value was stated.
    AFTER_VALUE = "after each value"
    #: Each time the bracket of a question was read.
    WITHIN_QUESTION = "within each question"


@frozen
class Damage:
    """One mutant."""

    component: Component
    kind: Kind
    when: When
    stale: bool = False

    @property
    def name(self) -> str:
        return f"{self.component} {'stale' if self.stale else 'cleared'}"


DAMAGES = (
    Damage(Component.CSA, Kind.PAIR, When.BEFORE_QUESTIONS),
    Damage(Component.CSA, Kind.PAIR, When.BEFORE_QUESTIONS, stale=True),
    Damage(Component.HCA, Kind.MARK, When.BEFORE_QUESTIONS),
    Damage(Component.HCA, Kind.MARK, When.BEFORE_QUESTIONS, stale=True),
    Damage(Component.INDEXER, Kind.PAIR, When.BEFORE_QUESTIONS),
    Damage(Component.RAW_SWA, Kind.PAIR, When.WITHIN_QUESTION),
    Damage(Component.CSA_RING, Kind.PAIR, When.AFTER_VALUE),
    Damage(Component.CSA_RING, Kind.PAIR, When.AFTER_VALUE, stale=True),
    Damage(Component.HCA_RING, Kind.MARK, When.AFTER_VALUE),
    Damage(Component.HCA_RING, Kind.MARK, When.AFTER_VALUE, stale=True),
    Damage(Component.INDEXER_RING, Kind.PAIR, When.AFTER_VALUE),
    Damage(Component.INDEXER_RING, Kind.PAIR, When.AFTER_VALUE, stale=True),
)


class Damaged(msgspec.Struct, frozen=True, kw_only=True):
    """Recall with a component damaged, beside recall without."""

    damage: str
    when: str
    #: Rows that were overwritten, over all recitals.
    rows: int
    undamaged: Recalled
    #: The state read and written back as it was: what is lost there is lost by the measuring.
    untouched: Recalled
    damaged: Recalled
    #: Answers that are the value of the other conversation, of a stale state.
    answered_stale: int


#: What to do with the state at a position: (engine, recital).
_Act = Callable[[InspectedEngine], int]


def _feed(engine: InspectedEngine, slot: int, tokens: tuple[int, ...], begin: int, end: int, chunk: int) -> Rows:
    """Commit tokens; the last row of logits."""
    logits = b""
    while begin < end:
        until = min(begin + chunk, end)
        output = engine.run([Work(slot, begin, tokens[begin:until], logits=LogitsWanted.LAST)])[0]
        if not output.finite or output.logits is None:
            raise NonFinite(f"NaN or Inf in the logits from position {begin} on")
        logits, begin = bytes(output.logits), until
    return np.frombuffer(logits, np.float32)


def _recite(
    engine: InspectedEngine, recital: Recital, chunk: int, acts: dict[int, _Act], slot: int = 0
) -> tuple[Rows, int]:
    """Rows of the answers, and how many rows of state were written; ``acts`` by the position before which they happen."""
    asked = {one.asked_at for one in recital.questions}
    stops = sorted({*acts, *(at + 1 for at in asked), len(recital.tokens)})
    rows, written, begin = [], 0, 0
    for stop in stops:
        last = _feed(engine, slot, recital.tokens, begin, stop, chunk)
        if stop - 1 in asked:
            rows.append(last)
        if stop in acts:
            written += acts[stop](engine)
        begin = stop
    return np.stack(rows), written


def _layers(engine: InspectedEngine, component: Component) -> Iterator[int]:
    return (layer for owned, layer in engine.owned() if owned is component)


def _write(engine: InspectedEngine, component: Component, change: Callable[[int, list[bytes]], list[bytes]]) -> int:
    """Overwrite every row of a component that the slot has; how many there were."""
    written = 0
    for layer in _layers(engine, component):
        for index, row in enumerate(change(layer, engine.rows(component, layer))):
            engine.poke(component, layer, index, row)
            written += 1
    return written


def _cleared(_: int, rows: list[bytes]) -> list[bytes]:
    return [bytes(len(row)) for row in rows]


def _acts(damage: Damage, recital: Recital, write: bool) -> dict[int, _Act]:
    """The damage of a recital, by position."""
    kept: dict[int, list[bytes]] = {}

    def keep(engine: InspectedEngine) -> int:
        for layer in _layers(engine, damage.component):
            kept[layer] = engine.rows(damage.component, layer)
        return 0

    def spoil(engine: InspectedEngine) -> int:
        if not write:
            return _write(engine, damage.component, lambda _, rows: rows)
        if not damage.stale:
            return _write(engine, damage.component, _cleared)
        if damage.when is When.AFTER_VALUE:
            return _write(engine, damage.component, lambda layer, _: kept[layer])
        return _write(engine, damage.component, lambda layer, _: engine.rows(damage.component, layer, slot=1))

    match damage.when:
        case When.BEFORE_QUESTIONS:
            return {recital.first_asked: spoil}
        case When.WITHIN_QUESTION:
            return {one.asked_at: spoil for one in recital.questions}
        case _:
            # From before the statement's bracket, until its value was read.
            before = {one.stated_at - 2: keep for one in recital.questions}
            return {**before, **{one.stated_at + 1: spoil for one in recital.questions}}


def damaged(plan: QualityPlan, damage: Damage, model: Path) -> Damaged:
    """Recall of one mutant's kind at the plan's distance: as it is, with the state written back, and damaged."""
    artifact = Artifact.open(model)
    context: ContextParams = context_of(plan, Way(name=damage.name, chunk=plan.chunk), 2)
    engine = InspectedEngine(artifact, None, context)
    found: dict[str, list[Rows]] = {"undamaged": [], "untouched": [], "damaged": []}
    questions: list[Question] = []
    others: list[int] = []
    written = 0
    try:
        for seed in range(plan.changed_recitals):
            recital = make_recital(damage.kind, plan.changed_at, held_out_text(), seed)
            other = make_recital(damage.kind, plan.changed_at, held_out_text(), seed, values_seed=1)
            questions += recital.questions
            others += [one.answer for one in other.questions]
            if damage.stale and damage.when is When.BEFORE_QUESTIONS:
                _feed(engine, 1, other.tokens, 0, other.first_asked, plan.chunk)
            for name, acts in (
                ("undamaged", {}),
                ("untouched", _acts(damage, recital, write=False)),
                ("damaged", _acts(damage, recital, write=True)),
            ):
                rows, count = _recite(engine, recital, plan.chunk, acts)
                found[name].append(rows)
                written += count if name == "damaged" else 0
                engine.close(0)
            engine.close(1)
    finally:
        engine.stop()
    answers = {name: np.concatenate(rows) for name, rows in found.items()}
    told = {name: recalled(damage.kind, plan.changed_at, rows, questions) for name, rows in answers.items()}
    top = answers["damaged"].argmax(axis=1)
    stale = sum(
        answer == other != one.answer for answer, other, one in zip(top.tolist(), others, questions, strict=True)
    )
    return Damaged(
        damage=damage.name,
        when=damage.when,
        rows=written,
        undamaged=told["undamaged"],
        untouched=told["untouched"],
        damaged=told["damaged"],
        answered_stale=stale,
    )
