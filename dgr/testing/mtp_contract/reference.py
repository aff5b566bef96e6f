"""The MTP contract interpreted: one session's layers and MTP block; positions are real, numbers eight-byte stand-ins.

Every value is a digest of what a model would compute it from, so a wrong plane, a stale row, a hole in the window or a
hidden row of the wrong position shows in everything behind it, down to the tokens. The toy has four layers, CSA and HCA in
turn; an indexer keeps the same positions as its CSA layer. :mod:`dgr.testing.mtp_contract.shard` makes stages of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from attrs import define, field, frozen

from dgr.core.route import LayerRange
from dgr.testing.mtp_contract.rollback import LOST, CompressorRing, RollbackLedger, RollbackShape, mix
from dgr.testing.mtp_contract.states import DRAFTER, DrafterEvent, DrafterState
from dgr.v4.hyper_parameters import CSA_RATIO, HCA_RATIO

__all__ = [
    "N_LAYERS",
    "WINDOW",
    "DrafterView",
    "Language",
    "ReferenceDrafter",
    "ReferenceLayer",
    "ReferenceTrunk",
    "StageView",
]

#: Layers of the toy.
N_LAYERS = 4
#: Sliding window of V4 in tokens, the query itself included.
WINDOW = 128
#: What stands before position 0 where a hidden row is wanted.
_NO_ROW = bytes(8)


@frozen
class Language:
    """A toy that draws tokens from final hidden rows, and an MTP block that mostly guesses them.

    Most tokens follow from the one before; about one in five is a surprise that only the trunk's row tells. The block does
    not know surprises, and errs by itself now and then as its own row says. A lost row draws ``bos``: the symptom of spoiled
    state that users report.
    """

    n_vocab: int = 512
    #: Ids that no sound row draws: beginning, end, padding.
    special: frozenset[int] = frozenset({0, 1, 2})
    bos: int = 0
    eos: int = 1
    #: Of 256: how often the trunk surprises, and how often the block errs.
    surprise: int = 48
    slip: int = 24

    def usual(self, token: int) -> int:
        n = self.n_vocab - len(self.special)
        return len(self.special) + (token * 5 + 7) % n

    def draw(self, token: int, row: bytes) -> int:
        """The trunk's next token behind ``token``."""
        if row == LOST:
            return self.bos
        if row[0] < self.surprise:
            return len(self.special) + int.from_bytes(row[1:5], "little") % (self.n_vocab - len(self.special))
        return self.usual(token)

    def guess(self, token: int, row: bytes) -> int:
        """The block's guess of it."""
        if row == LOST:
            return self.bos
        return self.usual(token + 1 if row[0] < self.slip else token)


class DrafterView(msgspec.Struct, frozen=True):
    """Where the MTP block of a session stands."""

    state: str
    #: Positions its own cache holds, from 0 (as far back as its window reaches).
    position: int
    #: Position of the hidden row it would go on from; -1 for none.
    row: int


class StageView(msgspec.Struct, frozen=True):
    """Where a session stands on a stage. Ranges are ``[begin, end)`` of positions.

    Rings are those of the plane that counts; None where the stage has no layer of the kind.
    """

    position: int
    n_last: int
    pending: int
    budget: int
    state: str
    csa_rows: int
    hca_rows: int
    csa_ring: tuple[int, int] | None
    hca_ring: tuple[int, int] | None
    drafter: DrafterView | None


def _span(ring: CompressorRing, ledger: RollbackLedger) -> tuple[int, int]:
    """The positions in the plane that counts, as a range; ``(-1, -1)`` when they are not the last ones before P."""
    begin = max(0, ledger.position - ring.n_rows)
    held = [at for at, _ in ring.held(ledger.pending) if at < ledger.position]
    return (begin, ledger.position) if held == list(range(begin, ledger.position)) else (-1, -1)


@define
class ReferenceLayer:
    """One layer of one session: its compressor, and the raw keys of the window."""

    index: int
    compressor: CompressorRing
    #: Raw keys by position: those that a rollback within the budget may need, and not one more.
    raw: dict[int, bytes] = field(factory=dict)

    @classmethod
    def empty(cls, index: int, n_planes: int) -> ReferenceLayer:
        return cls(index, CompressorRing.hca(n_planes) if index % 2 else CompressorRing.csa(n_planes))

    @property
    def is_hca(self) -> bool:
        return not self.compressor.overlap

    def run(self, first: int, rows: Sequence[bytes], pending: int) -> list[bytes]:
        """One ubatch; rows in, rows out."""
        name = bytes([self.index])
        values = [mix(name, at.to_bytes(4, "little"), row) for at, row in enumerate(rows, first)]
        self.compressor.run(first, values, pending)
        self.raw.update(enumerate(values, first))
        out = [mix(name, *self._attended(at)) for at in range(first, first + len(values))]
        self.raw = {at: value for at, value in self.raw.items() if at > first - WINDOW}
        return out

    def _attended(self, at: int) -> list[bytes]:
        window = [self.raw.get(q, LOST) for q in range(max(0, at + 1 - WINDOW), at + 1)]
        return window + self.compressor.visible(at + 1)

    def truncate(self, position: int) -> None:
        """The raw keys behind ``position`` go at once; the compressor only learns of it with the next ubatch."""
        self.raw = {at: value for at, value in self.raw.items() if at < position}

    def replace(self, position: int, pending: int) -> None:
        self.compressor.forget_planes(pending)
        self.raw = {at: value for at, value in self.raw.items() if at >= position - WINDOW}

    def clear(self) -> None:
        self.compressor.clear()
        self.raw = {}

    def live(self, position: int, pending: int) -> bytes:
        ring = [value for at, value in self.compressor.held(pending) if at < position]
        window = [self.raw.get(q, LOST) for q in range(max(0, position + 1 - WINDOW), position)]
        return mix(*ring, *window, *self.compressor.visible(position))


