"""Where the time of a request went: what this side and every stage noted of its work, on one clock.

    trace = pipeline.tracer.begin()
    with trace.of(session):
        async for token in session.generate("Hello"): ...
    found = await pipeline.tracer.finish(trace)

Work frames of the block name the trace, so that stages note when each of them came, waited, was computed and was sent;
:meth:`Tracer.finish` asks for that. Times, counts and addresses are all that is noted: never a token, never a text.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import trio
from attrs import define, frozen

from dgr.client.replies import PendingReply
from dgr.core.route import LayerRange, StageRef
from dgr.core.trace import WorkRecord
from dgr.errors import DgrError
from dgr.wire import frames
from dgr.wire.clocks import ClockOffset, compare_clocks
from dgr.wire.nurseries import open_nursery

if TYPE_CHECKING:
    from dgr.client.route_client import RouteClient

__all__ = ["Phase", "RequestTrace", "StageTrace", "Trace", "TracedWork", "Tracer"]

#: Work frames that one trace holds, and records of stages that wait for their request's end; more are counted as missing.
_MOST = 65536


@define
class TracedWork:
    """One work frame, as its client saw it."""

    epoch: int
    session: int
    seq: int
    #: Of the first token, in the session's transcript; and how many there are.
    position: int
    tokens: int
    #: Before the link was given it, and when its reply was here, in trio's time; None: it never came.
    sent: float
    came: float | None = None
    #: What the reply was.
    reply: str = ""

    def answered(self, reply: PendingReply) -> None:
        self.came = trio.current_time()
        value = reply.value
        self.reply = type(value if value is None or isinstance(value, DgrError) else value.frame).__name__


@frozen
class Phase:
    """A stretch of a request's life that its owner names: a wait in a line, for example."""

    name: str
    began: float
    ended: float


class TracedWorker(Protocol):
    """What sends a session's work frames."""

    trace: RequestTrace | None


class TracedSession(Protocol):
    """A session, as a trace sees it."""

    @property
    def traced(self) -> TracedWorker: ...


class RequestTrace:
    """A request under way. Made by :meth:`Tracer.begin`."""

    def __init__(self, trace_id: bytes) -> None:
        #: As in W3C's trace context.
        self.id = trace_id
        self.began = trio.current_time()
        self.works: list[TracedWork] = []
        self.phases: list[Phase] = []
        #: Work frames beyond what a trace holds.
        self.unnoted = 0
        #: Stage -> what it has told so far, and how much it had dropped.
        self.records: dict[str, list[WorkRecord]] = {}
        self.dropped: dict[str, int] = {}

    @contextmanager
    def of(self, session: TracedSession) -> Iterator[None]:
        """What the session does in this block belongs to the request."""
        self.follow(session)
        try:
            yield
        finally:
            self.leave(session)

    def follow(self, session: TracedSession) -> None:
        """What the session does from now on belongs to the request."""
        session.traced.trace = self

    def leave(self, session: TracedSession) -> None:
        """What the session does from now on is its own."""
        if session.traced.trace is self:
            session.traced.trace = None

    def send(self, frame: frames.Tokens, send: Callable[[frames.Tokens], PendingReply]) -> PendingReply:
        """Send a work frame, and note when its reply is here."""
        key, now = frame.key, trio.current_time()
        reply = send(frame)
        if len(self.works) < _MOST:
            work = TracedWork(key.epoch, key.session, frame.seq, frame.expect.position, len(frame.tokens), now)
            self.works.append(work)
            reply.when_set(partial(work.answered, reply))
        else:
            self.unnoted += 1
        return reply

    def phase(self, name: str, began: float, ended: float) -> None:
        """Note a stretch of the request's life, in trio's time."""
        self.phases.append(Phase(name, began, ended))


