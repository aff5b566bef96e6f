"""The MTP contract interpreted on one stage: positions are real, numbers are eight-byte stand-ins.

Every value is a digest of what a model would compute it from, so a wrong plane, a stale row, a hole in the window or a
hidden row of the wrong position shows in everything behind it, down to the tokens. One CSA layer (its indexer keeps the same
positions) and one HCA layer stand for all of a stage. :mod:`dgr.model.mtp_route` joins stages to a route.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from attrs import define, field, frozen

from dgr.model.mtp_messages import (
    Advanced,
    Expectation,
    Proposal,
    Reason,
    Refused,
    Rollback,
    RolledBack,
    Want,
    Work,
)
from dgr.model.mtp_rollback import LOST, CompressorRing, RollbackLedger, RollbackShape, mix
from dgr.model.mtp_states import DRAFTER, DrafterEvent, DrafterState
from dgr.model.prefix import PrefixDigest

__all__ = [
    "WINDOW",
    "Answer",
    "DrafterView",
    "Language",
    "ReferenceDrafter",
    "ReferenceShard",
    "ReferenceTrunk",
    "StageView",
    "Taken",
    "expectation",
]

#: What a stage answers to the pipeline.
Answer: TypeAlias = Advanced | Proposal | RolledBack | Refused
#: Answers for the pipeline, and rows for the next stage; no rows: the message ends here.
Taken: TypeAlias = tuple[list[Answer], list[bytes] | None]

#: Sliding window of V4 in tokens, the query itself included.
WINDOW = 128
#: What stands before position 0 where a hidden row is wanted.
_NO_ROW = bytes(8)


def expectation(tokens: Sequence[int], position: int) -> Expectation:
    """What a stage must hold that has committed the first ``position`` tokens."""
    return Expectation(position, PrefixDigest(tokens[:position]).digest())


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
    """Where a session stands on a stage. Ranges are ``[begin, end)`` of positions; rings are those of the plane that counts."""

    position: int
    n_last: int
    pending: int
    budget: int
    state: str
    csa_rows: int
    hca_rows: int
    csa_ring: tuple[int, int]
    hca_ring: tuple[int, int]
    drafter: DrafterView | None


def _span(cells: Sequence[tuple[int, bytes]], n_rows: int, position: int) -> tuple[int, int]:
    """The positions that count in a ring, as a range; ``(-1, -1)`` when they are not the last ones before ``position``."""
    begin = max(0, position - n_rows)
    held = [at for at, _ in cells if at < position]
    return (begin, position) if held == list(range(begin, position)) else (-1, -1)


@define
class ReferenceTrunk:
    """One session's main layers on one stage."""

    name: bytes
    ledger: RollbackLedger
    csa: CompressorRing
    hca: CompressorRing
    #: Raw keys by position: those that a rollback within the budget may need, and not one more.
    raw: dict[int, bytes] = field(factory=dict)

    @classmethod
    def empty(cls, name: bytes, shape: RollbackShape) -> ReferenceTrunk:
        planes = shape.planes
        return cls(name, RollbackLedger(shape), CompressorRing.csa(planes), CompressorRing.hca(planes))

    def clone(self) -> ReferenceTrunk:
        ledger = self.ledger
        twin = type(ledger)(ledger.shape, ledger.position, ledger.n_last, ledger.pending, ledger.state)
        return type(self)(self.name, twin, self.csa.clone(), self.hca.clone(), self.raw.copy())

    def run(self, rows: Sequence[bytes]) -> list[bytes]:
        """Decode as many tokens as there are rows, which come from the stage before (from the embedding, on a head)."""
        out: list[bytes] = []
        first, pending = self.ledger.position, self.ledger.pending
        for size in self.ledger.shape.ubatches(len(rows)):
            begin = len(out)
            out += self._ubatch(first + begin, rows[begin : begin + size], pending)
            pending = 0  # the first ubatch took it
        self.ledger.decode(len(rows))
        return out

    def _ubatch(self, first: int, rows: Sequence[bytes], pending: int) -> list[bytes]:
        values = [mix(self.name, at.to_bytes(4, "little"), row) for at, row in enumerate(rows, first)]
        self.csa.run(first, values, pending)
        self.hca.run(first, values, pending)
        self.raw.update(enumerate(values, first))
        out = [self._attend(at) for at in range(first, first + len(values))]
        self.raw = {at: value for at, value in self.raw.items() if at > first - WINDOW}
        return out

    def _attend(self, at: int) -> bytes:
        window = [self.raw.get(q, LOST) for q in range(max(0, at + 1 - WINDOW), at + 1)]
        return mix(self.name, *window, *self.csa.visible(at + 1), *self.hca.visible(at + 1))

    def roll_back(self, k: int) -> None:
        """Take back ``k`` tokens; the ledger's :meth:`~dgr.model.mtp_rollback.RollbackLedger.refusal` was asked before."""
        self.ledger.roll_back(k)
        self.raw = {at: value for at, value in self.raw.items() if at < self.ledger.position}

    def replace(self) -> None:
        """What saving and restoring this state leaves (dgr does neither): the present, the window, no planes."""
        position = self.ledger.position
        for ring in (self.csa, self.hca):
            ring.forget_planes(self.ledger.pending)
        self.raw = {at: value for at, value in self.raw.items() if at >= position - WINDOW}
        self.ledger.replace(position)

    def clear(self) -> None:
        self.csa.clear()
        self.hca.clear()
        self.raw = {}
        self.ledger.clear()

    def live(self) -> bytes:
        """A digest of everything that what comes next is computed from. Equal digests, equal future."""
        ledger = self.ledger
        rings = [
            value for ring in (self.csa, self.hca) for at, value in ring.held(ledger.pending) if at < ledger.position
        ]
        window = [self.raw.get(q, LOST) for q in range(max(0, ledger.position + 1 - WINDOW), ledger.position)]
        rows = self.csa.visible(ledger.position) + self.hca.visible(ledger.position)
        return mix(ledger.position.to_bytes(4, "little"), *rings, *window, *rows)

    def view(self, drafter: ReferenceDrafter | None) -> StageView:
        ledger = self.ledger
        position, pending = ledger.position, ledger.pending
        return StageView(
            position=position,
            n_last=ledger.n_last,
            pending=pending,
            budget=ledger.budget,
            state=ledger.state.value,
            csa_rows=position // self.csa.ratio,
            hca_rows=position // self.hca.ratio,
            csa_ring=_span(self.csa.held(pending), self.csa.n_rows, position),
            hca_ring=_span(self.hca.held(pending), self.hca.n_rows, position),
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

    def clone(self) -> ReferenceDrafter:
        return type(self)(
            self.language, self.n_rows, self.state, self.position, self.own.copy(), self.rows.copy(), self.ahead
        )

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


@define
class _Held:
    """A session on a shard."""

    trunk: ReferenceTrunk
    drafter: ReferenceDrafter | None
    tokens: list[int] = field(factory=list)
    #: On the tail: the answer to the last work, while guesses are still being added to it.
    thinking: tuple[Work, Proposal] | None = None


@define
class ReferenceShard:
    """One stage with all its sessions: takes messages, gives answers and what goes on to the next stage."""

    index: int
    n_stages: int
    shape: RollbackShape
    language: Language = field(factory=Language)
    epoch: int = 0
    held: dict[int, _Held] = field(factory=dict)
    evicted: set[int] = field(factory=set)

    @property
    def is_tail(self) -> bool:
        return self.index == self.n_stages - 1

    # --- life ---

    def fence(self, epoch: int) -> None:
        """Drop every session of older epochs: planes, rings, rows, the block's own cache, all of it."""
        self.epoch = epoch
        self.held.clear()
        self.evicted.clear()

    def open(self, session: int) -> None:
        drafter = ReferenceDrafter(self.language, self.shape.planes) if self.is_tail else None
        self.held[session] = _Held(ReferenceTrunk.empty(bytes([self.index]), self.shape), drafter)
        self.evicted.discard(session)

    def close(self, session: int) -> None:
        self.held.pop(session, None)
        self.evicted.discard(session)

    def evict(self, session: int) -> None:
        """An idle session makes room; its next message is refused."""
        if self.held.pop(session, None) is not None:
            self.evicted.add(session)

    # --- messages ---

    def take(self, message: Work | Rollback, rows: Sequence[bytes]) -> Taken:
        """Take one message in the order of the link; a rollback goes on with no rows at all."""
        reason = self._refusal(message)
        if reason is not None:
            return [self._refused(message, reason)], None
        held = self.held[message.key.session]
        if isinstance(message, Rollback):
            return self._roll_back(held, message)
        return self._run(held, message, rows)

    def _refusal(self, message: Work | Rollback) -> Reason | None:
        """Looked at in the order of :class:`~dgr.model.mtp_messages.Reason`; nothing is changed."""
        if message.key.epoch != self.epoch:
            return Reason.STALE_EPOCH
        held = self.held.get(message.key.session)
        if held is None:
            return Reason.EVICTED if message.key.session in self.evicted else Reason.UNKNOWN
        expect = message.expect if isinstance(message, Work) else message.at
        if expect.position != held.trunk.ledger.position:
            return Reason.POSITION
        if expect != expectation(held.tokens, expect.position):
            return Reason.DIGEST
        if isinstance(message, Work):
            if message.candidates > self.shape.planes or message.candidates >= len(message.tokens):
                return Reason.CANDIDATES
            return Reason.CONTEXT if expect.position + len(message.tokens) > self.shape.n_ctx else None
        reason = held.trunk.ledger.refusal(message.at.position - message.to.position)
        if reason is None and message.to != expectation(held.tokens, message.to.position):
            return Reason.DIGEST
        return reason

    def _refused(self, message: Work | Rollback, reason: Reason) -> Refused:
        held = self.held.get(message.key.session) if reason is not Reason.STALE_EPOCH else None
        position, budget = (0, 0) if held is None else (held.trunk.ledger.position, held.trunk.ledger.budget)
        return Refused(message.key, message.seq, reason, position, budget)

    def _roll_back(self, held: _Held, message: Rollback) -> Taken:
        held.trunk.roll_back(message.at.position - message.to.position)
        del held.tokens[message.to.position :]
        if held.drafter is None:
            return [], []
        held.drafter.truncate(message.to.position)
        return [RolledBack(message.key, message.seq, message.to.position)], None

    def _run(self, held: _Held, work: Work, rows: Sequence[bytes]) -> Taken:
        if self.index == 0:
            rows = [token.to_bytes(4, "little") for token in work.tokens]
        out = held.trunk.run(rows)
        held.tokens += work.tokens
        if held.drafter is None:
            return [], out
        held.drafter.catch_up(work.expect.position, work.tokens, out)
        if work.want is Want.NOTHING:
            return [Advanced(work.key, work.seq, held.trunk.ledger.position)], None
        held.thinking = (work, self._verify(held.drafter, work, out))
        return [], None

    def _verify(self, drafter: ReferenceDrafter, work: Work, rows: Sequence[bytes]) -> Proposal:
        """Draw behind every candidate as plain decoding would; the first one that differs ends it."""
        certain = len(work.tokens) - work.candidates
        accepted = 0
        token = self.language.draw(work.tokens[certain - 1], rows[certain - 1])
        while accepted < work.candidates and work.tokens[certain + accepted] == token:
            if token == self.language.eos and accepted + 1 < work.candidates:
                break  # nothing behind the end of the text is output, so nothing of it stays in the context
            accepted += 1
            token = self.language.draw(token, rows[certain + accepted - 1])
        position = work.expect.position + certain + accepted
        drafter.truncate(position)
        return Proposal(work.key, work.seq, position, accepted, token, ())

    def think(self, session: int) -> Proposal | None:
        """One more guess of the tail for a session; its answer when it is complete. None: not yet, or never."""
        held = self.held.get(session)
        if held is None or held.thinking is None or held.drafter is None:
            return None
        work, proposal = held.thinking
        room = self.shape.n_ctx - proposal.position - 1
        if len(proposal.drafts) < min(work.draft, self.shape.planes, room):
            guess = held.drafter.draft(proposal.token)
            drafts = (*proposal.drafts, guess)
            held.thinking = (work, msgspec.structs.replace(proposal, drafts=drafts))
            return None
        held.drafter.truncate(proposal.position)
        held.thinking = None
        return proposal
