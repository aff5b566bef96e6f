"""Links inside one process: a byte pipe between two ends, that carries what a socket would."""

from __future__ import annotations

import operator
from collections import deque
from typing import Protocol, runtime_checkable

import trio

__all__ = ["DirectTransport", "memory_transports"]

#: Bytes handed over at a time.
_CHUNK = 65536
#: Chunks of 64 KiB that a memory transport holds each way.
_MEMORY_CHUNKS = 16


@runtime_checkable
class DirectTransport(Protocol):
    """A transport that can take bytes, and give those that have come, without waiting."""

    @property
    def send_room(self) -> int:
        """Bytes that :meth:`send_nowait` takes now."""
        ...

    def send_nowait(self, data: bytes) -> None:
        """Hand over at most :attr:`send_room` bytes."""
        ...

    def receive_nowait(self) -> bytes:
        """Bytes that have come and were not taken; none when there are none, or nothing more will come."""
        ...


class _Pipe:
    """Bytes on their way from one end to the other, in chunks; bounded."""

    __slots__ = ("came", "chunks", "ended", "room", "unread")

    def __init__(self) -> None:
        self.chunks: deque[bytes] = deque()
        #: Whether the sending end was closed, and whether the receiving one was.
        self.ended = self.unread = False
        #: Set when the receiver has something to look at.
        self.came = trio.Event()
        #: Senders that wait until there are fewer chunks.
        self.room = trio.lowlevel.ParkingLot()

    @property
    def is_full(self) -> bool:
        return len(self.chunks) >= _MEMORY_CHUNKS

    def put(self, chunk: bytes) -> None:
        self.chunks.append(chunk)
        self.came.set()

    def take(self) -> bytes:
        self.room.unpark()
        return self.chunks.popleft()

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


class _MemoryTransport(trio.abc.Stream):
    """One end of an in-process byte pipe; bounded, ordered, no thread, no socket."""

    def __init__(self, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._rest = b""
        self._closed = False
        self._receiving = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.wait_send_all_might_not_block()
        pipe, view = self._outgoing, memoryview(data).cast("B")
        for start in range(0, view.nbytes, _CHUNK):
            while pipe.is_full and not self._closed and not pipe.unread:
                await pipe.room.park()
            self._check_open()
            if pipe.unread:
                raise trio.BrokenResourceError("the other end was closed")
            # A copy: the two ends share no buffer, exactly as over a socket.
            pipe.put(bytes(view[start : start + _CHUNK]))

    @property
    def send_room(self) -> int:
        """Bytes that :meth:`send_nowait` takes now; 0 when an end is closed, so that :meth:`send_all` tells why."""
        pipe = self._outgoing
        if self._closed or pipe.unread or pipe.room:
            return 0
        return (_MEMORY_CHUNKS - len(pipe.chunks)) * _CHUNK

    def send_nowait(self, data: bytes) -> None:
        """Hand over at most :attr:`send_room` bytes without a turn of the event loop."""
        for start in range(0, len(data), _CHUNK):
            self._outgoing.put(data[start : start + _CHUNK])

    def receive_nowait(self) -> bytes:
        """Bytes that have come and were not taken; none when there are none, or nothing more will come."""
        data, self._rest = self._rest, b""
        return data or (self._incoming.take() if self._incoming.chunks else b"")

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this end was closed")

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError(f"max_bytes is {max_bytes}, must be at least 1")
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this end")
        self._receiving = True
        try:
            await self._wait_for_bytes()
        finally:
            self._receiving = False
        self._check_open()
        data = self.receive_nowait()
        if max_bytes is not None and len(data) > max_bytes:
            data, self._rest = data[:max_bytes], data[max_bytes:]
        return data

    async def _wait_for_bytes(self) -> None:
        pipe = self._incoming
        if self._rest or pipe.chunks or pipe.ended or self._closed:
            await trio.lowlevel.checkpoint()
        while not (self._rest or pipe.chunks or pipe.ended or self._closed):
            pipe.came = trio.Event()
            await pipe.came.wait()

    async def aclose(self) -> None:
        self._closed = True
        self._rest = b""
        self._outgoing.end()
        self._incoming.drop()
        await trio.lowlevel.checkpoint()


def memory_transports() -> tuple[trio.abc.Stream, trio.abc.Stream]:
    """Two ends of an in-process transport."""
    one, other = _Pipe(), _Pipe()
    return _MemoryTransport(one, other), _MemoryTransport(other, one)
