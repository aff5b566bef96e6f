"""A pipeline: conversations over one route.

This is the face that callers see. Its :class:`~dgr.client.route_client.RouteClient` fences the stages and knows the links;
its :class:`~dgr.client.session.ClientSession` objects hold the transcripts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

import trio
from attrs import frozen

from dgr.client.control_links import Connector
from dgr.client.events import Event, EventHub
from dgr.client.fork import ForkedSession
from dgr.client.generation import MOST_AHEAD, Vocabulary
from dgr.client.pace import CHUNK_SECONDS
from dgr.client.route_client import RouteClient, Timeouts
from dgr.client.session import ClientSession
from dgr.client.tracing import Tracer
from dgr.core.arguments import check_instance, check_number, check_whole
from dgr.core.load import StageLoad
from dgr.core.route import LayerRange, Route, StageRef
from dgr.core.values import ContextParams, StageIdentity
from dgr.errors import ClosedError, SessionLost, WireError
from dgr.protocol.limits import INBOX
from dgr.protocol.states import RouteState
from dgr.wire import frames
from dgr.wire.nurseries import cancelled_first, open_nursery

__all__ = ["Connector", "Pipeline", "PipelineStatistics", "StageStatus", "Timeouts", "Vocabulary", "open_pipeline_on"]

AnySession = TypeVar("AnySession", bound=ClientSession)


@frozen
class PipelineStatistics:
    """A snapshot of a pipeline."""

    epoch: int
    state: str
    sessions: int
    #: Work frames sent whose reply has not come, over all sessions; those of cancelled work among them.
    in_flight: int
    #: Times the route was lost.
    downs: int
    #: Re-prefills by reason, and the tokens that were run again.
    re_prefills: Mapping[str, int]
    re_prefilled_tokens: Mapping[str, int]


@frozen
class StageStatus:
    """One stage of the present route, as this side sees it."""

    address: str
    layers: LayerRange
    devices: tuple[str, ...]
    #: Why it does not answer; None while its control link lives.
    lost: str | None


class Pipeline:
    """Sessions over one route. Made by :func:`open_pipeline_on`, :func:`dgr.open_pipeline` or :func:`dgr.open_route`."""

    def __init__(
        self, client: RouteClient, hub: EventHub, vocabulary: Vocabulary | None, retries: int, ahead: int = 0
    ) -> None:
        self.vocabulary = vocabulary
        self._client = client
        self._hub = hub
        self._retries = retries
        self._ahead = ahead
        #: Where the time of single requests goes.
        self.tracer = Tracer(client)
        self._sessions: dict[int, ClientSession] = {}
        self._next_session = 1

    @property
    def epoch(self) -> int:
        return self._client.epoch

    @property
    def route_id(self) -> bytes:
        """The random 128-bit id under which stages keep this pipeline's state."""
        return self._client.route_id

    @property
    def route(self) -> Route:
        return self._client.route

    @property
    def state(self) -> RouteState:
        return self._client.state

    @property
    def last_recovery_error(self) -> str | None:
        """Why the last try to bring a route back failed."""
        return self._client.last_recovery_error

    @property
    def refuses_sessions(self) -> str | None:
        """Why a route that is live takes no new sessions: a stage is being drained that has no spare. None while it does."""
        why = self._client.refuses_sessions
        return None if why is None else str(why)

    @property
    def descriptions(self) -> tuple[StageIdentity, ...]:
        """What the stages said of themselves, head first."""
        return self._client.descriptions

    @property
    def stages(self) -> tuple[StageStatus, ...]:
        """The stages, head first: which of them answer."""
        refs = self.route.stages
        return tuple(
            StageStatus(ref.address, ref.layers, about.devices, self._client.loss(ref.address))
            for ref, about in zip(refs, self.descriptions, strict=True)
        )

    @property
    def context(self) -> ContextParams:
        """The context parameters all stages share."""
        return self.descriptions[0].context

    @property
    def n_vocab(self) -> int:
        return self._client.limits.n_vocab

    @property
    def chunk(self) -> int:
        """Most tokens of one prefill chunk."""
        return self._client.limits.chunk

    @property
    def window(self) -> int:
        """Chunks of one session that may be in flight."""
        return self._client.limits.window

    @property
    def copies_sessions(self) -> bool:
        """Whether :meth:`ClientSession.fork` copies state: every stage of the present route offers it."""
        return self._client.limits.forks

    def statistics(self) -> PipelineStatistics:
        return PipelineStatistics(
            epoch=self.epoch,
            state=self.state.value,
            sessions=len(self._sessions),
            in_flight=sum(session.in_flight for session in self._sessions.values()),
            downs=self._hub.downs,
            re_prefills=dict(self._hub.re_prefills),
            re_prefilled_tokens=dict(self._hub.re_prefilled_tokens),
        )

    async def load(self, seconds: float = 5.0) -> Mapping[str, StageLoad | None]:
        """Ask every stage of the present route how much it has to do: address -> its load, head first.

        None for a stage that is lost, or has not answered within ``seconds``. A stage answers while it computes. Raises
        :class:`~dgr.errors.ClosedError`.
        """
        check_number("seconds", seconds, 0)
        if self.state is RouteState.CLOSED:
            raise ClosedError("the pipeline is closed; open another one")
        loads: dict[str, StageLoad | None] = {ref.address: None for ref in self.route.stages}

        async def ask(address: str) -> None:
            try:
                report = await self._client.ask_stage(address, frames.QueryLoad, frames.LoadReport, seconds)
            except (WireError, SessionLost):
                return  # it stays without one
            loads[address] = report.load

        async with open_nursery() as nursery:
            for address in loads:
                nursery.start_soon(ask, address)
        return loads

    def events(self) -> trio.MemoryReceiveChannel[Event]:
        """Subscribe to everything that happens from now on; iterate over the channel."""
        return self._hub.subscribe()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[ClientSession]:
        """A conversation. State on the stages is made at first use and dropped when the block ends."""
        async with self._made(ClientSession) as session:
            yield session

    def fork_target(self) -> AbstractAsyncContextManager[ForkedSession]:
        """A conversation that is to begin as another one (:meth:`~dgr.client.fork.ForkedSession.begin_as`).

        :meth:`ClientSession.fork` does both, and when it is cancelled waits until the stages have dropped the half-made copy.
        """
        return self._made(ForkedSession)

    @asynccontextmanager
    async def _fork(self, source: ClientSession) -> AsyncIterator[ClientSession]:
        async with self.fork_target() as session:
            await session.begin_as(source)
            yield session

    @asynccontextmanager
    async def _made(self, kind: type[AnySession]) -> AsyncIterator[AnySession]:
        number, self._next_session = self._next_session, self._next_session + 1
        session = kind(self._client, number, vocabulary=self.vocabulary, retries=self._retries, ahead=self._ahead)
        session.copier = self._fork
        self._sessions[session.id] = self._client.members[session.id] = session
        try:
            yield session
        finally:
            try:
                await self._dismiss(session)
            finally:
                del self._sessions[session.id], self._client.members[session.id]

    async def _dismiss(self, session: ClientSession) -> None:
        """Have the stages drop a session, and wait until they have; for a while alone once the caller is cancelled.

        That is not passed on: what the block raised leaves as it is, and the caller's next checkpoint tells.
        """
        waiting = trio.CancelScope(shield=True)

        async def hurry() -> None:
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                waiting.deadline = trio.current_time() + self._client.timeouts.farewell

        async with open_nursery() as nursery:
            nursery.start_soon(hurry)
            with waiting:
                await session.aclose()
            nursery.cancel_scope.cancel()

    async def change_route(self, route: Route, spares: Sequence[StageRef] = ()) -> None:
        """Fence a new epoch on every stage of ``route``; sessions re-prefill when they are next used.

        ``spares``: other stages of the same layer ranges; one takes over when a stage is lost, or now when one cannot be had.

        Raises :class:`InvalidRoute` when the stages do not fit together (the old route stays), :class:`PeerRefused` or
        :class:`DeadlineExceeded` when a stage does not fence (the route is then down until it does, or the next change).
        """
        check_instance("route", route, Route)
        await self._client.change(route, _checked(spares))

    async def wait_live(self) -> None:
        """Wait until the route admits work. Raises :class:`DeadlineExceeded`, :class:`ClosedError`."""
        await self._client.wait_live()


