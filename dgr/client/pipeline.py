"""The pipeline: a client's view of one route.

It draws a random route session, fences every stage for an epoch, and gives out :class:`~dgr.client.session.ClientSession`
objects. One reader task per control link hands answers to whoever waits for them; nothing else runs in the background.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, TypeAlias

import trio
from attrs import field, frozen

from dgr.client.control_links import Connector, StageLink, Switchboard
from dgr.client.events import Event, EventHub, RouteChanged, RouteDown
from dgr.client.replies import Answer, refused_request
from dgr.client.session import ClientSession
from dgr.core.arguments import check_instance, check_whole, number
from dgr.core.route import Route
from dgr.core.state_machine import Machine
from dgr.engine.base import ContextParams, EngineDescription
from dgr.errors import (
    ClosedError,
    DeadlineExceeded,
    DgrError,
    LinkBroken,
    SessionLost,
    WireError,
)
from dgr.protocol.identity import identity_of
from dgr.protocol.states import ROUTE, RouteEvent, RouteState
from dgr.stage.session import INBOX
from dgr.wire import frames
from dgr.wire.frames import Key
from dgr.wire.framing import Received
from dgr.wire.links import Link
from dgr.wire.nurseries import cancelled_first, open_nursery

__all__ = ["Connector", "Pipeline", "PipelineStatistics", "Timeouts", "Vocabulary", "open_pipeline_on"]

#: An answer to a request of a session, or to a fence.
SessionAnswer: TypeAlias = (
    frames.Opened
    | frames.Closed
    | frames.Advanced
    | frames.Token
    | frames.Logits
    | frames.CacheMiss
    | frames.StaleEpoch
    | frames.Refused
    | frames.Cancelled
    | frames.Frontier
)

#: Seconds between two tries to bring a route back: at first, and at most.
_FIRST_PAUSE = 0.05
_LAST_PAUSE = 0.5


class Vocabulary(Protocol):
    """Text to token ids and back."""

    n_vocab: int
    eos: int | None

    def encode(self, text: str, *, add_special: bool = False) -> list[int]: ...

    def piece(self, token: int) -> bytes: ...


@frozen
class Timeouts:
    """Every wait of a pipeline, seconds (``math.inf``: for ever)."""

    #: For the answer to one chunk, from the moment it is the oldest in flight.
    reply: float = field(default=120.0, validator=number(0))
    #: For Opened, Closed, Frontier. A Close waits for the step that runs, so this is no shorter than ``reply``.
    control: float = field(default=120.0, validator=number(0))
    #: For Fenced from every stage, and for a session waiting until the route is live.
    route: float = field(default=60.0, validator=number(0))


@frozen
class PipelineStatistics:
    """A snapshot of a pipeline."""

    epoch: int
    state: str
    sessions: int
    #: Work frames sent and not answered yet, over all sessions.
    in_flight: int


class Pipeline:
    """Sessions over one route session. Made by :func:`open_pipeline_on` or :func:`dgr.open_pipeline`."""

    def __init__(
        self,
        connect: Connector,
        *,
        vocabulary: Vocabulary | None,
        chunk: int | None,
        window: int | None,
        retries: int,
        timeouts: Timeouts,
    ) -> None:
        self.vocabulary = vocabulary
        self.retries = retries
        self.timeouts = timeouts
        self.route_id = secrets.token_bytes(16)
        self.epoch = 0
        self._board = Switchboard(connect, on_answer=self._on_answer, on_loss=self._on_loss)
        self._chunk = chunk
        self._window = window
        self._machine = Machine(ROUTE)
        self._live = trio.Event()
        self._changing = trio.Lock()
        self._route: Route | None = None
        self._sessions: dict[int, ClientSession] = {}
        self._next_session = 1
        self._down = trio.Event()
        #: Why the last try to bring a route back failed.
        self.last_recovery_error: str | None = None
        self._hub = EventHub()

    # --- what people read ---

    @property
    def route(self) -> Route:
        assert self._route is not None
        return self._route

    @property
    def state(self) -> RouteState:
        return self._machine.state

    @property
    def descriptions(self) -> tuple[EngineDescription, ...]:
        """What the stages said of themselves, head first."""
        return tuple(self._board.stages[ref.address].description for ref in self.route.stages)

    @property
    def context(self) -> ContextParams:
        """The context parameters all stages share."""
        return self.descriptions[0].context

    @property
    def n_vocab(self) -> int:
        return self.descriptions[0].n_vocab

    @property
    def chunk(self) -> int:
        """Tokens of one prefill chunk."""
        return min(self._chunk or self.context.n_ubatch, self.context.n_batch)

    @property
    def window(self) -> int:
        """Chunks of one session that may be in flight: enough to keep every stage at work."""
        return self._window or len(self.route.stages) + 1

    def statistics(self) -> PipelineStatistics:
        return PipelineStatistics(
            epoch=self.epoch,
            state=self.state.value,
            sessions=len(self._sessions),
            in_flight=sum(session.in_flight for session in self._sessions.values()),
        )

    def events(self) -> trio.MemoryReceiveChannel[Event]:
        """Subscribe to everything that happens from now on; iterate over the channel."""
        return self._hub.subscribe()

    def emit(self, event: Event) -> None:
        """Tell the subscribers."""
        self._hub.emit(event)

    # --- sessions ---

    @asynccontextmanager
    async def session(self) -> AsyncIterator[ClientSession]:
        """A conversation. State on the stages is made at first use and dropped when the block ends."""
        session = ClientSession(self, self._next_session)
        self._next_session += 1
        self._sessions[session.id] = session
        try:
            yield session
        finally:
            with trio.CancelScope(shield=True):
                await session.aclose()
            del self._sessions[session.id]

    # --- the route ---

    async def change_route(self, route: Route) -> None:
        """Fence a new epoch on every stage of ``route``; sessions re-prefill when they are next used.

        Raises :class:`InvalidRoute` when the stages do not fit together (the old route stays), :class:`PeerRefused` or
        :class:`DeadlineExceeded` when a stage does not fence (the route is then down until it does, or the next change).
        """
        async with cancelled_first():
            await self._change(route, only_if_down=False)

    async def _change(self, route: Route, *, only_if_down: bool) -> None:
        async with self._changing:
            if only_if_down and self.state is not RouteState.DOWN:
                return
            self._refuse_if_closed()
            began = trio.current_time()
            stages = await self._board.reach(route)
            self._refuse_if_closed()
            if self.state is not RouteState.FENCING:
                self._machine.fire(RouteEvent.CHANGE)
            self._not_live()
            self.epoch += 1
            for session in self._sessions.values():
                session.lose("route change")
            # Answers to the old epoch are heard no more: whoever waits for one must not wait in vain.
            self._board.fail_waits(SessionLost("route change"))
            left = [stage for address, stage in self._board.stages.items() if stages.get(address) is not stage]
            self._board.stages, self._route = stages, route
            try:
                fenced = await self._fence(route)
            except BaseException:  # a caller who gave up leaves a route that was fenced in part: fence it anew
                if self._machine.can(RouteEvent.BREAK):
                    self._machine.fire(RouteEvent.BREAK)
                    self._down.set()
                raise
            finally:
                # Closing its control link makes a stage that left the route drop this route session.
                for stage in left:
                    stage.scope.cancel()
            self._machine.fire(RouteEvent.FENCED)
            self._live.set()
            self.emit(
                RouteChanged(
                    self.epoch,
                    route,
                    sessions_dropped=sum(frame.sessions_dropped for frame in fenced),
                    bytes_released=sum(frame.bytes_released for frame in fenced),
                    seconds=trio.current_time() - began,
                )
            )

    async def _fence(self, route: Route) -> list[frames.Fenced]:
        answers = []
        for index, ref in enumerate(route.stages):
            answer = self._board.expect(ref.address, 0, self.epoch)
            fence = frames.Fence(
                self.route_id, self.epoch, ref.address, route.predecessor(index), route.successor(index)
            )
            self._board.say(ref.address, fence, answer)
            answers.append((ref, answer))
        fenced: list[frames.Fenced] = []
        failures: list[DgrError] = []

        async def hear(address: str, answer: Answer) -> None:
            try:
                frame = (await answer.wait(self.timeouts.route, f"Fence({self.epoch}) from {address}")).frame
            except DgrError as error:
                failures.append(error)
            else:
                if isinstance(frame, frames.Fenced):
                    fenced.append(frame)
                    return
                failures.append(refused_request(address, frame))
            nursery.cancel_scope.cancel()

        # All at once: stages wait for the ones behind them, and only the one that fails knows why.
        async with open_nursery() as nursery:
            for ref, answer in answers:
                nursery.start_soon(hear, ref.address, answer)
        await trio.lowlevel.checkpoint_if_cancelled()  # then links end because we leave, and not the other way round
        if failures:
            raise failures[0]
        self._refuse_if_closed()
        for ref in route.stages:
            if (lost := self._board.stages[ref.address].lost) is not None:  # it fenced, and died before the others had
                raise LinkBroken(lost)
        if self._board.reference is None:
            self._board.reference = identity_of(self._board.stages[route.stages[0].address].description)
        return fenced

    async def wait_live(self) -> None:
        """Wait until the route admits work. Raises :class:`DeadlineExceeded`, :class:`ClosedError`."""
        with trio.move_on_after(self.timeouts.route):
            while not self._live.is_set():
                await self._live.wait()
        self._refuse_if_closed()
        if not self._live.is_set():
            raise DeadlineExceeded(
                f"the route is {self.state.value} and was not live within {self.timeouts.route:g} s: {self.route}"
                f" ({self.last_recovery_error or 'no stage has said why'}); start its stages, or set another route"
            )

    def _refuse_if_closed(self) -> None:
        if self.state is RouteState.CLOSED:
            raise ClosedError("the pipeline is closed; open another one")

    def _not_live(self) -> None:
        """Sessions wait from now on. Those that wait already keep their event: it is the one that will be set."""
        if self._live.is_set():
            self._live = trio.Event()

    # --- links ---

    def _on_answer(self, address: str, received: Received) -> None:
        frame = received.frame
        if isinstance(frame, frames.Fenced):
            if frame.route != self.route_id:
                raise WireError("it says that it fenced a route session that is not this pipeline's")
            self._board.settle((address, 0, frame.epoch), received)
        elif isinstance(frame, SessionAnswer):
            if frame.key.route == self.route_id and frame.key.epoch == self.epoch:
                self._on_session_answer(address, frame, received)
            # else: an answer to an epoch that is over
        else:
            raise WireError(f"{type(frame).__name__} came from stage {address}, which may only answer")

    def _on_session_answer(self, address: str, frame: SessionAnswer, received: Received) -> None:
        key = frame.key
        if (
            isinstance(frame, frames.Refused)
            and (frame.code is frames.Refusal.SUCCESSOR or not key.session)  # it is about the route session itself
            and self.state is RouteState.LIVE
        ):
            self._go_down(f"stage {address}: {frame.message}")
        elif self._board.settle((address, key.session, frame.seq if key.session else key.epoch), received):
            return
        elif (session := self._sessions.get(key.session)) is not None:
            session.on_answer(address, frame.seq, received)

    def _on_loss(self, stage: StageLink, why: str) -> None:
        """A control link ended: waits for that stage fail, and the route is down."""
        self._board.fail_waits(LinkBroken(why), of=stage.ref.address)
        if self.state is RouteState.LIVE:
            self._go_down(why)

    def _go_down(self, why: str) -> None:
        """The route admits no work until every stage has fenced a new epoch."""
        self._machine.fire(RouteEvent.BREAK)
        self._not_live()
        for session in self._sessions.values():
            session.lose(why)
        self.emit(RouteDown(self.epoch, why))
        self._down.set()

    async def _recover(self) -> None:
        """Fence the same route anew whenever it is down, until its stages answer or another route is set."""
        while True:
            await self._down.wait()
            self._down = trio.Event()
            pause = _FIRST_PAUSE
            while self.state is RouteState.DOWN:
                try:
                    await self._change(self.route, only_if_down=True)
                except DgrError as error:
                    self.last_recovery_error = str(error)
                    await trio.sleep(pause)
                    pause = min(2 * pause, _LAST_PAUSE)

    # --- what sessions use ---

    def key(self, session: int) -> Key:
        return Key(self.route_id, self.epoch, session)

    @property
    def head(self) -> Link:
        return self._board.stages[self.route.stages[0].address].link

    async def ask_all(self, frame: frames.Open | frames.Close | frames.Probe) -> list[tuple[str, frames.Frame]]:
        """Send one request to every stage and collect (address, answer), head first."""
        self._refuse_if_closed()
        what = f"{type(frame).__name__} of session {frame.key.session}"
        waits = [
            (ref.address, self._board.expect(ref.address, frame.key.session, frame.seq)) for ref in self.route.stages
        ]
        try:
            for address, answer in waits:
                self._board.say(address, frame, answer)
            received = [
                (address, await answer.wait(self.timeouts.control, f"{what} from stage {address}"))
                for address, answer in waits
            ]
        finally:
            for address, _ in waits:
                self._board.forget(address, frame.key.session, frame.seq)
        return [(address, answer.frame) for address, answer in received]

    async def run(self, route: Route, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the control links until cancelled."""
        async with open_nursery() as nursery:
            self._board.nursery = nursery
            await self.change_route(route)
            task_status.started()
            await self._recover()

    def close(self) -> None:
        """Mark the end: whoever still waits is told; the links close with :meth:`run`."""
        if self.state is RouteState.CLOSED:
            return
        self._machine.fire(RouteEvent.CLOSE)
        for session in self._sessions.values():
            session.lose("the pipeline was closed")
        self._board.fail_waits(ClosedError("the pipeline was closed"))
        self._live.set()
        self._hub.close()


