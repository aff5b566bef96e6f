"""Training sequences: English, statements and questions in English, and copies. A function of seed and step."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
from attrs import frozen

from dgr.selftest.learned.recall import BOS, KEYS, VALUES, Kind, as_tokens

__all__ = ["Batch", "Target", "make_batch"]


class Target(IntEnum):
    """What the prediction of a token counts as."""

    #: Not to be predicted: a bracket that comes from nowhere, a key, a value stated for the first time.
    NOTHING = 0
    TEXT = 1
    PAIR = 2
    MARK = 3
    COPY = 4


#: Shares of all sequences.
_SHARES = {Target.TEXT: 0.2, Target.PAIR: 0.55, Target.MARK: 0.2, Target.COPY: 0.05}
#: Fewest bytes of text between statements on average; at most so many, or that share of the length.
_LEAST_GAP, _MOST_GAP, _GAP_SHARE = 3.0, 12.0, 1 / 32
#: How often a sequence of that kind has to do without the rows of CSA and of HCA layers, so that each learns its part.
_WITHOUT = {Target.PAIR: (0.0, 0.5), Target.MARK: (0.8, 0.0), Target.COPY: (0.0, 0.3), Target.TEXT: (0.1, 0.1)}


@frozen
class Batch:
    """Sequences of one length. ``tokens``: [batch, length + 1]; ``targets``: [batch, length], of what follows each."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    #: Sequences that see no row of a CSA layer, of an HCA layer: [batch].
    without_csa: npt.NDArray[np.bool_]
    without_hca: npt.NDArray[np.bool_]


class _Writer:
    def __init__(self, text: bytes, length: int, rng: np.random.Generator) -> None:
        self.rng, self.text, self.length = rng, text, length
        self.at = int(rng.integers(len(text)))
        self.data = bytearray()
        self.targets: list[Target] = []

    @property
    def full(self) -> bool:
        return len(self.data) >= self.length

    def english(self, count: int) -> None:
        """Some text, which goes on from where it was interrupted; its first byte is not to be predicted then."""
        for index in range(count):
            self.targets.append(Target.TEXT if index or not self.data else Target.NOTHING)
            self.data.append(self.text[self.at])
            self.at = (self.at + 1) % len(self.text)

    def put(self, data: bytes, targets: list[Target]) -> None:
        self.data += data
        self.targets += targets


def _statements(writer: _Writer, kind: Kind, gap: float, n_keys: int) -> None:
    """Statements and questions, one after ``gap`` bytes of text on average; at most ``n_keys`` are open at a time."""
    rng, (opening, closing) = writer.rng, kind.brackets
    asked = Target.PAIR if kind is Kind.PAIR else Target.MARK
    order = rng.permutation(len(KEYS))[:n_keys]
    values: dict[int, int] = {}
    while not writer.full:
        writer.english(int(rng.exponential(gap)))
        new = len(values) < n_keys and (not values or rng.random() < 0.4)
        key = KEYS[order[len(values)]] if new else int(rng.choice(list(values)))
        value = VALUES[int(rng.integers(len(VALUES)))] if new else values[key]
        values[key] = value
        nothing = Target.NOTHING
        writer.put(bytes((opening, key, value, closing)), [nothing, nothing, nothing if new else asked, nothing])


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


def make_batch(text: bytes, length: int, count: int, seed: int, step: int) -> Batch:
    """``count`` sequences of ``length`` tokens and one more."""
    rng = np.random.default_rng([seed, step])
    kinds = list(_SHARES)
    rows, targets, without = [], [], []
    for index in range(count):
        # Shares are kept over steps, not drawn, so that no kind is missing for long.
        place = (index + step * count) * 0.6180339887 % 1.0
        kind = kinds[int(np.searchsorted(np.cumsum([_SHARES[one] for one in kinds]), place, side="right")) % len(kinds)]
        writer = _Writer(text, length, rng)
        # Short sequences are dense: many answers to learn from, over short distances. Long ones are like what is asked.
        gap = float(np.exp(rng.uniform(np.log(_LEAST_GAP), np.log(max(_MOST_GAP, length * _GAP_SHARE)))))
        if kind is Target.PAIR:
            _statements(writer, Kind.PAIR, gap, int(rng.integers(2, 13)))
        elif kind is Target.MARK:
            _statements(writer, Kind.MARK, 2 * gap, int(rng.integers(1, 5)))
        elif kind is Target.COPY:
            _copies(writer, gap)
        else:
            writer.english(length)
        rows.append([BOS, *as_tokens(bytes(writer.data[:length]))])
        targets.append(writer.targets[:length])
        without.append([rng.random() < share for share in _WITHOUT[kind]])
    flags = np.array(without)
    return Batch(np.array(rows), np.array(targets, np.int64), flags[:, 0], flags[:, 1])