def _checked(spares: Sequence[StageRef]) -> tuple[StageRef, ...]:
    for spare in spares:
        check_instance("a spare stage", spare, StageRef)
    return tuple(spares)


@asynccontextmanager
async def open_pipeline_on(
    connect: Connector,
    route: Route,
    *,
    spares: Sequence[StageRef] = (),
    vocabulary: Vocabulary | None = None,
    chunk: int | None = None,
    chunk_seconds: float = CHUNK_SECONDS,
    window: int | None = None,
    retries: int = 2,
    ahead: int = 0,
    timeouts: Timeouts | None = None,
) -> AsyncIterator[Pipeline]:
    """Open a pipeline over stages that ``connect`` reaches.

    ``spares``: other stages that own the same layer ranges as those of ``route``; they take over, in the order given, when
    one is lost, cannot be had or is drained. What failed is tried later again.
    ``vocabulary``: text to token ids and back; without one, prompts are token ids and answers have no text. ``chunk``:
    tokens of one prefill chunk; by default n_ubatch, and in exact numerics what the slowest stage evaluates in
    ``chunk_seconds`` if that is less: a chunk is how long other sessions' streams pause, and how long a cancelled prompt
    goes on. ``window``: chunks of one session in flight (default stages + 1).
    ``retries``: re-prefills tried for one request before :class:`~dgr.errors.PrefillFailed`. ``ahead``: tokens of an answer
    that the stages may draw before they are asked for, by themselves. ``timeouts``: every wait.
    Raises :class:`InputError` for values out of range, :class:`InvalidRoute` when the stages do not fit together,
    :class:`PeerRefused`, :class:`LinkBroken` or :class:`DeadlineExceeded` when one cannot be had, and :class:`NoCandidate`
    when none of those of one range can.
    """
    if chunk is not None:
        check_whole("chunk", chunk, 1)
    check_number("chunk_seconds", chunk_seconds, 0, above=True)
    if window is not None:
        check_whole("window", window, 1, INBOX)  # more would not fit a session's inbox on a stage
    check_whole("retries", retries, 0)
    check_whole("ahead", ahead, 0, MOST_AHEAD)
    check_instance("route", route, Route)
    spares = _checked(spares)
    timeouts = Timeouts() if timeouts is None else timeouts
    check_instance("timeouts", timeouts, Timeouts)
    hub = EventHub()
    client = RouteClient(
        connect, chunk=chunk, chunk_seconds=chunk_seconds, window=window, timeouts=timeouts, emit=hub.emit
    )
    hub.route_id = client.route_id
    async with open_nursery() as nursery:
        async with cancelled_first():
            await nursery.start(client.run, route, spares)
        try:
            yield Pipeline(client, hub, vocabulary, retries, ahead)
        finally:
            client.close()
            hub.close()
            nursery.cancel_scope.cancel()