@asynccontextmanager
async def open_pipeline_on(
    connect: Connector,
    route: Route,
    *,
    vocabulary: Vocabulary | None = None,
    chunk: int | None = None,
    window: int | None = None,
    retries: int = 2,
    timeouts: Timeouts | None = None,
) -> AsyncIterator[Pipeline]:
    """Open a pipeline over stages that ``connect`` reaches.

    ``chunk``: tokens of one prefill chunk (default n_ubatch). ``window``: chunks of one session in flight (default
    stages + 1). ``retries``: re-prefills tried for one request before :class:`~dgr.errors.PrefillFailed`.
    """
    if chunk is not None:
        check_whole("chunk", chunk, 1)
    if window is not None:
        check_whole("window", window, 1, INBOX)  # more would not fit a session's inbox on a stage
    check_whole("retries", retries, 0)
    check_instance("route", route, Route)
    timeouts = timeouts or Timeouts()
    check_instance("timeouts", timeouts, Timeouts)
    pipeline = Pipeline(connect, vocabulary=vocabulary, chunk=chunk, window=window, retries=retries, timeouts=timeouts)
    async with open_nursery() as nursery:
        async with cancelled_first():
            await nursery.start(pipeline.run, route)
        try:
            yield pipeline
        finally:
            pipeline.close()
            nursery.cancel_scope.cancel()
