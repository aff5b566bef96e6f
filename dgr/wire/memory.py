"""Links inside one process: a byte pipe between two ends, that carries what a socket would.

A stream's user gets what it would get from a socket: nothing that one end holds can be changed by the other. A link hands
its payloads over as they are, because nobody changes them any more; nothing is copied then.
"""

from __future__ import annotations

import operator

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


class _Held:
    """What is on its way in one direction, and who waits for less of it."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.waiting = trio.lowlevel.ParkingLot()


class MemoryTransport(trio.abc.Stream):
    """One end of an in-process byte pipe; bounded, ordered, no thread, no socket."""

    def __init__(
        self,
        send: trio.MemorySendChannel[bytes | memoryview],
        sending: _Held,
        receive: trio.MemoryReceiveChannel[bytes | memoryview],
        receiving: _Held,
    ) -> None:
        self._send = send
        self._sending = sending
        self._receive = receive
        self._held = receiving
        self._rest: bytes | memoryview = b""
        self._closed = False
        self._receiving = False

    # --- as any stream ---

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self._closed or not len(data):
            await self.wait_send_all_might_not_block()
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, _CHUNK):
            # A copy: the two ends share no buffer, exactly as over a socket.
            chunk = bytes(view[start : start + _CHUNK])
            await self._send.send(chunk)
            self._sending.n_bytes += len(chunk)

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise trio.ClosedResourceError("this end was closed")

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError(f"max_bytes is {max_bytes}, must be at least 1")
        data = await self.receive_lasting()
        limit = len(data) if max_bytes is None else max_bytes
        self._rest = data[limit:]
        return bytes(data[:limit])

    async def aclose(self) -> None:
        self._closed = True
        self._rest = b""
        self._send.close()
        self._receive.close()
        for held in (self._sending, self._held):
            held.waiting.unpark_all()
        await trio.lowlevel.checkpoint()

    # --- as a link uses it ---

    @property
    def has_room(self) -> bool:
        """Whether :meth:`hand_over` takes a packet now; False when an end is closed, so that :meth:`wait_room` tells why."""
        seen = self._send.statistics()
        return (
            not self._closed
            and seen.open_receive_channels > 0
            and not seen.tasks_waiting_send
            and seen.current_buffer_used <= _MEMORY_CHUNKS - 2
            and self._sending.n_bytes < _FULL
        )

    async def wait_room(self) -> None:
        """Wait until it does."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self.has_room:
            if self._closed:
                raise trio.ClosedResourceError("this end was closed")
            if not self._send.statistics().open_receive_channels:
                raise trio.BrokenResourceError("the other end was closed")
            await self._sending.waiting.park()

    def hand_over(self, head: bytes, body: memoryview | None) -> None:
        """Pass a packet on, a long body as it is: it must not change any more."""
        if body is not None and body.nbytes <= _COPIED:
            head, body = b"".join((head, body)), None
        for part in (head,) if body is None else (head, body.toreadonly()):
            self._send.send_nowait(part)
            self._sending.n_bytes += len(part)

    async def receive_lasting(self) -> bytes | memoryview:
        """The next bytes as they were handed over; nobody changes them any more. Empty at the end."""
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this end")
        self._receiving = True
        try:
            if self._rest and not self._closed:
                await trio.lowlevel.checkpoint()
                data, self._rest = self._rest, b""
                return data
            return await self._next()
        finally:
            self._receiving = False

    async def _next(self) -> bytes | memoryview:
        try:
            data = await self._receive.receive()
        except trio.EndOfChannel:
            await trio.lowlevel.checkpoint()
            return b""
        self._held.n_bytes -= len(data)
        self._held.waiting.unpark_all()
        return data


def memory_transports() -> tuple[MemoryTransport, MemoryTransport]:
    """Two ends of an in-process transport."""
    to_right, at_right = trio.open_memory_channel[bytes | memoryview](_MEMORY_CHUNKS)
    to_left, at_left = trio.open_memory_channel[bytes | memoryview](_MEMORY_CHUNKS)
    rightward, leftward = _Held(), _Held()
    return MemoryTransport(to_right, rightward, at_left, leftward), MemoryTransport(
        to_left, leftward, at_right, rightward
    )
