"""Bytes of every state component, as native code allocates them, are those of the state map's formulae, to the byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from fixture_types import Model

from dgr.artifact.artifact import Artifact
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams
from dgr.engine.llama import LlamaEngine, estimate_memory
from dgr.selftest.chain import cut_at
from dgr.selftest.fixture import write_fixture
from dgr.v4.hyper_parameters import V4_FLASH
from dgr.v4.state_map import Component, ContextShape, state_map

CONTEXTS = (
    ContextParams(n_ctx=256),
    ContextParams(n_ctx=4096, n_seq_max=3),
    ContextParams(n_ctx=5000, n_ubatch=128, n_batch=128, n_seq_max=4, type_k="f32"),
    ContextParams(n_ctx=33000, n_ubatch=2048, n_batch=2048, type_k="q8_0"),
    ContextParams(n_ctx=131072, n_ubatch=32, n_batch=64, n_seq_max=2),
    ContextParams(n_ctx=1048576),
)


def shape_of(context: ContextParams) -> ContextShape:
    return ContextShape(context.n_ctx, min(context.n_ubatch, context.n_batch), context.n_seq_max, context.type_k)


def wrong_bytes(
    artifact: Artifact, ranges: Iterable[LayerRange], context: ContextParams, shape: ContextShape | None = None
) -> Iterator[str]:
    for layers in ranges:
        native = estimate_memory(artifact, layers, context).state
        for state in state_map(artifact.hp, layers, shape or shape_of(context)).components:
            if native[state.component] != state.n_bytes:
                yield f"{layers} {state.component}: {native[state.component]} allocated, {state.n_bytes} by formula"


def in_two(cuts: Iterable[int]) -> list[LayerRange]:
    return [layers for cut in cuts for layers in cut_at(43, (cut,))]


def test_some_cuts_in_two(tiny: Path) -> None:
    assert list(wrong_bytes(Artifact.open(tiny), in_two((1, 2, 3, 4, 21, 41, 42)), CONTEXTS[2])) == []


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS)
def test_every_cut_in_two_in_every_context(tiny: Path, context: ContextParams) -> None:
    assert list(wrong_bytes(Artifact.open(tiny), in_two(range(1, 43)), context)) == []


@pytest.mark.parametrize("context", CONTEXTS)
def test_some_ranges_in_every_context(tiny: Path, context: ContextParams) -> None:
    ranges = [LayerRange.parse(text) for text in ("0:43", "0:2", "2:3", "3:4", "17:30")]
    assert list(wrong_bytes(Artifact.open(tiny), ranges, context)) == []


def test_an_mtp_block_owns_no_state(model: Model) -> None:
    artifact = Artifact.open(model("f32", layers=7, mtp=True))
    assert list(wrong_bytes(artifact, [LayerRange(0, 7), LayerRange(4, 7)], CONTEXTS[1])) == []


@pytest.mark.slow
def test_the_published_widths(tmp_path: Path) -> None:
    """V4 Flash itself: 284 G parameters as a hole in a file, a million tokens, nothing allocated."""
    write_fixture(tmp_path / "real.gguf", preset="real", weights="mixed", sparse=True)
    artifact = Artifact.open(tmp_path / "real.gguf")
    ranges = [LayerRange.parse(text) for text in ("0:43", "0:11", "3:4")]
    assert list(wrong_bytes(artifact, ranges, ContextParams(n_ctx=1048576))) == []
    for n_ctx, total in ((32768, 271_466_496), (131072, 947_798_016), (1048576, 7_260_225_536)):
        assert state_map(V4_FLASH, V4_FLASH.whole, ContextShape(n_ctx)).total_bytes == total


def test_what_is_estimated_is_what_is_allocated(small: Path) -> None:
    context = ContextParams(n_ctx=600, n_seq_max=2)
    for text in ("0:7", "0:2", "3:4", "4:7"):
        layers = LayerRange.parse(text)
        engine = LlamaEngine(small, layers, context)
        try:
            assert engine.memory() == estimate_memory(small, layers, context)
            assert set(engine.describe().components) == {name for name, size in engine.memory().state.items() if size}
        finally:
            engine.stop()


def test_a_stage_owns_nothing_of_other_layers(tiny: Path) -> None:
    artifact, context = Artifact.open(tiny), CONTEXTS[1]
    whole = estimate_memory(artifact, None, context)
    parts = [estimate_memory(artifact, layers, context) for layers in cut_at(43, (2, 3, 4, 20))]
    for component in Component:
        assert sum(part.state[component] for part in parts) == whole.state[component]
    assert parts[0].state[Component.CSA] == parts[0].state[Component.HCA_RING] == 0
    assert parts[1].state[Component.HCA] == parts[2].state[Component.INDEXER] == 0


@pytest.mark.parametrize(
    "mistake", [{"n_ctx": 5121}, {"n_ubatch": 129}, {"n_seq_max": 5}, {"type_k": "f16"}], ids=lambda m: next(iter(m))
)
def test_a_formula_off_by_one_step_is_caught(tiny: Path, mistake: dict[str, Any]) -> None:
    context = CONTEXTS[2]
    wrong = evolve(shape_of(context), **mistake)
    assert list(wrong_bytes(Artifact.open(tiny), [LayerRange(0, 43)], context, wrong)) != []
