"""The session actor: one conversation's state on one shard, for one epoch.

It holds a sequence slot, knows the tokens committed there (P and the prefix digest), and takes work frames one after
another. A frame that does not fit exactly what it holds is answered with a miss and changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterable

import trio
from attrs import frozen

from dgr.core.prefix import PrefixDigest
from dgr.core.state_machine import StateMachine
from dgr.core.trace import WorkRecord
from dgr.core.values import Expectation, Key, LogitsWanted, StageIdentity, StateSummary
from dgr.engine.base import Work
from dgr.errors import DgrError, EngineError, InputError, NonFinite, WireError
from dgr.protocol.limits import INBOX
from dgr.protocol.lossless import unpacked
from dgr.protocol.runs import next_in_run
from dgr.protocol.sampling import sampling_problem
from dgr.protocol.states import SESSION, SessionEvent, SessionState
from dgr.stage.ledger import Lease
from dgr.stage.scheduler import Scheduler, StepResult
from dgr.stage.tracing import StepTimes
from dgr.wire import frames
from dgr.wire.frames import Boundary, Miss, Refusal, Tokens

__all__ = ["Origin", "SessionActor", "SessionReply", "WorkFrame", "expire_idle", "no_copy"]

#: Seconds between two looks for idle sessions, at least.
_EXPIRY_PAUSE = 0.01

WorkFrame = Tokens | Boundary


@frozen
class _Delivery:
    """A work frame that came."""

    frame: WorkFrame
    payload: memoryview | None
    #: To be called when the frame has been handled.
    consumed: Callable[[], None]
    came: float
    #: It goes on with a decode run.
    from_tail: bool


#: What a session tells the pipeline that owns it.
SessionReply = (
    frames.Opened
    | frames.Advanced
    | frames.Token
    | frames.Logits
    | frames.CacheMiss
    | frames.Refused
    | frames.WorkSkipped
)

#: How a reply, with its payload if it has one, gets to the pipeline.
Reply = Callable[[SessionReply, memoryview | bytes | None], Awaitable[None]]

#: How a boundary gets to the next stage. Raises :class:`WireError` when it cannot.
Forward = Callable[[Boundary, memoryview | bytes], Awaitable[None]]

#: How the next work of a decode run gets from the tail to the head; False when it cannot.
PassOn = Callable[[Tokens], bool]


@frozen
class Origin:
    """What a forked session begins as: what another one of its route session holds."""

    source: SessionActor
    expect: Expectation


def no_copy(
    key: Key, seq: int, problem: Miss | str, source: SessionActor | None, code: Refusal = Refusal.PROTOCOL
) -> frames.CacheMiss | frames.Refused:
    """What a fork is answered with that gets no copy."""
    if isinstance(problem, str):
        return frames.Refused(key, seq, code, problem[:4096])
    return frames.CacheMiss(key, seq, problem, 0 if source is None else source.position)


class SessionActor:
    """One (route session, epoch, session) on one shard. The supervisor alone makes and ends it."""

    def __init__(
        self,
        key: Key,
        lease: Lease,
        first_seq: int,
        *,
        scheduler: Scheduler,
        description: StageIdentity,
        reply: Reply,
        forward: Forward,
        pass_on: PassOn,
        ring: int,
        on_end: Callable[[SessionActor], None],
        note: Callable[[WorkRecord], None],
        origin: Origin | None = None,
    ) -> None:
        self.key = key
        self.lease = lease
        #: Set when the slot is cleared and the lease returned.
        self.ended = trio.Event()
        #: Why the session ended, for later frames; None when its pipeline closed it.
        self.end_reason: Miss | None = None
        self.last_active = trio.current_time()
        #: On a tail, what the head was given in a decode run and has not sent on yet: its sequence number.
        self.passed_on: int | None = None
        #: The last work that was committed: what comes from the tail must be what follows it.
        self._done: WorkFrame | None = None
        #: Whether rows of logits were wanted of it: what came before was a prefill.
        self.answered = False
        self._first_seq = first_seq
        self._cancelled_through = 0
        self._scheduler = scheduler
        self._description = description
        self._reply = reply
        self._forward = forward
        self._pass_on = pass_on
        self._ring = ring
        self._on_end = on_end
        #: Takes what was noted of traced work.
        self._note = note
        self._machine = StateMachine(SESSION)
        self._scope = trio.CancelScope()
        self._is_ending = False
        self._send, self._receive = trio.open_memory_channel[_Delivery](INBOX)
        #: Requests taken and not dealt with yet: in the inbox, on their way out of it, or being handled; a fork is one.
        self._undone = 0 if origin is None else 1
        self._origin = origin
        self._prefix = PrefixDigest()
        # Only the tail draws tokens, and penalties look at the whole transcript.
        self._history = array("i") if description.is_tail else None

    @property
    def state(self) -> SessionState:
        return self._machine.state

    @property
    def position(self) -> int:
        """Tokens committed (P)."""
        return self._prefix.position

    @property
    def digest(self) -> bytes:
        return self._prefix.digest()

    @property
    def is_idle(self) -> bool:
        """Whether the session could make room: no step under way, no work waiting, no answer on its way out."""
        return not self._undone and not self.is_ending

    @property
    def is_ending(self) -> bool:
        """Whether it takes no more work: :meth:`end` was called, or its supervisor leaves."""
        return self._is_ending

    # --- the interface of the supervisor ---

    def deliver(
        self, frame: WorkFrame, payload: memoryview | None, consumed: Callable[[], None], *, from_tail: bool = False
    ) -> bool:
        """Queue work; False when the inbox is full. ``consumed`` is called when the frame has been handled."""
        now = trio.current_time()
        try:
            self._send.send_nowait(_Delivery(frame, payload, consumed, now, from_tail))
        except trio.WouldBlock:
            return False
        self._undone += 1
        self.last_active = now
        return True

    def cancel(self, last_seq: int) -> None:
        """Do not start queued work up to ``last_seq``."""
        self._cancelled_through = max(self._cancelled_through, last_seq)

    def end(self, end_reason: Miss | None) -> None:
        """Begin the end; :attr:`ended` tells when it is complete. Ending twice is harmless."""
        if self._is_ending:
            return
        self._is_ending = True
        self.end_reason = end_reason
        self._scope.cancel()

    async def state_summary(self) -> StateSummary:
        """The native state summary of the slot."""
        return await self._scheduler.state_summary(self.lease.slot)

    def copy_problem(self, expect: Expectation) -> Miss | str | None:
        """Why no copy of what is expected can be taken at this moment: it is not held here, or not at rest."""
        if self.is_ending:
            return Miss.UNKNOWN if self.end_reason is None else self.end_reason
        if self.state is SessionState.POISONED:
            return Miss.POISONED
        if self.state is not SessionState.IDLE or self._receive.statistics().current_buffer_used:
            return f"session {self.key.session} is at work: copy it when its answers have come"
        return self._differs(expect)

    # --- its own life ---

    async def run(self) -> None:
        """Serve work until ended; the slot is cleared and the lease returned whatever happens."""
        try:
            with self._scope:
                if self._origin is None or await self._begin_as(self._origin):
                    await self._serve()
        finally:
            self._is_ending = True
            self._machine.fire(SessionEvent.END)
            try:
                with trio.CancelScope(shield=True):
                    await self._scheduler.clear(self.lease.slot)  # waits for a step under way
                self._machine.fire(SessionEvent.CLEARED)
                self._on_end(self)
            finally:
                # A slot that could not be cleared stays leased for good: what is in it must meet no other session.
                self._drop_queued()
                self.ended.set()

    async def _begin_as(self, origin: Origin) -> bool:
        """Take a copy of what the source holds, and tell the pipeline; False when none is to be had."""
        source, position = origin.source, origin.expect.position
        if (problem := source.copy_problem(origin.expect)) is not None:
            return await self._without_copy(problem, source)
        # Nothing waits between that look at the source and the place in line for the engine: if the source is cleared from
        # now on, then after the copy.
        self._prefix = source._prefix.copy()
        self._history = None if source._history is None else source._history[:]
        try:
            copied = await self._scheduler.fork(source.lease.slot, self.lease.slot, position)
        except DgrError as error:
            return await self._without_copy(str(error), source, Refusal.ENGINE)
        if not copied:
            return await self._without_copy(Miss.POSITION, source)
        self._undone -= 1
        self.last_active = trio.current_time()
        await self._reply(frames.Opened(self.key, self._first_seq, self.lease.total), None)
        return True

    async def _without_copy(self, problem: Miss | str, source: SessionActor, code: Refusal = Refusal.PROTOCOL) -> bool:
        self._prefix = PrefixDigest()
        await self._reply(no_copy(self.key, self._first_seq, problem, source, code), None)
        return False

    async def _serve(self) -> None:
        while True:
            delivery = await self._receive.receive()
            try:
                if delivery.frame.trace is None:
                    await self._handle(delivery)
                else:
                    await self._handle_traced(delivery)
            finally:
                self._undone -= 1
                delivery.consumed()
            del delivery  # or its payload would live until the next one comes
            self.last_active = trio.current_time()

    def _drop_queued(self) -> None:
        """Frames that nobody will handle any more give their credit back.

        Nobody waits for an answer either: a session with frames left was closed or fenced, by the one who sent them.
        """
        while True:
            try:
                self._receive.receive_nowait().consumed()
            except trio.WouldBlock:
                return

    async def _handle_traced(self, delivery: _Delivery) -> None:
        times = StepTimes(delivery.came, trio.current_time())
        try:
            await self._handle(delivery, times)
        finally:
            if times.batch_items:
                self._note(times.record(delivery.frame))

    async def _handle(self, delivery: _Delivery, times: StepTimes | None = None) -> None:
        frame = delivery.frame
        if self.passed_on is not None and frame.seq >= self.passed_on:
            self.passed_on = None
        if frame.seq < self._first_seq:
            return  # a late frame of an earlier life; nobody waits for its answer
        if frame.seq <= self._cancelled_through:
            await self._reply(frames.WorkSkipped(self.key, frame.seq, self.position), None)
        elif (reason := self._missing(frame)) is not None:
            await self._reply(frames.CacheMiss(self.key, frame.seq, reason, self.position), None)
        elif delivery.from_tail and not self._was_granted(frame):
            await self._refuse(frame, Refusal.PROTOCOL, "the tail goes on further than it was granted, or otherwise")
        elif (problem := self._unacceptable(frame)) is not None:
            await self._refuse(frame, Refusal.INPUT, problem)
        else:
            await self._step(frame, delivery.payload, times)

    def _was_granted(self, frame: WorkFrame) -> bool:
        """Whether work that the tail sends is what follows the last one in its decode run."""
        if self._done is None or len(frame.tokens) != 1:
            return False
        return frame == next_in_run(self._done, frame.tokens[0], frame.expect, self._description.context.n_ctx)

    def _missing(self, frame: WorkFrame) -> Miss | None:
        """Why the session does not hold what the frame expects."""
        return Miss.POISONED if self.state is SessionState.POISONED else self._differs(frame.expect)

    def _differs(self, expect: Expectation) -> Miss | None:
        """What of an expectation the session does not hold."""
        if expect.position != self.position:
            return Miss.POSITION
        return None if expect.digest == self.digest else Miss.DIGEST

    def _unacceptable(self, frame: WorkFrame) -> str | None:
        """Why the frame breaks a limit of the stage."""
        about = self._description
        largest = max(frame.tokens)
        if largest >= about.n_vocab:
            return f"token id {largest} is outside the vocabulary of {about.n_vocab}"
        end = self.position + len(frame.tokens)
        if end > about.context.n_ctx:
            return f"{end} tokens do not fit n_ctx {about.context.n_ctx}"
        if frame.sampling is not None and frame.logits != LogitsWanted.LAST:
            return "a token is drawn from the last row: sampling needs logits = 1 (last)"
        return None if frame.sampling is None else sampling_problem(frame.sampling, about.n_vocab)

    async def _step(self, frame: WorkFrame, payload: memoryview | None, times: StepTimes | None) -> None:
        about = self._description
        tail = about.is_tail
        if payload is not None:
            try:
                payload = await unpacked(payload, len(frame.tokens) * about.context.wire.row_bytes(about.width_in))
            except WireError as error:
                await self._refuse(frame, Refusal.INPUT, str(error))
                return
        work = Work(
            slot=self.lease.slot,
            position=self.position,
            tokens=frame.tokens,
            residual=payload,
            logits=LogitsWanted(frame.logits) if tail else LogitsWanted.NONE,
        )
        if self._history is not None:
            self._history.extend(frame.tokens)
        self._machine.fire(SessionEvent.WORK)
        try:
            result = await self._scheduler.step(
                work, frame.sampling if tail else None, self._history or (), ring=self._ring, times=times
            )
        except InputError as error:
            self._machine.fire(SessionEvent.REFUSED)
            if self._history is not None:
                del self._history[-len(frame.tokens) :]
            await self._refuse(frame, Refusal.INPUT, str(error))
        except EngineError as error:
            code = Refusal.NON_FINITE if isinstance(error, NonFinite) else Refusal.ENGINE
            await self._poison(frame, code, str(error))
        else:
            self._machine.fire(SessionEvent.COMMITTED)
            self._prefix.extend(frame.tokens)
            self._done = frame
            self.answered = self.answered or frame.logits != LogitsWanted.NONE
            if times is not None:
                times.sent = trio.current_time()
            await self._answer(frame, result)

    async def _answer(self, frame: WorkFrame, result: StepResult) -> None:
        output, key, seq = result.output, self.key, frame.seq
        if output.residual is not None:
            size = memoryview(output.residual).nbytes
            boundary = Boundary(
                key, seq, frame.expect, frame.tokens, frame.logits, frame.sampling, size, frame.trace, frame.run
            )
            try:
                await self._forward(boundary, output.residual)
            except WireError as error:
                await self._poison(frame, Refusal.SUCCESSOR, str(error))
        elif result.token is not None:
            goes_on = self._go_on(frame, result.token)
            await self._reply(frames.Token(key, seq, self.position, result.token, result.top, goes_on), None)
        elif output.logits is not None:
            size = memoryview(output.logits).nbytes
            n_rows = size // (4 * self._description.n_vocab)
            await self._reply(frames.Logits(key, seq, self.position, n_rows, size), output.logits)
        else:
            await self._reply(frames.Advanced(key, seq, self.position), None)

    def _go_on(self, frame: WorkFrame, token: int) -> bool:
        """Give the head the next work of a decode run, if there is any and it can be had."""
        if frame.run is None or frame.seq <= self._cancelled_through:
            return False
        expect = Expectation(self.position, self.digest)
        following = next_in_run(frame, token, expect, self._description.context.n_ctx)
        if following is None or not self._pass_on(following):
            return False
        self.passed_on = following.seq
        return True

    async def _poison(self, frame: WorkFrame, code: Refusal, message: str) -> None:
        """The session is lost: clear its slot at once, so that nothing of it lives on."""
        self._machine.fire(SessionEvent.FAILED)
        self._done = self.passed_on = None
        self._prefix = PrefixDigest()
        if self._history is not None:
            self._history = array("i")
        await self._scheduler.clear(self.lease.slot)
        await self._refuse(frame, code, message)

    async def _refuse(self, frame: WorkFrame, code: Refusal, message: str) -> None:
        await self._reply(frames.Refused(self.key, frame.seq, code, message[:4096]), None)


async def expire_idle(actors: Callable[[], Iterable[SessionActor]], idle: float) -> None:
    """End every session that has been idle for ``idle`` seconds; forever. All in one look, so that work costs no timer."""
    while True:
        now = trio.current_time()
        due = now + idle
        for actor in actors():
            if actor.is_idle and actor.last_active + idle <= now:
                actor.end(Miss.EXPIRED)
            elif actor.is_idle:
                due = min(due, actor.last_active + idle)
        await trio.sleep_until(max(due, now + _EXPIRY_PAUSE))
