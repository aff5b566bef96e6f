"""What a client says to the application that answers it: a little ahead, and never in the way of its leaving."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from anycorn import Config
from anycorn.task_group import TaskGroup
from anycorn.typing import (
    AppWrapper,
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
    HTTPDisconnectEvent,
    Scope,
)

__all__ = ["Applications", "Inbox"]

#: Parts of a body that an application has not asked for yet; then its client waits.
_AHEAD = 10
_LEFT = HTTPDisconnectEvent(type="http.disconnect")


class Inbox:
    """Messages of one request.

    anycorn's own queue takes the client's leaving, and the end of the answer, as one message more: where parts of a body fill
    it that nobody asks for, both wait for ever, and an application that ends its answer waits for itself.
    """

    def __init__(self) -> None:
        self._said: deque[ASGIReceiveEvent] = deque()
        self._is_over = False
        self._words, self._room = trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot()

    async def put(self, message: ASGIReceiveEvent) -> None:
        """Hand a message over; a part of a body waits for room. What comes after the end nobody reads."""
        if message["type"] == "http.disconnect":
            self.close()
        while len(self._said) >= _AHEAD and not self._is_over:
            await self._room.park()
        if not self._is_over:
            self._said.append(message)
            self._words.unpark_all()

    async def receive(self) -> ASGIReceiveEvent:
        """The next message; that the client left, once all that it said is told."""
        while not self._said:
            if self._is_over:
                return _LEFT
            await self._words.park()
        self._room.unpark()
        return self._said.popleft()

    def close(self) -> None:
        """Take nothing more: the client has left, or nobody asks any more."""
        self._is_over = True
        self._words.unpark_all()
        self._room.unpark_all()


class Applications(TaskGroup):
    """The tasks in which a connection's requests are answered."""

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Scope, send: Callable[[ASGISendEvent | None], Awaitable[None]]
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        """Answer a request; gives what takes its client's messages."""
        inbox = Inbox()

        async def answer(
            scope: Scope,
            receive: ASGIReceiveCallable,  # noqa: ARG001 (anycorn's queue)
            send: ASGISendCallable,
            sync_spawn: Callable[..., Any],
            call_soon: Callable[..., Any],
        ) -> None:
            try:
                await app(scope, inbox.receive, send, sync_spawn, call_soon)
            finally:
                inbox.close()

        await super().spawn_app(answer, config, scope, send)
        return inbox.put
