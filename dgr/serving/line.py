"""The line in front of a server's sequence slots: bounded, first come first served."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import trio
from attrs import define, field

from dgr.errors import InputError, QueueFull

__all__ = ["Line", "Place"]

#: What a client is told to wait at least and at most, seconds: a guess beyond a minute helps nobody.
_LEAST_WAIT, _MOST_WAIT = 1.0, 60.0
#: Weight of the newest request in the mean time that a slot is held.
_NEWEST = 0.2


@define(eq=False)
class Place:
    """One choice's place in a :class:`Line`."""

    #: Prompt tokens.
    tokens: int
    #: Set when a slot is its own.
    turn: trio.Event = field(factory=trio.Event)
    #: When the turn came, in trio's time.
    since: float = math.nan


class Line:
    """Who holds a slot and who waits for one. Entering and leaving never wait, so no choice is between the two."""

    def __init__(self, slots: int, max_waiting: int, max_waiting_tokens: int) -> None:
        self.slots = slots
        self.running = 0
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._waiting: deque[Place] = deque()
        self._mean_hold: float | None = None
        self._empty = trio.Event()
        self._empty.set()

    @property
    def waiting(self) -> int:
        """Choices that wait; a request is one, or as many as it asks for."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the choices that wait."""
        return sum(place.tokens for place in self._waiting)

    def enter(self, tokens: int) -> Place:
        """Take a place. Raises :class:`~dgr.errors.QueueFull` at once when as many wait as may."""
        place = Place(tokens)
        if self.running == self.slots:
            self._refuse_beyond_bounds(tokens)
        self._waiting.append(place)
        self._empty = trio.Event() if self._empty.is_set() else self._empty
        self._promote()
        return place

    def refuse_more_than_ever_fits(self, tokens: Sequence[int]) -> None:
        """Refuse choices that come together, of so many prompt tokens each, when not even an empty line could take all.

        Raises :class:`~dgr.errors.InputError` with the bound.
        """
        waiting = tokens[self.slots :]
        if len(waiting) > self._max_waiting:
            raise InputError(
                f"{len(tokens)} choices are asked for at once, and {self.slots + self._max_waiting} are the most that this"
                f" server can take: {self.slots} are answered and {self._max_waiting} may wait; ask for fewer"
            )
        if len(waiting) > 1 and sum(waiting) > self._max_waiting_tokens:
            raise InputError(
                f"{len(tokens)} choices are asked for at once, {self.slots} are answered and the others would wait with"
                f" {sum(waiting)} prompt tokens, of which {self._max_waiting_tokens} may wait; ask for fewer"
            )

    def _refuse_beyond_bounds(self, tokens: int) -> None:
        held, waiting = self.waiting_tokens, self.waiting
        if waiting >= self._max_waiting:
            why = f"{waiting} choices wait, and no more than {self._max_waiting} may"
        elif waiting and held + tokens > self._max_waiting_tokens:  # one alone may be as long as the context
            why = f"{held} prompt tokens wait; with {tokens} more they would be above {self._max_waiting_tokens}"
        else:
            return
        wait = self.expected_wait()
        raise QueueFull(f"the server is full: {why}; try again in {wait:.0f} s", wait)

    def expected_wait(self) -> float:
        """A guess at the seconds until a new request would have its turn."""
        rounds = (self.waiting + 1) / self.slots
        return min(max(rounds * (self._mean_hold or _LEAST_WAIT), _LEAST_WAIT), _MOST_WAIT)

    def leave(self, place: Place) -> None:
        """Give a place back, waiting or not."""
        if place.turn.is_set():
            self.running -= 1
            held = trio.current_time() - place.since
            before = held if self._mean_hold is None else self._mean_hold
            self._mean_hold = before + _NEWEST * (held - before)
        else:
            self._waiting.remove(place)
        self._promote()
        if not self.running and not self._waiting:
            self._empty.set()

    def _promote(self) -> None:
        while self._waiting and self.running < self.slots:
            place = self._waiting.popleft()
            self.running += 1
            place.since = trio.current_time()
            place.turn.set()

    async def wait_empty(self) -> None:
        """Wait until nobody holds a place."""
        while self.running or self._waiting:
            await self._empty.wait()
