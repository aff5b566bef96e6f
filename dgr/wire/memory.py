"""Links inside one process: a byte pipe between two ends, that carries what a socket would.

A stream's user gets what it would get from a socket: nothing that one end holds can be changed by the other. A link hands
its payloads over as they are, because nobody changes them any more; nothing is copied then.
"""

from __future__ import annotations

import operator
from collections import deque

import trio

__all__ = ["MemoryTransport", "memory_transports"]

#: Bytes handed over at a time.
_CHUNK = 65536
#: Chunks of 64 KiB that a memory transport holds each way.
_MEMORY_CHUNKS = 16
#: Bytes that it holds each way before a link waits with the next packet.
_FULL = _MEMORY_CHUNKS * _CHUNK
#: Largest body that is copied: a view of a few rows would keep all the rows of its batch.
_COPIED = 65536


class _Pipe:
    """Bytes on their way from one end to the other, in chunks; bounded."""

    __slots__ = ("came", "chunks", "ended", "n_bytes", "room", "unread")

    def __init__(self) -> None:
        self.chunks: deque[bytes | memoryview] = deque()
        self.n_bytes = 0
        #: Whether the sending end was closed, and whether the receiving one was.
        self.ended = self.unread = False
        #: Set when the receiver has something to look at.
        self.came = trio.Event()
        #: Senders that wait until there is less.
        self.room = trio.lowlevel.ParkingLot()

    @property
    def is_full(self) -> bool:
        return len(self.chunks) >= _MEMORY_CHUNKS or self.n_bytes >= _FULL

    def put(self, chunk: bytes | memoryview) -> None:
        self.chunks.append(chunk)
        self.n_bytes += len(chunk)
        self.came.set()

    def take(self) -> bytes | memoryview:
        chunk = self.chunks.popleft()
        self.n_bytes -= len(chunk)
        self.room.unpark()
        return chunk

    def end(self) -> None:
        """Nothing more is sent; what is on its way arrives."""
        self.ended = True
        self.came.set()
        self.room.unpark_all()

    def drop(self) -> None:
        """Nobody reads any more."""
        self.unread = True
        self.chunks.clear()
        self.came.set()
        self.room.unpark_all()


class MemoryTransport(trio.abc.Stream):
    """One end of an in-process byte pipe; bounded, ordered, no thread, no socket."""

    def __init__(self, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._rest: bytes | memoryview = b""
        self._closed = False
        self._receiving = False

    # --- as any stream ---

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.wait_send_all_might_not_block()
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, _CHUNK):
            await self._wait_for_room()
            # A copy: the two ends share no buffer, exactly as over a socket.
            self._outgoing.put(bytes(view[start : start + _CHUNK]))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()
        self._check_open()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError(f"max_bytes is {max_bytes}, must be at least 1")
        data = await self.receive_lasting()
        if max_bytes is not None and len(data) > max_bytes:
            data, self._rest = data[:max_bytes], data[max_bytes:]
        return bytes(data)

    async def aclose(self) -> None:
        self._closed = True
        self._rest = b""
        self._outgoing.end()
        self._incoming.drop()
        await trio.lowlevel.checkpoint()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this end was closed")

    async def _wait_for_room(self) -> None:
        pipe = self._outgoing
        while pipe.is_full and not self._closed and not pipe.unread:
            await pipe.room.park()
        self._check_open()
        if pipe.unread:
            raise trio.BrokenResourceError("the other end was closed")

    # --- as a link uses it ---

    @property
    def has_room(self) -> bool:
        """Whether :meth:`hand_over` may be called now; False when an end is closed, so that :meth:`wait_room` tells why."""
        pipe = self._outgoing
        return not (self._closed or pipe.unread or pipe.room or pipe.is_full)

    async def wait_room(self) -> None:
        """Wait until there is room for a packet, of whatever size."""
        await trio.lowlevel.checkpoint()
        await self._wait_for_room()

    def hand_over(self, head: bytes, body: memoryview | None) -> None:
        """Pass a packet on, a long body as it is: it must not change any more."""
        if body is not None and body.nbytes <= _COPIED:
            head, body = b"".join((head, body)), None
        self._outgoing.put(head)
        if body is not None:
            self._outgoing.put(body.toreadonly())

    async def receive_lasting(self) -> bytes | memoryview:
        """The next bytes as they were handed over; nobody changes them any more. Empty at the end."""
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this end")
        self._receiving = True
        try:
            await self._wait_for_bytes()
        finally:
            self._receiving = False
        self._check_open()
        return self.receive_nowait()

    def receive_nowait(self) -> bytes | memoryview:
        """As :meth:`receive_lasting`; empty too when nothing has come."""
        data, self._rest = self._rest, b""
        return data or (self._incoming.take() if self._incoming.chunks else b"")

    async def _wait_for_bytes(self) -> None:
        pipe = self._incoming
        if self._rest or pipe.chunks or pipe.ended or self._closed:
            await trio.lowlevel.checkpoint()
        while not (self._rest or pipe.chunks or pipe.ended or self._closed):
            pipe.came = trio.Event()
            await pipe.came.wait()


def memory_transports() -> tuple[MemoryTransport, MemoryTransport]:
    """Two ends of an in-process transport."""
    one, other = _Pipe(), _Pipe()
    return MemoryTransport(one, other), MemoryTransport(other, one)
