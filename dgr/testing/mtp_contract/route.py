"""The MTP contract interpreted on a route: a pipeline's side of the rounds, and stages joined by queues.

A round: the pipeline sends the last token drawn with the candidates behind it; every stage runs them all; the tail draws
behind each, says how many were right, what comes next and what it guesses for the round after; what was wrong is rolled back
on every stage by a command that flows along the chain in the order of the work, so the next round may follow at once.

Everything is one queue of small acts. :meth:`ReferenceRoute.tick` does the next one, so that a cancel, a new epoch or an
eviction can strike between any two; :meth:`ReferenceRoute.settle` does them all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from attrs import define, field, frozen

from dgr.core.values import Key
from dgr.errors import InputError, SessionLost
from dgr.testing.mtp_contract.messages import Message, MtpRefused, MtpWork, Proposal, Reason, Rollback, RolledBack, Want
from dgr.testing.mtp_contract.reference import Language, StageView
from dgr.testing.mtp_contract.rollback import RollbackShape
from dgr.testing.mtp_contract.shard import Answer, ReferenceShard, expectation
from dgr.testing.mtp_contract.states import ROUND, RoundEvent, RoundState

__all__ = ["MtpClientState", "ReferenceRoute", "Round", "Sent"]

#: Bytes of a toy residual row, four streams of one float: what the payload of a message counts in.
TOY_ROW_BYTES = 16


@frozen
class Sent:
    """One message on one link: ``pipeline``, or the number of a stage."""

    sender: str
    receiver: str
    message: Message


@frozen
class Round:
    """What one round gave its caller."""

    candidates: tuple[int, ...]
    accepted: int
    #: The tokens that are certain now and were not before: the accepted candidates, and the one drawn.
    tokens: tuple[int, ...]


@define
class MtpClientState:
    """A session as its pipeline sees it."""

    id: int
    #: Every token that is certain. All but the last are committed when a round has ended.
    transcript: list[int] = field(factory=list)
    #: Tokens that every stage has committed, once what is in flight has settled.
    committed: int = 0
    state: RoundState = ROUND.first
    seq: int = 0
    drafts: tuple[int, ...] = ()
    #: Drawn for a caller who had given up: the next token, if nothing else is appended.
    unclaimed: int | None = None
    in_flight: deque[MtpWork] = field(factory=deque)
    #: Numbers of messages that are not answered yet; an answer to any other is to nobody.
    waiting: set[int] = field(factory=set)
    rounds: list[Round] = field(factory=list)
    #: Refusals that its own messages met, oldest first.
    refusals: list[MtpRefused] = field(factory=list)
    #: Whether the stages hold a slot for it in the present epoch.
    is_open: bool = False

    def fire(self, event: RoundEvent) -> None:
        self.state = ROUND.follow(self.state, event)


@frozen
class _ToStage:
    stage: int
    message: MtpWork | Rollback
    rows: Sequence[bytes] = ()


@frozen
class _Think:
    """The tail makes one more guess."""

    key: Key


@frozen
class _ToPipeline:
    answer: Answer
    sender: int


_Act: TypeAlias = _ToStage | _Think | _ToPipeline


class ReferenceRoute:
    """Stages, and a pipeline over them: at most as many as the toy has layers. ``shard`` is the class of a stage."""

    def __init__(
        self,
        n_stages: int,
        shape: RollbackShape,
        *,
        language: Language | None = None,
        route_id: bytes = bytes(16),
        shard: type[ReferenceShard] = ReferenceShard,
    ) -> None:
        self.shape, self.route_id = shape, route_id
        self.language = language or Language()
        self.epoch = 0
        self.sessions: dict[int, MtpClientState] = {}
        #: Every message in the order in which it was sent.
        self.sent: list[Sent] = []
        self._queue: deque[_Act] = deque()
        self._make = shard
        self.shards: list[ReferenceShard] = []
        self.change_route(n_stages)

    # --- acts of the pipeline ---

    def change_route(self, n_stages: int) -> None:
        """A new epoch: every stage drops what it holds of older ones; transcripts stay, guesses do not."""
        self.epoch += 1
        if len(self.shards) != n_stages:
            self.shards = [self._make(index, n_stages, self.shape, self.language) for index in range(n_stages)]
        for shard in self.shards:
            shard.fence(self.epoch)
        for client in self.sessions.values():
            self._lose(client)

    def open(self) -> int:
        """A session of this pipeline; stages lease a slot at first use."""
        if len(self.sessions) >= self.shape.n_seq_max:
            raise InputError(f"all {self.shape.n_seq_max} slots are taken; close a session")
        session = max(self.sessions, default=0) + 1
        self.sessions[session] = MtpClientState(session)
        return session

    def close(self, session: int) -> None:
        client = self.sessions.pop(session)
        client.fire(RoundEvent.CLOSE)
        for shard in self.shards:
            shard.close(session)

    def prefill(
        self,
        session: int,
        tokens: Sequence[int],
        *,
        draft: int = 0,
        chunk: int | None = None,
        want: Want = Want.TOKEN,
    ) -> None:
        """Send what is not committed, and ``tokens`` behind it, in chunks back to back; ``want``: of the last one."""
        client = self.sessions[session]
        client.transcript += tokens
        client.unclaimed = None
        self._send_certain(client, draft, chunk, want)

    def send_round(self, session: int, draft: int, candidates: Sequence[int] | None = None) -> None:
        """Send the token drawn last with the guesses behind it (or with ``candidates``); ask for ``draft`` new ones.

        A session whose state is lost is prefilled anew from token 0 instead: its guesses are gone with it.
        """
        client = self.sessions[session]
        if client.unclaimed is not None:
            client.transcript.append(client.unclaimed)
            client.unclaimed = None
        certain = client.transcript[client.committed :]
        if client.state is RoundState.LOST or len(certain) != 1:
            self._send_certain(client, draft)
            return
        guesses = tuple(client.drafts if candidates is None else candidates)
        guesses = guesses[: max(0, self.shape.n_ctx - client.committed - 1)]
        self._send_work(client, (*certain, *guesses), len(guesses), Want.TOKEN, draft)

    def roll_back(self, session: int, k: int) -> None:
        """Take back ``k`` committed tokens. Sent as asked: it is the stages' to refuse."""
        client = self.sessions[session]
        at = client.committed
        if not 0 <= at - k <= len(client.transcript):
            raise InputError(f"a rollback of {k} tokens from position {at} leads nowhere")
        client.fire(RoundEvent.REJECTED)
        client.committed = at - k
        self._send_rollback(client, at, at - k, client.transcript)

    def inject(self, message: MtpWork | Rollback) -> None:
        """Send the head something of one's own making; its answer goes to nobody who waits for it."""
        self._log("pipeline", "0", message)
        self._queue.append(_ToStage(0, message))

    def evict(self, stage: int, session: int) -> None:
        """One stage drops an idle session to make room for another."""
        if self.sessions[session].state is not RoundState.READY:
            raise InputError(f"session {session} is {self.sessions[session].state.value}; only idle ones are evicted")
        self.shards[stage].evict(session)

    def cancel(self, session: int) -> None:
        """The caller gave up: the head drops work that it has not started; what is in flight drains and is taken back."""
        client = self.sessions[session]
        if client.state in (RoundState.VERIFYING, RoundState.BEHIND):
            client.fire(RoundEvent.CANCEL)
            for act in [act for act in self._queue if isinstance(act, _ToStage) and act.stage == 0]:
                work = act.message
                if isinstance(work, MtpWork) and work.key == self._key(session):
                    self._queue.remove(act)
                    self._answer(MtpRefused(work.key, work.seq, Reason.CANCELLED, work.expect.position, 0), 0)

    # --- the queue ---

    def tick(self) -> bool:
        """Do the next act; whether there was one."""
        if not self._queue:
            return False
        match self._queue.popleft():
            case _ToStage(stage, message, rows):
                self._at_stage(self.shards[stage] if stage < len(self.shards) else None, message, rows)
            case _Think(key):
                self._at_tail(key)
            case _ToPipeline(answer, sender):
                self._at_pipeline(answer, sender)
        return True

    def settle(self) -> None:
        """Do every act until nothing is in flight."""
        while self.tick():
            pass

    @property
    def acts_left(self) -> int:
        return len(self._queue)

    @property
    def on_the_way(self) -> list[tuple[int, MtpWork | Rollback]]:
        """Messages that a stage has not taken yet: (stage, message)."""
        return [(act.stage, act.message) for act in self._queue if isinstance(act, _ToStage)]

    def _at_stage(self, shard: ReferenceShard | None, message: MtpWork | Rollback, rows: Sequence[bytes]) -> None:
        if shard is None:
            return  # the stage left the route, and its links with it
        answers, onward = shard.take(message, rows)
        for answer in answers:
            self._answer(answer, shard.index)
        if onward is not None and not shard.is_tail:
            if isinstance(message, MtpWork):
                message = msgspec.structs.replace(message, payload=TOY_ROW_BYTES * len(message.tokens))
            self._log(str(shard.index), str(shard.index + 1), message)
            self._queue.append(_ToStage(shard.index + 1, message, onward))
        elif not answers:
            self._queue.append(_Think(message.key))

    def _at_tail(self, key: Key) -> None:
        tail = self.shards[-1]
        if key.epoch != self.epoch or key.session not in tail.held or tail.held[key.session].thinking is None:
            return  # what it thought about is gone
        proposal = tail.think(key.session)
        if proposal is None:
            self._queue.append(_Think(key))
        else:
            self._answer(proposal, tail.index)

    def _answer(self, answer: Answer, sender: int) -> None:
        self._log(str(sender), "pipeline", answer)
        self._queue.append(_ToPipeline(answer, sender))

    def _log(self, sender: str, receiver: str, message: Message) -> None:
        self.sent.append(Sent(sender, receiver, message))

    # --- the pipeline's side ---

    def _key(self, session: int) -> Key:
        return Key(self.route_id, self.epoch, session)

    def _lose(self, client: MtpClientState) -> None:
        client.fire(RoundEvent.LOSE)
        client.in_flight.clear()
        client.waiting.clear()
        client.drafts, client.unclaimed, client.committed, client.is_open = (), None, 0, False

    def _reopen(self, client: MtpClientState) -> None:
        """Whatever a stage still holds is dropped; all lease a slot."""
        if client.state is RoundState.LOST:
            client.fire(RoundEvent.RESET)
        if not client.is_open:
            for shard in self.shards:
                shard.close(client.id)
                shard.open(client.id)
            client.is_open, client.committed = True, 0

    def _send_certain(
        self, client: MtpClientState, draft: int, chunk: int | None = None, last: Want = Want.TOKEN
    ) -> None:
        self._reopen(client)
        begin, end = client.committed + sum(len(work.tokens) for work in client.in_flight), len(client.transcript)
        size = chunk or self.shape.n_batch
        while begin < end:
            until = min(begin + size, end)
            want = last if until == end else Want.NOTHING
            self._send_work(client, client.transcript[begin:until], 0, want, draft if want else 0)
            begin = until

    def _send_work(
        self, client: MtpClientState, tokens: Sequence[int], candidates: int, want: Want, draft: int
    ) -> None:
        self._reopen(client)
        begin = client.committed + sum(len(work.tokens) for work in client.in_flight)
        client.seq += 1
        expect = expectation(client.transcript, begin)
        work = MtpWork(
            self._key(client.id), client.seq, expect, tuple(tokens), want, candidates, draft, sampling=None, payload=0
        )
        client.fire(RoundEvent.WORK)
        client.in_flight.append(work)
        client.waiting.add(client.seq)
        self._log("pipeline", "0", work)
        self._queue.append(_ToStage(0, work))

    def _send_rollback(self, client: MtpClientState, at: int, to: int, tokens: Sequence[int]) -> None:
        client.seq += 1
        rollback = Rollback(self._key(client.id), client.seq, expectation(tokens, at), expectation(tokens, to))
        client.waiting.add(client.seq)
        self._log("pipeline", "0", rollback)
        self._queue.append(_ToStage(0, rollback))

    def _at_pipeline(self, answer: Answer, sender: int) -> None:
        client = self.sessions.get(answer.key.session)
        if client is None or answer.key.epoch != self.epoch or answer.seq not in client.waiting:
            return  # an answer to what is over
        client.waiting.remove(answer.seq)
        match answer:
            case RolledBack():
                client.committed = answer.position
                client.fire(RoundEvent.ROLLED_BACK)
            case MtpRefused(reason=Reason.CANCELLED):
                self._skipped(client, answer)
            case MtpRefused():
                self._on_refusal(client, answer, sender)
            case Proposal():
                self._on_proposal(client, answer)
            case _:
                client.in_flight.popleft()
                client.committed = answer.position
                if not client.in_flight:  # what came behind it was skipped
                    client.fire(RoundEvent.KEPT)

    def _skipped(self, client: MtpClientState, answer: MtpRefused) -> None:
        client.in_flight = deque(work for work in client.in_flight if work.seq != answer.seq)
        client.drafts = ()
        if not client.in_flight:
            client.fire(RoundEvent.SKIPPED)

    def _on_refusal(self, client: MtpClientState, answer: MtpRefused, sender: int) -> None:
        """A rollback that the head refuses has changed nothing anywhere; whatever else is refused costs the session."""
        client.refusals.append(answer)
        if client.state is RoundState.ROLLING and sender == 0:
            client.committed = answer.position
            client.fire(RoundEvent.ROLLED_BACK)
        else:
            self._lose(client)

    def _on_proposal(self, client: MtpClientState, answer: Proposal) -> None:
        work = client.in_flight.popleft()
        begin, end = work.expect.position, work.expect.position + len(work.tokens)
        certain = len(work.tokens) - work.candidates
        is_cancelled = client.state in (RoundState.DRAINING, RoundState.DRAINING_BEHIND)
        accepted = 0 if is_cancelled else answer.accepted
        kept = begin + certain + accepted
        ran = [*client.transcript[:begin], *work.tokens]
        client.committed = kept
        client.drafts = () if is_cancelled else answer.drafts
        if is_cancelled:
            client.unclaimed = work.tokens[certain] if answer.accepted else answer.token
        else:
            new = (*work.tokens[certain : certain + accepted], answer.token)
            client.transcript += new
            client.rounds.append(Round(work.tokens[certain:], accepted, new))
        if kept < end:
            client.fire(RoundEvent.REJECTED)
            self._send_rollback(client, end, kept, ran)
        else:
            client.fire(RoundEvent.KEPT)

    # --- read by tests and reports ---

    def positions(self, session: int) -> tuple[int, ...]:
        """Tokens committed on every stage, head first; 0 where a stage holds nothing."""
        return tuple(0 if view is None else view.position for view in self.views(session))

    def views(self, session: int) -> tuple[StageView | None, ...]:
        """Where the session stands on every stage."""
        held = (shard.held.get(session) for shard in self.shards)
        return tuple(None if one is None else one.trunk.view(one.drafter) for one in held)

    def live(self, session: int) -> tuple[bytes, ...]:
        """Digests of everything that what comes next is computed from: a stage each, and the tail's MTP block."""
        found = [shard.held[session] for shard in self.shards if session in shard.held]
        if len(found) != len(self.shards):
            raise SessionLost(f"session {session} is not held by every stage")
        trunks = [one.trunk.live() for one in found]
        return (*trunks, *(one.drafter.live() for one in found if one.drafter is not None))
