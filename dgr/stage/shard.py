"""The shard: one engine, its scheduler and ledger, and the route sessions it serves.

A shard admits several route sessions. Links come in two kinds: a *control* link belongs to one pipeline and carries its
requests and answers; a *boundary* link comes from a previous stage. The reader of either never waits.

What serves one peer ends alone: whatever goes wrong in a route session or on a link, even by a defect of ours, ends that
route session or that link, is logged, and is told to its pipeline. The shard and everyone else on it live on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakKeyDictionary

import trio

from dgr.core.load import StageLoad
from dgr.core.log_fields import log_fields
from dgr.core.values import Key
from dgr.engine.base import ShardEngine
from dgr.engine.budget import check_budget
from dgr.errors import LinkBroken, WireError
from dgr.protocol.states import EpochState
from dgr.stage.draining import DRAINING, Draining
from dgr.stage.ledger import Lease, Ledger
from dgr.stage.peers import AwaitedEpochs, answer_stranger, close, confined, grant, hand_over, tell
from dgr.stage.scheduler import Scheduler
from dgr.stage.session import SessionActor, expire_idle
from dgr.stage.statistics import ShardStatistics, stage_load
from dgr.stage.supervisor import EpochSupervisor
from dgr.stage.tracing import TraceBuffer
from dgr.stage.traffic import Traffic
from dgr.wire import frames
from dgr.wire.frames import Miss, Refusal
from dgr.wire.framing import Received
from dgr.wire.links import Link
from dgr.wire.nurseries import cancelled_first, open_nursery

__all__ = ["MIN_IDLE", "Dialer", "Shard", "open_shard"]

_log = logging.getLogger("dgr.shard")

#: Seconds without work after which a session may have to make room for another.
MIN_IDLE = 1.0

#: (own address, successor's address) -> the boundary link between them.
Dialer = Callable[[str, str], Awaitable[Link]]

#: Route sessions of one control link; a pipeline has one.
_ROUTES_PER_LINK = 16


class Shard:
    """One stage's runtime. Made by :func:`open_shard`."""

    def __init__(
        self,
        engine: ShardEngine,
        dial: Dialer,
        *,
        name: str,
        idle_timeout: float,
        min_idle: float,
        fence_timeout: float,
        memory_budget: int | None,
    ) -> None:
        self.name = name
        self.description = engine.describe()
        memory = engine.memory()
        check_budget(
            {f"stage {name} ({self.description.layers})": memory}, self.description.context.n_seq_max, memory_budget
        )
        self.ledger = Ledger(memory, self.description.context.n_seq_max)
        self.scheduler = Scheduler(engine)
        self._idle_timeout = idle_timeout
        self.min_idle = min_idle
        self.fence_timeout = fence_timeout
        self.traces = TraceBuffer()
        #: What goes over its links; whoever opens and takes them counts them here.
        self.traffic = Traffic()
        self._engine = engine
        self._began = trio.current_time()
        self._dial = dial
        self._routes: dict[bytes, EpochSupervisor] = {}
        self._awaited = AwaitedEpochs(2 * fence_timeout)
        self.draining = Draining(self)
        self._nursery: trio.Nursery | None = None
        #: One connection to a next stage is made at a time for each control link: a pipeline needs no more, and cannot
        #: have this stage hold many sockets to whoever accepts and says nothing.
        self._dialing: WeakKeyDictionary[Link, trio.Lock] = WeakKeyDictionary()
        self._leasing = trio.Lock()
        self._evictions = 0
        self._unroutable_frames = 0

    def statistics(self) -> ShardStatistics:
        return ShardStatistics(
            routes=len(self._routes),
            epochs={route: supervisor.epoch for route, supervisor in self._routes.items()},
            sessions=len(self.actors()),
            leased_bytes=self.ledger.leased_bytes,
            leased=self.ledger.leased(),
            evictions=self._evictions,
            unroutable_frames=self._unroutable_frames,
            draining=self.draining.is_on,
            steps=self.scheduler.statistics(),
        )

    def load(self) -> StageLoad:
        """How much it has to do, and room for."""
        return stage_load(
            self.statistics(),
            self.ledger,
            self.traffic,
            trio.current_time() - self._began,
            ready=self._nursery is not None and not self.draining.is_on,
        )

    def actors(self) -> list[SessionActor]:
        return [actor for supervisor in self._routes.values() for actor in supervisor.sessions.values()]

    def epoch_states(self) -> list[EpochState]:
        """Of its route sessions."""
        return [supervisor.state for supervisor in self._routes.values()]

    # --- the interface of supervisors ---

    def free_slot(self, owner: Hashable) -> Lease | None:
        return None if self._leasing.locked() else self.ledger.lease(owner)

    async def lease(
        self, owner: Hashable, wanted: Callable[[], bool], spared: SessionActor | None = None
    ) -> Lease | None:
        """A slot for a session; the session idle for longest, but not ``spared``, makes room if it must."""
        async with self._leasing:  # one after another, or everyone who waits would wake for every slot
            return await self._lease(owner, wanted, spared)

    async def _lease(self, owner: Hashable, wanted: Callable[[], bool], spared: SessionActor | None) -> Lease | None:
        while wanted():
            if (lease := self.ledger.lease(owner)) is not None:
                return lease
            leaving = next((actor for actor in self.actors() if actor.is_ending), None)
            if leaving is None:
                idle_since = trio.current_time() - self.min_idle
                idle = (actor for actor in self.actors() if actor.is_idle and actor is not spared)
                leaving = min(
                    (actor for actor in idle if actor.last_active <= idle_since),
                    key=lambda actor: actor.last_active,
                    default=None,
                )
                if leaving is None:
                    return None
                leaving.end(Miss.EVICTED)
                self._evictions += 1
                key = leaving.key
                _log.info("a session makes room for another", extra=log_fields(key.route, key.epoch, key.session))
            await leaving.ended.wait()
        return None

    async def dial(self, control: Link, own: str, successor: str) -> Link:
        """The boundary link to a next stage, for a route session of the pipeline behind ``control``."""
        async with self._dialing.setdefault(control, trio.Lock()):
            return await self._dial(own, successor)

    def pushes_to(self, link: Link) -> bool:
        """Whether some route session sends its boundaries over a link, or its decode runs."""
        return any(supervisor.pushes_to(link) for supervisor in self._routes.values())

    def announce(self, supervisor: EpochSupervisor) -> None:
        """Tell a stage that waits for it that an epoch is admitted."""
        _log.info("stage %s admits the epoch", self.name, extra=log_fields(supervisor.route, supervisor.epoch))
        self._awaited.admitted(supervisor)

    # --- links ---

    async def serve_control(self, link: Link) -> None:
        """Read a pipeline's link until it ends; its route sessions end with it, and the link is closed."""
        with confined(f"link {link.name}"):
            await self._serve_control(link)

    async def _serve_control(self, link: Link) -> None:
        self.draining.links.add(link)
        async with open_nursery() as nursery:
            try:
                while batch := await link.receive():
                    for received in batch:
                        await self._on_control(link, received.frame, received.payload, nursery)
            except WireError:
                # Broken or hostile: either way the link is over, and nothing else of the shard is touched.
                pass
            finally:
                nursery.cancel_scope.cancel()
                self.draining.links.discard(link)
                for supervisor in [one for one in self._routes.values() if one.control is link]:
                    supervisor.leave()
                await close(link)

    async def serve_boundary(self, link: Link, peer: str) -> None:
        """Read the link of a previous stage, which the route knows as ``peer``, until it ends; the link is closed."""
        with confined(f"link {link.name}"):
            try:
                while batch := await link.receive():
                    for received in batch:
                        self._on_boundary(link, peer, received)
            except WireError:
                # As above. The pipeline learns of a dead stage on its own control link to it.
                pass
            finally:
                self._awaited.left(link)
                await close(link)

    def _on_boundary(self, link: Link, peer: str, received: Received) -> None:
        frame, payload = received.frame, received.payload
        match frame:
            case frames.AwaitReady():
                self._awaited.wait(link, peer, frame, self._routes.get(frame.route))
            case frames.Boundary() if payload is not None:
                size = payload.nbytes
                self._take_work(peer, frame, payload, lambda: grant(link, size))
            case frames.Tokens():
                self._take_work(peer, frame, None, lambda: None)
            case _:
                raise WireError(f"{type(frame).__name__} came on a boundary link")

    def _take_work(
        self,
        peer: str,
        frame: frames.Boundary | frames.Tokens,
        payload: memoryview | None,
        consumed: Callable[[], None],
    ) -> None:
        """Work from another stage, which the route knows as ``peer``."""
        from_tail = isinstance(frame, frames.Tokens)
        supervisor = self._routes.get(frame.key.route)
        if supervisor is None:
            self._unroutable_frames += 1
            consumed()
        elif frame.key.epoch == supervisor.epoch and peer != (supervisor.tail if from_tail else supervisor.predecessor):
            # A fault of this route alone; others share the link.
            what, who = ("a decode run", "its tail") if from_tail else ("a boundary", "the stage before this one")
            supervisor.refuse(frame, f"{what} came from {peer}, which is not {who}")
            consumed()
        else:
            with self._blaming(supervisor):
                supervisor.work(frame, payload, consumed, from_tail=from_tail)

    async def watch_successor(self, link: Link) -> None:
        """Read what comes back on the link to a next stage until it ends."""
        why = "it failed on this side"
        with confined(f"link {link.name}"):
            why = await self._hear_successor(link)
        for supervisor in list(self._routes.values()):
            supervisor.link_lost(link, why)

    async def _hear_successor(self, link: Link) -> str:
        """Read the link to a next stage; returns why it ended."""
        try:
            async for received in link:
                if not isinstance(received.frame, frames.Ready):
                    raise WireError(f"{type(received.frame).__name__} came back on a boundary link")
                supervisor = self._routes.get(received.frame.route)
                if supervisor is not None:
                    supervisor.successor_ready(link, received.frame.epoch)
        except WireError as error:
            return str(error)
        return "closed by the other side"

    async def _on_control(
        self, link: Link, frame: frames.Frame, payload: memoryview | None, nursery: trio.Nursery
    ) -> None:
        match frame:
            case frames.Drain():
                self.draining.take(frame, link)
            case frames.Fence() if self.draining.is_on and frame.route not in self._routes:
                link.send_nowait(frames.Refused(Key(frame.route, frame.epoch, 0), 0, Refusal.DRAINING, DRAINING))
            case frames.Fence():
                supervisor = self._routes.get(frame.route) or await self._admit(frame.route, link)
                if supervisor.control is link:
                    await supervisor.started.wait()
                    with self._blaming(supervisor, frame.epoch):
                        supervisor.request(frame)
                elif len(nursery.child_tasks) < _ROUTES_PER_LINK:
                    nursery.start_soon(self._take_over, link, frame, supervisor)
                else:
                    raise WireError(
                        f"the link fences more than {_ROUTES_PER_LINK} route sessions of other links; a pipeline has one"
                    )
            case (
                frames.Open() | frames.Fork() | frames.Close() | frames.QueryState() | frames.Tokens() | frames.Cancel()
            ):
                known = self._routes.get(frame.key.route)
                if known is None or known.control is not link:
                    self._unroutable_frames += 1
                    answer_stranger(link, frame)
                else:
                    if not known.started.is_set():  # it may have been taken over in this very moment
                        await known.started.wait()
                    with self._blaming(known):
                        hand_over(known, frame, payload)
            case frames.QueryLoad():
                tell(link, frames.LoadReport(frame.seq, self.load()))
            case frames.QueryTrace():
                owner = self._routes.get(frame.route)
                taken = self.traces.take(frame.route) if owner is not None and owner.control is link else ((), False, 0)
                tell(link, frames.TraceReport(frame.seq, *taken))
            case _:
                raise WireError(f"{type(frame).__name__} came on a control link")

    async def _take_over(self, link: Link, frame: frames.Fence, former: EpochSupervisor) -> None:
        """A route session comes on another link: its pipeline left and came back, faster than its state could go."""
        with trio.move_on_after(self.fence_timeout):
            await former.ended.wait()
        try:
            supervisor = self._routes.get(frame.route) or await self._admit(frame.route, link)
            if supervisor.control is link:
                await supervisor.started.wait()
                with self._blaming(supervisor, frame.epoch):
                    supervisor.request(frame)
            else:
                problem = "the route session belongs to another link"
                link.send_nowait(frames.Refused(Key(frame.route, frame.epoch, 0), 0, Refusal.PROTOCOL, problem))
        except WireError:
            # The link is over; whoever reads it ends what there is of the route session.
            return

    async def _admit(self, route: bytes, link: Link) -> EpochSupervisor:
        if sum(supervisor.control is link for supervisor in self._routes.values()) >= _ROUTES_PER_LINK:
            raise WireError(f"the link has {_ROUTES_PER_LINK} route sessions already; a pipeline has one")
        tasks, supervisor = self._tasks, EpochSupervisor(route, link, self)
        self._routes[route] = supervisor
        await tasks.start(self._supervise, supervisor)
        return supervisor

    async def _supervise(
        self, supervisor: EpochSupervisor, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        try:
            await supervisor.run(task_status=task_status)
        except Exception as error:
            self._fail(supervisor, error)  # its sessions are cleared and their slots are back
        finally:
            _log.info("the route session has ended", extra=log_fields(supervisor.route, supervisor.epoch))
            del self._routes[supervisor.route]
            self.traces.forget(supervisor.route)
            self._awaited.forget(supervisor)
            supervisor.ended.set()

    @contextmanager
    def _blaming(self, supervisor: EpochSupervisor, epoch: int | None = None) -> Iterator[None]:
        """A defect in the handling of a frame ends its route session; others may share the link."""
        try:
            yield
        except WireError:
            raise  # the link's
        except Exception as error:
            self._fail(supervisor, error, epoch)
            supervisor.leave()

    def _fail(self, supervisor: EpochSupervisor, error: Exception, epoch: int | None = None) -> None:
        _log.error(
            "route session %s of stage %s ends by a defect; please report this",
            supervisor.route.hex(),
            self.name,
            exc_info=error,
            extra=log_fields(supervisor.route, supervisor.epoch if epoch is None else epoch),
        )
        supervisor.fail(f"stage {self.name} failed in this route session: {type(error).__name__}: {error}", epoch)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; on the way out every session ends and every slot is cleared."""
        # The scheduler outlives the sessions, which wait for it to clear their slots, also when all is cancelled at once.
        stepping = trio.CancelScope(shield=True)

        async def step() -> None:
            with stepping:
                await self.scheduler.run()

        async with open_nursery() as outer:
            outer.start_soon(step)
            try:
                async with open_nursery() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(expire_idle, self.actors, self._idle_timeout)
                    task_status.started()
                    try:
                        await trio.sleep_forever()
                    finally:
                        self._nursery = None  # it takes no more tasks, though sessions may still be ending in it
            finally:
                stepping.cancel()

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run a task among the shard's own: a link that it serves. Raises :class:`LinkBroken` when the shard is ending."""
        self._tasks.start_soon(function, *args)

    @property
    def _tasks(self) -> trio.Nursery:
        if self._nursery is None:
            raise LinkBroken(f"stage {self.name} is not running")
        return self._nursery


@asynccontextmanager
async def open_shard(
    engine: ShardEngine,
    dial: Dialer,
    *,
    name: str = "shard",
    idle_timeout: float = math.inf,
    min_idle: float = MIN_IDLE,
    fence_timeout: float = 30.0,
    memory_budget: int | None = None,
) -> AsyncIterator[Shard]:
    """Run a shard for the length of the block.

    ``dial(own, successor)`` returns the boundary link to a next stage; the shard reads it with :meth:`Shard.watch_successor`,
    which the dialer starts. ``fence_timeout``: seconds a fence waits for the next stage. ``idle_timeout``: seconds after
    which an idle session is dropped; ``min_idle``: after which it may have to make room for another one.
    ``memory_budget``: bytes; exceeding it is refused with :class:`~dgr.errors.BudgetExceeded`. The engine is not stopped:
    it belongs to the caller.
    """
    shard = Shard(
        engine,
        dial,
        name=name,
        idle_timeout=idle_timeout,
        min_idle=min_idle,
        fence_timeout=fence_timeout,
        memory_budget=memory_budget,
    )
    async with open_nursery() as nursery:
        async with cancelled_first():
            await nursery.start(shard.run)
        try:
            yield shard
        finally:
            nursery.cancel_scope.cancel()
