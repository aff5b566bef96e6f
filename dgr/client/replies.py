"""Replies that a client waits for, and what a refusal means to its caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeGuard

import trio
from attrs import field, frozen

from dgr.core.arguments import number
from dgr.errors import (
    CacheMissed,
    DeadlineExceeded,
    DgrError,
    InputError,
    NonFinite,
    Overloaded,
    PeerRefused,
    SessionLost,
    StageDraining,
    WireError,
)
from dgr.wire import frames
from dgr.wire.framing import Received

__all__ = [
    "ControlReply",
    "ControlRequest",
    "FenceReply",
    "PendingReplies",
    "PendingReply",
    "ReplyKey",
    "SessionReply",
    "StageQuery",
    "StageReply",
    "Timeouts",
    "WorkReply",
    "concerns_the_route",
    "control_error",
    "is_draining",
    "work_error",
]


@frozen
class Timeouts:
    """Every wait of a pipeline, seconds (``math.inf``: for ever). Raises :class:`InputError` for anything else."""

    #: For the reply to one chunk, from the moment it is the oldest in flight.
    reply: float = field(default=120.0, validator=number(0))
    #: For Opened, Closed, StateReport. A Close waits for the step that runs, so this is at least as long as ``reply``.
    control: float = field(default=120.0, validator=number(0))
    #: For Fenced from every stage, and for a session waiting until the route is live.
    route: float = field(default=60.0, validator=number(0))
    #: For Closed, where whoever leaves a session's block is being cancelled, at most ``control``. The stages have been told by
    #: then and drop the session when their step ends; by default that is some chunks away.
    farewell: float = field(default=5.0, validator=number(0))


@frozen
class FenceReply:
    """A stage's reply to the fence of an epoch."""

    stage: str
    epoch: int


@frozen
class ControlReply:
    """A stage's reply to a request about one session: to open it, to close it, to tell its state."""

    stage: str
    session: int
    seq: int


@frozen
class WorkReply:
    """The reply to a work frame of a session, from whichever stage: the tail's result, or a refusal on the way."""

    session: int
    seq: int


@frozen
class StageReply:
    """A stage's reply to a question about the stage itself."""

    stage: str
    seq: int


@frozen
class OccupancyReply:
    """A stage's first word on whether it is being drained."""

    stage: str


#: What a pipeline asks a stage about itself.
StageQuery: TypeAlias = frames.QueryLoad | frames.QueryTrace

#: What a pipeline asks every stage about one session.
ControlRequest: TypeAlias = frames.Open | frames.Fork | frames.Close | frames.QueryState

ReplyKey: TypeAlias = FenceReply | ControlReply | WorkReply | StageReply | OccupancyReply


#: Raises :class:`WireError` for a reply that cannot be one to this work.
WorkCheck: TypeAlias = Callable[[frames.Tokens], None]

#: A reply about a session, or a refused fence.
SessionReply: TypeAlias = (
    frames.Opened
    | frames.Closed
    | frames.Advanced
    | frames.Token
    | frames.Logits
    | frames.CacheMiss
    | frames.StaleEpoch
    | frames.Refused
    | frames.WorkSkipped
    | frames.StateReport
)


class PendingReply:
    """A place where one reply will be put; the first one counts."""

    __slots__ = ("_event", "_on_set", "request", "value")

    def __init__(self, request: frames.Frame | None = None) -> None:
        self._event = trio.Event()
        #: What it replies to, where that decides what it may say.
        self.request = request
        #: What was put here; None as long as nothing was.
        self.value: Received | DgrError | None = None
        self._on_set: list[Callable[[], None]] = []

    def set(self, value: Received | DgrError) -> None:
        if self.value is None:
            self.value = value
            self._event.set()
            for call in self._on_set:
                call()

    def when_set(self, call: Callable[[], None]) -> None:
        """Have something done as soon as a reply is put here: before anything else that comes on its link is looked at."""
        if self.value is None:
            self._on_set.append(call)
        else:
            call()

    async def wait(self, seconds: float, what: str) -> Received:
        """Return the reply. Raises the error that was put here, or :class:`DeadlineExceeded` after ``seconds``."""
        with trio.move_on_after(seconds):
            await self._event.wait()
        match self.value:
            case None:
                raise DeadlineExceeded(f"no reply to {what} within {seconds:g} s")
            case DgrError() as error:
                raise error
            case received:
                return received


