"""What native tensors hold after P tokens is what the state map says, row by row.

Rows are told apart by content. A prompt is fed token by token first, and each row is noted as its position writes it;
in exact numerics the same position must leave the same bytes however it was reached, so every row found later names the
position it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from fixture_types import Prompt
from msgspec.structs import replace

from dgr.artifact.artifact import Artifact
from dgr.core.values import ContextParams
from dgr.selftest.chain import Chain
from dgr.selftest.llama_chain import open_chain
from dgr.testing.state_inspector import InspectedEngine
from dgr.v4.hyper_parameters import CSA_RATIO, HCA_RATIO
from dgr.v4.state_map import Component, ComponentExpectation, expected_state

POSITIONS = (1, 3, 4, 5, 7, 8, 9, 127, 128, 129, 255, 256, 257, 511, 512, 513)
#: The smallest ring of raw K, 256 cells: it wraps twice within the positions above.
CONTEXT = ContextParams(n_ctx=1024, n_ubatch=128, n_batch=1024)
SPLIT = "0:2,2:3,3:4,4:7"

#: (component, layer, position a row stands for) -> the row.
Rows = dict[tuple[Component, int, int], bytes]

_RATIO = {Component.CSA: CSA_RATIO, Component.INDEXER: CSA_RATIO, Component.HCA: HCA_RATIO}
_RINGS = {Component.CSA_RING, Component.HCA_RING, Component.INDEXER_RING}


def stages(chain: Chain) -> Sequence[InspectedEngine]:
    return [engine for engine in chain.engines if isinstance(engine, InspectedEngine)]


def note_rows(chain: Chain, tokens: Sequence[int]) -> Rows:
    """Feed token by token; every row as the token that completes it leaves it."""
    noted: Rows = {}
    for position in range(len(tokens)):
        chain.feed(tokens[position : position + 1], chunk=1, begin=position)
        for stage in stages(chain):
            cell = stage.raw_positions().index(position)
            for component, layer in stage.owned():
                if component is Component.RAW_SWA:
                    row, stands_for = cell, position
                elif component in _RINGS:
                    row, stands_for = position % stage.map[component].rows, position
                elif (position + 1) % _RATIO[component] == 0:
                    row = position // _RATIO[component]
                    stands_for = row * _RATIO[component]
                else:
                    continue
                noted[component, layer, stands_for] = stage.rows(component, layer, begin=row, count=1)[0]
    return noted


def wrong_rows(stage: InspectedEngine, expected: Sequence[ComponentExpectation], noted: Rows) -> list[str]:
    """What the stage's tensors hold otherwise than expected."""
    wrong = []
    cells = stage.raw_positions()
    for part in expected:
        for layer in stage.map[part.component].layers:
            rows = stage.rows(part.component, layer)
            if part.component is Component.RAW_SWA:
                live = {cell: position for cell, position in enumerate(cells) if position >= 0}
                if sorted(live.values()) != list(part.positions):
                    wrong.append(f"{part.component} {layer}: cells hold {sorted(live.values())}")
                # A cell that was freed keeps its row until it is written again.
                empty = [row for cell, row in enumerate(rows) if cell not in live] if len(live) < len(rows) else []
            else:
                live = dict(enumerate(part.positions))
                # The last row of a compressed cache takes dummy writes: it has no meaning before it is live.
                end = len(rows) - (part.component not in _RINGS)
                empty = rows[len(live) : end]
            if len(rows) != part.capacity:
                wrong.append(f"{part.component} {layer}: {len(rows)} rows, not {part.capacity}")
            for row, position in live.items():
                if rows[row] != noted[part.component, layer, position]:
                    wrong.append(f"{part.component} {layer}: row {row} is not that of position {position}")
            if any(any(row) for row in empty):
                wrong.append(f"{part.component} {layer}: rows beyond the frontier are not empty")
    return wrong


def wrong_frontier(stage: InspectedEngine, expected: Sequence[ComponentExpectation], n_tokens: int) -> list[str]:
    """How the stage's own account of itself differs."""
    frontier = stage.state_summary(0)
    found = [(part.name, part.capacity, part.rows_min, part.rows_max) for part in frontier.components]
    wanted = [(part.component.value, part.capacity, part.rows, part.rows) for part in expected]
    wrong = [] if frontier.position == stage.position(0) == n_tokens else [f"position {frontier.position}"]
    return wrong + [f"{one} is not {other}" for one, other in zip(found, wanted, strict=True) if one != other]


def expected_of(stage: InspectedEngine, artifact: Artifact, n_tokens: int) -> tuple[ComponentExpectation, ...]:
    return expected_state(artifact.hp, stage.map.layers, stage.map.shape, n_tokens)


def assert_as_mapped(chain: Chain, artifact: Artifact, n_tokens: int, noted: Rows) -> None:
    for stage in stages(chain):
        expected = expected_of(stage, artifact, n_tokens)
        assert wrong_frontier(stage, expected, n_tokens) == []
        assert wrong_rows(stage, expected, noted) == []


@pytest.fixture(scope="module")
def noted(small: Path, prompt: Prompt) -> Rows:
    with open_chain(small, None, CONTEXT, engine=InspectedEngine) as chain:
        return note_rows(chain, prompt(POSITIONS[-1]))


def test_rows_have_content(noted: Rows) -> None:
    """No two positions leave the same row, so that a row names its position."""
    assert all(any(row) for row in noted.values())
    for layer_rows in {key[:2] for key in noted}:
        rows = [row for key, row in noted.items() if key[:2] == layer_rows]
        assert len(set(rows)) == len(rows)


