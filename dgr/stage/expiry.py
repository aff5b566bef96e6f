"""Sessions that nobody uses end after a while: looked at together, so that work costs no timer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio

from dgr.stage.session import SessionActor
from dgr.wire.frames import Miss

__all__ = ["expire_idle"]

#: Seconds between two looks at least.
_PAUSE = 0.01


async def expire_idle(actors: Callable[[], Iterable[SessionActor]], idle: float) -> None:
    """End every session that has been idle for ``idle`` seconds; forever."""
    while True:
        now = trio.current_time()
        due = now + idle
        for actor in actors():
            if actor.is_idle and actor.last_active + idle <= now:
                actor.end(Miss.EXPIRED)
            elif actor.is_idle:
                due = min(due, actor.last_active + idle)
        await trio.sleep_until(max(due, now + _PAUSE))
