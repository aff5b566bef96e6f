"""A prompt that several answers share: the first to have its turn evaluates it, and those that wait by then get copies."""

from __future__ import annotations

from collections import deque

import trio
from attrs import define, field

from dgr.errors import DgrError
from dgr.serving.sessions import KeptSession, SessionPool

__all__ = ["SharedPrompt"]


@define(eq=False)
class _Waiting:
    """An answer that waits for its copy."""

    told: trio.Event = field(factory=trio.Event)
    copy: KeptSession | None = None
    gone: bool = False


class SharedPrompt:
    """The choices of one request. Whoever gets no copy (it came later, or there was none to be had) evaluates for itself."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._is_under_way = False
        #: The session in which it is being evaluated.
        self.evaluating: KeptSession | None = None

    async def copy(self, pool: SessionPool) -> KeptSession | None:
        """A copy of what is being evaluated, once it is; None for a caller that has to, and that calls :meth:`end` then."""
        while self._is_under_way:
            place = _Waiting()
            self._waiting.append(place)
            try:
                await place.told.wait()
            except trio.Cancelled:
                place.gone = True
                if place.copy is not None:
                    pool.give_back(place.copy)
                raise
            if place.copy is not None:
                return place.copy
        self._is_under_way = True
        return None

    async def hand_out(self, kept: KeptSession, pool: SessionPool) -> None:
        """Copy a session that stands at the prompt's end, but for the last token, for everybody who waits."""
        while self._waiting:
            place = self._waiting.popleft()
            if place.gone:
                continue
            try:
                copy = await pool.branch(kept)
            except DgrError:  # no slot, or no stage that could copy: whoever waits finds out for itself
                self._waiting.append(place)
                return
            except BaseException:
                self._waiting.append(place)
                raise
            if place.gone:
                pool.give_back(copy)
            else:
                place.copy = copy
                place.told.set()

    def end(self) -> None:
        """Nobody evaluates it any more: the first of those that still wait does."""
        self._is_under_way, self.evaluating = False, None
        waiting, self._waiting = self._waiting, deque()
        for place in waiting:
            place.told.set()
