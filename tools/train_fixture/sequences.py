"""Training sequences: English, statements and questions in English, and copies. A function of seed and step."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from dgr.selftest.learned.recall import BOS, KEYS, VALUES, Kind, as_tokens
from dgr.v4.hyper_parameters import HCA_RATIO

__all__ = ["Batch", "Target", "make_batch"]


class Target(IntEnum):
    """What the prediction of a token counts as."""

    #: Not to be predicted: a bracket that comes from nowhere, a key, a value stated for the first time.
    NOTHING = 0
    TEXT = 1
    PAIR = 2
    MARK = 3
    COPY = 4


#: Share of steps with marks, and shares of the other steps' sequences.
_MARKS = 0.22
_SHARES = {Target.TEXT: 0.74, Target.PAIR: 0.16, Target.COPY: 0.1}
#: Fewest bytes of text between pairs on average; at most four times that, or this share of the length.
_LEAST_GAP, _GAP_SHARE = 3.0, 1 / 32
#: Bytes of text before a mark is stated, and on average before it is asked for.
_MARK_GAP, _ASKED_GAP = (40, 200), 15.0
#: So many tokens after it was stated a mark is behind the window, and its HCA row complete.
_FAR = 132
#: How often there is no text between marks.
_FILLED = 0.1
#: How often a sequence of that kind has to do without the rows of CSA and of HCA layers, so that each learns its part.
_WITHOUT = {Target.PAIR: (0.0, 0.5), Target.COPY: (0.0, 0.3), Target.TEXT: (0.1, 0.1)}
#: How often marks do without the rows of CSA layers; else they have those of a twin, which has stated other values.
_MARKS_WITHOUT = 0.5
#: Shares of lengths of twins, as multiples of the other sequences' length.
_TWINS = {0.5: 0.3, 1: 0.55, 2: 0.15}


@frozen
class Batch:
    """Sequences of one length. ``tokens``: [batch, length + 1]; ``targets``: [batch, length], of what follows each."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    #: Sequences that see no row of a CSA layer, of an HCA layer: [batch].
    without_csa: npt.NDArray[np.bool_]
    without_hca: npt.NDArray[np.bool_]
    #: HCA row that holds the answer to be predicted: [batch, length]; -1 where none does.
    rows: npt.NDArray[np.int64]
    #: Whether each of two sequences attends to the CSA rows of the other one.
    swapped_csa: bool = False


class _Writer:
    def __init__(self, text: bytes, length: int, rng: np.random.Generator, values: np.random.Generator) -> None:
        #: What draws all else, and what draws the values that are stated.
        self.rng, self.values = rng, values
        self.text, self.length = text, length
        self.at = int(rng.integers(len(text)))
        self.data = bytearray()
        self.targets: list[Target] = []
        #: HCA row that holds the answer, by the place of the target.
        self.rows: dict[int, int] = {}

    @property
    def full(self) -> bool:
        return len(self.data) >= self.length

    def english(self, count: int) -> None:
        """Some text, which goes on from where it was interrupted; its first byte is not to be predicted then."""
        for index in range(count):
            self.targets.append(Target.TEXT if index or not self.data else Target.NOTHING)
            self.data.append(self.text[self.at])
            self.at = (self.at + 1) % len(self.text)

    def tell_row(self, end: int) -> None:
        """The answer of the question that follows was stated right before ``end``; no row has all where it is split."""
        key, value = (end - 2) // HCA_RATIO, (end - 1) // HCA_RATIO  # a token before all else makes it one more
        if key == value:
            self.rows[len(self.data) + 2] = value

    def put(self, data: bytes, targets: list[Target]) -> None:
        self.data += data
        self.targets += targets


def _pairs(writer: _Writer, gap: float, n_keys: int) -> None:
    """Statements and questions, one after ``gap`` bytes of text on average; at most ``n_keys`` are open at a time."""
    order = writer.rng.permutation(len(KEYS))[:n_keys]
    values: dict[int, int] = {}
    while not writer.full:
        writer.english(int(writer.rng.exponential(gap)))
        if len(values) < n_keys and (not values or writer.rng.random() < 0.4):
            _state(writer, Kind.PAIR, KEYS[order[len(values)]], values)
        else:
            _ask(writer, Kind.PAIR, int(writer.rng.choice(list(values))), values)


