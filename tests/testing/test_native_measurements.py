"""What the test extension measures: a slot that is filled is one that was computed, but for its values; times of operations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixture_types import Model

from dgr.artifact.artifact import Artifact
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams, LogitsWanted
from dgr.engine.base import Work
from dgr.errors import EngineError, InputError
from dgr.selftest.chain import pieces, some_tokens
from dgr.testing.native_measurements import MeasuredEngine, Roof, measure_roof
from dgr.v4.state_map import Component, ContextShape, expected_state

N_CTX, CHUNK = 2048, 256
#: Cells of the sliding window: the window, a chunk, rounded up.
CELLS = 512


@pytest.fixture(scope="module")
def path(model: Model) -> Path:
    return model("mixed", layers=4)


@pytest.fixture
def engine(path: Path) -> Iterator[MeasuredEngine]:
    opened = MeasuredEngine(path, None, ContextParams(n_ctx=N_CTX, n_batch=CHUNK, n_ubatch=CHUNK, n_seq_max=2))
    yield opened
    opened.stop()


def compute(engine: MeasuredEngine, n_tokens: int, slot: int) -> None:
    tokens = some_tokens(n_tokens, engine.describe().n_vocab)
    for begin, end in pieces(n_tokens, CHUNK):
        engine.run([Work(slot, begin, tokens[begin:end])])


def go_on(engine: MeasuredEngine, slot: int) -> list[bytes]:
    """Rows of logits of a chunk and of some tokens, from where the slot stands."""
    tokens = some_tokens(CHUNK + 5, engine.describe().n_vocab, seed=9)
    rows = []
    for begin, end in [(0, CHUNK), *((CHUNK + at, CHUNK + at + 1) for at in range(5))]:
        work = Work(slot, engine.position(slot), tokens[begin:end], logits=LogitsWanted.ALL)
        rows.append(bytes(engine.run([work])[0].logits or b""))
    return rows


@pytest.mark.parametrize("n_tokens", [1, 3, 4, 127, 128, 300, CELLS, N_CTX - 300, N_CTX])
def test_a_filled_slot_has_the_rows_of_its_tokens(path: Path, engine: MeasuredEngine, n_tokens: int) -> None:
    engine.fill(n_tokens, slot=1)
    assert (engine.position(0), engine.position(1)) == (0, n_tokens)
    shape = ContextShape(N_CTX, CHUNK, 2)
    state = engine.state_summary(1)
    found = {part.name: (part.rows_min, part.rows_max) for part in state.components}
    wanted = expected_state(Artifact.open(path).hp, LayerRange(0, 4), shape, n_tokens)
    assert found == {part.component.value: (part.rows, part.rows) for part in wanted}
    assert {part.name: part.rows_max for part in engine.state_summary(0).components} == dict.fromkeys(found, 0)
    engine.close(1)
    assert engine.position(1) == 0
    assert {part.name: part.rows_max for part in engine.state_summary(1).components} == dict.fromkeys(found, 0)


def transplant(
    engine: MeasuredEngine, source: int, target: int, leave_out: tuple[Component, int] | None = None
) -> None:
    """Overwrite the rows of a slot by another one's, but for a component's row."""
    for component, layer in engine.owned():
        for row, data in enumerate(engine.rows(component, layer, source)):
            if (component, row) != leave_out:
                engine.poke(component, layer, row, data, target)


@pytest.mark.parametrize("n_tokens", [3, 100, CELLS, 2 * CELLS])
def test_with_computed_rows_it_goes_on_as_if_computed(engine: MeasuredEngine, n_tokens: int) -> None:
    compute(engine, n_tokens, slot=0)
    engine.fill(n_tokens, slot=1)
    # As long as no cell is used a second time, and after a whole number of rounds, the same cells come next, too. Elsewhere
    # the same rows would be added up in another order.
    assert engine.raw_positions(0) == engine.raw_positions(1)
    transplant(engine, 0, 1)
    assert go_on(engine, 1) == go_on(engine, 0)


@pytest.mark.parametrize(
    "left_out", [(Component.HCA, 1), (Component.INDEXER, 0), (Component.CSA_RING, 5), (Component.RAW_SWA, CELLS - 1)]
)
def test_a_row_that_is_not_the_computed_one_is_seen(engine: MeasuredEngine, left_out: tuple[Component, int]) -> None:
    compute(engine, CELLS, slot=0)
    engine.fill(CELLS, slot=1)
    transplant(engine, 0, 1, left_out)
    assert go_on(engine, 1) != go_on(engine, 0)


def test_a_seed_gives_the_same_rows(engine: MeasuredEngine) -> None:
    images = []
    for seed in (0, 0, 1):
        engine.fill(300, seed=seed)
        images.append(engine.image())
        engine.close(0)
    assert images[0] == images[1]
    changed = {key for key in images[0] if images[0][key] != images[2][key]}
    assert changed == {key for key in images[0] if key[1] >= 0}  # but for the positions of cells
    rows = [images[0][Component.CSA, 2], images[0][Component.HCA, 3], images[0][Component.INDEXER, 2]]
    assert len(set(rows)) == 3


@pytest.mark.parametrize(
    ("slot", "n_tokens", "message"), [(0, 0, "n_tokens is 0"), (0, N_CTX + 1, "must be in"), (2, 5, "slot is 2")]
)
def test_what_cannot_be_filled_is_refused(engine: MeasuredEngine, slot: int, n_tokens: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine.fill(n_tokens, slot=slot)
    assert engine.position(0) == 0


def test_a_slot_that_is_not_empty_is_refused(engine: MeasuredEngine) -> None:
    engine.fill(5)
    with pytest.raises(InputError, match="slot 0 is not empty"):
        engine.fill(5)


def test_a_profile_names_what_takes_the_time_and_changes_no_bit(engine: MeasuredEngine) -> None:
    compute(engine, 300, slot=0)
    compute(engine, 300, slot=1)
    with engine.profile() as operations:
        profiled = go_on(engine, 0)
    assert profiled == go_on(engine, 1)
    calls = {(one.op, one.name, one.weight): one.calls for one in operations}
    assert calls["MUL_MAT_ID", "ffn_gate_exps", "mxfp4"] == 6 * 4  # runs, layers
    assert calls["MUL_MAT", "indexer.attn_q_b", "q8_0"] == 6
    assert calls["MUL_MAT", "output", "bf16"] == 6
    assert calls["FLASH_ATTN_EXT", "attn_sinks", "f32"] == 6 * 4
    assert all(one.seconds > 0 for one in operations)
    assert [one.seconds for one in operations] == sorted((one.seconds for one in operations), reverse=True)
    with engine.profile() as operations:
        pass
    assert operations == []


def test_an_operation_that_fails_leaves_no_profile_behind(engine: MeasuredEngine) -> None:
    with pytest.raises(InputError), engine.profile():
        engine.run([Work(0, 7, (1,))])
    engine.abort()
    with pytest.raises(EngineError):
        engine.run([Work(0, 0, (1,))])


@pytest.mark.parametrize("kind", Roof)
def test_what_the_machine_can_do(kind: Roof) -> None:
    rate = measure_roof(kind, 1, 0.02, 1 << 20)
    assert rate > 1e8 or (rate == 0 and kind in (Roof.BF16, Roof.INT8))


def test_a_limit_that_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InputError, match="n_threads is 100000"):
        measure_roof(Roof.READ, 100000)
    with pytest.raises(InputError, match="n_bytes is 3, too few"):
        measure_roof(Roof.TRIAD, 1, 0.01, 3)
