"""Residuals rounded on their way: the same cuts give the same bits, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from e2e.running import Open
from fixture_types import PipelineLogits, Prompt
from msgspec.structs import replace

import dgr
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams, LogitsWanted, Numerics, SamplingParams, Wire
from dgr.engine.base import Output, Work
from dgr.engine.llama import LlamaEngine
from dgr.errors import InputError, NonFinite
from dgr.testing.engines.mutants import Mutant

SAME_CUTS = ContextParams(n_ctx=512, n_batch=128, n_ubatch=128, n_seq_max=3, numerics=Numerics.SAME_CUTS)
SPLIT = "0:2,2:4,4:7"
ROUNDED = [Wire.BF16, Wire.F16, Wire.Q8]


async def _rows(
    path: Path, wire: Wire, tokens: Sequence[int], logits: PipelineLogits, *, split: str = SPLIT, chunk: int = 50
) -> bytes:
    return await logits(path, split, tokens, context=replace(SAME_CUTS, wire=wire), chunk=chunk)


@pytest.mark.parametrize("wire", ROUNDED)
async def test_the_same_cuts_give_the_same_bits(
    small: Path, prompt: Prompt, pipeline_logits: PipelineLogits, wire: Wire
) -> None:
    """In other chunks, beside other sessions, and after the state was lost."""
    first = await _rows(small, wire, prompt(110), pipeline_logits)
    assert await _rows(small, wire, prompt(110), pipeline_logits, chunk=7) == first
    row = len(first) // 110
    async with dgr.open_pipeline(small, SPLIT, context=replace(SAME_CUTS, wire=wire), chunk=33) as pipeline:
        found: dict[int, bytearray] = {}

        async def run(seed: int) -> None:
            rows = found[seed] = bytearray(len(first))

            def take(position: int, values: memoryview) -> None:
                rows[position * row : position * row + values.nbytes] = values

            async with pipeline.session() as session:
                await session.logits(prompt(110, seed=seed), take)

        async with trio.open_nursery() as nursery:
            for seed in (0, 1, 2):
                nursery.start_soon(run, seed)
        assert found[0] == first
        await pipeline.change_route(pipeline.route)  # all state is dropped: it is prefilled again
        await run(0)
        assert found[0] == first


@pytest.mark.parametrize("wire", ROUNDED)
async def test_rounding_changes_the_bits_and_hardly_the_numbers(
    small: Path, prompt: Prompt, pipeline_logits: PipelineLogits, wire: Wire
) -> None:
    plain, rounded, elsewhere = [
        await _rows(small, kind, prompt(60), pipeline_logits, split=split)
        for kind, split in ((Wire.F32, SPLIT), (wire, SPLIT), (wire, "0:3,3:7"))
    ]
    assert len({plain, rounded, elsewhere}) == 3  # with f32 the cut is nobody's business
    assert plain == await _rows(small, Wire.F32, prompt(60), pipeline_logits, split="0:3,3:7")
    exact, near = (np.frombuffer(rows, np.float32) for rows in (plain, rounded))
    assert np.corrcoef(exact, near)[0, 1] > 0.99


class _Forgets(Mutant):
    """Rounds by what ran before."""

    def run(self, batch: Sequence[Work]) -> list[Output]:
        outputs = self.engine.run(batch)
        for work, output in zip(batch, outputs, strict=True):
            if work.position and output.residual is not None:
                output.residual[0] ^= 1  # type: ignore[index]
        return outputs


async def test_a_stage_whose_rounding_depends_on_the_chunk_is_caught(
    small: Path, prompt: Prompt, open_stages: Open
) -> None:
    found = []
    for chunk in (64, 13):
        context = replace(SAME_CUTS, wire=Wire.BF16)
        async with open_stages(small, SPLIT, context, mutate={1: _Forgets}, chunk=chunk) as running:
            rows = bytearray()

            def take(_position: int, values: memoryview, rows: bytearray = rows) -> None:
                rows += values

            async with running.pipeline.session() as session:
                await session.logits(prompt(64), take)
            found.append(rows)
    assert found[0] != found[1]


def _expected(values: np.ndarray[Any, np.dtype[np.float32]], wire: Wire) -> bytes:
    """The rounded rows, by numpy."""
    match wire:
        case Wire.F16:
            return values.astype(np.float16).tobytes()
        case Wire.BF16:
            bits = values.view(np.uint32)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
        case _:
            import gguf

            return gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0).tobytes()


@pytest.mark.parametrize("wire", ROUNDED)
def test_what_leaves_a_stage_is_its_residual_rounded_row_by_row(small: Path, prompt: Prompt, wire: Wire) -> None:
    work = Work(0, 0, tuple(prompt(9)), None, LogitsWanted.NONE)
    rows = []
    for kind in (Wire.F32, wire):
        engine = LlamaEngine(small, LayerRange(0, 2), replace(SAME_CUTS, wire=kind))
        try:
            [output] = engine.run([work])
            assert output.finite
            rows.append(bytes(output.residual or b""))
            width = engine.describe().width_out
        finally:
            engine.stop()
    assert rows[1] == _expected(np.frombuffer(rows[0], np.float32).reshape(9, width), wire)
    assert len(rows[1]) == 9 * wire.row_bytes(width)


@pytest.mark.parametrize(
    ("wire", "bad"), [(Wire.F16, 0x7C00), (Wire.F16, 0x7E00), (Wire.BF16, 0x7FC0), (Wire.Q8, 0x7C00)]
)
def test_what_is_not_finite_is_refused_as_it_comes(small: Path, prompt: Prompt, wire: Wire, bad: int) -> None:
    engine = LlamaEngine(small, LayerRange(2, 7), replace(SAME_CUTS, wire=wire))
    try:
        row = wire.row_bytes(engine.describe().width_in)
        residual = bytearray(3 * row)
        residual[row : row + 2] = bad.to_bytes(2, "little")
        residual[row + 2] = 1  # q8: a value for the scale
        with pytest.raises(NonFinite, match="position 1 holds"):
            engine.run([Work(0, 0, tuple(prompt(3)), bytes(residual), LogitsWanted.LAST)])
        assert engine.position(0) == 0
        engine.run([Work(0, 0, tuple(prompt(3)), bytes(3 * row), LogitsWanted.LAST)])
    finally:
        engine.stop()


class _Louder(Mutant):
    """A stage whose residuals grew beyond f16 on the way in."""

    def run(self, batch: Sequence[Work]) -> list[Output]:
        louder = []
        for work in batch:
            values = np.frombuffer(work.residual or b"", np.float16).copy()
            values[:] = 65504
            louder.append(Work(work.slot, work.position, work.tokens, values.tobytes(), work.logits))
        return self.engine.run(louder)


async def test_a_value_that_f16_does_not_carry_ends_the_request_and_no_other(
    small: Path, prompt: Prompt, open_stages: Open
) -> None:
    context = replace(SAME_CUTS, wire=Wire.F16)
    async with open_stages(small, SPLIT, context, mutate={1: _Louder}, retries=0) as running:
        with pytest.raises(NonFinite, match=r"wire f16 does not carry.*use wire bf16 or f32"):
            async with running.pipeline.session() as session:
                await session.prefill(prompt(5))
    async with dgr.open_pipeline(small, SPLIT, context=context) as pipeline, pipeline.session() as session:
        assert [token async for token in session.generate(prompt(5), max_tokens=2, stop=(), sampling=SamplingParams())]


def test_rounding_is_refused_where_any_cut_must_give_the_same_bits() -> None:
    for wire in ROUNDED:
        with pytest.raises(InputError, match=rf"wire {wire} rounds.*choose numerics = same-cuts"):
            ContextParams(wire=wire)
        for numerics in (Numerics.SAME_CUTS, Numerics.NATIVE):
            assert ContextParams(wire=wire, numerics=numerics).wire is wire
    with pytest.raises(InputError, match="wire"):
        ContextParams(wire="f8")  # type: ignore[arg-type]
