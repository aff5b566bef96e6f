"""The MTP contract interpreted: one stage with all its sessions, which takes messages and answers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from attrs import define, field

from dgr.core.prefix import PrefixDigest
from dgr.core.route import LayerRange
from dgr.core.values import Expectation
from dgr.testing.mtp_contract.messages import (
    MtpAdvanced,
    MtpRefused,
    MtpWork,
    Proposal,
    Reason,
    Rollback,
    RolledBack,
    Want,
)
from dgr.testing.mtp_contract.reference import N_LAYERS, Language, ReferenceDrafter, ReferenceTrunk
from dgr.testing.mtp_contract.rollback import RollbackShape

__all__ = ["Answer", "ReferenceShard", "Taken", "expectation"]

#: What a stage answers to the pipeline.
Answer: TypeAlias = MtpAdvanced | Proposal | RolledBack | MtpRefused
#: Answers for the pipeline, and rows for the next stage; no rows: the message ends here.
Taken: TypeAlias = tuple[list[Answer], list[bytes] | None]


def expectation(tokens: Sequence[int], position: int) -> Expectation:
    """What a stage must hold that has committed the first ``position`` tokens."""
    return Expectation(position, PrefixDigest(tokens[:position]).digest())


@define
class _Held:
    """A session on a shard."""

    trunk: ReferenceTrunk
    drafter: ReferenceDrafter | None
    tokens: list[int] = field(factory=list)
    #: On the tail: the answer to the last work, while guesses are still being added to it.
    thinking: tuple[MtpWork, Proposal] | None = None


@define
class ReferenceShard:
    """One stage with all its sessions: takes messages, returns answers and what goes on to the next stage."""

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

    @property
    def layers(self) -> LayerRange:
        begin, end = (N_LAYERS * at // self.n_stages for at in (self.index, self.index + 1))
        return LayerRange(begin, end)

    # --- life ---

    def fence(self, epoch: int) -> None:
        """Drop every session of older epochs: planes, rings, rows, the block's own cache, all of it."""
        self.epoch = epoch
        self.held.clear()
        self.evicted.clear()

    def open(self, session: int) -> None:
        drafter = ReferenceDrafter(self.language, self.shape.planes) if self.is_tail else None
        self.held[session] = _Held(ReferenceTrunk.empty(self.layers, self.shape), drafter)
        self.evicted.discard(session)

    def close(self, session: int) -> None:
        self.held.pop(session, None)
        self.evicted.discard(session)

    def evict(self, session: int) -> None:
        """An idle session makes room; its next message is refused."""
        if self.held.pop(session, None) is not None:
            self.evicted.add(session)

    # --- messages ---

    def take(self, message: MtpWork | Rollback, rows: Sequence[bytes]) -> Taken:
        """Take one message in the order of the link; a rollback goes on with no rows at all."""
        reason = self._refusal(message)
        if reason is not None:
            return [self._refused(message, reason)], None
        held = self.held[message.key.session]
        if isinstance(message, Rollback):
            return self._roll_back(held, message)
        return self._run(held, message, rows)

    def _refusal(self, message: MtpWork | Rollback) -> Reason | None:
        """Looked at in the order of :class:`~dgr.testing.mtp_contract.messages.Reason`; nothing is changed."""
        if message.key.epoch != self.epoch:
            return Reason.STALE_EPOCH
        held = self.held.get(message.key.session)
        if held is None:
            return Reason.EVICTED if message.key.session in self.evicted else Reason.UNKNOWN
        expect = message.expect if isinstance(message, MtpWork) else message.at
        if expect.position != held.trunk.ledger.position:
            return Reason.POSITION
        if expect != expectation(held.tokens, expect.position):
            return Reason.DIGEST
        if isinstance(message, MtpWork):
            if message.candidates > self.shape.planes or message.candidates >= len(message.tokens):
                return Reason.CANDIDATES
            return Reason.CONTEXT if expect.position + len(message.tokens) > self.shape.n_ctx else None
        reason = held.trunk.ledger.refusal(message.at.position - message.to.position)
        if reason is None and message.to != expectation(held.tokens, message.to.position):
            return Reason.DIGEST
        return reason

    def _refused(self, message: MtpWork | Rollback, reason: Reason) -> MtpRefused:
        held = self.held.get(message.key.session) if reason is not Reason.STALE_EPOCH else None
        position, budget = (0, 0) if held is None else (held.trunk.ledger.position, held.trunk.ledger.budget)
        return MtpRefused(message.key, message.seq, reason, position, budget)

    def _roll_back(self, held: _Held, message: Rollback) -> Taken:
        held.trunk.roll_back(message.at.position - message.to.position)
        del held.tokens[message.to.position :]
        if held.drafter is None:
            return [], []
        held.drafter.truncate(message.to.position)
        return [RolledBack(message.key, message.seq, message.to.position)], None

    def _run(self, held: _Held, work: MtpWork, rows: Sequence[bytes]) -> Taken:
        if self.index == 0:
            rows = [token.to_bytes(4, "little") for token in work.tokens]
        out = held.trunk.run(rows)
        held.tokens += work.tokens
        if held.drafter is None:
            return [], out
        held.drafter.catch_up(work.expect.position, work.tokens, out)
        if work.want is Want.NOTHING:
            return [MtpAdvanced(work.key, work.seq, held.trunk.ledger.position)], None
        held.thinking = (work, self._verify(held.drafter, work, out))
        return [], None

    def _verify(self, drafter: ReferenceDrafter, work: MtpWork, rows: Sequence[bytes]) -> Proposal:
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
