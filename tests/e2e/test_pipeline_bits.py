"""A pipeline of actors and frames gives the bits of the whole model run by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from e2e.running import Open
from fixture_types import Model, PipelineLogits, Prompt
from msgspec.structs import replace

import dgr
from dgr.client.session import ClientSession
from dgr.core.values import ContextParams, Numerics, SamplingParams
from dgr.selftest.llama_chain import open_chain
from dgr.testing.engines.mutants import Mutant, StaleRow, SwappedSideband

CONTEXT = ContextParams(n_ctx=1024, n_seq_max=4)
SPLIT = "0:15,15:29,29:43"


def by_hand(path: Path, prompt: Sequence[int], decoded: int) -> tuple[list[int], bytes]:
    with open_chain(path, None, replace(CONTEXT, n_seq_max=1)) as chain:
        rows = chain.feed(prompt, chunk=512)
        first, _ = chain.engines[-1].sample(rows, (), SamplingParams())
        drawn, more = chain.decode(first, len(prompt), decoded)
        return [first, *drawn], rows + more


async def generated(session: ClientSession, prompt: Sequence[int], count: int) -> list[int]:
    return [token.id async for token in session.generate(prompt, max_tokens=count, stop=())]


async def all_logits(session: ClientSession, tokens: Sequence[int], row: int) -> bytes:
    rows = bytearray(row * (len(session.transcript) + len(tokens)))

    def take(position: int, values: memoryview) -> None:
        rows[position * row : position * row + values.nbytes] = values

    await session.logits(tokens, take)
    return bytes(rows)


async def through_the_runtime(
    path: Path, split: str, prompt: Sequence[int], tokens: Sequence[int], chunk: int
) -> tuple[list[int], bytes]:
    """Greedy text, drawn in runs, and the logits of prompt and text; two sessions at once, that share batches."""
    text: list[int] = []
    rows = b""
    async with dgr.open_pipeline(path, split, context=CONTEXT, chunk=chunk, ahead=5) as pipeline:

        async def generate() -> None:
            nonlocal text
            async with pipeline.session() as session:
                text = await generated(session, prompt, len(tokens))

        async def logits() -> None:
            nonlocal rows
            async with pipeline.session() as session:
                rows = await all_logits(session, [*prompt, *tokens[:-1]], 4 * pipeline.n_vocab)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            nursery.start_soon(logits)
    return text, rows


async def test_text_and_logits_of_three_stages(tiny: Path, prompt: Prompt) -> None:
    tokens, rows = await trio.to_thread.run_sync(by_hand, tiny, prompt(260), 12)
    assert await through_the_runtime(tiny, SPLIT, prompt(260), tokens, 64) == (tokens, rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "split", "chunk"),
    [("f32", SPLIT, 64), ("mixed", "0:2,2:3,3:42,42:43", 512)],
)
async def test_700_tokens_and_64_decode_steps(
    model: Model, prompt: Prompt, weights: str, split: str, chunk: int
) -> None:
    tokens, rows = await trio.to_thread.run_sync(by_hand, model(weights), prompt(700), 64)
    assert await through_the_runtime(model(weights), split, prompt(700), tokens, chunk) == (tokens, rows)


@pytest.mark.parametrize("chunk", [1, 5, 64, None])
async def test_chunks(small: Path, prompt: Prompt, pipeline_logits: PipelineLogits, chunk: int | None) -> None:
    _, rows = by_hand(small, prompt(200), 0)
    assert await pipeline_logits(small, "0:2,2:4,4:7", prompt(200), context=CONTEXT, chunk=chunk) == rows


async def test_sessions_at_once_are_as_sessions_alone(small: Path, prompt: Prompt) -> None:
    lengths = (5, 130, 257, 64)
    alone = [by_hand(small, prompt(length, seed=length), 15)[0] for length in lengths]
    found: dict[int, list[int]] = {}
    async with dgr.open_pipeline(small, "0:2,2:4,4:7", context=CONTEXT, chunk=50) as pipeline:

        async def talk(length: int) -> None:
            async with pipeline.session() as session:
                found[length] = await generated(session, prompt(length, seed=length), 16)

        async with trio.open_nursery() as nursery:
            for length in lengths:
                nursery.start_soon(talk, length)
    assert [found[length] for length in lengths] == alone


@pytest.mark.parametrize(("mutant", "equal"), [(Mutant, True), (SwappedSideband, False), (StaleRow, False)])
async def test_a_mutant_among_the_stages_is_caught(
    small: Path, prompt: Prompt, open_stages: Open, mutant: type[Mutant], equal: bool
) -> None:
    _, rows = by_hand(small, prompt(60), 0)
    async with (
        open_stages(small, "0:2,2:7", CONTEXT, mutate={1: mutant}) as running,
        running.pipeline.session() as session,
    ):
        found = await all_logits(session, prompt(60), 4 * running.pipeline.n_vocab)
    assert (found == rows) is equal


class CopiesAnother(Mutant):
    """Copies the slot of another session that is as long."""

    def fork(self, source: int, target: int) -> None:
        slots = range(self.engine.describe().context.n_seq_max)
        wrong = next(slot for slot in slots if slot != source and self.position(slot) == self.position(source))
        self.engine.fork(wrong, target)


@pytest.mark.parametrize(
    ("numerics", "mutant", "equal"),
    [
        (Numerics.EXACT, Mutant, True),
        (Numerics.NATIVE, Mutant, True),
        (Numerics.EXACT, CopiesAnother, False),
    ],
)
async def test_forked_equals_cold(
    small: Path, prompt: Prompt, open_stages: Open, numerics: Numerics, mutant: type[Mutant], equal: bool
) -> None:
    """Byte for byte on every stage, and in all that follows, however the other one goes on."""
    context = replace(CONTEXT, n_ctx=512, numerics=numerics)
    async with open_stages(small, "0:2,2:4,4:7", context, mutate={1: mutant}, chunk=64) as running:
        row = 4 * running.pipeline.n_vocab
        cold: dict[int, bytes] = {}
        for kind in (1, 2):
            async with running.pipeline.session() as session:
                await session.prefill(prompt(200))
                cold[kind] = (await all_logits(session, prompt(140, seed=kind), row))[200 * row :]
        async with running.pipeline.session() as session, running.pipeline.session() as beside:
            await session.prefill(prompt(200))
            await beside.prefill(prompt(200, seed=3))
            async with session.fork() as other:
                assert (running.images(other) == running.images(session)) is equal
                assert (await all_logits(session, prompt(140, seed=1), row))[200 * row :] == cold[1]
                assert ((await all_logits(other, prompt(140, seed=2), row))[200 * row :] == cold[2]) is equal
            running.assert_slots_empty()
