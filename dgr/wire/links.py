"""Links: a transport, a framer, one reader and one writer.

The reader is whoever iterates over the link; it must never wait for a caller, so that any byte is read as soon as it
comes. One writer task alone writes (a cancelled send would leave half a frame). Control messages go first; the payloads
under way are interleaved fragment by fragment; the bytes queued for payloads are bounded, and :meth:`Link.send` waits for
room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import trio
from attrs import frozen

from dgr.errors import ClosedError, FrameError, LinkBroken, Overloaded
from dgr.wire.framing import Framer, Limits, Received, encode
from dgr.wire.frames import Frame
from dgr.wire.nurseries import open_nursery

__all__ = ["Link", "LinkStatistics", "memory_transports", "open_link"]

#: Read size; larger reads are several times slower through TLS.
_READ = 65536
#: Control messages that may wait for the writer; more is a flood and breaks the link.
_CONTROL_QUEUE = 4096
#: Chunks of 64 KiB that a memory transport holds each way.
_MEMORY_CHUNKS = 16


@frozen
class LinkStatistics:
    """Counters of one link since it was opened."""

    frames_sent: int
    frames_received: int
    bytes_sent: int
    bytes_received: int
    #: Payload bytes waiting for the writer.
    bytes_queued: int


_Packets = Iterator[tuple[bytes, memoryview | None]]


class Link:
    """One end of a link. Made by :func:`open_link`; iterate over it to receive."""

    def __init__(self, transport: trio.abc.Stream, limits: Limits, name: str) -> None:
        self.name = name
        self.limits = limits
        self._transport = transport
        self._framer = Framer(limits)
        # One message of any size always fits, so that the bound cannot wedge the link.
        self._queue_limit = 2 * limits.n_batch * limits.boundary_width * 4
        self._control: deque[_Packets] = deque()
        self._payloads: deque[tuple[_Packets, int, int]] = deque()
        self._queued = 0
        self._streams = 0
        self._streams_busy: set[int] = set()
        self._work = trio.Event()
        self._room = trio.lowlevel.ParkingLot()
        self._received: deque[Received] = deque()
        self._closed = False
        self._broken: str | None = None
        self._frames_sent = self._frames_received = self._bytes_sent = self._bytes_received = 0

    def __repr__(self) -> str:
        return f"<Link {self.name}>"

    def statistics(self) -> LinkStatistics:
        return LinkStatistics(
            self._frames_sent, self._frames_received, self._bytes_sent, self._bytes_received, self._queued
        )

    # --- sending ---

    def send_nowait(self, frame: Frame) -> None:
        """Queue a frame that has no payload, ahead of all payloads."""
        self._check_open()
        if len(self._control) >= _CONTROL_QUEUE:
            self._break(f"more than {_CONTROL_QUEUE} control messages wait; the other side does not read")
            raise Overloaded(f"link {self.name}: {self._broken}")
        # Packets are made now, so that a frame that breaks a limit is refused to its sender.
        self._control.append(iter(list(encode(frame, None, 0, self.limits))))
        self._frames_sent += 1
        self._work.set()

    async def send(self, frame: Frame, payload: bytes | bytearray | memoryview | None = None) -> None:
        """Queue a frame; with a payload, wait until there is room for it."""
        if payload is None:
            self.send_nowait(frame)
            await trio.lowlevel.checkpoint()
            return
        size = memoryview(payload).nbytes
        while self._queued and self._queued + size > self._queue_limit:
            self._check_open()
            await self._room.park()
        self._check_open()
        stream = self._next_stream()
        packets = iter(encode(frame, payload, stream, self.limits))
        first = next(packets)  # refuses a frame that breaks a limit, here and not in the writer
        self._streams_busy.add(stream)
        self._control.append(iter([first]))
        self._payloads.append((packets, stream, size))
        self._queued += size
        self._frames_sent += 1
        self._work.set()
        await trio.lowlevel.checkpoint()

    def _next_stream(self) -> int:
        while True:
            self._streams = self._streams % 65535 + 1
            if self._streams not in self._streams_busy:
                return self._streams

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"link {self.name} was closed on this side")
        if self._broken is not None:
            raise LinkBroken(f"link {self.name}: {self._broken}")

    async def _write(self) -> None:
        while True:
            if self._control:
                for packet in self._control.popleft():
                    await self._put(packet)
            elif self._payloads:
                packets, stream, size = self._payloads.popleft()
                packet_or_end = next(packets, None)
                if packet_or_end is None:
                    self._streams_busy.discard(stream)
                    self._queued -= size
                    self._room.unpark_all()
                else:
                    await self._put(packet_or_end)
                    self._payloads.append((packets, stream, size))
            else:
                self._work = trio.Event()
                await self._work.wait()

    async def _put(self, packet: tuple[bytes, memoryview | None]) -> None:
        head, body = packet
        await self._transport.send_all(head)
        self._bytes_sent += len(head)
        if body is not None:
            await self._transport.send_all(body)
            self._bytes_sent += body.nbytes

    async def _run_writer(self) -> None:
        try:
            await self._write()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._break(f"cannot write: {error or type(error).__name__}")

    def _break(self, why: str) -> None:
        if self._broken is None:
            self._broken = why
        self._room.unpark_all()

    # --- receiving ---

    def __aiter__(self) -> Link:
        return self

    async def __anext__(self) -> Received:
        """The next frame; the iteration ends when the other side closed the link between two frames.

        Raises :class:`FrameError` on bytes that are no frame, :class:`LinkBroken` on a link cut inside a frame.
        """
        while not self._received:
            if self._closed:
                raise StopAsyncIteration
            try:
                data = await self._transport.receive_some(_READ)
            except trio.ClosedResourceError:
                raise StopAsyncIteration from None
            except trio.BrokenResourceError as error:
                self._break(f"cannot read: {error or type(error).__name__}")
                raise LinkBroken(f"link {self.name}: {self._broken}") from error
            if not data:
                self._break("closed by the other side")
                if self._framer.pending:
                    raise LinkBroken(f"link {self.name}: cut inside a frame, {self._framer.pending} bytes held")
                raise StopAsyncIteration
            self._bytes_received += len(data)
            try:
                self._received.extend(self._framer.receive(data))
            except FrameError as error:
                self._break(f"the other side broke the protocol: {error}")
                raise
        self._frames_received += 1
        return self._received.popleft()

    async def aclose(self) -> None:
        """Close this end at once; what still waits for the writer is lost."""
        self._closed = True
        self._room.unpark_all()
        await trio.aclose_forcefully(self._transport)


@asynccontextmanager
async def open_link(transport: trio.abc.Stream, limits: Limits, *, name: str = "link") -> AsyncIterator[Link]:
    """Run a link's writer for the length of the block; the link is closed on the way out."""
    link = Link(transport, limits, name)
    async with open_nursery() as nursery:
        nursery.start_soon(link._run_writer)
        try:
            yield link
        finally:
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await link.aclose()


