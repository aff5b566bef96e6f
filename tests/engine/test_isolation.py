"""What happens to one sequence never touches another: every byte of every component, read from the native tensors.

The shapes are those of public reports against caches of this kind: clearing one slot cleared all of them, a slot that
was filled again wiped its neighbours, batches of some slots rolled the absent ones back, cells leaked with every reuse.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fixture_types import Model, Prompt
from msgspec.structs import replace

from dgr.core.values import ContextParams, LogitsWanted, StateSummary
from dgr.engine.base import Work
from dgr.errors import InputError
from dgr.selftest.chain import Chain
from dgr.testing.state_inspector import InspectedEngine

SLOTS = 4
#: The ring of raw K has 256 cells here, so that it wraps within the context.
CONTEXT = ContextParams(n_ctx=1024, n_batch=1024, n_ubatch=128, n_seq_max=SLOTS)
LENGTHS = (5, 130, 257, 64)


@pytest.fixture
def engine(small: Path) -> Iterator[InspectedEngine]:
    engine = InspectedEngine(small, None, CONTEXT)
    yield engine
    engine.stop()


def is_empty(engine: InspectedEngine, slot: int) -> bool:
    image = engine.image(slot)
    return set(engine.raw_positions(slot)) == {-1} and not any(any(image[key]) for key in engine.owned())


def fill(engine: InspectedEngine, prompt: Prompt, lengths: Sequence[int] = LENGTHS) -> None:
    """One session a slot, each with tokens of its own."""
    for slot, length in enumerate(lengths):
        if length:
            engine.run([Work(slot, 0, prompt(length, seed=slot))])


def go_on(engine: InspectedEngine, slot: int, tokens: Sequence[int]) -> bytes:
    """Run more tokens of a slot, one by one; their rows of logits."""
    return Chain([engine]).feed(tokens, chunk=1, slot=slot, begin=engine.position(slot))


class Watch:
    """Fails when a slot changes that nobody touched."""

    def __init__(self, engine: InspectedEngine) -> None:
        self.engine = engine
        self.images = [engine.image(slot) for slot in range(SLOTS)]

    def only_changed(self, touched: set[int]) -> None:
        for slot, before in enumerate(self.images):
            now = self.engine.image(slot)
            if slot not in touched:
                assert [key for key in before if before[key] != now[key]] == [], f"slot {slot} changed"
            self.images[slot] = now


@pytest.mark.parametrize("slot", range(SLOTS))
def test_every_act_on_one_slot_leaves_the_others_byte_identical(
    engine: InspectedEngine, prompt: Prompt, slot: int
) -> None:
    fill(engine, prompt)
    watch = Watch(engine)

    go_on(engine, slot, prompt(3, seed=9))  # decode
    watch.only_changed({slot})
    Chain([engine]).feed(prompt(300), chunk=300, slot=slot, begin=engine.position(slot))  # prefill, past the ring
    watch.only_changed({slot})
    with pytest.raises(InputError):
        engine.run([Work(slot, 0, [1])])
    watch.only_changed(set())
    engine.close(slot)  # cancelled for good, evicted, cleared: one act
    watch.only_changed({slot})
    assert is_empty(engine, slot)
    engine.close(slot)
    watch.only_changed(set())
    engine.run([Work(slot, 0, prompt(200, seed=7))])  # opened by another session
    watch.only_changed({slot})


def test_batches_of_some_slots_leave_the_absent_ones(engine: InspectedEngine, prompt: Prompt) -> None:
    fill(engine, prompt)
    watch = Watch(engine)
    for slots in ((0, 1), (0, 2), (1, 3), (0, 1, 3), (2,), (0, 1, 2, 3), (3,)):
        batch = [Work(slot, engine.position(slot), prompt(1 + 40 * (slot == slots[0]), seed=slot)) for slot in slots]
        engine.run(batch)
        watch.only_changed(set(slots))


def test_interleaved_sessions_stand_where_lone_ones_stand(engine: InspectedEngine, small: Path, prompt: Prompt) -> None:
    """Rows, counts and logits of sessions that ran together are those of sessions that ran alone."""
    texts = [prompt(280, seed=slot) for slot in range(SLOTS)]
    at, rows = [0] * SLOTS, [b""] * SLOTS
    dice = random.Random(3)
    while min(at) < 280:
        batch = []
        for slot in sorted(dice.sample(range(SLOTS), dice.randint(1, SLOTS))):
            size = min(dice.choice((1, 1, 2, 5, 64, 130)), 280 - at[slot])
            if size:
                tokens = texts[slot][at[slot] : at[slot] + size]
                batch.append(Work(slot, at[slot], tokens, logits=LogitsWanted.ALL))
                at[slot] += size
        for output in engine.run(batch) if batch else ():
            rows[output.slot] += bytes(output.logits or b"")
    alone = InspectedEngine(small, None, replace(CONTEXT, n_seq_max=1))
    try:
        for slot, text in enumerate(texts):
            assert Chain([alone]).feed(text, chunk=280) == rows[slot]
            assert alone.state_summary(0) == engine.state_summary(slot)
            assert alone.raw_positions(0) == engine.raw_positions(slot)
            alone.close(0)
    finally:
        alone.stop()


def test_a_long_session_remembers_while_its_neighbour_comes_and_goes(engine: InspectedEngine, prompt: Prompt) -> None:
    """Two slots, a prompt of 946 tokens: after the neighbour is cleared and filled again, not a bit is lost."""
    engine.run([Work(0, 0, prompt(946))])
    undisturbed = go_on(engine, 0, prompt(20, seed=5))
    engine.close(0)
    engine.run([Work(0, 0, prompt(946)), Work(1, 0, prompt(60, seed=1))])
    disturbed = b""
    for token in prompt(20, seed=5):
        engine.close(1)
        engine.run([Work(1, 0, prompt(60, seed=1))])  # filled again, as after a restore
        disturbed += go_on(engine, 0, [token])
    assert disturbed == undisturbed


def test_a_random_life_of_many_sessions(engine: InspectedEngine, prompt: Prompt) -> None:
    """Open, go on, close, refuse, in any order; after each act only its own slots have changed."""
    dice = random.Random(11)
    watch = Watch(engine)
    for _ in range(60):
        slot = dice.randrange(SLOTS)
        position = engine.position(slot)
        match dice.choice(("run", "run", "run", "close", "refuse", "batch")):
            case "close":
                engine.close(slot)
                assert is_empty(engine, slot)
            case "refuse":
                with pytest.raises(InputError):
                    engine.run([Work(slot, position + 1, [1])])
                watch.only_changed(set())
            case "batch":
                other = (slot + dice.randrange(1, SLOTS)) % SLOTS
                pair = sorted((slot, other))
                works = [Work(one, engine.position(one), prompt(dice.choice((1, 5, 9)))) for one in pair]
                if all(engine.position(one) < 900 for one in pair):
                    engine.run(works)
                watch.only_changed(set(pair))
            case _:
                if position < 800:
                    engine.run([Work(slot, position, prompt(dice.choice((1, 3, 64, 129))))])
        watch.only_changed({slot})


def test_200_rounds_in_one_slot_leak_nothing(model: Model, prompt: Prompt) -> None:
    """Many times the context in tokens: no cell is lost, freed slots are empty, the last session is as the first."""
    lengths = (3, 64, 1, 129, 5, 17, 2, 33)
    engine = InspectedEngine(model("f32", layers=5), None, replace(CONTEXT, n_ctx=256, n_seq_max=2))
    try:
        total, first = 0, dict[int, tuple[bytes, StateSummary]]()
        engine.run([Work(0, 0, prompt(100, seed=2))])
        neighbour = engine.image(0)
        for round_ in range(200):
            length = lengths[round_ % len(lengths)]
            output = engine.run([Work(1, 0, prompt(length), logits=LogitsWanted.LAST)])[0]
            total += length
            frontier = engine.state_summary(1)
            assert first.setdefault(length, (bytes(output.logits or b""), frontier)) == (output.logits, frontier)
            engine.close(1)
            assert is_empty(engine, 1)
        assert engine.image(0) == neighbour
        assert total > 20 * 256
        engine.run([Work(1, 0, prompt(256))])  # the whole context is still there
    finally:
        engine.stop()


# --- the proof can fail -----------------------------------------------------------------------------------------------


def test_one_changed_byte_in_another_slot_is_caught(engine: InspectedEngine, prompt: Prompt) -> None:
    fill(engine, prompt)
    for component, layer in engine.owned():
        watch = Watch(engine)
        row = engine.rows(component, layer, 2, count=1)[0]
        engine.poke(component, layer, 0, bytes([row[0] ^ 1]) + row[1:], slot=2)
        with pytest.raises(AssertionError, match="slot 2 changed"):
            watch.only_changed({1})


def test_a_row_left_behind_is_caught(engine: InspectedEngine, prompt: Prompt) -> None:
    fill(engine, prompt)
    engine.close(3)
    for component, layer in engine.owned():
        zero = engine.rows(component, layer, 3, count=1)[0]
        engine.poke(component, layer, 1, b"\1" + zero[1:], slot=3)
        assert not is_empty(engine, 3)
        engine.poke(component, layer, 1, zero, slot=3)
    assert is_empty(engine, 3)
