"""Towards one peer, who may be gone or hostile: what becomes of it concerns nobody else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import trio

from dgr.errors import WireError
from dgr.protocol.states import EpochState
from dgr.stage.supervisor import EpochSupervisor
from dgr.wire import frames
from dgr.wire.frames import Miss
from dgr.wire.links import Link

__all__ = ["AwaitedEpochs", "SessionRequest", "answer_stranger", "close", "confined", "grant", "hand_over", "tell"]

_log = logging.getLogger("dgr.shard")

#: What a pipeline asks of one of its sessions.
SessionRequest: TypeAlias = frames.Open | frames.Fork | frames.Close | frames.QueryState | frames.Tokens | frames.Cancel

#: Answers that may wait on a link when it is asked for a long one.
_UNREAD = 64
#: Waits for epochs that no pipeline has fenced here yet; more is a flood.
_AWAITING = 1024


def tell(link: Link, report: frames.LoadReport | frames.TraceReport) -> None:
    """Answer with what may be long. Raises :class:`WireError` when the other side asks and does not read."""
    if link.backlog > _UNREAD:
        raise WireError(
            f"{link.backlog} answers wait on the link; a pipeline reads a report before it asks for the next"
        )
    link.send_nowait(report)


def answer_stranger(link: Link, frame: SessionRequest) -> None:
    """A route session that is not known here holds nothing here."""
    match frame:
        case frames.Close():
            link.send_nowait(frames.Closed(frame.key, frame.seq, 0))
        case frames.Tokens() | frames.Open() | frames.Fork() | frames.QueryState():
            link.send_nowait(frames.CacheMiss(frame.key, frame.seq, Miss.UNKNOWN, 0))


class AwaitedEpochs:
    """Previous stages that wait until an epoch is admitted here.

    A pipeline that went away between its fences of the two never fences this one: nobody waits for longer than ``patience``
    seconds.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        #: Their links, and since when, by route, epoch and the stage's name; the oldest first.
        self._links: dict[tuple[bytes, int, str], tuple[Link, float]] = {}

    def __len__(self) -> int:
        oldest = trio.current_time() - self._patience
        while self._links and next(iter(self._links.values()))[1] < oldest:
            del self._links[next(iter(self._links))]
        return len(self._links)

    def wait(self, link: Link, peer: str, frame: frames.AwaitReady, supervisor: EpochSupervisor | None) -> None:
        """``peer`` asks to be told once its epoch is admitted. Raises :class:`WireError` for a flood."""
        if supervisor is not None and supervisor.epoch > frame.epoch:
            return  # that epoch is over here, and the pipeline knows
        if supervisor is not None and supervisor.epoch == frame.epoch and supervisor.state is EpochState.LIVE:
            if supervisor.predecessor == peer:
                _say_ready(link, supervisor.route, supervisor.epoch)
            # else: the route is at fault, and others share the link; the fence that waits will say so
        elif len(self) >= _AWAITING:
            raise WireError(f"{_AWAITING} stages wait for epochs that were never fenced here")
        else:
            self._links.pop((frame.route, frame.epoch, peer), None)
            self._links[frame.route, frame.epoch, peer] = link, trio.current_time()

    def admitted(self, supervisor: EpochSupervisor) -> None:
        """Tell a stage that waits for it that an epoch is admitted."""
        link, _since = self._links.pop((supervisor.route, supervisor.epoch, supervisor.predecessor), (None, 0.0))
        if link is not None:
            _say_ready(link, supervisor.route, supervisor.epoch)
        self.forget(supervisor)

    def forget(self, supervisor: EpochSupervisor) -> None:
        """Its epochs up to the present one will never be admitted here any more."""
        for wait in [wait for wait in self._links if wait[0] == supervisor.route and wait[1] <= supervisor.epoch]:
            del self._links[wait]

    def left(self, link: Link) -> None:
        """Whoever waits on a link has gone."""
        self._links = {wait: waiting for wait, waiting in self._links.items() if waiting[0] is not link}


def _say_ready(link: Link, route: bytes, epoch: int) -> None:
    """Tell the stage before, if it is still there, that an epoch is admitted."""
    try:
        link.send_nowait(frames.Ready(route, epoch))
    except WireError:
        # The stage before is gone; its pipeline fences anew, and it asks again then.
        return


def grant(link: Link, size: int) -> None:
    """Give credit back to a sender, if it is still there."""
    try:
        link.grant(size)
    except WireError:
        # The sender is gone or does not read; its link ends, and the session that took the payload lives on.
        return


@contextmanager
def confined(what: str) -> Iterator[None]:
    """A defect of ours ends what serves one peer, and nothing else."""
    try:
        yield
    except Exception:
        _log.exception("%s ends by a defect; everything else goes on. Please report this", what)


async def close(link: Link) -> None:
    """Nobody reads the link any more: the other side must not wait for what will never come."""
    with trio.CancelScope(shield=True):
        await link.aclose()


def _nothing() -> None:
    """A frame without payload takes no credit."""


def hand_over(
    supervisor: EpochSupervisor,
    frame: SessionRequest,
    payload: memoryview | None,
) -> None:
    """Give a route session what its pipeline asks of one of its sessions."""
    match frame:
        case frames.Tokens():
            supervisor.work(frame, payload, _nothing)
        case frames.Cancel():
            supervisor.cancel(frame)
        case _:
            supervisor.request(frame)
