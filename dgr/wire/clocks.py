"""Two clocks, compared over the link between their hosts: each answer to a question for the time was given between its
question and its coming. Taken to be given in the middle it is wrong by half of the round trip at most, and that is the bound.
"""

from __future__ import annotations

import trio
from attrs import frozen

__all__ = ["ClockOffset", "ClockQuestion"]


@frozen
class ClockOffset:
    """How another clock stands to this one."""

    #: Seconds by which the other is ahead.
    offset: float
    #: Seconds by which that may be wrong, either way.
    error: float

    def here(self, there: float) -> float:
        """A time of the other clock on this one."""
        return there - self.offset


class ClockQuestion:
    """A question for the time, and its answer."""

    def __init__(self, asked: float) -> None:
        self._asked = asked
        self._answered = trio.Event()
        self._found: ClockOffset | None = None

    def answer(self, there: float, now: float) -> None:
        """The other clock said ``there``, which came at ``now``."""
        self._found = ClockOffset(there - (self._asked + now) / 2, (now - self._asked) / 2)
        self._answered.set()

    async def wait(self) -> ClockOffset:
        await self._answered.wait()
        assert self._found is not None
        return self._found
