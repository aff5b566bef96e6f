"""Tokenizer metadata: what llama.cpp would abort on, never return from, or take a default of another model for."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from dgr.errors import UnsupportedModel
from dgr.gguf.reader import GgufFile, MetaArray, MetaValue, ValueType, read_gguf
from dgr.selftest.fixture.metadata import strings
from dgr.v4.metadata import from_metadata

N_VOCAB = 320


def numbers(values: Sequence[float], kind: ValueType = ValueType.INT32) -> MetaValue:
    code = {ValueType.INT32: "i", ValueType.FLOAT32: "f", ValueType.UINT32: "I"}[kind]
    return MetaValue(ValueType.ARRAY, MetaArray(kind, len(values), struct.pack(f"<{len(values)}{code}", *values)))


def text(value: str) -> MetaValue:
    return MetaValue(ValueType.STRING, value)


def u32(value: int) -> MetaValue:
    return MetaValue(ValueType.UINT32, value)


@pytest.fixture(scope="module")
def header(min_model: Path) -> GgufFile:
    return read_gguf(min_model)


def vocabulary_of(header: GgufFile, changes: dict[str, MetaValue | None]) -> int:
    metadata = dict(header.metadata)
    for key, value in changes.items():
        metadata.pop(key if "." in key else f"tokenizer.ggml.{key}", None)
        if value is not None:
            metadata[key if "." in key else f"tokenizer.ggml.{key}"] = value
    return from_metadata(metadata, header.tensors.__contains__).n_vocab


def stored(header: GgufFile, name: str) -> list[str]:
    array = header.metadata[f"tokenizer.ggml.{name}"].value
    assert isinstance(array, MetaArray)
    return [str(value) for value in array.values()]


def with_token(header: GgufFile, index: int, token: str) -> MetaValue:
    tokens = stored(header, "tokens")
    tokens[index] = token
    return strings(tokens)


def with_type(kind: int, index: int = 300) -> MetaValue:
    kinds = [1] * N_VOCAB
    kinds[index] = kind
    return numbers(kinds)


TAKEN: dict[str, dict[str, MetaValue | None]] = {
    "as the fixture": {},
    "the pre-tokenizer of V3": {"pre": text("deepseek-v3")},
    "no types": {"token_type": None},
    "every type": {"token_type": numbers([1, 2, 3, 4, 5, 0] * 53 + [1, 1])},
    "scores": {"scores": numbers([0.5] * N_VOCAB, ValueType.FLOAT32)},
    "the last token as a special one": {"eot_token_id": u32(N_VOCAB - 1)},
    "no flags": {"add_bos_token": None, "add_eos_token": None},
    "suppressed tokens": {"suppress_tokens": numbers([1, 2])},
}


@pytest.mark.parametrize("case", TAKEN)
def test_takes(header: GgufFile, case: str) -> None:
    assert vocabulary_of(header, TAKEN[case]) == N_VOCAB


def test_takes_one_empty_token(header: GgufFile) -> None:
    assert vocabulary_of(header, {"tokens": with_token(header, 300, "")}) == N_VOCAB


def test_takes_several_empty_tokens(header: GgufFile) -> None:
    tokens = stored(header, "tokens")
    tokens[300:303] = ["", "", ""]
    assert vocabulary_of(header, {"tokens": strings(tokens)}) == N_VOCAB


@pytest.mark.parametrize(
    "kind", ["bert", "llama", "t5", "rwkv", "plamo2", "gemma4", "hybriddna", "whitespace", "test", ""]
)
def test_refuses_every_other_kind_of_tokenizer(header: GgufFile, kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"tokenizer.ggml.model is '{kind}', but DeepSeek V4 has 'gpt2'"):
        vocabulary_of(header, {"model": text(kind)})


@pytest.mark.parametrize("pre", ["default", "gpt-2", "llama-bpe", "deepseek-coder", "deepseek-llm", "kimi-k2", "", "x"])
def test_refuses_every_other_pre_tokenizer(header: GgufFile, pre: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"tokenizer.ggml.pre is '{pre}', but DeepSeek V4 splits"):
        vocabulary_of(header, {"pre": text(pre)})


REFUSED: dict[str, tuple[dict[str, MetaValue | None], str]] = {
    "no kind": ({"model": None}, "model is missing"),
    "a kind that is a number": ({"model": u32(1)}, "model is 1 (UINT32), but must be a string"),
    "no pre-tokenizer": ({"pre": None}, "pre is missing"),
    "no tokens": ({"tokens": None}, "tokens is missing"),
    "no token": ({"tokens": strings([])}, "the number of tokenizer.ggml.tokens is 0"),
    "more tokens than memory": ({"tokens": strings([""] * ((1 << 20) + 1))}, "is 1048577, but must be 1 to 1048576"),
    "tokens that are numbers": ({"tokens": numbers([1])}, "an array of 1 INT32, but must be an array of strings"),
    "types too few": ({"token_type": numbers([1] * 319)}, "token_type has 319 entries"),
    "types too many": ({"token_type": numbers([1] * 321)}, "token_type has 321 entries"),
    "types of another kind": ({"token_type": numbers([1] * 320, ValueType.UINT32)}, "must be an array of INT32"),
    "a type of none": ({"token_type": with_type(7)}, "token_type[300] is 7, but llama.cpp knows 0 to 6"),
    "a negative type": ({"token_type": with_type(-1)}, "token_type[300] is -1"),
    "a byte token of another name": ({"token_type": with_type(6)}, "of type BYTE, but such a token is called like"),
    "scores too few": ({"scores": numbers([0.0] * 5, ValueType.FLOAT32)}, "scores has 5 entries"),
    "scores of another kind": (
        {"scores": numbers([0] * 320, ValueType.UINT32)},
        "must be an array of FLOAT32 or INT32",
    ),
    "no merges": ({"merges": None}, "merges is missing"),
    "merges that are numbers": ({"merges": numbers([1])}, "merges is an array of 1 INT32"),
    "a merge of one": ({"merges": strings(["a b", "ab"])}, "merges[1] is 'ab', but a merge is two tokens"),
    "a merge of three": ({"merges": strings(["a b c"])}, "merges[0] is 'a b c'"),
    "a merge of nothing": ({"merges": strings([" b"])}, "merges[0] is ' b'"),
    "a flag that is a number": ({"add_bos_token": u32(1)}, "add_bos_token is 1 (UINT32), but must be a BOOL"),
    "suppressed words": ({"suppress_tokens": strings(["a"])}, "suppress_tokens is an array of 1 STRING"),
    "no begin": ({"bos_token_id": None}, "bos_token_id is missing: llama.cpp would take token 11"),
    "no end": ({"eos_token_id": None}, "eos_token_id is missing: llama.cpp would take token 11"),
    "no tokenizer and no size": ({"model": text("none"), "deepseek4.vocab_size": None}, "vocab_size is missing"),
    "no tokenizer and any size": (
        {"model": text("none"), "deepseek4.vocab_size": u32(2**32 - 1)},
        "is 4294967295, but",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(header: GgufFile, case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(UnsupportedModel) as caught:
        vocabulary_of(header, changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "cls", "mask", "prefix", "suffix", "middle"),
        *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
    ],
)
@pytest.mark.parametrize("value", [u32(N_VOCAB), u32(2**32 - 1), MetaValue(ValueType.INT32, 0), text("0")])
def test_refuses_special_tokens_outside_the_vocabulary(header: GgufFile, name: str, value: MetaValue) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{name}_token_id is .* but must be a token id from 0 to 319"):
        vocabulary_of(header, {f"{name}_token_id": value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({300: "a"}, "is 'a', which is token"),
        ({300: "x" * 5, 301: "x" * 5}, "tokens[301] is 'xxxxx', which is token 300 already"),
        ({300: "", 301: "[EMPTY_300]"}, "tokens[301] is '[EMPTY_300]', which is token 300 already"),
        ({300: "c\0d"}, "llama.cpp reads a token only up to a NUL"),
        ({300: "é" * 2049}, "tokens[300] is 4098 bytes long, but a token may have at most 4096"),
    ],
)
def test_refuses_tokens(header: GgufFile, changes: dict[int, str], message: str) -> None:
    tokens = stored(header, "tokens")
    for index, token in changes.items():
        tokens[index] = token
    with pytest.raises(UnsupportedModel) as caught:
        vocabulary_of(header, {"tokens": strings(tokens)})
    assert message in str(caught.value)


def test_refuses_tokens_that_grow_without_bound(header: GgufFile) -> None:
    """llama.cpp spells a token that is not in byte symbols as often as it has characters."""
    tokens = [*stored(header, "tokens")[:200], *("漢" * 1300 + str(index) for index in range(N_VOCAB - 200))]
    with pytest.raises(UnsupportedModel, match="bytes once spelled out, but may take 268435456"):
        vocabulary_of(header, {"tokens": strings(tokens)})