def _marks(writer: _Writer, n_keys: int, filler: bool) -> None:
    """Rounds of statements, about one in a row of 128 tokens, and of questions for them after some text.

    ``filler``: in place of text there is one byte again and again, so that a row holds little but its statement.
    """
    rng = writer.rng
    byte = int(rng.choice(list(b"._- "))) if filler else None
    fresh = [int(key) for key in rng.permutation(list(KEYS))]

    def wait(count: float) -> None:
        if byte is None:
            writer.english(int(count))
        else:
            writer.put(bytes([byte]) * int(count), [Target.NOTHING] * int(count))

    while not writer.full:
        keys, fresh = fresh[:n_keys], fresh[n_keys:]
        values: dict[int, int] = {}
        stated: dict[int, int] = {}
        for key in keys:
            wait(rng.uniform(*_MARK_GAP))
            _state(writer, Kind.MARK, key, values)
            stated[key] = len(writer.data)
        wait(np.exp(rng.uniform(np.log(4), np.log(writer.length / 2))))
        for key in rng.permutation(keys):
            wait(rng.exponential(_ASKED_GAP))
            if len(writer.data) - stated[key] > _FAR:
                writer.tell_row(stated[key])
            _ask(writer, Kind.MARK, key, values)
        if not fresh:
            wait(writer.length)


def _state(writer: _Writer, kind: Kind, key: int, values: dict[int, int]) -> None:
    opening, closing = kind.brackets
    values[key] = VALUES[int(writer.values.integers(len(VALUES)))]
    writer.put(bytes((opening, key, values[key], closing)), [Target.NOTHING] * 4)


def _ask(writer: _Writer, kind: Kind, key: int, values: dict[int, int]) -> None:
    opening, closing = kind.brackets
    asked = Target.PAIR if kind is Kind.PAIR else Target.MARK
    nothing = Target.NOTHING
    writer.put(bytes((opening, key, values[key], closing)), [nothing, nothing, asked, nothing])


def _copies(writer: _Writer, gap: float) -> None:
    """Strings of letters, each twice, the second time after some text."""
    rng = writer.rng
    while not writer.full:
        writer.english(1 + int(rng.exponential(gap)))
        size = int(rng.integers(6, 25))
        string = bytes(VALUES[index] for index in rng.integers(len(VALUES), size=size))
        writer.put(b"[" + string + b"]", [Target.NOTHING] * (size + 2))
        writer.english(int(rng.exponential(gap)) if rng.random() < 0.5 else 0)
        writer.put(b"[" + string + b"]", [Target.NOTHING] * 3 + [Target.COPY] * (size - 1))


def _kind(place: int) -> Target:
    """Shares are kept over places, not drawn, so that no kind is missing for long."""
    shares = np.cumsum(list(_SHARES.values()))
    return list(_SHARES)[int(np.searchsorted(shares, place * 0.4142135624 % 1.0 * shares[-1], side="right"))]


def _twins(text: bytes, length: int, seed: int, step: int) -> Batch:
    """Two sequences with marks that differ in the values alone, for each other's CSA rows."""
    length = int(length * np.random.default_rng([seed, step, 9]).choice(list(_TWINS), p=list(_TWINS.values())))
    writers = []
    for values in range(2):
        rng = np.random.default_rng([seed, step])
        writer = _Writer(text, length, rng, np.random.default_rng([seed, step, 1 + values]))
        _marks(writer, int(rng.integers(1, 7)), rng.random() < _FILLED)
        writers.append(writer)
    without = np.full(2, rng.random() < _MARKS_WITHOUT)
    return _batch(writers, without, np.zeros(2, np.bool_), swapped=not without[0])


def _batch(writers: list[_Writer], without_csa: Any, without_hca: Any, *, swapped: bool = False) -> Batch:
    length = writers[0].length
    tokens = np.array([[BOS, *as_tokens(bytes(writer.data[:length]))] for writer in writers])
    targets = np.array([writer.targets[:length] for writer in writers], np.int64)
    rows = np.full(targets.shape, -1)
    for index, writer in enumerate(writers):
        for at, row in writer.rows.items():
            if at < length:
                rows[index, at] = row
    return Batch(tokens, targets, np.array(without_csa, np.bool_), np.array(without_hca, np.bool_), rows, swapped)


def make_batch(text: bytes, length: int, count: int, seed: int, step: int) -> Batch:
    """``count`` sequences of ``length`` tokens and one more, or two with marks that have as many together."""
    if step * 0.6180339887 % 1.0 < _MARKS:
        return _twins(text, length, seed, step)
    rng = np.random.default_rng([seed, step])
    writers, without = [], []
    for index in range(count):
        kind = _kind(index + step * count)
        writer = _Writer(text, length, rng, rng)
        # Short sequences are dense: many answers to learn from, over short distances. Long ones are like what is asked.
        most = max(4 * _LEAST_GAP, length * _GAP_SHARE)
        gap = float(np.exp(rng.uniform(np.log(_LEAST_GAP), np.log(most))))
        if kind is Target.PAIR:
            _pairs(writer, gap, int(rng.integers(2, 13)))
        elif kind is Target.COPY:
            _copies(writer, gap)
        else:
            writer.english(length)
        writers.append(writer)
        without.append([rng.random() < share for share in _WITHOUT[kind]])
    return _batch(writers, *zip(*without, strict=True))
