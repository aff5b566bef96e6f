"""The shard: one engine, its stepper and ledger, and the route sessions it serves.

A shard admits several route sessions. Links come in two kinds: a *control* link belongs to one pipeline and carries its
requests and answers; a *boundary* link comes from a previous stage. The reader of either never waits.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio
from attrs import frozen

from dgr.engine.base import EngineDescription, ShardEngine
from dgr.engine.budget import check_budget
from dgr.errors import WireError
from dgr.runtime.ledger import Ledger, Lease
from dgr.runtime.session import SessionActor
from dgr.runtime.steps import Stepper, StepperStatistics
from dgr.runtime.supervisor import EpochSupervisor
from dgr.wire import frames
from dgr.wire.frames import Key, Miss, Refusal
from dgr.wire.framing import Limits
from dgr.wire.links import Link
from dgr.wire.nurseries import open_nursery

__all__ = ["Shard", "ShardStatistics", "limits_of", "open_shard"]


@frozen
class ShardStatistics:
    """A snapshot of a shard."""

    #: Route sessions it serves.
    routes: int
    #: Live sessions over all routes.
    sessions: int
    #: Bytes of state leased to them.
    leased_bytes: int
    #: The same by component.
    leased: dict[str, int]
    #: Sessions ended to make room for others.
    evictions: int
    #: Frames dropped because their route session is not known here.
    strays: int
    steps: StepperStatistics


def limits_of(description: EngineDescription) -> Limits:
    """What a link to or from a stage may carry."""
    width = max(description.width_in, description.width_out)
    return Limits(n_batch=description.context.n_batch, boundary_width=max(width, 1), n_vocab=description.n_vocab)


class Shard:
    """One stage's runtime. Made by :func:`open_shard`."""

    def __init__(
        self,
        engine: ShardEngine,
        dial: Callable[[str], Awaitable[Link]],
        *,
        name: str,
        time_to_live: float,
        memory_budget: int | None,
    ) -> None:
        self.name = name
        self.description = engine.describe()
        memory = engine.memory()
        check_budget({f"stage {name} ({self.description.layers})": memory}, self.description.context.n_seq_max, memory_budget)
        self.ledger = Ledger(memory, self.description.context.n_seq_max)
        self.stepper = Stepper(engine)
        self.time_to_live = time_to_live
        self._engine = engine
        self._dial = dial
        self._routes: dict[bytes, EpochSupervisor] = {}
        self._nursery: trio.Nursery | None = None
        self._evictions = 0
        self._strays = 0

    def statistics(self) -> ShardStatistics:
        return ShardStatistics(
            routes=len(self._routes),
            sessions=len(self._actors()),
            leased_bytes=self.ledger.leased_bytes,
            leased=self.ledger.leased(),
            evictions=self._evictions,
            strays=self._strays,
            steps=self.stepper.statistics(),
        )

    def _actors(self) -> list[SessionActor]:
        return [actor for supervisor in self._routes.values() for actor in supervisor.sessions.values()]

    # --- what supervisors ask of their host ---

    async def lease(self, owner: Key) -> Lease | None:
        """A slot for a session; the session idle for longest makes room if it must."""
        while (lease := self.ledger.lease(owner)) is None:
            idle = [actor for actor in self._actors() if actor.is_idle]
            if not idle:
                return None
            victim = min(idle, key=lambda actor: actor.last_active)
            victim.end(Miss.EVICTED)
            await victim.ended.wait()
            self._evictions += 1
        return lease

    async def dial(self, address: str) -> Link:
        """A link to a next stage."""
        return await self._dial(address)

    # --- links ---

    async def serve_control(self, link: Link) -> None:
        """Read a pipeline's link until it ends; its route sessions end with it."""
        try:
            async for received in link:
                await self._on_control(link, received.frame, received.payload)
        except WireError:
            # Broken or hostile: either way the link is over, and nothing else of the shard is touched.
            pass
        finally:
            for supervisor in [one for one in self._routes.values() if one.control is link]:
                supervisor.leave()

    async def serve_boundary(self, link: Link) -> None:
        """Read a previous stage's link until it ends."""
        try:
            async for received in link:
                if isinstance(received.frame, frames.Boundary):
                    supervisor = self._routes.get(received.frame.key.route)
                    if supervisor is None:
                        self._strays += 1
                    else:
                        supervisor.work(received.frame, received.payload)
                else:
                    raise WireError(f"{type(received.frame).__name__} came on a boundary link")
        except WireError:
            # As above: the previous stage's sessions time out at their pipelines; nothing here is touched.
            pass

    async def _on_control(self, link: Link, frame: frames.Frame, payload: memoryview | None) -> None:
        match frame:
            case frames.Fence():
                supervisor = self._routes.get(frame.route) or await self._admit(frame.route, link)
                if supervisor.control is not link:
                    link.send_nowait(
                        frames.Refused(
                            Key(frame.route, frame.epoch, 0), 0, Refusal.PROTOCOL, "the route session belongs to another link"
                        )
                    )
                else:
                    supervisor.request(frame)
            case frames.Open() | frames.Close() | frames.Probe() | frames.Tokens() | frames.Cancel():
                known = self._routes.get(frame.key.route)
                if known is None or known.control is not link:
                    self._answer_stranger(link, frame)
                elif isinstance(frame, frames.Tokens):
                    known.work(frame, payload)
                elif isinstance(frame, frames.Cancel):
                    known.cancel(frame)
                else:
                    known.request(frame)
            case _:
                raise WireError(f"{type(frame).__name__} came on a control link")

    def _answer_stranger(self, link: Link, frame: frames.Open | frames.Close | frames.Probe | frames.Tokens | frames.Cancel) -> None:
        """A route session that is not known here holds nothing here."""
        self._strays += 1
        match frame:
            case frames.Close():
                link.send_nowait(frames.Closed(frame.key, frame.seq, 0))
            case frames.Tokens() | frames.Open() | frames.Probe():
                link.send_nowait(frames.CacheMiss(frame.key, frame.seq, Miss.UNKNOWN, 0))

    async def _admit(self, route: bytes, link: Link) -> EpochSupervisor:
        supervisor = EpochSupervisor(route, link, self)
        self._routes[route] = supervisor
        assert self._nursery is not None
        await self._nursery.start(self._supervise, supervisor)
        return supervisor

    async def _supervise(
        self, supervisor: EpochSupervisor, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        try:
            await supervisor.run(task_status=task_status)
        finally:
            del self._routes[supervisor.route]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; on the way out every session ends and every slot is cleared."""
        # Two nurseries: the stepper must outlive the sessions, which wait for it to clear their slots.
        async with open_nursery() as outer:
            outer.start_soon(self.stepper.run)
            try:
                async with open_nursery() as self._nursery:
                    task_status.started()
                    await trio.sleep_forever()
            finally:
                outer.cancel_scope.cancel()

    def start_soon(self, function: Callable[[Link], Awaitable[object]], link: Link) -> None:
        """Serve a link among the shard's own tasks."""
        assert self._nursery is not None
        self._nursery.start_soon(function, link)


@asynccontextmanager
async def open_shard(
    engine: ShardEngine,
    dial: Callable[[str], Awaitable[Link]],
    *,
    name: str = "shard",
    time_to_live: float = math.inf,
    memory_budget: int | None = None,
) -> AsyncIterator[Shard]:
    """Run a shard for the length of the block.

    ``time_to_live``: seconds after which an idle session is dropped. ``memory_budget``: bytes; exceeding it is refused
    with :class:`~dgr.errors.BudgetExceeded`. The engine is not stopped: it belongs to the caller.
    """
    shard = Shard(engine, dial, name=name, time_to_live=time_to_live, memory_budget=memory_budget)
    async with open_nursery() as nursery:
        await nursery.start(shard.run)
        try:
            yield shard
        finally:
            nursery.cancel_scope.cancel()
