"""Questions about what was stated far back in a text: what the learned model is trained on, and measured by.

A statement is four bytes: an opening bracket, a key, a value, a closing bracket. A question is the bracket and the key once
more; the answer is the value. Tokens are bytes, behind the special tokens of the fixture's vocabulary.
"""

from __future__ import annotations

import random
from enum import StrEnum

from attrs import frozen

from dgr.errors import InputError
from dgr.selftest.fixture.vocabulary import SPECIALS

__all__ = ["BOS", "KEYS", "VALUES", "Kind", "Question", "Recital", "as_tokens", "make_recital"]

#: Token that every sequence begins with.
BOS = 0
_FIRST_BYTE = len(SPECIALS)

KEYS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
VALUES = b"abcdefghijklmnopqrstuvwxyz"

#: Statements and questions begin at multiples of the step, and of half the step beyond: neither is ever in the other's place.
_STEP = 16
#: Bytes of text before the first statement: its value is the second token of a block of four, so that the row that will hold
#: it is not complete yet, and what damages a ring then damages it.
_LEAD = 62


class Kind(StrEnum):
    """Which statements; each has brackets of its own."""

    #: Many, close together: what CSA rows are good for.
    PAIR = "pair"
    #: Few, far apart: one in each HCA row.
    MARK = "mark"

    @property
    def brackets(self) -> bytes:
        return b"<>" if self is Kind.PAIR else b"{}"

    @property
    def statements(self) -> int:
        """Statements of a recital."""
        return 12 if self is Kind.PAIR else 4

    @property
    def step(self) -> int:
        """Tokens from a statement to the next one."""
        return _STEP if self is Kind.PAIR else 8 * _STEP


def as_tokens(text: bytes) -> list[int]:
    """The tokens of some bytes."""
    return [_FIRST_BYTE + byte for byte in text]


@frozen
class Question:
    """Where something is asked, and what must follow."""

    #: Position of the stated value.
    stated_at: int
    #: Position of the key that asks: its row of logits is the answer.
    asked_at: int
    answer: int


@frozen
class Recital:
    """Statements in a text, and as many questions, each ``distance`` tokens behind its statement."""

    kind: Kind
    distance: int
    tokens: tuple[int, ...]
    questions: tuple[Question, ...]

    @property
    def first_asked(self) -> int:
        """Position of the bracket of the first question; every statement is before it where the distance is long."""
        return self.questions[0].asked_at - 1


def make_recital(kind: Kind, distance: int, text: bytes, seed: int, values_seed: int | None = None) -> Recital:
    """A recital in a piece of ``text``; ``values_seed`` changes the stated values and nothing else.

    ``distance``: from the stated value to the answer, 8 more than a multiple of 16. Raises :class:`~dgr.errors.InputError`
    for another one, and for more tokens than the text has bytes.
    """
    if distance < _STEP // 2 or distance % _STEP != _STEP // 2:
        raise InputError(f"the distance is {distance}; give 8 more than a multiple of {_STEP}")
    length = _LEAD + (kind.statements - 1) * kind.step + distance + 4
    if length > len(text):
        raise InputError(f"a question over {distance} tokens needs {length} bytes of text, not {len(text)}")
    rng = random.Random(f"{kind}/{distance}/{seed}")
    start = rng.randrange(len(text) - length + 1)
    data = bytearray(text[start : start + length])
    keys = rng.sample(KEYS, kind.statements)
    if values_seed is not None:
        rng = random.Random(f"{kind}/{distance}/{seed}/{values_seed}")
    values = [rng.choice(VALUES) for _ in keys]
    opening, closing = kind.brackets
    questions = []
    for index, (key, value) in enumerate(zip(keys, values, strict=True)):
        at = _LEAD + index * kind.step
        for begin in (at, at + distance):
            data[begin : begin + 4] = bytes((opening, key, value, closing))
        # Positions count the token of the beginning.
        questions.append(Question(at + 3, at + distance + 2, as_tokens(bytes((value,)))[0]))
    return Recital(kind, distance, (BOS, *as_tokens(bytes(data))), tuple(questions))