@define
class ReferenceTrunk:
    """One session's main layers on one stage."""

    ledger: RollbackLedger
    layers: list[ReferenceLayer]

    @classmethod
    def empty(cls, layers: LayerRange, shape: RollbackShape) -> ReferenceTrunk:
        return cls(RollbackLedger(shape), [ReferenceLayer.empty(index, shape.planes) for index in layers.layers])

    def run(self, rows: Sequence[bytes]) -> list[bytes]:
        """Decode as many tokens as there are rows, which come from the stage before (from the embedding, on a head)."""
        out: list[bytes] = []
        first, pending = self.ledger.position, self.ledger.pending
        for size in self.ledger.shape.ubatches(len(rows)):
            part = list(rows[len(out) : len(out) + size])
            for layer in self.layers:
                part = layer.run(first + len(out), part, pending)
            out += part
            pending = 0  # the first ubatch took it
        self.ledger.decode(len(rows))
        return out

    def roll_back(self, k: int) -> None:
        """Take back ``k`` tokens; the ledger's :meth:`~.rollback.RollbackLedger.refusal` was asked before."""
        self.ledger.roll_back(k)
        for layer in self.layers:
            layer.truncate(self.ledger.position)

    def replace(self) -> None:
        """What saving and restoring this state leaves (dgr does neither): the present, the window, no planes."""
        for layer in self.layers:
            layer.replace(self.ledger.position, self.ledger.pending)
        self.ledger.replace(self.ledger.position)

    def clear(self) -> None:
        for layer in self.layers:
            layer.clear()
        self.ledger.clear()

    def live(self) -> bytes:
        """A digest of everything that what comes next is computed from. Equal digests, equal future."""
        position, pending = self.ledger.position, self.ledger.pending
        return mix(position.to_bytes(4, "little"), *(layer.live(position, pending) for layer in self.layers))

    def view(self, drafter: ReferenceDrafter | None) -> StageView:
        ledger = self.ledger
        csa = [_span(layer.compressor, ledger) for layer in self.layers if not layer.is_hca]
        hca = [_span(layer.compressor, ledger) for layer in self.layers if layer.is_hca]
        return StageView(
            position=ledger.position,
            n_last=ledger.n_last,
            pending=ledger.pending,
            budget=ledger.budget,
            state=ledger.state.value,
            csa_rows=ledger.position // CSA_RATIO if csa else 0,
            hca_rows=ledger.position // HCA_RATIO if hca else 0,
            csa_ring=csa[0] if csa else None,
            hca_ring=hca[0] if hca else None,
            drafter=None if drafter is None else drafter.view(),
        )


@define
class ReferenceDrafter:
    """One session's MTP block on the tail: its own sliding-window cache, and the trunk's hidden rows it may go on from."""

    language: Language
    #: Hidden rows kept behind the present one, so that a rollback finds the row it goes on from: R.
    n_rows: int
    state: DrafterState = DRAFTER.first
    #: The next position of its own cache.
    position: int = 0
    own: dict[int, bytes] = field(factory=dict)
    #: The trunk's final rows by position.
    rows: dict[int, bytes] = field(factory=dict)
    #: While drafting: the last guess, and the block's own row behind it.
    ahead: tuple[int, bytes] | None = None

    def catch_up(self, first: int, tokens: Sequence[int], rows: Sequence[bytes]) -> None:
        """Run what the trunk has run: token x_p with the trunk's row of p - 1, for every position p, without output."""
        self.state = DRAFTER.follow(self.state, DrafterEvent.CATCH_UP)
        self.rows.update(enumerate(rows, first))
        for at, token in enumerate(tokens, first):
            self._step(at, token, self._row_before(at))
        self.rows = {at: row for at, row in self.rows.items() if at >= self.position - 1 - self.n_rows}
        self.own = {at: value for at, value in self.own.items() if at > first - WINDOW}

    def draft(self, token: int) -> int:
        """One more guess: ``token`` is certain for the first one, and goes on from the guess before afterwards."""
        self.state = DRAFTER.follow(self.state, DrafterEvent.DRAFT)
        before, row = (token, self._row_before(self.position)) if self.ahead is None else self.ahead
        out = self._step(self.position, before, row)
        guess = self.language.guess(before, out)
        self.ahead = (guess, out)
        return guess

    def truncate(self, position: int) -> None:
        """Forget guesses, and what the trunk will take back."""
        self.state = DRAFTER.follow(self.state, DrafterEvent.TRUNCATE)
        self.own = {at: value for at, value in self.own.items() if at < position}
        self.rows = {at: row for at, row in self.rows.items() if at < position}
        self.position, self.ahead = position, None

    def _step(self, at: int, token: int, row: bytes) -> bytes:
        self.own[at] = mix(b"mtp", at.to_bytes(4, "little"), token.to_bytes(4, "little"), row)
        self.position = at + 1
        return mix(b"nextn", *(self.own.get(q, LOST) for q in range(max(0, at + 1 - WINDOW), at + 1)))

    def _row_before(self, at: int) -> bytes:
        return self.rows.get(at - 1, LOST) if at else _NO_ROW

    def live(self) -> bytes:
        """A digest of what its next guesses are made from."""
        window = (self.own.get(q, LOST) for q in range(max(0, self.position + 1 - WINDOW), self.position))
        return mix(self.position.to_bytes(4, "little"), *window, self._row_before(self.position))

    def view(self) -> DrafterView:
        at = self.position - 1
        return DrafterView(self.state.value, self.position, at if at in self.rows else -1)
