"""State that is read, copied or cleared in pieces is what it is in one go, whatever runs in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fixture_types import Prompt

from dgr.core.values import ContextParams, StateSummary
from dgr.engine import llama
from dgr.engine.base import Work, WorksInPieces
from dgr.errors import EngineError, InputError
from dgr.testing.state_inspector import InspectedEngine
from dgr.v4.state_map import Component

CONTEXT = ContextParams(n_ctx=2048, n_batch=512, n_ubatch=128, n_seq_max=3)


@pytest.fixture
def engine(small: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InspectedEngine]:
    monkeypatch.setattr(llama, "_PIECE", 1 << 14)
    engine = InspectedEngine(small, None, CONTEXT)
    yield engine
    engine.stop()


def drain(engine: InspectedEngine, slot: int) -> tuple[StateSummary, int]:
    *pieces, summary = engine.state_pieces(slot)
    assert summary is not None
    assert pieces == [None] * len(pieces)
    return summary, len(pieces)


def test_a_summary_in_pieces_is_the_summary(
    engine: InspectedEngine, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(engine, WorksInPieces)
    engine.run([Work(1, 0, prompt(300))])
    summary, pieces = drain(engine, 1)
    assert pieces > 2
    monkeypatch.setattr(llama, "_PIECE", 1 << 40)
    assert drain(engine, 1) == (summary, 0)
    assert engine.state_summary(1) == summary
    assert summary.position == 300
    assert drain(engine, 2)[0] == engine.state_summary(2) != summary


def test_other_slots_run_between_the_pieces(engine: InspectedEngine, prompt: Prompt) -> None:
    engine.run([Work(1, 0, prompt(300))])
    alone = drain(engine, 1)[0]
    found: StateSummary | None = None
    for at, summary in enumerate(engine.state_pieces(1)):
        found = summary
        engine.run([Work(0, at, prompt(1)), Work(2, at, prompt(1))])
    assert found == alone


def test_a_slot_that_does_not_stand_still_has_no_summary(engine: InspectedEngine, prompt: Prompt) -> None:
    engine.run([Work(1, 0, prompt(300))])

    def read_a_busy_slot() -> None:
        for at, _ in enumerate(engine.state_pieces(1)):
            engine.run([Work(1, 300 + at, prompt(1))])

    with pytest.raises(InputError, match="slot 1 does not stand still: ask for its state when it is idle"):
        read_a_busy_slot()


def test_a_slot_that_moved_once_is_read_again(engine: InspectedEngine, prompt: Prompt) -> None:
    engine.run([Work(1, 0, prompt(300))])
    pieces = engine.state_pieces(1)
    assert next(pieces) is None
    engine.run([Work(1, 300, prompt(9))])
    assert [summary for summary in pieces if summary] == [engine.state_summary(1)]


def test_a_slot_takes_no_work_before_it_is_clear(engine: InspectedEngine, prompt: Prompt) -> None:
    """Others do; and at the end all of it is zero, up to rows that no token has written."""
    engine.run([Work(0, 0, prompt(300))])
    engine.run([Work(1, 0, prompt(300, seed=1))])
    for component, layer in engine.owned():  # as a run that failed might have left it
        row = engine.rows(component, layer, slot=1, begin=0, count=1)[0]
        engine.poke(component, layer, engine.map[component].rows // 2, b"\xff" * len(row), slot=1)
    before = engine.image(0)
    pieces = 0
    for _ in engine.close_pieces(1):
        pieces += 1
        assert engine.position(1) < 300
        with pytest.raises(InputError, match="slot 1 was lost in an earlier run: clear it first"):
            engine.run([Work(1, 0, prompt(3))])
        engine.run([Work(2, pieces - 1, prompt(1))])
    assert pieces > 2
    assert engine.position(1) == 0
    assert engine.image(0) == before
    for (component, layer), data in engine.image(1).items():
        empty = b"\xff" if (component, layer) == (Component.RAW_SWA, -1) else b"\0"
        assert data == empty * len(data), (component, layer)
    engine.run([Work(1, 0, prompt(3))])


def test_a_slot_that_was_full_is_as_large_as_before(engine: InspectedEngine, prompt: Prompt) -> None:
    """Cells are freed from the end; those of the window are gone long before the others."""
    for _ in range(2):
        for begin in range(0, CONTEXT.n_ctx, 512):
            engine.run([Work(1, begin, prompt(512))])
        assert engine.position(1) == CONTEXT.n_ctx
        assert len(list(engine.close_pieces(1))) > 100
        assert engine.position(1) == 0


def test_a_copy_in_pieces_is_of_one_moment(engine: InspectedEngine, prompt: Prompt) -> None:
    """Others run between the pieces, and the source goes on, up to rows that it completes meanwhile."""
    tokens = prompt(400)
    engine.run([Work(0, 0, tokens[:299])])
    alone, before = engine.state_summary(0), engine.image(0)
    pieces = 0
    for at, _ in enumerate(engine.fork_pieces(0, 1)):
        pieces += 1
        with pytest.raises(InputError, match="slot 1 was lost in an earlier run: clear it first"):
            engine.run([Work(1, 299, tokens[299:300])])
        engine.run([Work(0, 299 + at, tokens[299 + at : 300 + at]), Work(2, at, prompt(1))])
    assert pieces > 10
    assert engine.state_summary(1) == alone
    assert engine.image(1) == before
    gone_on = engine.state_summary(0)
    engine.run([Work(1, 299, tokens[299 : 299 + pieces])])
    assert engine.state_summary(1).components == gone_on.components


def test_a_source_that_is_cleared_under_a_copy_loses_the_copy(engine: InspectedEngine, prompt: Prompt) -> None:
    engine.run([Work(0, 0, prompt(300))])
    pieces = engine.fork_pieces(0, 1)
    next(pieces)
    engine.close(0)
    engine.run([Work(0, 0, prompt(300, seed=1))])
    with pytest.raises(EngineError, match="slot 0 was cleared while it was copied to slot 1: clear slot 1"):
        next(pieces)
    with pytest.raises(InputError, match="slot 1 was lost in an earlier run: clear it first"):
        engine.run([Work(1, 0, prompt(3))])
    engine.close(1)
    assert engine.image(1) == engine.image(2)


def test_a_copy_that_was_left_half_way_leaves_nothing(engine: InspectedEngine, prompt: Prompt) -> None:
    engine.run([Work(0, 0, prompt(300))])
    with closing(engine.fork_pieces(0, 1)) as pieces:
        next(pieces)
    engine.close(1)
    assert engine.image(1) == engine.image(2)
    engine.fork(0, 1)
    assert engine.state_summary(1) == engine.state_summary(0)


def test_what_a_reader_waits_for_may_be_stopped(engine: InspectedEngine, prompt: Prompt) -> None:
    engine.run([Work(1, 0, prompt(300))])
    pieces = engine.state_pieces(1)
    assert next(pieces) is None
    engine.stop()
    with pytest.raises(EngineError, match="the stage was stopped"):
        next(pieces)
