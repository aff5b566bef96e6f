"""The fixture's tokenizer: a byte-level BPE vocabulary in the shape of DeepSeek V4's.

Every byte is a token, so any text round-trips; merges build the words below, then pairs and triples of letters until
the vocabulary is full. The pre-tokenizer is V4's own, ``joyai-llm`` (``src/llama-vocab.cpp``).
"""

# ruff: noqa: RUF001 (the marks in V4's special tokens are what they look like)

from __future__ import annotations

import itertools
from collections.abc import Iterator
from enum import IntEnum

from attrs import frozen

from dgr.errors import InputError

__all__ = ["CHAT_TEMPLATE", "MIN_VOCAB", "TokenType", "Vocabulary", "build_vocabulary", "byte_symbols"]

SPECIALS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
)

#: Fewest tokens: the specials and one per byte.
MIN_VOCAB = len(SPECIALS) + 256

#: The turns of a conversation, in V4's markers; enough for chat clients to run against the fixture.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}<｜User｜>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<｜Assistant｜></think>{{ message['content'] }}<｜end▁of▁sentence｜>"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜></think>{% endif %}"
)

# Frequent words first: a small vocabulary holds the first of them only.
_WORDS = (
    " the of and to in is that it was for on are with as his they be at one have this from or had by not but some what"
    " there we can out other were all your when up use word how said an each she which do their time if will way about"
    " many then them would write like so these her long make thing see him two has look more day could go come did my"
    " sound no most number who over know water than call first people may down side been now find any new work part"
    " take get place made live where after back little only round man year came show every good me give our under"
)


class TokenType(IntEnum):
    """``llama_token_type``, the members in use."""

    NORMAL = 1
    CONTROL = 3


@frozen
class Vocabulary:
    """Tokens in id order, spelled in byte symbols, their types, and the merges in rank order."""

    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    merges: tuple[str, ...]
    #: Ids that spell a whole word.
    words: frozenset[int]
    bos: int = 0
    eos: int = 1
    pad: int = 2


def byte_symbols() -> tuple[str, ...]:
    """GPT-2's printable stand-in for each byte, by byte value."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = itertools.count(256)
    return tuple(chr(byte if byte in printable else next(spare)) for byte in range(256))


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs to merge, best first; both halves always exist already."""
    space = byte_symbols()[ord(" ")]
    for word in _WORDS.split():
        symbols = space + word
        for end in range(1, len(symbols)):
            yield symbols[:end], symbols[end]
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    pairs = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    for pair in pairs:
        yield pair[0], pair[1]
    for size in (3, 4):
        for parts in itertools.product(letters, repeat=size):
            text = "".join(parts)
            yield text[:-1], text[-1]


def build_vocabulary(n_vocab: int) -> Vocabulary:
    """A vocabulary of exactly ``n_vocab`` tokens."""
    if n_vocab < MIN_VOCAB:
        raise InputError(f"a fixture vocabulary of {n_vocab} tokens is too small; it needs at least {MIN_VOCAB}")
    tokens = [*SPECIALS, *byte_symbols()]
    known = set(tokens)
    merges: list[str] = []
    for left, right in _merges():
        if len(tokens) == n_vocab:
            break
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    if len(tokens) < n_vocab:
        raise InputError(f"a fixture vocabulary has at most {len(tokens)} tokens, not {n_vocab}")
    types = [TokenType.CONTROL] * len(SPECIALS) + [TokenType.NORMAL] * (n_vocab - len(SPECIALS))
    space = byte_symbols()[ord(" ")]
    whole = {space + word for word in _WORDS.split()}
    words = frozenset(token for token, text in enumerate(tokens) if text in whole)
    return Vocabulary(tuple(tokens), tuple(types), tuple(merges), words)