class PendingReplies:
    """Every reply that one client waits for, by what it replies to."""

    def __init__(self) -> None:
        self._pending: dict[ReplyKey, PendingReply] = {}
        #: Session -> numbers of the work that its decode run may come to.
        self._granted: dict[int, range] = {}
        #: What other stages said of such work, over their own links, before the tail's token came that it follows.
        self._early: dict[WorkReply, tuple[Received, WorkCheck]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def register(self, key: ReplyKey, request: frames.Frame | None = None) -> PendingReply:
        """Announce a wait; ``request`` is what will be replied to."""
        reply = self._pending[key] = PendingReply(request)
        return reply

    def resolve(self, key: ReplyKey, value: Received | DgrError) -> bool:
        """End a wait; False when nobody waits for that reply."""
        reply = self._pending.pop(key, None)
        if reply is not None:
            reply.set(value)
        return reply is not None

    def discard(self, key: ReplyKey) -> None:
        """Nobody waits for that reply any more."""
        self._pending.pop(key, None)

    def fail(self, error: DgrError, *, stage: str | None = None) -> None:
        """End every wait with an error; with ``stage``, those for a reply of that stage alone."""
        for key in list(self._pending):
            if stage is None or (not isinstance(key, WorkReply) and key.stage == stage):
                self.resolve(key, error)

    # --- work ---

    def sent_work(self, work: frames.Tokens) -> PendingReply:
        """Announce the wait for the reply to work that this client has sent, and what its decode run may come to."""
        session, run = work.key.session, work.run
        self._forget_run(session)
        if run is not None:
            self._granted[session] = range(work.seq + 1, work.seq + 1 + run.tokens)
        return self.register(WorkReply(session, work.seq), work)

    def passed_on(self, work: frames.Tokens) -> PendingReply:
        """The same of work that the tail has given the head."""
        key = WorkReply(work.key.session, work.seq)
        reply = self.register(key, work)
        if (early := self._early.pop(key, None)) is not None:
            self.take_work_reply(key, *early)
        return reply

    def take_work_reply(self, key: WorkReply, received: Received, check: WorkCheck) -> None:
        """End the wait for the reply to work, once ``check`` has found that it can be one."""
        pending = self._pending.get(key)
        run = self._granted.get(key.session, range(0))
        if pending is not None and isinstance(pending.request, frames.Tokens):
            check(pending.request)
            self.resolve(key, received)
            goes_on = isinstance(received.frame, frames.Token) and received.frame.goes_on
            if key.seq >= run.start - 1 and not goes_on:
                self._forget_run(key.session)
        elif pending is None and key.seq in run:
            self._early[key] = received, check

    def fail_work(self, key: WorkReply, error: DgrError) -> None:
        """Nobody cares any more for the reply to work, and for what would follow it."""
        self.resolve(key, error)
        self._forget_run(key.session)

    def _forget_run(self, session: int) -> None:
        self._granted.pop(session, None)
        for key in [key for key in self._early if key.session == session]:
            del self._early[key]


def control_error(stage: str, frame: frames.Frame) -> DgrError:
    """Return the error that a stage's refusal of a control request means."""
    match frame:
        case frames.Refused(code=frames.Refusal.OVERLOADED):
            return Overloaded(f"stage {stage}: {frame.message}")
        case frames.Refused(code=frames.Refusal.DRAINING):
            return StageDraining(f"stage {stage}: {frame.message}")
        case frames.Refused():
            return PeerRefused(f"stage {stage}: {frame.message}")
        case frames.CacheMiss():
            return CacheMissed(f"stage {stage} holds no such session ({frame.reason.name.lower()})")
        case frames.StaleEpoch():
            return SessionLost(f"stage {stage} is at epoch {frame.current}, not at the one asked for")
        case _:
            return WireError(f"stage {stage} replied with {type(frame).__name__}")


def work_error(frame: frames.Frame) -> DgrError:
    """Return the error that a refusal of a work frame means. :class:`SessionLost` alone is worth a re-prefill."""
    match frame:
        case frames.CacheMiss():
            return CacheMissed(frame.reason.name.lower())
        case frames.StaleEpoch():
            return SessionLost(f"stale epoch: a stage is at {frame.current}")
        case frames.Refused(code=frames.Refusal.NON_FINITE):
            return NonFinite(frame.message)
        case frames.Refused(code=frames.Refusal.INPUT):
            return InputError(frame.message)
        case frames.Refused():
            return SessionLost(f"{frame.code.name.lower()}: {frame.message}")
        case frames.WorkSkipped():
            return SessionLost(f"cancelled at position {frame.position}")
        case _:
            return WireError(f"a work frame was replied to with {type(frame).__name__}")


def is_draining(frame: frames.Frame) -> bool:
    return isinstance(frame, frames.Refused) and frame.code is frames.Refusal.DRAINING


def concerns_the_route(frame: SessionReply) -> TypeGuard[frames.Refused]:
    """Whether a stage says that it lost the next one, or all that it held of the route session."""
    return isinstance(frame, frames.Refused) and (frame.code is frames.Refusal.SUCCESSOR or not frame.key.session)