def test_after_a_prompt_of_each_length(small: Path, prompt: Prompt, noted: Rows) -> None:
    artifact = Artifact.open(small)
    with open_chain(small, SPLIT, CONTEXT, engine=InspectedEngine) as chain:
        for n_tokens in POSITIONS:
            chain.feed(prompt(n_tokens), chunk=1024)
            assert_as_mapped(chain, artifact, n_tokens, noted)
            chain.close()
            assert_as_mapped(chain, artifact, 0, noted)


def test_as_a_session_grows(small: Path, prompt: Prompt, noted: Rows) -> None:
    artifact = Artifact.open(small)
    with open_chain(small, SPLIT, CONTEXT, engine=InspectedEngine) as chain:
        begin = 0
        for end in POSITIONS:
            chain.feed(prompt(end)[begin:], chunk=100, begin=begin)
            assert_as_mapped(chain, artifact, end, noted)
            begin = end


@pytest.mark.slow
@pytest.mark.parametrize("n_ubatch", [128, 512])
def test_of_the_whole_depth(tiny: Path, prompt: Prompt, n_ubatch: int) -> None:
    """43 layers in three stages; with n_ubatch 512 the ring of raw K is longer than the prompts."""
    artifact, context = Artifact.open(tiny), replace(CONTEXT, n_ubatch=n_ubatch)
    with (
        open_chain(tiny, None, context, engine=InspectedEngine) as one,
        open_chain(tiny, "0:15,15:29,29:43", context, engine=InspectedEngine) as chain,
    ):
        noted = note_rows(one, prompt(POSITIONS[-1]))
        begin = 0
        for end in POSITIONS:
            chain.feed(prompt(end)[begin:], chunk=1024, begin=begin)
            assert_as_mapped(chain, artifact, end, noted)
            begin = end


@pytest.mark.parametrize("type_k", ["f32", "q8_0"])
def test_other_k_types(small: Path, prompt: Prompt, type_k: str) -> None:
    artifact, context = Artifact.open(small), replace(CONTEXT, type_k=type_k)
    with open_chain(small, None, context, engine=InspectedEngine) as chain:
        noted = note_rows(chain, prompt(129))
        chain.close()
        for n_tokens in (9, 129):
            chain.feed(prompt(n_tokens), chunk=1024)
            assert_as_mapped(chain, artifact, n_tokens, noted)
            chain.close()


def test_digests_follow_the_rows(small: Path, prompt: Prompt) -> None:
    """Equal rows have equal digests, however they came to be; any changed live row changes its component's digest."""
    with open_chain(small, None, CONTEXT, engine=InspectedEngine) as chain:
        (stage,) = stages(chain)
        chain.feed(prompt(300), chunk=1)
        frontier = stage.state_summary(0)
        chain.close()
        chain.feed(prompt(300), chunk=77)
        assert stage.state_summary(0) == frontier
        before = {part.name: part.digest for part in frontier.components}
        for component, layer in stage.owned():
            row = stage.raw_positions().index(299) if component is Component.RAW_SWA else 0
            good = stage.rows(component, layer, begin=row, count=1)[0]
            stage.poke(component, layer, row, good[:-1] + bytes([good[-1] ^ 1]))
            after = {part.name: part.digest for part in stage.state_summary(0).components}
            assert {name for name in before if before[name] != after[name]} == {component.value}
            stage.poke(component, layer, row, good)
        assert stage.state_summary(0) == frontier


# --- the proof can fail -----------------------------------------------------------------------------------------------


def test_an_expectation_off_by_one_is_caught(small: Path, prompt: Prompt, noted: Rows) -> None:
    artifact = Artifact.open(small)
    with open_chain(small, SPLIT, CONTEXT, engine=InspectedEngine) as chain:
        for n_tokens in (7, 127, 300):
            chain.feed(prompt(n_tokens), chunk=1024)
            for stage in stages(chain):
                for other in (n_tokens - 1, n_tokens + 1):
                    expected = expected_of(stage, artifact, other)
                    assert wrong_rows(stage, expected, noted) != []
                    assert wrong_frontier(stage, expected, other) != []
            chain.close()


def test_a_wrong_row_anywhere_is_caught(small: Path, prompt: Prompt, noted: Rows) -> None:
    artifact, n_tokens = Artifact.open(small), 300
    with open_chain(small, SPLIT, CONTEXT, engine=InspectedEngine) as chain:
        chain.feed(prompt(n_tokens), chunk=1024)
        for stage in stages(chain):
            for component, layer in stage.owned():
                expected = next(p for p in expected_of(stage, artifact, n_tokens) if p.component is component)
                live = 0 if component is not Component.RAW_SWA else stage.raw_positions().index(n_tokens - 1)
                right = stage.rows(component, layer, begin=live, count=1)[0]
                older = noted[component, layer, 0]  # a row of this very sequence, of another position
                stale = older if older != right else noted[component, layer, expected.positions[-1]]
                stage.poke(component, layer, live, stale)
                assert len(wrong_rows(stage, expected_of(stage, artifact, n_tokens), noted)) == 1
                stage.poke(component, layer, live, right)
                if component in _RATIO:
                    stage.poke(component, layer, expected.rows, older)
                    assert len(wrong_rows(stage, expected_of(stage, artifact, n_tokens), noted)) == 1
                    assert len(wrong_frontier(stage, expected_of(stage, artifact, n_tokens), n_tokens)) == 1
                    stage.poke(component, layer, expected.rows, bytes(len(older)))
        assert_as_mapped(chain, artifact, n_tokens, noted)
