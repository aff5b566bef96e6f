"""Files in the shapes that people download: types, parts, metadata and tokenizer; whole and split give the same bits."""

# ruff: noqa: RUF001 (the marks in V4's special tokens are what they look like)

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from attrs import evolve
from published_vocabulary import published_tokenizer, vocabulary_of

from dgr.artifact.artifact import Artifact
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams
from dgr.engine.vocab import LlamaVocabulary
from dgr.gguf.reader import MetaArray, MetaValue, ValueType, read_gguf
from dgr.gguf.types import GgmlType
from dgr.gguf.writer import u32
from dgr.selftest.chain import Chain, some_tokens
from dgr.selftest.fixture import edit_gguf, presets, write_fixture, writer
from dgr.selftest.fixture.vocabulary import FixtureVocabulary
from dgr.selftest.llama_chain import open_chain
from dgr.v4.published import PUBLISHED

CONTEXT = ContextParams(n_ctx=512, n_batch=256, n_ubatch=64)
SPLIT = "0:2,2:5,5:7"
#: Run by default; the others differ from it in types alone.
MOST_DOWNLOADED = "published_q2"


SHAPES = [name if name == MOST_DOWNLOADED else pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED]


def rows_of(model: Path | Artifact, split: str | None, chunk: int, n_tokens: int = 140, n_vocab: int = 512) -> bytes:
    with open_chain(model, split, CONTEXT, certified_only=False) as chain:
        return Chain(chain.engines).feed(some_tokens(n_tokens, n_vocab), chunk=chunk)


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_of_each_shape_loads_splits_and_is_exact(name: str, tmp_path: Path) -> None:
    """In parts, of which the first has the metadata alone."""
    summary = write_fixture(tmp_path / "model.gguf", weights=name, layers=7, parts=3)
    first = read_gguf(summary.path)
    assert not first.tensors
    artifact = Artifact.open(summary.path)
    assert len(artifact.parts.present) == 3
    types = {tensor.type for tensor in artifact.tensors.values()} - {GgmlType.I32}
    # Seven layers are too few for those of the last ones.
    assert types >= PUBLISHED[name].matrix_types - {GgmlType.Q4_K}
    assert types <= PUBLISHED[name].matrix_types
    whole = rows_of(artifact, None, 140)
    assert rows_of(artifact, SPLIT, 17) == whole
    assert len({whole[at : at + 64] for at in range(0, len(whole), 4 * 512)}) == 140  # rows, and no two alike


def _ints(*values: int) -> MetaValue:
    raw = b"".join(value.to_bytes(4, "little", signed=True) for value in values)
    return MetaValue(ValueType.ARRAY, MetaArray(ValueType.INT32, len(values), raw))


def _flag(value: bool) -> MetaValue:
    return MetaValue(ValueType.BOOL, value)


RATIOS = (0, 0, 4, 128, 4, 128, 4)
#: What files of one model differ in, by who wrote them.
METADATA: dict[str, Mapping[str, MetaValue | None]] = {
    "preview": {
        "deepseek4.attention.compress_ratios": _ints(*RATIOS, 0),
        "tokenizer.ggml.add_bos_token": _flag(True),
        "tokenizer.ggml.padding_token_id": u32(1),
    },
    "0731": {
        "general.name": MetaValue(ValueType.STRING, "DeepSeek-V4-Flash-0731"),
        "deepseek4.attention.compress_ratios": _ints(*RATIOS, 0, 0, 0),
        "tokenizer.ggml.add_bos_token": _flag(False),
        "tokenizer.ggml.padding_token_id": u32(2),
    },
    "announces an MTP block that it has not": {
        "deepseek4.attention.compress_ratios": _ints(*RATIOS, 0),
        "deepseek4.nextn_predict_layers": u32(1),
    },
    "no template, no pad, no flags": {
        "tokenizer.chat_template": None,
        "tokenizer.ggml.padding_token_id": None,
        "tokenizer.ggml.add_bos_token": None,
        "tokenizer.ggml.add_eos_token": None,
    },
    "other ends": {
        "tokenizer.ggml.eot_token_id": u32(4),
        "tokenizer.ggml.add_eos_token": _flag(True),
        "tokenizer.ggml.unknown_token_id": u32(0),
    },
}


@pytest.mark.parametrize("writer_of", METADATA)
def test_metadata_of_all_writers_compute_the_same(writer_of: str, small: Path, tmp_path: Path) -> None:
    other = edit_gguf(small, tmp_path / "other.gguf", keys=METADATA[writer_of])
    artifact = Artifact.open(other)
    assert artifact.hp.n_layers == 7
    assert rows_of(artifact, SPLIT, 40, 40) == rows_of(small, None, 40, 40)
    with LlamaVocabulary(artifact) as vocabulary, LlamaVocabulary(small) as plain:
        assert (vocabulary.bos, vocabulary.eos) == (0, 1)
        text = "the quick brown fox"
        assert vocabulary.encode(text) == plain.encode(text)
        assert vocabulary.encode(text, add_special=True) == [0, *plain.encode(text)]


@pytest.mark.slow
def test_the_published_vocabulary_with_published_types_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """129 280 tokens at head and tail, and in the tables that route by them."""
    tokens, types, merges = vocabulary_of(published_tokenizer())
    assert (len(tokens), len(merges)) == (129280, 127741)

    def vocabulary(_: int) -> FixtureVocabulary:
        return FixtureVocabulary(tuple(tokens), tuple(types), tuple(merges), frozenset())  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "build_vocabulary", vocabulary)
    monkeypatch.setitem(presets.PRESETS, "wide", evolve(presets.PRESETS["wide"], n_vocab=len(tokens)))
    summary = write_fixture(tmp_path / "v4.gguf", weights=MOST_DOWNLOADED, layers=7, parts=4)
    artifact = Artifact.open(summary.path)
    with LlamaVocabulary(artifact) as words:
        assert (words.n_vocab, words.bos, words.eos) == (129280, 0, 1)
        prompt = words.encode("The quick brown fox jumps over the lazy dog. 中文 naïve 12345")
        assert words.decode(prompt) == "The quick brown fox jumps over the lazy dog. 中文 naïve 12345"
        assert words.encode("<｜User｜>x</think>", parse_special=True) == [128803, 90, 128822]
    ids = [0, 128803, *prompt, 128804, 128822, 129279]
    with open_chain(artifact, None, CONTEXT, certified_only=False) as chain:
        whole = chain.feed(ids, chunk=len(ids))
    with open_chain(artifact, SPLIT, CONTEXT, certified_only=False) as chain:
        assert chain.feed(ids, chunk=5) == whole
    assert len(whole) == 4 * 129280 * len(ids)
    assert artifact.weight_bytes(LayerRange(6, 7)) > artifact.block_bytes(6)
