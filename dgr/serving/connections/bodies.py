"""Bodies of requests, which a server holds until they are understood: bounded in bytes, all of them together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

__all__ = ["Bodies", "Body"]


class Body:
    """Bytes of one request that have come. Made by :meth:`Bodies.held`."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.size = 0
        #: All of it has come.
        self.is_whole = False
        #: Others needed its room; it is read no further.
        self.gave_way = False
        #: Around the wait for its bytes.
        self.reading = trio.CancelScope()

    def grow(self, n_bytes: int) -> None:
        """Some more have come."""
        self.size += n_bytes
        self._bodies.make_room(self)

    def give_way(self) -> None:
        self.gave_way, self.size = True, 0
        self.reading.cancel()


class Bodies:
    """At most ``most`` bytes, but for one body alone: beyond them the one that has been coming for longest gives way."""

    def __init__(self, most: int) -> None:
        self._most = most
        #: Oldest first.
        self._held: list[Body] = []

    @property
    def size(self) -> int:
        """Bytes held."""
        return sum(body.size for body in self._held)

    @contextmanager
    def held(self) -> Iterator[Body]:
        """One more body, for the length of the block."""
        body = Body(self)
        self._held.append(body)
        try:
            yield body
        finally:
            self._held.remove(body)

    def make_room(self, growing: Body) -> None:
        while growing.size < self.size > self._most:
            coming = [body for body in self._held if body.size and not body.is_whole and body is not growing]
            (*coming, growing)[0].give_way()