@frozen
class StageTrace:
    """One stage's part of a trace."""

    address: str
    layers: LayerRange
    #: How its clock stands to this side's; None when it could not be asked.
    clock: ClockOffset | None
    #: Its records, in its own time.
    records: tuple[WorkRecord, ...]
    #: Records of the pipeline that it had dropped.
    dropped: int
    #: Why it told nothing, or not all.
    problem: str | None = None


@frozen
class Trace:
    """A request that has ended. Times are this side's, in trio's seconds; those of stages' records are the stages' own."""

    id: bytes
    began: float
    ended: float
    works: Sequence[TracedWork]
    phases: Sequence[Phase]
    #: Head first.
    stages: Sequence[StageTrace]
    #: Work frames beyond what a trace holds.
    unnoted: int = 0


class Tracer:
    """Traces of one pipeline's requests; see :attr:`Pipeline.tracer`."""

    def __init__(self, client: RouteClient) -> None:
        self._client = client
        #: Several may be of one trace: whoever asks may ask twice in it.
        self._open: list[RequestTrace] = []
        self._asking = trio.Lock()

    def begin(self, trace_id: bytes | None = None) -> RequestTrace:
        """Begin to trace a request, under an id of 16 bytes that it has already, or a new one."""
        trace = RequestTrace(secrets.token_bytes(16) if trace_id is None else trace_id)
        self._open.append(trace)
        return trace

    def drop(self, trace: RequestTrace) -> None:
        """Nobody wants to know any more."""
        if trace in self._open:
            self._open.remove(trace)

    async def finish(self, trace: RequestTrace, seconds: float = 5.0) -> Trace:
        """Ask every stage of the present route what it noted of a request that has ended.

        A stage that does not answer within ``seconds`` is told of with the reason, and its part is missing.
        """
        ended = trio.current_time()
        ours = {(work.epoch, work.session, work.seq) for work in trace.works}
        try:
            stages = await self.collect(seconds)
        finally:
            self.drop(trace)
        return Trace(
            id=trace.id,
            began=trace.began,
            ended=ended,
            works=tuple(trace.works),
            phases=tuple(trace.phases),
            stages=tuple(
                StageTrace(
                    address=ref.address,
                    layers=ref.layers,
                    clock=told.clock,
                    records=tuple(
                        record
                        for record in trace.records.get(ref.address, ())
                        if (record.epoch, record.session, record.seq) in ours
                    ),
                    dropped=trace.dropped.get(ref.address, 0),
                    problem=told.problem,
                )
                for ref, told in stages
            ),
            unnoted=trace.unnoted,
        )

    async def collect(self, seconds: float = 5.0) -> list[tuple[StageRef, _Told]]:
        """Take what stages have noted by now into the traces that it belongs to, so that they need not keep it for long."""
        async with self._asking:
            stages = [(ref, _Told()) for ref in self._client.route.stages]
            async with open_nursery() as nursery:
                for ref, told in stages:
                    nursery.start_soon(self._ask, ref.address, told, seconds)
            return stages

    async def _ask(self, address: str, told: _Told, seconds: float) -> None:
        told.problem = f"no answer within {seconds:g} s"
        with trio.move_on_after(seconds):
            try:
                told.clock = await compare_clocks(self._client.control_link(address))
                more = True
                while more:
                    more = await self._take(address, seconds)
                told.problem = None
            except DgrError as error:
                told.problem = str(error)

    async def _take(self, address: str, seconds: float) -> bool:
        report = await self._client.ask_stage(
            address, lambda seq: frames.QueryTrace(self._client.route_id, seq), frames.TraceReport, seconds
        )
        for trace in self._open:
            trace.dropped[address] = trace.dropped.get(address, 0) + report.dropped
            held = trace.records.setdefault(address, [])
            held += [record for record in report.records if record.trace == trace.id][: _MOST - len(held)]
        return report.more


@define
class _Told:
    """What a stage said when it was asked."""

    clock: ClockOffset | None = None
    problem: str | None = None
