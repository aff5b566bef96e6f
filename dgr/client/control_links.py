"""A client's control links: one to each stage of its route, one reader task each, and the replies awaited on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

import trio
from attrs import define

from dgr.client.replies import (
    ControlReply,
    ControlRequest,
    FenceReply,
    OccupancyReply,
    PendingReplies,
    PendingReply,
    StageQuery,
    StageReply,
    control_error,
)
from dgr.core.route import Route, StageRef
from dgr.core.values import StageIdentity
from dgr.errors import DgrError, InvalidRoute, LinkBroken, StageDraining, WireError
from dgr.protocol.identity import check_alike, check_neighbours
from dgr.wire import frames
from dgr.wire.framing import Received
from dgr.wire.links import Link
from dgr.wire.nurseries import open_nursery

__all__ = ["Connector", "ControlLink", "ControlLinks", "Report", "blamed"]

Report = TypeVar("Report", frames.LoadReport, frames.TraceReport)


class FaultHandler(Protocol):
    """Told of a failure: of a stage, by its address, or of the way from one to the next, by both."""

    def __call__(self, error: DgrError, *what: str) -> None: ...


class Connector(Protocol):
    """How a client reaches a stage."""

    def __call__(self, address: str) -> AbstractAsyncContextManager[tuple[Link, StageIdentity]]: ...


@define(eq=False)
class ControlLink:
    """The link to one stage, and what the stage said of itself."""

    ref: StageRef
    link: Link
    description: StageIdentity
    scope: trio.CancelScope
    #: Why the link ended; None while it lives.
    lost: str | None = None


class ControlLinks:
    """The control links of the present route. What comes on them is handed to ``on_frame``, in the reader's task."""

    def __init__(
        self,
        connect: Connector,
        nursery: trio.Nursery,
        *,
        on_frame: Callable[[str, Received], None],
        on_loss: Callable[[str, str], None],
    ) -> None:
        #: By the stage's address.
        self.stages: dict[str, ControlLink] = {}
        #: Every reply that somebody waits for, whatever it replies to.
        self.replies = PendingReplies()
        #: What all stages share; set by the first epoch, and later routes must keep to it.
        self.reference: StageIdentity | None = None
        #: Numbers of questions about stages themselves.
        self._queries = itertools.count()
        self._connect = connect
        self._nursery = nursery
        self._on_frame = on_frame
        self._on_loss = on_loss

    async def reach(
        self, route: Route, on_fault: FaultHandler, *, asks_within: float | None = None
    ) -> dict[str, ControlLink]:
        """Connect to the stages that are not connected yet, and check that all of them fit together.

        ``on_fault`` is told which of them cannot be had, or does not fit. ``asks_within``: seconds in which each of the new
        ones is to say that it is not being drained; without it that is found out when the route is fenced.
        """
        stages: dict[str, ControlLink] = {}
        try:
            for ref in route.stages:
                known = self.stages.get(ref.address)
                if known is None or known.lost is not None:
                    try:
                        known = stages[ref.address] = await self._nursery.start(self._hold, ref)
                        if asks_within is not None:
                            await self._refuse_draining(known, asks_within)
                    except DgrError as error:
                        on_fault(error, ref.address)
                        raise
                stages[ref.address] = known
            _check_fit(route, [stages[ref.address].description for ref in route.stages], self.reference, on_fault)
        except BaseException:
            for address, stage in stages.items():
                if self.stages.get(address) is not stage:
                    stage.scope.cancel()
            raise
        return stages

    async def _refuse_draining(self, stage: ControlLink, seconds: float) -> None:
        """Raises :class:`StageDraining`, and :class:`WireError` when the stage does not say."""
        address = stage.ref.address
        reply = self.replies.register(OccupancyReply(address))
        try:
            stage.link.send_nowait(frames.Drain(None))
            frame = (await reply.wait(seconds, f"Drain from stage {address}")).frame
        finally:
            self.replies.discard(OccupancyReply(address))
        if isinstance(frame, frames.Occupancy) and frame.draining:
            raise StageDraining(f"stage {address} is being drained too")

    async def fence(
        self, route_id: bytes, epoch: int, route: Route, seconds: float, on_fault: FaultHandler
    ) -> list[frames.Fenced]:
        """Have every stage of ``route`` fence an epoch, each within ``seconds``; ``on_fault`` is told what failed."""
        replies: list[tuple[str, str, PendingReply]] = []
        for index, ref in enumerate(route.stages):
            before, after = route.predecessor(index), route.successor(index)
            ring = route.other_end(index)
            fence = frames.Fence(route_id, epoch, ref.address, before, after, len(route.stages), ring)
            replies.append((ref.address, after, self.request(FenceReply(ref.address, epoch), fence)))
        fenced: list[frames.Fenced] = []
        failures: list[DgrError] = []

        async def hear(address: str, after: str, reply: PendingReply) -> None:
            at = [address]
            try:
                frame = (await reply.wait(seconds, f"Fence({epoch}) from {address}")).frame
            except DgrError as error:
                failures.append(error)
            else:
                if isinstance(frame, frames.Fenced):
                    fenced.append(frame)
                    return
                if isinstance(frame, frames.Refused) and frame.code is frames.Refusal.SUCCESSOR:
                    at.append(after)
                failures.append(control_error(address, frame))
            on_fault(failures[-1], *at)
            nursery.cancel_scope.cancel()

        # All at once: stages wait for the ones behind them, and only the one that fails knows why.
        async with open_nursery() as nursery:
            for reply in replies:
                nursery.start_soon(hear, *reply)
        await trio.lowlevel.checkpoint_if_cancelled()  # then links end because we leave, and not the other way round
        if failures:
            raise failures[0]
        for ref in route.stages:
            if (lost := self.stages[ref.address].lost) is not None:  # it fenced, and died before the others had
                on_fault(LinkBroken(lost), ref.address)
                raise LinkBroken(lost)
        if self.reference is None:
            self.reference = self.stages[route.stages[0].address].description
        return fenced

    async def _hold(
        self, ref: StageRef, *, task_status: trio.TaskStatus[ControlLink] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Hold the control link to a stage and read it."""
        asked = OccupancyReply(ref.address)
        with trio.CancelScope() as scope:
            async with self._connect(ref.address) as (link, description):
                stage = ControlLink(ref, link, description, scope)
                task_status.started(stage)
                why = "closed by the stage"
                try:
                    while batch := await link.receive():
                        for received in batch:
                            if isinstance(received.frame, frames.Occupancy) and self.replies.resolve(asked, received):
                                continue
                            self._on_frame(ref.address, received)
                except WireError as error:
                    why = str(error)
                except trio.Cancelled:
                    # Our own end, no loss; but nobody reads this link any more, so nobody may wait for a reply on it.
                    self._end(stage, "its link was closed on this side")
                    raise
                if self._end(stage, why):
                    self._on_loss(ref.address, f"stage {ref.address}: {why}")

    def _end(self, stage: ControlLink, why: str) -> bool:
        """Fail what waits for a stage; returns whether the present route still counted on it."""
        address = stage.ref.address
        stage.lost = f"stage {address}: {why}"
        self.replies.resolve(OccupancyReply(address), LinkBroken(stage.lost))  # asked before it was of the route
        if self.stages.get(address) is not stage:
            return False
        self.replies.fail(LinkBroken(stage.lost), stage=address)
        return True

    async def ask(
        self, address: str, query: Callable[[int], StageQuery], answer: type[Report], seconds: float
    ) -> Report:
        """What a stage tells of itself. ``query(seq)`` makes the question.

        Raises :class:`WireError`, :class:`DeadlineExceeded`, :class:`SessionLost` when the route changes meanwhile.
        """
        key = StageReply(address, next(self._queries))
        reply = self.request(key, query(key.seq))
        try:
            frame = (await reply.wait(seconds, f"{answer.__name__} from stage {address}")).frame
        finally:
            self.replies.discard(key)
        if not isinstance(frame, answer):
            raise WireError(f"stage {address} replied with {type(frame).__name__}, and not with {answer.__name__}")
        return frame

    def request(
        self, key: FenceReply | ControlReply | StageReply, frame: frames.Fence | ControlRequest | StageQuery
    ) -> PendingReply:
        """Send a request to a stage; one that cannot be sent has its error for a reply, and others are asked all the same."""
        reply = self.replies.register(key)
        stage = self.stages[key.stage]
        try:
            if stage.lost is not None:
                raise LinkBroken(stage.lost)
            stage.link.send_nowait(frame)
        except WireError as error:
            self.replies.resolve(key, error)
        return reply


def blamed(route: Route, stage: str, frame: frames.Refused) -> tuple[str, ...]:
    """What failed where a stage says that the route is lost: itself, or the way from it to the next one."""
    if frame.code is not frames.Refusal.SUCCESSOR:
        return (stage,)
    return stage, route.successor([ref.address for ref in route.stages].index(stage))


def _check_fit(
    route: Route,
    identities: Sequence[StageIdentity],
    reference: StageIdentity | None,
    on_fault: FaultHandler,
) -> None:
    """Refuse stages that do not belong together, or not to the route's first epoch, naming both values."""
    route.check(identities[0].n_layers)
    at = route.stages[0].address
    try:
        for ref, identity in zip(route.stages, identities, strict=True):
            at = ref.address
            if identity.layers != ref.layers:
                raise InvalidRoute(f"stage {ref.address} owns layers {identity.layers}; the route says {ref.layers}")
            check_alike(f"stage {ref.address}", identity, reference or identities[0])
        for index, (before, after) in enumerate(itertools.pairwise(identities)):
            at = route.stages[index + 1].address
            check_neighbours(before, after)
    except InvalidRoute as error:
        on_fault(error, at)
        raise
