"""Two clocks, compared over the link between their hosts: each answer to a question for the time was given between its
question and its coming. Taken to be given in the middle it is wrong by half of the round trip at most, and that is the bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

import trio
from attrs import frozen

from dgr.wire.frames import Ping

__all__ = ["ClockOffset", "ClockQuestions", "compare_clocks"]

#: Nonces of Pings that ask for the time.
_nonces = itertools.count(2**62)


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


class _Question:
    """A question for the time, and its answer."""

    def __init__(self, asked: float) -> None:
        self.asked = asked
        self.answered = trio.Event()
        self.found: ClockOffset | None = None


class ClockQuestions:
    """Questions for the time that are under way on one link."""

    def __init__(self) -> None:
        self._open: dict[int, _Question] = {}

    def answer(self, nonce: int, there: float, now: float) -> bool:
        """The other clock said ``there``, which came at ``now``; False when nobody had asked."""
        question = self._open.pop(nonce, None)
        if question is None:
            return False
        question.found = ClockOffset(there - (question.asked + now) / 2, (now - question.asked) / 2)
        question.answered.set()
        return True

    async def ask(self, send: Callable[[Ping], None], now: float) -> ClockOffset:
        """One question, and how the clocks stand by its answer."""
        nonce = next(_nonces)
        question = self._open[nonce] = _Question(now)
        try:
            send(Ping(nonce))
            await question.answered.wait()
        finally:
            self._open.pop(nonce, None)
        assert question.found is not None
        return question.found


class AskedLink(Protocol):
    """What a comparison needs of a link."""

    clock: Callable[[], float]
    clock_questions: ClockQuestions

    def send_nowait(self, frame: Ping) -> None: ...


async def compare_clocks(link: AskedLink, rounds: int = 8) -> ClockOffset:
    """How the clock of the other side stands to this one's, by the shortest of some round trips, one after another.

    Somebody must be iterating over the link. It waits for a silent peer: give it a deadline. Raises
    :class:`~dgr.errors.WireError` on a link that has ended.
    """
    found = [await link.clock_questions.ask(link.send_nowait, link.clock()) for _ in range(rounds)]
    return min(found, key=lambda one: one.error)
