"""The fixture's tokenizer: well-formed, and any text round-trips."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgr.errors import InputError
from dgr.selftest.fixture.vocabulary import (
    MIN_VOCAB,
    SPECIALS,
    FixtureVocabulary,
    TokenType,
    build_vocabulary,
    byte_symbols,
)

SYMBOLS = byte_symbols()
BYTES = {symbol: byte for byte, symbol in enumerate(SYMBOLS)}


def encode(vocab: FixtureVocabulary, text: str) -> list[int]:
    """Byte-level BPE without pre-tokenizer: merge the best-ranked pair until none is left."""
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(vocab.merges)}
    ids = {token: number for number, token in enumerate(vocab.tokens)}
    parts = [SYMBOLS[byte] for byte in text.encode()]
    while True:
        found = [(ranks[pair], at) for at, pair in enumerate(itertools.pairwise(parts)) if pair in ranks]
        if not found:
            return [ids[part] for part in parts]
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def decode(vocab: FixtureVocabulary, ids: list[int]) -> str:
    return bytes(BYTES[symbol] for token in ids for symbol in vocab.tokens[token]).decode()


@pytest.mark.parametrize("size", [MIN_VOCAB, 320, 512, 4096])
def test_is_well_formed(size: int) -> None:
    vocab = build_vocabulary(size)
    assert len(vocab.tokens) == len(vocab.types) == len(set(vocab.tokens)) == size
    assert vocab.tokens[: len(SPECIALS)] == SPECIALS
    assert vocab.tokens[len(SPECIALS) : MIN_VOCAB] == SYMBOLS
    assert (vocab.bos, vocab.eos, vocab.pad) == (0, 1, 2)
    assert vocab.types.count(TokenType.CONTROL) == len(SPECIALS)
    known = set(SYMBOLS)
    for merge in vocab.merges:
        left, right = merge.split(" ")
        assert left in known
        assert right in known
        assert left + right not in known
        known.add(left + right)
    assert known == set(vocab.tokens[len(SPECIALS) :])


def test_every_byte_has_one_printable_symbol() -> None:
    assert len(SYMBOLS) == len(set(SYMBOLS)) == 256
    assert all(len(symbol) == 1 and symbol.isprintable() and not symbol.isspace() for symbol in SYMBOLS)
    assert SYMBOLS[ord("A")] == "A"
    assert SYMBOLS[ord(" ")] == "Ġ"
    assert SYMBOLS[ord("\n")] == "Ċ"


def test_words_are_tokens() -> None:
    vocab = build_vocabulary(512)
    ids = encode(vocab, " the and of")
    assert len(ids) == 3
    assert set(ids) <= vocab.words
    assert all(vocab.tokens[token].startswith("Ġ") for token in vocab.words)
    assert len(vocab.words) > 80


@pytest.mark.slow
@given(st.text(max_size=60))
def test_any_text_round_trips(text: str) -> None:
    vocab = build_vocabulary(512)
    assert decode(vocab, encode(vocab, text)) == text


def test_refuses_sizes_that_cannot_be() -> None:
    with pytest.raises(InputError, match="at least 263"):
        build_vocabulary(MIN_VOCAB - 1)
    with pytest.raises(InputError, match="at most"):
        build_vocabulary(10_000_000)
