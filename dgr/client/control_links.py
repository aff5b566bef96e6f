"""The switchboard: a pipeline's control links, and who waits for which answer on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import trio

from dgr.client.replies import Answer
from dgr.core.route import Route, StageRef
from dgr.engine.base import EngineDescription
from dgr.errors import DgrError, InvalidRoute, LinkBroken, WireError
from dgr.protocol.identity import check_alike, check_neighbours, identity_of
from dgr.wire import frames
from dgr.wire.framing import Received
from dgr.wire.links import Link

__all__ = ["Connector", "StageLink", "Switchboard"]


class Connector(Protocol):
    """How a pipeline reaches a stage."""

    def __call__(self, address: str) -> AbstractAsyncContextManager[tuple[Link, EngineDescription]]: ...


class StageLink:
    """A stage of the present route: its link and what it said of itself."""

    def __init__(self, ref: StageRef, link: Link, description: EngineDescription, scope: trio.CancelScope) -> None:
        self.ref = ref
        self.link = link
        self.description = description
        self.scope = scope
        #: Why its control link ended; None while it lives.
        self.lost: str | None = None


class Switchboard:
    """Holds one control link per stage of a route. One reader task each; answers are handed to whoever waits for them."""

    def __init__(
        self,
        connect: Connector,
        *,
        on_answer: Callable[[str, Received], None],
        on_loss: Callable[[StageLink, str], None],
    ) -> None:
        self.stages: dict[str, StageLink] = {}
        #: What all stages share; set by the first epoch, and later routes must keep to it.
        self.reference: frames.Identity | None = None
        #: Where the readers run; set by the pipeline for as long as it runs.
        self.nursery: trio.Nursery | None = None
        self._connect = connect
        self._on_answer = on_answer
        self._on_loss = on_loss
        self._answers: dict[tuple[str, int, int], Answer] = {}

    async def reach(self, route: Route) -> dict[str, StageLink]:
        """Connect to the stages that are not connected yet, and check that all of them fit together."""
        assert self.nursery is not None
        stages: dict[str, StageLink] = {}
        try:
            for ref in route.stages:
                known = self.stages.get(ref.address)
                if known is None or known.lost is not None:
                    known = await self.nursery.start(self._run_stage, ref)
                stages[ref.address] = known
            _check_fit(route, [stages[ref.address].description for ref in route.stages], self.reference)
        except BaseException:
            for address, stage in stages.items():
                if self.stages.get(address) is not stage:
                    stage.scope.cancel()
            raise
        return stages

    async def _run_stage(
        self, ref: StageRef, *, task_status: trio.TaskStatus[StageLink] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Hold the control link to a stage and read it."""
        with trio.CancelScope() as scope:
            async with self._connect(ref.address) as (link, description):
                stage = StageLink(ref, link, description, scope)
                task_status.started(stage)
                why = "closed by the stage"
                try:
                    async for received in link:
                        self._on_answer(ref.address, received)
                except WireError as error:
                    why = str(error)
                except trio.Cancelled:
                    # Our own end: nobody reads this link any more, so nobody may wait for an answer on it.
                    stage.lost = f"stage {ref.address}: its link was closed on this side"
                    if self.stages.get(ref.address) is stage:
                        self.fail_waits(LinkBroken(stage.lost), of=ref.address)
                    raise
                stage.lost = f"stage {ref.address}: {why}"
                if self.stages.get(ref.address) is stage:
                    self._on_loss(stage, stage.lost)

    def expect(self, address: str, session: int, seq: int) -> Answer:
        """Announce a wait for a stage's answer to a request (session 0 and the epoch: a fence)."""
        answer = Answer()
        self._answers[address, session, seq] = answer
        return answer

    def forget(self, address: str, session: int, seq: int) -> None:
        """Nobody waits for that answer any more."""
        self._answers.pop((address, session, seq), None)

    def settle(self, wait: tuple[str, int, int], received: Received) -> bool:
        answer = self._answers.pop(wait, None)
        if answer is not None:
            answer.set(received)
        return answer is not None

    def fail_waits(self, error: DgrError, *, of: str | None = None) -> None:
        """Every wait for an answer, or for one of a stage, ends with an error."""
        for wait, answer in list(self._answers.items()):
            if of is None or wait[0] == of:
                del self._answers[wait]
                answer.set(error)

    def say(
        self, address: str, frame: frames.Fence | frames.Open | frames.Close | frames.Probe, answer: Answer
    ) -> None:
        """Send a request to a stage; one that cannot be sent is answered at once, and other stages are asked all the same."""
        stage = self.stages[address]
        if stage.lost is not None:
            answer.set(LinkBroken(stage.lost))
            return
        try:
            stage.link.send_nowait(frame)
        except WireError as error:
            answer.set(error)


def _check_fit(route: Route, descriptions: Sequence[EngineDescription], reference: frames.Identity | None) -> None:
    """Refuse stages that do not belong together, or not to the route's first epoch, naming both values."""
    route.check(descriptions[0].n_layers)
    identities = [identity_of(description) for description in descriptions]
    for ref, description, identity in zip(route.stages, descriptions, identities, strict=True):
        if description.layers != ref.layers:
            raise InvalidRoute(f"stage {ref.address} owns layers {description.layers}; the route says {ref.layers}")
        check_alike(f"stage {ref.address}", identity, reference or identities[0])
    for before, after in itertools.pairwise(identities):
        check_neighbours(before, after)