class _MemoryTransport(trio.abc.Stream):
    """One end of an in-process byte pipe; bounded, ordered, no thread, no socket."""

    def __init__(self, send: trio.MemorySendChannel[bytes], receive: trio.MemoryReceiveChannel[bytes]) -> None:
        self._send = send
        self._receive = receive
        self._rest = b""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, _READ):
            # A copy: the two ends share no buffer, exactly as over a socket.
            await self._send.send(bytes(view[start : start + _READ]))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._rest:
            await trio.lowlevel.checkpoint()
            data = self._rest
        else:
            try:
                data = await self._receive.receive()
            except trio.EndOfChannel:
                return b""
        limit = len(data) if max_bytes is None else max_bytes
        self._rest = data[limit:]
        return data[:limit]

    async def aclose(self) -> None:
        self._send.close()
        self._receive.close()
        await trio.lowlevel.checkpoint()


def memory_transports() -> tuple[trio.abc.Stream, trio.abc.Stream]:
    """Two ends of an in-process transport."""
    to_right, at_right = trio.open_memory_channel[bytes](_MEMORY_CHUNKS)
    to_left, at_left = trio.open_memory_channel[bytes](_MEMORY_CHUNKS)
    return _MemoryTransport(to_right, at_left), _MemoryTransport(to_left, at_right)
