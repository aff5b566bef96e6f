"""Emptying a stage before it is maintained, and how occupied it is."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from dgr.errors import WireError
from dgr.protocol.states import EpochState
from dgr.stage.scheduler import Scheduler
from dgr.stage.session import SessionActor
from dgr.wire import frames
from dgr.wire.frames import Miss
from dgr.wire.links import Link

__all__ = ["DRAINING", "Draining"]

_log = logging.getLogger("dgr.shard")

#: Why a draining stage takes nobody new.
DRAINING = "this stage is being drained: it takes no new route sessions and no new sessions; use another one, or wait"
#: Seconds between two looks at sessions that may have come to rest.
_LOOK = 0.25
#: Seconds after its last work during which a session without an answer counts as being prefilled.
_RECENT = 5.0
_MOST_MS = 2**63 - 1


class DrainedShard(Protocol):
    """What there is to be drained."""

    scheduler: Scheduler

    def actors(self) -> list[SessionActor]: ...

    def epoch_states(self) -> list[EpochState]: ...

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: object) -> None: ...


class Draining:
    """Whether a stage is being drained: it takes nobody new, and sessions that rest are ended, their pipelines told why."""

    def __init__(self, shard: DrainedShard) -> None:
        self.is_on = False
        #: Control links that are served, told when it begins and when it is taken back.
        self.links: set[Link] = set()
        self._shard = shard
        self._idle = 0
        self._scope = trio.CancelScope()

    def take(self, frame: frames.Drain, link: Link) -> None:
        """Do what a client asks, and answer it. Whoever may open a control link may ask."""
        if frame.draining is not None:
            self._idle = frame.idle
            if frame.draining != self.is_on:
                self._turn(frame.draining)
                for one in self.links - {link}:
                    _tell(one, self.occupancy())
        _tell(link, self.occupancy())

    def begin(self, idle: int) -> None:
        """As a client would, from here."""
        self._idle = idle
        if not self.is_on:
            self._turn(True)
            for one in self.links:
                _tell(one, self.occupancy())

    def _turn(self, on: bool) -> None:
        self.is_on = on
        self._scope.cancel()
        _log.warning("the stage is being drained" if on else "the stage takes sessions again")
        if on:
            self._scope = trio.CancelScope()
            self._shard.start_soon(self._run, self._scope)

    def occupancy(self) -> frames.Occupancy:
        """Who is here, and what the engine does."""
        actors, steps = self._shard.actors(), self._shard.scheduler.statistics()
        since = trio.current_time() - _RECENT
        return frames.Occupancy(
            self.is_on,
            sum(state is EpochState.LIVE for state in self._shard.epoch_states()),
            len(actors),
            sum(not actor.answered and actor.last_active >= since for actor in actors),
            min(int(1000 * steps.running_seconds), _MOST_MS),
            min(int(1000 * steps.longest_seconds), _MOST_MS),
        )

    async def _run(self, scope: trio.CancelScope) -> None:
        """End sessions that have rested for long enough, until it is taken back."""
        with scope:
            while True:
                resting = trio.current_time() - self._idle
                for actor in self._shard.actors():
                    if actor.is_idle and actor.last_active <= resting:
                        actor.end(Miss.EVICTED)
                await trio.sleep(_LOOK)


def _tell(link: Link, frame: frames.Frame) -> None:
    try:
        link.send_nowait(frame)
    except WireError:
        return  # it is gone, and so is its interest
