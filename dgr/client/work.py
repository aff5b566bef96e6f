"""The work of one session: what was sent of its transcript, what is in flight, and what came through every stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from attrs import frozen

from dgr.client.events import OVERRUN, Event
from dgr.client.pace import ChunkPace
from dgr.client.replies import ControlRequest, PendingReply, work_error
from dgr.client.route_client import SessionLimits, Timeouts
from dgr.client.tracing import RequestTrace
from dgr.core.prefix import PrefixDigest
from dgr.core.values import DecodeRun, Expectation, Key, LogitsWanted, SamplingParams
from dgr.errors import DgrError, SessionLost
from dgr.protocol.runs import next_in_run
from dgr.wire import frames
from dgr.wire.framing import Received

__all__ = ["Chunk", "KeptTokens", "SessionRoute", "SessionWork", "WorkRequest", "can_go_on", "held_of", "loss_of"]

#: Replies that say that work was done.
_RESULTS = (frames.Advanced, frames.Token, frames.Logits)


class SessionRoute(Protocol):
    """What a session needs of its route; :class:`~dgr.client.route_client.RouteClient` is one."""

    #: Grows with every fence: what a stage holds of an older epoch is gone.
    epoch: int
    timeouts: Timeouts

    @property
    def limits(self) -> SessionLimits: ...

    @property
    def pace(self) -> ChunkPace: ...

    def key(self, session: int) -> Key: ...

    async def wait_live(self) -> None: ...

    def send_work(self, frame: frames.Tokens) -> PendingReply: ...

    def await_work(self, frame: frames.Tokens) -> PendingReply: ...

    def cancel_work(self, session: int, last_seq: int) -> None: ...

    def fail_work(self, session: int, seq: int, error: DgrError) -> None: ...

    async def ask_all(self, frame: ControlRequest) -> list[tuple[str, frames.Frame]]: ...

    def emit(self, event: Event) -> None: ...


@frozen
class WorkRequest:
    """What a run to the end of the transcript shall bring back: nothing, a token, or rows of logits."""

    #: Draw the token after the last one.
    sampling: SamplingParams | None = None
    #: Take rows of logits from position ``rows_from`` on: (position of the first row, little-endian float32).
    rows: Callable[[int, memoryview], None] | None = None
    rows_from: int = 0
    #: Leave to decode on after that token.
    run: DecodeRun | None = None

    @property
    def wants_output(self) -> bool:
        return self.sampling is not None or self.rows is not None

    def chunk(self, begin: int, end: int, size: int) -> tuple[int, LogitsWanted]:
        """Where the chunk that begins at ``begin`` ends, of at most ``size`` tokens; and the logits that are wanted of it."""
        until = min(begin + size, end)
        if self.rows is not None and begin < self.rows_from:
            return min(until, self.rows_from), LogitsWanted.NONE
        if self.rows is not None:
            return until, LogitsWanted.ALL
        return until, LogitsWanted.LAST if self.sampling and until == end else LogitsWanted.NONE


@frozen
class KeptTokens:
    """Tokens that were drawn for a caller who had gone, and what they were drawn with."""

    sampling: SamplingParams
    #: One position after the other.
    tokens: tuple[frames.Token, ...]

    def ids(self, begin: int) -> list[int]:
        """Those from a position on."""
        return [token.token for token in self.tokens if token.position >= begin]

    def at(self, position: int) -> frames.Token | None:
        """The token of a position, if it is among them."""
        return next((token for token in self.tokens if token.position == position), None)


@frozen
class Chunk:
    """A work frame in flight."""

    seq: int
    tokens: int
    #: Tokens committed once it is through.
    end: int
    sampling: SamplingParams | None
    reply: PendingReply


class SessionWork:
    """Sends a session's work frames and takes the replies, in order."""

    def __init__(self, route: SessionRoute, session: int) -> None:
        self._route = route
        self._session = session
        self._sent = PrefixDigest()
        self._committed = 0
        self._chunks: deque[Chunk] = deque()
        self._seq = 0
        #: Tokens sent from here over the session's life, those of re-prefills included.
        self.sent_in_all = 0
        #: The request that it is done for, if that is traced.
        self.trace: RequestTrace | None = None

    @property
    def committed(self) -> int:
        """Tokens that every stage has committed, as far as replies have come."""
        committed = self._committed
        for chunk in self._chunks:
            reply = chunk.reply.value
            if not isinstance(reply, Received) or not isinstance(reply.frame, _RESULTS):
                break
            committed = chunk.end
        return committed

    @property
    def sent(self) -> int:
        """Tokens of the transcript that were sent."""
        return self._sent.position

    @property
    def in_flight(self) -> int:
        """Work frames sent whose reply has not come."""
        return sum(chunk.reply.value is None for chunk in self._chunks)

    @property
    def untaken(self) -> int:
        """Work frames sent whose reply was not taken, come or not; those of cancelled work are taken at the next use."""
        return len(self._chunks)

    @property
    def digest(self) -> bytes:
        """Digest of the tokens that were sent."""
        return self._sent.digest()

    def next_seq(self) -> int:
        """Return a number for a request; numbers grow over the session's life."""
        self._seq += 1
        return self._seq

    def stand_at(self, tokens: Sequence[int]) -> None:
        """These tokens and no others were sent and are committed on every stage."""
        if self._sent.position != len(tokens):
            self._sent = PrefixDigest(tokens)
        self._committed = len(tokens)

    def send(self, tokens: Sequence[int], logits: LogitsWanted, request: WorkRequest) -> None:
        """Send the next tokens of the transcript to the head. Raises :class:`WireError` when they cannot be sent."""
        draws = logits is LogitsWanted.LAST
        run = request.run if draws else None
        frame = frames.Tokens(
            key=self._route.key(self._session),
            seq=self._seq + 1,
            expect=self._stands(),
            tokens=tuple(tokens),
            logits=logits,
            sampling=request.sampling if draws else None,
            trace=None if self.trace is None else self.trace.id,
            run=run,
        )
        self._await(frame, self._route.send_work)
        self.sent_in_all += len(tokens)
        self._seq = frame.seq + (0 if run is None else run.tokens)

    def _stands(self) -> Expectation:
        return Expectation(self._sent.position, self._sent.digest())

    def _await(self, frame: frames.Tokens, send: Callable[[frames.Tokens], PendingReply]) -> None:
        reply = send(frame) if self.trace is None else self.trace.send(frame, send)
        self._sent.extend(frame.tokens)
        self._chunks.append(Chunk(frame.seq, len(frame.tokens), self._sent.position, frame.sampling, reply))
        if frame.run is not None:
            reply.when_set(partial(self._follow, frame, reply))

    def _follow(self, frame: frames.Tokens, reply: PendingReply) -> None:
        """What the tail gives the head in a decode run is in flight as if it had been sent from here."""
        value = reply.value
        if isinstance(value, Received) and isinstance(value.frame, frames.Token) and value.frame.goes_on:
            following = next_in_run(frame, value.frame.token, self._stands(), self._route.limits.n_ctx)
            if following is not None:  # as the route has found
                self._await(following, self._route.await_work)

    def awaits(self, position: int, sampling: SamplingParams | None) -> bool:
        """Whether the oldest work in flight draws the token of a position, in this way."""
        chunk = self._chunks[0]
        return chunk.end == position and chunk.sampling is not None and chunk.sampling == sampling

    async def next_reply(self, *, cancelled: bool = False) -> tuple[Chunk, Received]:
        """Take the reply to the oldest work in flight. Cancelled work may not have been run; its replies say so.

        A result is one that the work can have had: the route has looked at it (:mod:`dgr.client.claims`). Raises what a
        refusal means (see :func:`dgr.client.replies.work_error`), :class:`SessionLost` when the wait was ended meanwhile,
        :class:`DeadlineExceeded`.
        """
        chunk = self._chunks[0]
        what = f"{'cancelled ' if cancelled else ''}work frame {chunk.seq} of session {self._session}"
        received = await chunk.reply.wait(self._route.timeouts.reply, what)
        if not self._chunks or self._chunks[0] is not chunk:
            # It came, and before this task ran the session was lost or closed: the reply counts no more.
            raise SessionLost("the session was lost or closed")
        self._chunks.popleft()
        frame = received.frame
        if isinstance(frame, _RESULTS):
            self._committed = chunk.end
        elif not (cancelled and isinstance(frame, frames.WorkSkipped)):
            raise work_error(frame)
        return chunk, received

    def cancel(self) -> None:
        """Tell the head to start nothing of what is in flight. Raises :class:`WireError` when it cannot be told."""
        self._route.cancel_work(self._session, self._seq)

    def forget(self, error: DgrError) -> None:
        """No stage holds anything: whoever waits for a reply is told the error."""
        chunks, self._chunks = self._chunks, deque()
        self._sent = PrefixDigest()
        self._committed = 0
        for chunk in chunks:
            self._route.fail_work(self._session, chunk.seq, error)


def held_of(transcript: list[int], kept: KeptTokens | None, count: int) -> list[int]:
    """The first ``count`` tokens of a transcript and of those that are kept for its end."""
    return [*transcript, *([] if kept is None else kept.ids(len(transcript)))][:count]


def can_go_on(transcript: list[int], held: list[int], kept: KeptTokens | None) -> bool:
    """Whether stages that hold ``held`` can go on with a transcript: to its end, or with a token of it that is kept."""
    if len(transcript) >= len(held):
        return transcript[: len(held)] == held
    return kept is not None and kept.at(len(transcript)) is not None and held[: len(transcript)] == transcript


def loss_of(transcript: list[int], before: list[int], held: list[int]) -> str:
    """Why stages that hold ``held`` cannot go on with a transcript that was ``before``."""
    return OVERRUN if len(held) > len(before) and transcript[: len(before)] == before else "diverged"
