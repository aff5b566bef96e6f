"""The same tokens give the same bits: over splits, chunks, threads, batch companions, weight and K-cache types.

A proof compares the bytes of all rows of logits, mostly over 700 tokens of prompt and 64 greedy decode steps. The fixture
network is chaotic: a difference in one last bit anywhere is a difference of order one in the rows behind it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

import pytest
from attrs import frozen
from fixture_types import Model, Parallel, Prompt
from msgspec.structs import replace

from dgr.core.route import LayerRange
from dgr.core.values import ContextParams, Numerics, SamplingParams
from dgr.engine.llama import LlamaEngine
from dgr.engine.native import kernel_fingerprint
from dgr.selftest.chain import Chain, cut_at
from dgr.selftest.invariance import beside_others, difference
from dgr.selftest.llama_chain import open_chain
from dgr.testing.engines.mutants import Mutant, OffByOne, StaleChunk, StaleRow, SwappedSideband
from dgr.testing.state_inspector import InspectedEngine

PROMPT, DECODED = 700, 64
CONTEXT = ContextParams(n_ctx=1024)
_GREEDY = SamplingParams()

#: Cuts of 3- to 5-way splits: inside the hash layers (0-2), around single layers, with stages that have no CSA layer
#: (0:2, 3:4, 41:42) and stages that have no HCA layer (0:2, 2:3, 4:5).
SPLITS = (
    (1, 2),
    (2, 3),
    (3, 4),
    (15, 29),
    (41, 42),
    (1, 2, 3),
    (2, 3, 4),
    (20, 21, 22),
    (3, 20, 41),
    (1, 2, 3, 42),
    (2, 3, 20, 42),
    (4, 5, 6, 7),
)
#: Three cuts, for every chunking and type: in the hash layers, in the middle, near the end.
THREE_CUTS = (2, 20, 41)


@frozen
class Rows:
    """What a run gave."""

    tokens: tuple[int, ...]
    logits: bytes


def run(chain: Chain, prompt: Sequence[int], chunk: int, decoded: int = DECODED) -> Rows:
    """Prefill and decode greedily; every row of logits."""
    rows = chain.feed(prompt, chunk=chunk)
    first, _ = chain.engines[-1].sample(rows, (), _GREEDY)
    drawn, more = chain.decode(first, len(prompt), decoded)
    return Rows((first, *drawn), rows + more)


def assert_same(found: Rows, whole: Rows, row_bytes: int = 4 * 512) -> None:
    differs = difference(found.logits, whole.logits, row_bytes)
    assert differs is None, differs
    assert found.tokens == whole.tokens


def run_split(
    path: Path,
    prompt: Sequence[int],
    cuts: Sequence[int],
    chunk: int = 512,
    context: ContextParams = CONTEXT,
    threads: int = 1,
    layers: int = 43,
    decoded: int = DECODED,
) -> Rows:
    with open_chain(path, cut_at(layers, cuts), context, threads=threads) as chain:
        return run(chain, prompt, chunk, decoded)


@pytest.fixture(scope="module")
def whole(prompt: Prompt) -> Callable[..., Rows]:
    """``whole(path, context)``: the whole model on the prompt, in chunks of 512."""

    @lru_cache
    def reference(path: Path, context: ContextParams = CONTEXT, layers: int = 43) -> Rows:
        return run_split(path, prompt(PROMPT), (), 512, context, layers=layers)

    return reference


@pytest.fixture(scope="module")
def short(small: Path, prompt: Prompt) -> Rows:
    return run_split(small, prompt(150), (), 50, layers=7, decoded=4)


def wrong_splits(found: dict[Sequence[int], Rows], reference: Rows) -> dict[Sequence[int], str]:
    """The splits that differ, and how."""
    differences = {cuts: difference(rows.logits, reference.logits, 4 * 512) for cuts, rows in found.items()}
    return {cuts: differs for cuts, differs in differences.items() if differs is not None}


# --- splits -----------------------------------------------------------------------------------------------------------


def check_splits(
    path: Path,
    splits: Sequence[Sequence[int]],
    prompt: list[int],
    reference: Rows,
    parallel: Parallel,
    decoded: int = DECODED,
) -> None:
    found = parallel([partial(run_split, path, prompt, cuts, decoded=decoded) for cuts in splits])
    assert wrong_splits(dict(zip(map(tuple, splits), found, strict=True)), reference) == {}
    assert {rows.tokens for rows in found} == {reference.tokens}


@pytest.mark.slow
def test_a_split_in_six(tiny: Path, prompt: Prompt, parallel: Parallel) -> None:
    whole, split = parallel([partial(run_split, tiny, prompt(PROMPT), cuts) for cuts in ((), (1, 3, 4, 21, 42))])
    assert_same(split, whole)


@pytest.mark.slow
def test_every_cut_in_two(tiny: Path, prompt: Prompt, parallel: Parallel) -> None:
    """Fewer tokens than elsewhere, still beyond the window and the second row of each HCA layer."""
    tokens, decoded = prompt(300), 16
    reference = run_split(tiny, tokens, (), decoded=decoded)
    check_splits(tiny, [(cut,) for cut in range(1, 43)], tokens, reference, parallel, decoded)


@pytest.mark.slow
def test_splits_in_three_to_five(tiny: Path, prompt: Prompt, whole: Callable[..., Rows], parallel: Parallel) -> None:
    check_splits(tiny, SPLITS, prompt(PROMPT), whole(tiny), parallel)


@pytest.mark.slow
def test_43_stages_of_one_layer(tiny: Path, prompt: Prompt, whole: Callable[..., Rows]) -> None:
    assert_same(run_split(tiny, prompt(PROMPT), range(1, 43)), whole(tiny))


# --- chunks, types ----------------------------------------------------------------------------------------------------


def test_some_chunks_and_types(model: Model, prompt: Prompt, whole: Callable[..., Rows], parallel: Parallel) -> None:
    cases = [*itertools.product(("mixed", "q4_k"), ("f16", "f32")), ("f32", "q8_0")]
    paths = {weights: model(weights, layers=7) for weights, _ in cases}
    contexts = {type_k: replace(CONTEXT, type_k=type_k) for _, type_k in cases}
    jobs = [
        partial(run_split, paths[weights], prompt(200), cuts, chunk, contexts[type_k], layers=7, decoded=8)
        for weights, type_k in cases
        for cuts, chunk in (((), 200), ((2, 5), 5))
    ]
    found = parallel(jobs)
    for index, case in enumerate(cases):
        assert found[2 * index] == found[2 * index + 1], case


@pytest.mark.slow
@pytest.mark.parametrize("type_k", ["f16", "f32"])
@pytest.mark.parametrize("weights", ["f32", "mixed", "q4_k"])
def test_every_chunking_with_every_type(
    model: Model, prompt: Prompt, whole: Callable[..., Rows], parallel: Parallel, weights: str, type_k: str
) -> None:
    path, context = model(weights), replace(CONTEXT, type_k=type_k)
    reference = whole(path, context)
    chunks = (1, 5, 64, 512)
    found = parallel([partial(run_split, path, prompt(PROMPT), THREE_CUTS, chunk, context) for chunk in chunks])
    for chunk, rows in zip(chunks, found, strict=True):
        assert rows == reference, f"chunks of {chunk}: {difference(rows.logits, reference.logits, 4 * 512)}"


# --- threads, companions ----------------------------------------------------------------------------------------------


def test_some_work_on_two_threads(small: Path, prompt: Prompt, two_cpus: None) -> None:
    tokens = prompt(300)
    rows = [run_split(small, tokens, cuts, 300, layers=7, decoded=4, threads=n) for n, cuts in ((1, ()), (2, (3,)))]
    assert_same(rows[1], rows[0])


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["f32", "mixed", "q4_k"])
def test_two_threads(model: Model, prompt: Prompt, whole: Callable[..., Rows], two_cpus: None, weights: str) -> None:
    path = model(weights)
    assert_same(run_split(path, prompt(PROMPT), (20,), threads=2), whole(path))


@pytest.mark.parametrize("cuts", [(), (1, 3)])
def test_batch_companions(small: Path, prompt: Prompt, cuts: tuple[int, ...]) -> None:
    tokens = prompt(300)
    reference = run_split(small, tokens, (), 512, layers=7, decoded=0)
    with open_chain(small, cut_at(7, cuts), replace(CONTEXT, n_seq_max=4)) as chain:
        assert_same(Rows(reference.tokens, beside_others(chain, tokens)), reference)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["f32", "mixed", "q4_k"])
def test_batch_companions_of_the_whole_depth(model: Model, prompt: Prompt, weights: str) -> None:
    path, tokens = model(weights), prompt(350)
    reference = run_split(path, tokens, (), 512, decoded=0)
    with open_chain(path, cut_at(43, THREE_CUTS), replace(CONTEXT, n_seq_max=4)) as chain:
        assert_same(Rows(reference.tokens, beside_others(chain, tokens)), reference)


def test_a_used_slot_is_like_a_new_one(small: Path, prompt: Prompt) -> None:
    tokens = prompt(300)
    with open_chain(small) as chain:
        first = run(chain, tokens, 64)
        chain.close()
        chain.feed(prompt(500, seed=1), chunk=100)
        chain.close()
        assert_same(run(chain, tokens, 64), first)


def test_an_mtp_block_in_the_file_changes_nothing(model: Model, prompt: Prompt, short: Rows) -> None:
    with open_chain(model("f32", layers=7, mtp=True), "0:3,3:7", CONTEXT) as chain:
        assert_same(run(chain, prompt(150), 50, 4), short)


def test_a_mapped_file_is_like_a_read_one(small: Path, prompt: Prompt, short: Rows) -> None:
    engine = LlamaEngine(small, None, CONTEXT, mmap=True, check_tensors=True)
    try:
        assert_same(run(Chain([engine]), prompt(150), 50, 4), short)
    finally:
        engine.stop()


def test_without_flash_attention(small: Path, prompt: Prompt) -> None:
    """Other numbers, but steady ones: what ``--flash-attn off`` gives in exact numerics."""
    context = replace(CONTEXT, flash_attn=False, type_k="f32")
    found = [
        run_split(small, prompt(150), cuts, chunk, context, layers=7, decoded=4)
        for cuts, chunk in (((), 150), ((2, 4), 7))
    ]
    assert_same(found[1], found[0])


# --- native numerics: equal chunks only -------------------------------------------------------------------------------

NATIVE = replace(CONTEXT, numerics=Numerics.NATIVE)


@pytest.mark.parametrize("chunk", [5, 512])
def test_native_split_equals_whole_in_equal_chunks(small: Path, prompt: Prompt, chunk: int) -> None:
    tokens = prompt(300)
    found = [run_split(small, tokens, cuts, chunk, NATIVE, layers=7) for cuts in ((), (1, 2, 5))]
    assert_same(found[1], found[0])


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["f32", "mixed", "q4_k"])
def test_native_splits_of_the_whole_depth(model: Model, prompt: Prompt, parallel: Parallel, weights: str) -> None:
    path, tokens = model(weights), prompt(PROMPT)
    cases = list(itertools.product((5, 512), ((), THREE_CUTS)))
    found = parallel([partial(run_split, path, tokens, cuts, chunk, NATIVE) for chunk, cuts in cases])
    for index in range(0, len(cases), 2):
        assert found[index] == found[index + 1], cases[index]


# --- the proofs can fail ----------------------------------------------------------------------------------------------


def test_a_mutant_that_changes_nothing_passes(small: Path, prompt: Prompt, short: Rows) -> None:
    with open_chain(small, "0:2,2:7", CONTEXT) as chain:
        assert_same(run(Chain([chain.engines[0], Mutant(chain.engines[1])]), prompt(150), 50, 4), short)


@pytest.mark.parametrize("mutant", [SwappedSideband, OffByOne, StaleRow, StaleChunk])
def test_a_mutant_is_caught(small: Path, prompt: Prompt, short: Rows, mutant: type[Mutant]) -> None:
    with open_chain(small, "0:2,2:7", CONTEXT) as chain:
        wrong = Chain([chain.engines[0], mutant(chain.engines[1])])
        with pytest.raises(AssertionError, match="rows differ"):
            assert_same(run(wrong, prompt(150), 50, 4), short)


@pytest.mark.parametrize("skipped", range(1, 6))
def test_a_skipped_layer_is_caught(small: Path, prompt: Prompt, short: Rows, skipped: int) -> None:
    ranges = (LayerRange(0, skipped), LayerRange(skipped + 1, 7))
    with open_chain(small, ranges, CONTEXT) as chain, pytest.raises(AssertionError, match="rows differ"):
        assert_same(run(chain, prompt(150), 50, 4), short)


# --- the test extension is the product --------------------------------------------------------------------------------


def test_the_test_extension_gives_the_same_bits(small: Path, prompt: Prompt, short: Rows) -> None:
    with open_chain(small, "0:2,2:7", CONTEXT, engine=InspectedEngine) as chain:
        assert_same(run(chain, prompt(150), 50, 4), short)
        assert {engine.describe().kernel_fingerprint for engine in chain.engines} == {kernel_fingerprint()}
