"""Responses that end when their client leaves: whole ones, and server-sent events with a sign of life."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from dgr.serving.api.errors import ApiError
from dgr.serving.connections.bodies import Body
from dgr.serving.http.keys import Receive, Send
from dgr.wire.nurseries import open_nursery

__all__ = ["ClientLeft", "Emit", "data_event", "read_body", "send_events", "send_whole", "while_connected"]

T = TypeVar("T")

#: Events made and not sent yet, for one client; then its work waits.
_AHEAD = 8

#: Seconds for a request's body.
_BODY = 120.0

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]

#: Takes an event and waits until there is room for it.
Emit = Callable[[bytes], Awaitable[None]]


class ClientLeft(Exception):
    """The client closed its connection; nobody reads an answer."""


def data_event(data: bytes, name: str | None = None) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n" if name is None else b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


async def read_body(receive: Receive, most: int, body: Body) -> bytes:
    """The request's body.

    Raises :class:`ApiError` 413 beyond ``most`` bytes, 408 when it is slow and 503 when it gave way; :class:`ClientLeft`.
    """
    with trio.move_on_after(_BODY), body.reading:
        read = await _read_body(receive, most, body)
        body.is_whole = True
        return read
    if body.gave_way:
        message = (
            "larger bodies of other requests are coming than this server holds at once; this one was coming for longest"
        )
        raise ApiError(503, message, kind="server_error", code="service_unavailable", retry_after=1)
    raise ApiError(408, f"the body did not come within {_BODY:g} s", code="request_timeout")


async def _read_body(receive: Receive, most: int, body: Body) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise ApiError(
                413, f"the body is larger than {most} bytes, the most this server reads", code="body_too_large"
            )
        parts.append(part)
        body.grow(len(part))
        if not message.get("more_body", False):
            return b"".join(parts)


async def while_connected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Do ``work``; cancel it when the client leaves, and raise :class:`ClientLeft`."""
    done: list[T] = []
    async with open_nursery() as nursery:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                continue
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        done.append(await work())
        nursery.cancel_scope.cancel()
    if not done:
        raise ClientLeft
    return done[0]


async def send_whole(send: Send, body: bytes) -> None:
    """A JSON response."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_events(
    receive: Receive,
    send: Send,
    produce: Callable[[Emit], Awaitable[None]],
    sign_of_life: Callable[[], bytes],
    every: float,
) -> None:
    """Server-sent events from ``produce`` until it returns; ``sign_of_life()`` at once and after ``every`` quiet seconds.

    ``every`` is infinity: no sign of life at all.

    Raises :class:`ClientLeft` when the client goes before the end; ``produce`` is cancelled then.
    """
    await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})

    async def body(data: bytes, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})

    complete = False

    async def run() -> None:
        nonlocal complete
        outgoing, incoming = trio.open_memory_channel[bytes](_AHEAD)

        async def make() -> None:
            async with outgoing:
                await produce(outgoing.send)

        async with open_nursery() as nursery:
            nursery.start_soon(make)
            if every < math.inf:
                await body(sign_of_life())
            while True:
                event: bytes | None = None
                with trio.move_on_after(every):
                    try:
                        event = await incoming.receive()
                    except trio.EndOfChannel:
                        break
                await body(sign_of_life() if event is None else event)
        complete = True  # from here on the connection's end is the server's own
        await body(b"", more=False)

    try:
        await while_connected(receive, run)
    except ClientLeft:
        if not complete:
            raise
