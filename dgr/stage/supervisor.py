"""The epoch supervisor: one per shard and route session.

It alone makes and ends session actors. A fence raises the epoch at once, so that every older frame is stale from then
on; ends every older actor; waits until their slots are cleared and their bytes are back; reaches the new successor and
waits until that one is ready; and only then answers Fenced and admits work. Readiness thus flows from the tail to the
head: whoever sees the head's Fenced knows that every stage behind it admits the epoch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Protocol

import trio

from dgr.core.state_machine import StateMachine
from dgr.core.values import Key, StageIdentity
from dgr.engine.base import FORK
from dgr.errors import DgrError, WireError
from dgr.protocol.lossless import push
from dgr.protocol.states import EPOCH, EpochEvent, EpochState
from dgr.stage.draining import DRAINING, Draining
from dgr.stage.ledger import Lease, Ledger
from dgr.stage.ring import NextStage, WayToHead
from dgr.stage.scheduler import Scheduler
from dgr.stage.session import Origin, SessionActor, SessionReply, WorkFrame, no_copy
from dgr.stage.tracing import TraceBuffer
from dgr.wire import frames
from dgr.wire.frames import Boundary, Miss, Refusal
from dgr.wire.links import Link
from dgr.wire.nurseries import open_nursery

__all__ = ["EpochSupervisor", "StageServices"]

#: Ended sessions whose fate is remembered, to tell a late frame why.
_END_REASONS = 1024
#: Times that QueryState looks at a session that works on meanwhile.
_PROBES = 8
#: Control requests of one route session that may be under way at once.
_REQUESTS = 1024

ControlRequest = frames.Fence | frames.Open | frames.Fork | frames.Close | frames.QueryState


class StageServices(Protocol):
    """What the shard offers its supervisors."""

    scheduler: Scheduler
    ledger: Ledger
    description: StageIdentity
    traces: TraceBuffer
    #: Seconds a fence waits for its successor.
    fence_timeout: float
    draining: Draining

    def free_slot(self, owner: Hashable) -> Lease | None:
        """A slot that is free, unless others wait for one."""
        ...

    async def lease(
        self, owner: Hashable, wanted: Callable[[], bool], spared: SessionActor | None = None
    ) -> Lease | None:
        """A slot, evicting the oldest idle session of any route but ``spared`` if none is free, as long as it is wanted."""
        ...

    async def dial(self, control: Link, own: str, successor: str) -> Link:
        """The boundary link to a next stage, on behalf of whoever is behind ``control``.

        ``own`` is the address by which the route knows this stage.
        """
        ...

    def announce(self, supervisor: EpochSupervisor) -> None:
        """Tell a stage that waits for it that the epoch is admitted."""
        ...


class EpochSupervisor:
    """The sessions of one route session on one shard."""

    def __init__(self, route: bytes, control: Link, services: StageServices) -> None:
        self.route = route
        self.control = control
        self.epoch = 0
        #: Address of the stage before this one; empty on a head. Boundaries are taken from no one else.
        self.predecessor = ""
        #: On a head the address of the tail: work of decode runs is taken from no one else.
        self.tail = ""
        self._stages = 1
        self.sessions: dict[int, SessionActor] = {}
        #: Set when it takes requests.
        self.started = trio.Event()
        #: Set when nothing of the route session is left here.
        self.ended = trio.Event()
        self._services = services
        self._machine = StateMachine(EPOCH)
        self._next: NextStage | None = None
        self._way_to_head: WayToHead | None = None
        self._end_reasons: OrderedDict[int, Miss] = OrderedDict()
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._requests = 0
        #: Session -> sequence number of the Open that waits for a slot.
        self._opening: dict[int, int] = {}

    @property
    def state(self) -> EpochState:
        return self._machine.state

    def pushes_to(self, link: Link) -> bool:
        """Whether the present epoch sends work over a link."""
        return any(way is not None and way.link is link for way in (self._next, self._way_to_head))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the session actors until :meth:`leave`; nothing of them outlives this call."""
        with self._scope:
            async with open_nursery() as nursery:
                self._nursery = nursery
                self.started.set()
                task_status.started()
                await trio.sleep_forever()

    def leave(self) -> None:
        """The pipeline is gone: end every session."""
        if self.state is not EpochState.GONE:
            self._machine.fire(EpochEvent.LEAVE)
            self._scope.cancel()

    def fail(self, problem: str, epoch: int | None = None) -> None:
        """Tell the pipeline that nothing of the route session is left here; it fences anew. ``epoch``: what it fences now."""
        key = Key(self.route, self.epoch if epoch is None else epoch, 0)
        self._answer(frames.Refused(key, 0, Refusal.ENGINE, problem[:4096]))

    # --- requests, from the control link's reader; none of these waits ---
    #
    # Requests take effect in the order in which they came: what one changes at once is changed here, in the reader.
    # Only its waits (for a slot, for slots to be cleared, for the next stage) are a task's; tasks start in any order.

    def request(self, frame: ControlRequest) -> None:
        """Start a control request. It runs beside the sessions' work, never behind it."""
        if self._requests >= _REQUESTS:
            raise WireError(
                f"{_REQUESTS} control requests of one route session are under way; a pipeline waits for their answers first"
            )
        if self.state is EpochState.GONE:
            return
        match frame:
            case frames.Fence():
                if (old := self._begin_fence(frame)) is not None:
                    self._start(self._fence, frame, old, self._next)
            case frames.Open():
                self._begin_open(frame, None)
            case frames.Fork():
                if (origin := self._origin_of(frame)) is not None:
                    self._begin_open(frame, origin)
            case frames.Close():
                self._start(self._close, frame, self._begin_close(frame))
            case frames.QueryState():
                self._start(self._probe, frame)

    def _start(self, handler: Callable[..., Awaitable[None]], *args: object) -> None:
        async def run() -> None:
            try:
                await handler(*args)
            finally:
                self._requests -= 1

        assert self._nursery is not None
        self._requests += 1
        self._nursery.start_soon(run)

    def work(
        self, frame: WorkFrame, payload: memoryview | None, consumed: Callable[[], None], *, from_tail: bool = False
    ) -> None:
        """Hand a work frame to its session, or answer why not. ``consumed`` is called once the frame is done with.

        ``from_tail``: it goes on with a decode run, and must be what was granted.
        """
        key = frame.key
        if key.epoch != self.epoch:
            self._answer(frames.StaleEpoch(key, frame.seq, self.epoch))
        elif (actor := self.sessions.get(key.session)) is None or actor.is_ending:
            self._answer(frames.CacheMiss(key, frame.seq, self._why_missing(key, actor), 0))
        elif actor.deliver(frame, payload, consumed, from_tail=from_tail):
            return
        else:
            self._answer(
                frames.Refused(
                    key, frame.seq, Refusal.OVERLOADED, "the session's inbox is full: keep fewer frames in flight"
                )
            )
        consumed()

    def refuse(self, frame: WorkFrame, problem: str) -> None:
        """Answer work that may not come this way."""
        self._answer(frames.Refused(frame.key, frame.seq, Refusal.PROTOCOL, problem))

    def cancel(self, frame: frames.Cancel) -> None:
        """Stop queued work of a session; bypasses its inbox."""
        actor = self.sessions.get(frame.key.session)
        if frame.key.epoch == self.epoch and actor is not None:
            actor.cancel(frame.last_seq)

    def _why_missing(self, key: Key, ending: SessionActor | None) -> Miss:
        if self.state is EpochState.FENCING:
            return Miss.FENCING
        if ending is not None and ending.end_reason is not None:
            return ending.end_reason
        return self._end_reasons.get(key.session, Miss.UNKNOWN)

    def _answer(self, frame: frames.Frame) -> None:
        try:
            self.control.send_nowait(frame)
        except WireError:
            # The pipeline is gone; the reader of its control link ends this route session.
            return

    # --- the requests themselves ---

    def _begin_fence(self, frame: frames.Fence) -> list[SessionActor] | None:
        """Raise the epoch and begin the end of every older session; returns those sessions."""
        if frame.epoch <= self.epoch:
            self._answer(frames.StaleEpoch(Key(self.route, frame.epoch, 0), 0, self.epoch))
            return None
        self._machine.fire(EpochEvent.FENCE)
        self.epoch, self.predecessor, self._stages = frame.epoch, frame.predecessor, frame.stages
        self.tail = "" if frame.predecessor else frame.ring
        if self._next is not None:
            self._next.give_up()  # an older fence that still waits, or dials, gives way
        self._next = NextStage(frame, partial(self._services.dial, self.control, frame.stage))
        self._way_to_head = WayToHead(frame, self._next.dial, start=self._start, here=self._take_own)
        self._opening.clear()
        old = list(self.sessions.values())
        for actor in old:
            actor.end(None)
        return old

    async def _fence(self, frame: frames.Fence, old: list[SessionActor], after: NextStage) -> None:
        released = sum(actor.lease.total for actor in old)
        for actor in old:
            await actor.ended.wait()
        problem = await after.reach(self._services.fence_timeout)
        if self.epoch != frame.epoch or self.state is not EpochState.FENCING:
            return  # a newer fence took over while this one waited; it answers
        if problem is not None:
            self._machine.fire(EpochEvent.FAILED)
            self._answer(frames.Refused(Key(self.route, frame.epoch, 0), 0, Refusal.SUCCESSOR, problem[:4096]))
            return
        self._end_reasons.clear()
        self._machine.fire(EpochEvent.DRAINED)
        self._services.announce(self)
        self._answer(frames.Fenced(self.route, frame.epoch, len(old), released))

    def successor_ready(self, link: Link, epoch: int) -> None:
        """The next stage admits an epoch."""
        if self._next is not None:
            self._next.is_ready(link, epoch)

    def link_lost(self, link: Link, why: str) -> None:
        """A link over which work is sent has ended: what was under way on it is lost, and the pipeline must know at once."""
        if self._next is not None and self._next.lost(link):
            key = Key(self.route, self.epoch, 0)
            self._answer(frames.Refused(key, 0, Refusal.SUCCESSOR, f"the link to the next stage ended: {why}"[:4096]))
        if self._way_to_head is not None and self._way_to_head.lost(link):
            problem = f"the link to the head ended in a decode run: {why}"[:4096]
            for key, seq in [(actor.key, actor.passed_on) for actor in self.sessions.values()]:
                if seq is not None:
                    self._answer(frames.Refused(key, seq, Refusal.RING, problem))

    def _begin_open(self, frame: frames.Open | frames.Fork, origin: Origin | None) -> None:
        """Open a session in a free slot, at once: sessions that open together get neighbouring slots, the same order of them on
        every stage. Else begin to wait for one."""
        key = frame.key
        if not self._admits(key, frame.seq):
            return
        if self._services.draining.is_on:
            self._answer(frames.Refused(key, frame.seq, Refusal.DRAINING, DRAINING))
            return
        if key.session in self.sessions or key.session in self._opening:
            problem = f"session {key.session} is open already; close it first"
            self._answer(frames.Refused(key, frame.seq, Refusal.PROTOCOL, problem))
        elif (lease := self._services.free_slot((key, frame.seq))) is not None:
            self._open_in(lease, frame, origin)
        else:
            self._opening[key.session] = frame.seq
            self._start(self._wait_for_slot, frame, origin)

    def _origin_of(self, frame: frames.Fork) -> Origin | None:
        """What is to be copied; None, and an answer, when that cannot be: nobody shall make room for it then."""
        key, source = frame.key, self.sessions.get(frame.source)
        problem: Miss | str | None
        if not self._admits(key, frame.seq):
            return None
        if self._services.description.capabilities.get(FORK) != "executable":
            problem = "this stage does not copy sessions: open another one, and send its tokens again"
        elif not frame.expect.position:
            problem = f"session {frame.source} is to be copied before it holds a token: open another one instead"
        elif source is None:
            problem = self._end_reasons.get(frame.source, Miss.UNKNOWN)
        elif (problem := source.copy_problem(frame.expect)) is None:
            source.last_active = trio.current_time()
            return Origin(source, frame.expect)
        self._answer(no_copy(key, frame.seq, problem, source))
        return None

    async def _wait_for_slot(self, frame: frames.Open | frames.Fork, origin: Origin | None) -> None:
        key = frame.key

        def wanted() -> bool:
            return self._opening.get(key.session) == frame.seq

        # No checkpoint from here on once there is a lease: either it gets its actor or it goes back.
        spared = None if origin is None else origin.source
        lease = await self._services.lease((key, frame.seq), wanted, spared)
        if not wanted():  # fenced or closed meanwhile; a Close has its own answer
            self._admits(key, frame.seq)
            if lease is not None:
                self._services.ledger.release(lease)
            return
        del self._opening[key.session]
        if lease is None:
            self._answer(frames.Refused(key, frame.seq, Refusal.OVERLOADED, self._services.ledger.refusal()))
        else:
            self._open_in(lease, frame, origin)

    def _open_in(self, lease: Lease, frame: frames.Open | frames.Fork, origin: Origin | None) -> None:
        try:
            self._begin_session(lease, frame, origin)
        except BaseException:
            if frame.key.session not in self.sessions:  # else its actor gives it back
                self._services.ledger.release(lease)
            raise

    def _begin_session(self, lease: Lease, frame: frames.Open | frames.Fork, origin: Origin | None) -> None:
        key = frame.key
        actor = SessionActor(
            key,
            lease,
            frame.seq,
            scheduler=self._services.scheduler,
            description=self._services.description,
            reply=self._reply,
            forward=self._forward,
            pass_on=self._pass_on,
            ring=self._stages,
            on_end=self._ended,
            note=partial(self._services.traces.add, self.route),
            origin=origin,
        )
        self.sessions[key.session] = actor
        self._end_reasons.pop(key.session, None)
        assert self._nursery is not None
        self._nursery.start_soon(actor.run)
        if origin is None:  # else it answers once it has its copy
            self._answer(frames.Opened(key, frame.seq, lease.total))

    def _admits(self, key: Key, seq: int) -> bool:
        if key.epoch != self.epoch:
            self._answer(frames.StaleEpoch(key, seq, self.epoch))
        elif self.state is not EpochState.LIVE:
            self._answer(frames.CacheMiss(key, seq, Miss.FENCING, 0))
        else:
            return True
        return False

    def _begin_close(self, frame: frames.Close) -> SessionActor | None:
        """Begin the end of a session, or take back an Open that waits; returns the actor whose end is to be awaited."""
        key = frame.key
        if key.epoch != self.epoch:
            return None
        self._opening.pop(key.session, None)
        actor = self.sessions.get(key.session)
        if actor is not None:
            actor.end(None)
        return actor

    async def _close(self, frame: frames.Close, actor: SessionActor | None) -> None:
        key = frame.key
        if actor is not None:
            await actor.ended.wait()
        if key.epoch == self.epoch:
            self._end_reasons.pop(key.session, None)
        self._answer(frames.Closed(key, frame.seq, 0 if actor is None else actor.lease.total))

    async def _probe(self, frame: frames.QueryState) -> None:
        key = frame.key
        for _ in range(_PROBES):
            if not self._admits(key, frame.seq):
                return
            actor = self.sessions.get(key.session)
            if actor is None or actor.is_ending:
                self._answer(frames.CacheMiss(key, frame.seq, self._why_missing(key, actor), 0))
                return
            try:
                summary = await actor.state_summary()
            except DgrError as error:
                self._answer(frames.Refused(key, frame.seq, Refusal.ENGINE, str(error)[:4096]))
                return
            # One native call reads position and components together; the digest must be of the same moment.
            if key.epoch == self.epoch and not actor.is_ending and summary.position == actor.position:
                self._answer(frames.StateReport(key, frame.seq, actor.digest, summary))
                return
            await trio.lowlevel.checkpoint()  # a step ended, and its actor has yet to take note of it
        problem = "the session does not stand still: ask for its state when it is idle"
        self._answer(frames.Refused(key, frame.seq, Refusal.PROTOCOL, problem))

    def _ended(self, actor: SessionActor) -> None:
        """An actor's slot is cleared: take its bytes back."""
        self._services.ledger.release(actor.lease)
        del self.sessions[actor.key.session]
        if actor.end_reason is not None:
            self._end_reasons[actor.key.session] = actor.end_reason
            while len(self._end_reasons) > _END_REASONS:
                self._end_reasons.popitem(last=False)

    # --- what sessions send ---

    async def _reply(self, frame: SessionReply, payload: memoryview | bytes | None) -> None:
        """To the pipeline, if the reply is of the present epoch."""
        if frame.key.epoch != self.epoch:
            return
        try:
            if payload is None:
                self.control.send_nowait(frame)
            else:
                await self.control.send(frame, payload)
        except WireError:
            # As in _answer: the control link's reader ends this route session.
            return

    async def _forward(self, frame: Boundary, payload: memoryview | bytes) -> None:
        """To the successor, if the boundary is of the present epoch."""
        if frame.key.epoch != self.epoch:
            return
        if self._next is None or self._next.link is None:
            raise WireError("this stage has no successor in the current epoch")
        await push(self._next.link, frame, payload)

    def _pass_on(self, frame: frames.Tokens) -> bool:
        """To the head, the next work of a decode run; False when there is no way to it, and the pipeline has to send it."""
        return frame.key.epoch == self.epoch and self._way_to_head is not None and self._way_to_head.send(frame)

    def _take_own(self, frame: frames.Tokens) -> None:
        """The same where this stage is the head too."""
        self.work(frame, None, lambda: None, from_tail=True)
