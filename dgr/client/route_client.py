"""The client of a route: it draws a random route id, fences every stage for an epoch, and brings the route back when it
is down.

Sessions use it to send work and requests; one registry knows every reply that somebody waits for. Nothing runs in the
background but the readers of the control links and the recovery of a route that is down.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import trio

from dgr.client.candidates import Candidates
from dgr.client.claims import check_work_reply
from dgr.client.control_links import Connector, ControlLinks, Report, blamed
from dgr.client.events import Event, RouteChanged, RouteDown
from dgr.client.pace import ChunkPace, SessionLimits
from dgr.client.replies import (
    ControlReply,
    ControlRequest,
    FenceReply,
    PendingReply,
    SessionReply,
    StageQuery,
    StageReply,
    Timeouts,
    WorkReply,
    concerns_the_route,
    is_draining,
)
from dgr.core.route import Route, StageRef
from dgr.core.state_machine import StateMachine
from dgr.core.values import Key, StageIdentity
from dgr.engine.base import FORK
from dgr.errors import ClosedError, DeadlineExceeded, DgrError, InvalidRoute, LinkBroken, SessionLost, WireError
from dgr.protocol.states import ROUTE, RouteEvent, RouteState
from dgr.wire import frames
from dgr.wire.framing import Received
from dgr.wire.links import Link
from dgr.wire.nurseries import cancelled_first, open_nursery

__all__ = ["RouteClient", "RouteMember", "SessionLimits", "Timeouts"]

#: Seconds between two tries to bring a route back: at first, and at most.
_FIRST_PAUSE = 0.05
_LAST_PAUSE = 0.5
#: Seconds between two tries to leave a stage that is being drained, at most.
_LEAVING_PAUSE = 10.0


class RouteMember(Protocol):
    """A session, as its route sees it."""

    def lose(self, reason: str) -> None:
        """What the stages held of it is gone."""
        ...


class RouteClient:
    """One route session. Sessions of the caller join it; :meth:`run` holds its links."""

    def __init__(
        self,
        connect: Connector,
        *,
        chunk: int | None,
        chunk_seconds: float,
        window: int | None,
        timeouts: Timeouts,
        emit: Callable[[Event], None],
    ) -> None:
        self.route_id = secrets.token_bytes(16)
        self.epoch = 0
        self.timeouts = timeouts
        #: Tell the subscribers.
        self.emit = emit
        #: By session id.
        self.members: dict[int, RouteMember] = {}
        #: Why the last try to bring a route back failed.
        self.last_recovery_error: str | None = None
        self._connect = connect
        self._chunk = chunk
        self._chunk_seconds = chunk_seconds
        self._pace: ChunkPace | None = None
        #: Of the present route; None until they are asked for.
        self._limits: SessionLimits | None = None
        self._window = window
        self._machine = StateMachine(ROUTE)
        self._live = trio.Event()
        #: Set when the route is down, or a stage of it is about to be maintained.
        self._attention = trio.Event()
        self._changing = trio.Lock()
        self._route: Route | None = None
        self._candidates: Candidates | None = None
        #: Addresses of stages that wish to be left.
        self._draining: set[str] = set()
        self._open_links: ControlLinks | None = None

    @property
    def state(self) -> RouteState:
        return self._machine.state

    @property
    def route(self) -> Route:
        assert self._route is not None
        return self._route

    @property
    def descriptions(self) -> tuple[StageIdentity, ...]:
        """What the stages said of themselves, head first."""
        return tuple(self._links.stages[ref.address].description for ref in self.route.stages)

    @property
    def refuses_sessions(self) -> DgrError | None:
        """Why no new session is taken, though the route is live: what is drained cannot be left. None while they are."""
        if self._candidates is None or not (self._draining and self._live.is_set() and self.state is RouteState.LIVE):
            return None
        self._candidates.avoided = self._draining
        return self._candidates.drained(self.route)

    def loss(self, address: str) -> str | None:
        """Why the control link to a stage of the route ended; None while it lives."""
        return self._links.stages[address].lost

    @property
    def pace(self) -> ChunkPace:
        """Tokens of the next chunk: as ``chunk`` says; without it at most n_ubatch, and in exact numerics what takes
        ``chunk_seconds``."""
        if self._pace is None:
            exact = self.descriptions[0].context.numerics.exact_kernels
            adapts = self._chunk is None and exact and self._chunk_seconds < math.inf
            self._pace = ChunkPace(self.limits.chunk, self._chunk_seconds if adapts else None)
        return self._pace

    @property
    def limits(self) -> SessionLimits:
        """By default a chunk is at most n_ubatch tokens, and a window keeps every stage at work: stages + 1."""
        if self._limits is None:
            head = self._links.stages[self.route.stages[0].address].description
            self._limits = SessionLimits(
                n_vocab=head.n_vocab,
                n_ctx=head.context.n_ctx,
                chunk=min(self._chunk or head.context.n_ubatch, head.context.n_batch),
                window=self._window or len(self.route.stages) + 1,
                forks=all(about.capabilities.get(FORK) == "executable" for about in self.descriptions),
            )
        return self._limits

    @property
    def _links(self) -> ControlLinks:
        assert self._open_links is not None, "the route client is not running"
        return self._open_links

    # --- its life ---

    async def run(
        self,
        route: Route,
        spares: Sequence[StageRef] = (),
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Hold the control links until cancelled; started once every stage has fenced the first epoch."""
        async with open_nursery() as nursery:
            self._open_links = ControlLinks(self._connect, nursery, on_frame=self._on_frame, on_loss=self._on_loss)
            await self.change(route, spares)
            task_status.started()
            await self._keep_live()

    def close(self) -> None:
        """Mark the end: whoever still waits is told; the links close with :meth:`run`."""
        if self.state is RouteState.CLOSED:
            return
        self._machine.fire(RouteEvent.CLOSE)
        self._lose_all("the pipeline was closed")
        self._links.replies.fail(ClosedError("the pipeline was closed"))
        self._live.set()

    async def wait_live(self) -> None:
        """Wait until the route admits work. Raises :class:`DeadlineExceeded`, :class:`ClosedError`."""
        if not self._live.is_set():
            with trio.move_on_after(self.timeouts.route):
                while not self._live.is_set():
                    await self._live.wait()
        self._check_open()
        if not self._live.is_set():
            raise DeadlineExceeded(
                f"the route is {self.state.value} and was not live within {self.timeouts.route:g} s: {self.route}"
                f" ({self.last_recovery_error or 'no stage has said why'}); start its stages, or set another route"
            )

    def _check_open(self) -> None:
        if self.state is RouteState.CLOSED:
            raise ClosedError("the pipeline is closed; open another one")

    def _lose_all(self, why: str) -> None:
        for member in self.members.values():
            member.lose(why)

    def _not_live(self) -> None:
        """Sessions wait from now on. Those that wait already keep their event: it is the one that will be set."""
        if self._live.is_set():
            self._live = trio.Event()

    # --- epochs ---

    async def change(self, route: Route, spares: Sequence[StageRef] = ()) -> None:
        """Fence a new epoch on every stage of ``route``. See :meth:`dgr.client.pipeline.Pipeline.change_route`."""
        candidates = Candidates(route, spares)
        while True:
            try:
                await self._change(
                    candidates, lambda: self._candidates is not candidates or self.state is not RouteState.LIVE
                )
            except (WireError, InvalidRoute) as error:
                self._check_open()
                if not candidates.has_spares:
                    raise
                if candidates.rest(trio.current_time()):  # each of them has failed
                    raise candidates.error() from error
            else:
                return

    async def _change(self, candidates: Candidates, wanted: Callable[[], bool], *, gently: bool = False) -> None:
        """Fence a new epoch on the candidates that are best now, if that is still wanted when its turn has come; ``gently``
        asks them before whether they are being drained."""
        async with cancelled_first(), self._changing:
            if not wanted():
                return
            route = candidates.choose(trio.current_time())

            def blame(error: DgrError, *what: str) -> None:
                candidates.fail(*what, now=trio.current_time(), why=str(error))

            self._check_open()
            began = trio.current_time()
            stages = await self._links.reach(route, blame, asks_within=self.timeouts.control if gently else None)
            self._check_open()
            if self.state is not RouteState.FENCING:
                self._machine.fire(RouteEvent.CHANGE)
            self._not_live()
            self.epoch += 1
            self._lose_all("route change")
            # Replies to the old epoch are dropped from now on, so whoever waits for one must be told.
            self._links.replies.fail(SessionLost("route change"))
            left = [stage for address, stage in self._links.stages.items() if stages.get(address) is not stage]
            self._links.stages, self._route, self._candidates, self._limits = stages, route, candidates, None
            self._draining &= stages.keys()
            try:
                fenced = await self._links.fence(self.route_id, self.epoch, route, self.timeouts.route, blame)
                self._check_open()
            except BaseException:  # a caller who gave up leaves a route that was fenced in part: fence it anew
                if self._machine.can(RouteEvent.BREAK):
                    self._machine.fire(RouteEvent.BREAK)
                    self._attention.set()
                raise
            finally:
                # Closing its control link makes a stage that left the route drop this route session.
                for stage in left:
                    stage.scope.cancel()
            self._machine.fire(RouteEvent.FENCED)
            candidates.serves(route)
            self._live.set()
            if self._draining:  # one said so while it was being fenced
                self._attention.set()
            self.emit(
                RouteChanged(
                    self.epoch,
                    route,
                    sessions_dropped=sum(frame.sessions_dropped for frame in fenced),
                    bytes_released=sum(frame.bytes_released for frame in fenced),
                    seconds=trio.current_time() - began,
                )
            )

    def _go_down(self, why: str, *at: str) -> None:
        """The route admits no work until every stage has fenced a new epoch. ``at``: what failed, as candidates know it."""
        if self._candidates is not None:
            self._candidates.fail(*at, now=trio.current_time(), why=why)
        self._machine.fire(RouteEvent.BREAK)
        self._not_live()
        self._lose_all(why)
        self.emit(RouteDown(self.epoch, why))
        self._attention.set()

    async def _keep_live(self) -> None:
        """Whenever the route is down, fence it anew, on other candidates where there are any, until its stages reply or
        another route is set; leave stages that are about to be maintained where others can take their places."""
        while True:
            with trio.move_on_after(self._patience):
                await self._attention.wait()
            self._attention = trio.Event()
            pause = _FIRST_PAUSE
            while self.state is RouteState.DOWN and (candidates := self._candidates) is not None:
                try:
                    await self._change(candidates, lambda: self.state is RouteState.DOWN)
                except DgrError as error:
                    all_failed = candidates.rest(trio.current_time()) > 0
                    self.last_recovery_error = str(
                        candidates.error() if candidates.has_spares and all_failed else error
                    )
                    if all_failed or not candidates.has_spares:
                        await trio.sleep(pause)
                        pause = min(2 * pause, _LAST_PAUSE)
            await self._leave_draining()

    async def _leave_draining(self) -> None:
        """Move to candidates that stay, if there are any; else the answers under way end where they are."""
        candidates = self._candidates
        if candidates is None:
            return

        def better() -> bool:
            candidates.avoided = self._draining
            is_held = bool(self._draining) and self.state is RouteState.LIVE and self._candidates is candidates
            return is_held and candidates.leaves_drained(trio.current_time())

        first = True
        while better() and (first or not candidates.rest(trio.current_time())):
            first = False
            try:
                await self._change(candidates, better, gently=True)
            except DgrError as error:
                self.last_recovery_error = str(error)  # that one has failed too; down, the route is brought back
        if self.state is RouteState.LIVE:
            self._live.set()

    @property
    def _patience(self) -> float:
        """Seconds until another try to leave a stage that wishes it."""
        if not self._draining or self._candidates is None or not self._candidates.has_spares:
            return math.inf
        return min(max(self._candidates.rest(trio.current_time()), _LAST_PAUSE), _LEAVING_PAUSE)

    # --- frames from the stages ---

    def _on_frame(self, stage: str, received: Received) -> None:
        frame, replies = received.frame, self._links.replies
        if isinstance(frame, frames.Fenced):
            if frame.route != self.route_id:
                raise WireError("it says that it fenced a route session that is not this pipeline's")
            replies.resolve(FenceReply(stage, frame.epoch), received)
        elif isinstance(frame, frames.Occupancy):
            self._on_occupancy(stage, frame)
        elif isinstance(frame, frames.LoadReport | frames.TraceReport):
            replies.resolve(StageReply(stage, frame.seq), received)
        elif not isinstance(frame, SessionReply):
            raise WireError(f"{type(frame).__name__} came from stage {stage}, which may only reply")
        elif frame.key.route != self.route_id or frame.key.epoch != self.epoch:
            return  # a reply to an epoch that is over
        elif concerns_the_route(frame) and self.state is RouteState.LIVE:
            self._go_down(f"stage {stage}: {frame.message}", *blamed(self.route, stage, frame))
        elif not frame.key.session:
            replies.resolve(FenceReply(stage, frame.key.epoch), received)
        elif not replies.resolve(ControlReply(stage, frame.key.session, frame.seq), received):
            self._on_work_reply(stage, WorkReply(frame.key.session, frame.seq), received)

    def _on_occupancy(self, stage: str, frame: frames.Occupancy) -> None:
        """A stage is about to be maintained, or is no longer."""
        if frame.draining and stage not in self._draining:
            self._draining.add(stage)
            if self.state is RouteState.LIVE and self._candidates is not None and self._candidates.has_spares:
                self._not_live()  # sessions wait until it is known whether another stage takes its place
            self._attention.set()
        elif not frame.draining:
            self._draining.discard(stage)

    def _on_work_reply(self, stage: str, key: WorkReply, received: Received) -> None:
        head, tail = self.route.stages[0].address, self.route.stages[-1].address
        check = partial(
            check_work_reply, reply=received.frame, is_head=stage == head, is_tail=stage == tail, limits=self.limits
        )
        self._links.replies.take_work_reply(key, received, check)

    def _on_loss(self, address: str, why: str) -> None:
        """A control link ended."""
        self._draining.discard(address)  # whoever comes back in its place has not said so
        if self.state is RouteState.LIVE:
            self._go_down(why, address)

    # --- the interface of sessions ---

    def key(self, session: int) -> Key:
        """What every frame of a session carries: the route session, the present epoch, the session."""
        return Key(self.route_id, self.epoch, session)

    def send_work(self, frame: frames.Tokens) -> PendingReply:
        """Send a work frame to the head. Raises :class:`WireError` when it cannot be sent."""
        self.head.send_nowait(frame)
        return self._links.replies.sent_work(frame)

    def await_work(self, frame: frames.Tokens) -> PendingReply:
        """Wait for the reply to a work frame that the tail has given the head."""
        return self._links.replies.passed_on(frame)

    def cancel_work(self, session: int, last_seq: int) -> None:
        """Tell the head not to start work up to ``last_seq``. Raises :class:`WireError` when it cannot be told."""
        self.head.send_nowait(frames.Cancel(self.key(session), last_seq))

    def fail_work(self, session: int, seq: int, error: DgrError) -> None:
        """End the wait for the reply to a work frame."""
        self._links.replies.fail_work(WorkReply(session, seq), error)

    @property
    def head(self) -> Link:
        """The control link to the stage that takes token ids."""
        return self._links.stages[self.route.stages[0].address].link

    async def ask_all(self, frame: ControlRequest) -> list[tuple[str, frames.Frame]]:
        """Send one request to every stage and collect (address, reply), head first."""
        self._check_open()
        what = f"{type(frame).__name__} of session {frame.key.session}"
        keys = [ControlReply(ref.address, frame.key.session, frame.seq) for ref in self.route.stages]
        replies = [self._links.request(key, frame) for key in keys]
        try:
            found = [
                (key.stage, (await reply.wait(self.timeouts.control, f"{what} from stage {key.stage}")).frame)
                for key, reply in zip(keys, replies, strict=True)
            ]
        finally:
            for key in keys:
                self._links.replies.discard(key)
        if any(is_draining(one) for _, one in found):
            if not self._live.is_set():
                raise SessionLost("a stage is being drained")  # it was told before: the route is about to leave it
            if (why := self.refuses_sessions) is not None:
                raise why
        return found

    async def ask_stage(
        self, address: str, query: Callable[[int], StageQuery], answer: type[Report], seconds: float
    ) -> Report:
        """See :meth:`dgr.client.control_links.ControlLinks.ask`."""
        self._check_open()
        return await self._links.ask(address, query, answer, seconds)

    def control_link(self, address: str) -> Link:
        """The control link to a stage of the route. Raises :class:`LinkBroken` when it has ended."""
        stage = self._links.stages[address]
        if stage.lost is not None:
            raise LinkBroken(stage.lost)
        return stage.link
