"""A client's control links: one to each stage of its route, one reader task each, and the replies awaited on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import trio
from attrs import define

from dgr.client.replies import ControlReply, ControlRequest, FenceReply, PendingReplies, PendingReply
from dgr.core.route import Route, StageRef
from dgr.core.values import StageIdentity
from dgr.errors import InvalidRoute, LinkBroken, WireError
from dgr.protocol.identity import check_alike, check_neighbours
from dgr.wire import frames
from dgr.wire.framing import Received
from dgr.wire.links import Link

__all__ = ["Connector", "ControlLink", "ControlLinks"]


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
        on_loss: Callable[[str], None],
    ) -> None:
        #: By the stage's address.
        self.stages: dict[str, ControlLink] = {}
        #: Every reply that somebody waits for, whatever it replies to.
        self.replies = PendingReplies()
        #: What all stages share; set by the first epoch, and later routes must keep to it.
        self.reference: StageIdentity | None = None
        self._connect = connect
        self._nursery = nursery
        self._on_frame = on_frame
        self._on_loss = on_loss

    async def reach(self, route: Route) -> dict[str, ControlLink]:
        """Connect to the stages that are not connected yet, and check that all of them fit together."""
        stages: dict[str, ControlLink] = {}
        try:
            for ref in route.stages:
                known = self.stages.get(ref.address)
                if known is None or known.lost is not None:
                    known = await self._nursery.start(self._hold, ref)
                stages[ref.address] = known
            _check_fit(route, [stages[ref.address].description for ref in route.stages], self.reference)
        except BaseException:
            for address, stage in stages.items():
                if self.stages.get(address) is not stage:
                    stage.scope.cancel()
            raise
        return stages

    def keep_to(self, head: str) -> None:
        """Remember what the stages of the first route share; ``head`` is the address of one of them."""
        if self.reference is None:
            self.reference = self.stages[head].description

    async def _hold(
        self, ref: StageRef, *, task_status: trio.TaskStatus[ControlLink] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Hold the control link to a stage and read it."""
        with trio.CancelScope() as scope:
            async with self._connect(ref.address) as (link, description):
                stage = ControlLink(ref, link, description, scope)
                task_status.started(stage)
                why = "closed by the stage"
                try:
                    while batch := await link.receive():
                        for received in batch:
                            self._on_frame(ref.address, received)
                except WireError as error:
                    why = str(error)
                except trio.Cancelled:
                    # Our own end, no loss; but nobody reads this link any more, so nobody may wait for a reply on it.
                    self._end(stage, "its link was closed on this side")
                    raise
                if self._end(stage, why):
                    self._on_loss(f"stage {ref.address}: {why}")

    def _end(self, stage: ControlLink, why: str) -> bool:
        """Fail what waits for a stage; returns whether the present route still counted on it."""
        address = stage.ref.address
        stage.lost = f"stage {address}: {why}"
        if self.stages.get(address) is not stage:
            return False
        self.replies.fail(LinkBroken(stage.lost), stage=address)
        return True

    def request(self, key: FenceReply | ControlReply, frame: frames.Fence | ControlRequest) -> PendingReply:
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


def _check_fit(route: Route, identities: Sequence[StageIdentity], reference: StageIdentity | None) -> None:
    """Refuse stages that do not belong together, or not to the route's first epoch, naming both values."""
    route.check(identities[0].n_layers)
    for ref, identity in zip(route.stages, identities, strict=True):
        if identity.layers != ref.layers:
            raise InvalidRoute(f"stage {ref.address} owns layers {identity.layers}; the route says {ref.layers}")
        check_alike(f"stage {ref.address}", identity, reference or identities[0])
    for before, after in itertools.pairwise(identities):
        check_neighbours(before, after)
