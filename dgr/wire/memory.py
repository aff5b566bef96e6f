"""Links inside one process: a byte pipe between two ends, that carries what a socket would."""

from __future__ import annotations

import operator
from typing import Protocol, runtime_checkable

import trio

__all__ = ["DirectTransport", "memory_transports"]

#: Bytes handed over at a time.
_CHUNK = 65536
#: Chunks of 64 KiB that a memory transport holds each way.
_MEMORY_CHUNKS = 16


@runtime_checkable
class DirectTransport(Protocol):
    """A transport that can take bytes without waiting."""

    @property
    def send_room(self) -> int:
        """Bytes that :meth:`send_nowait` takes now."""
        ...

    def send_nowait(self, data: bytes) -> None:
        """Hand over at most :attr:`send_room` bytes."""
        ...


class _MemoryTransport(trio.abc.Stream):
    """One end of an in-process byte pipe; bounded, ordered, no thread, no socket."""

    def __init__(self, send: trio.MemorySendChannel[bytes], receive: trio.MemoryReceiveChannel[bytes]) -> None:
        self._send = send
        self._receive = receive
        self._rest = b""
        self._closed = False
        self._receiving = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self._closed or not len(data):
            await self.wait_send_all_might_not_block()
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, _CHUNK):
            # A copy: the two ends share no buffer, exactly as over a socket.
            await self._send.send(bytes(view[start : start + _CHUNK]))

    @property
    def send_room(self) -> int:
        """Bytes that :meth:`send_nowait` takes now; 0 when an end is closed, so that :meth:`send_all` tells why."""
        seen = self._send.statistics()
        if self._closed or not seen.open_receive_channels or seen.tasks_waiting_send:
            return 0
        return (_MEMORY_CHUNKS - seen.current_buffer_used) * _CHUNK

    def send_nowait(self, data: bytes) -> None:
        """Hand over at most :attr:`send_room` bytes without a turn of the event loop."""
        for start in range(0, len(data), _CHUNK):
            self._send.send_nowait(data[start : start + _CHUNK])

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise trio.ClosedResourceError("this end was closed")

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError(f"max_bytes is {max_bytes}, must be at least 1")
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this end")
        self._receiving = True
        try:
            return await self._receive_some(max_bytes)
        finally:
            self._receiving = False

    async def _receive_some(self, max_bytes: int | None) -> bytes:
        if self._rest and not self._closed:
            await trio.lowlevel.checkpoint()
        else:
            try:
                self._rest = await self._receive.receive()
            except trio.EndOfChannel:
                await trio.lowlevel.checkpoint()
                return b""
        limit = len(self._rest) if max_bytes is None else max_bytes
        data, self._rest = self._rest[:limit], self._rest[limit:]
        return data

    async def aclose(self) -> None:
        self._closed = True
        self._rest = b""
        self._send.close()
        self._receive.close()
        await trio.lowlevel.checkpoint()


def memory_transports() -> tuple[trio.abc.Stream, trio.abc.Stream]:
    """Two ends of an in-process transport."""
    to_right, at_right = trio.open_memory_channel[bytes](_MEMORY_CHUNKS)
    to_left, at_left = trio.open_memory_channel[bytes](_MEMORY_CHUNKS)
    return _MemoryTransport(to_right, at_left), _MemoryTransport(to_left, at_right)
