"""A stream over an AF_UNIX socket whose long pieces go through shared memory.

What is said on the socket is a sequence of records: three numbers (``u32``, little-endian) and bytes. The numbers: how many
bytes of the stream follow on the socket; how many bytes after them lie in the writer's ring; how many bytes of the other
ring were read and may be written again. Nobody names a place: both sides count, so a lie can only be about a number, and
one that does not fit what was counted ends the link. What lies in a ring is copied once, into the payload that it belongs
to, and looked at nowhere but in the copy: the other side may change it at any time.

One task writes and one reads, as in a :class:`~dgr.wire.links.Link`. The reader never waits for the writer: what it has to give
back goes with the writer's next record, for which the link asks when :attr:`SharedStream.owes`. A side that does not read
hears of no room in its own ring either.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import ClassVar, Protocol

import trio

from dgr.errors import FrameError
from dgr.wire.framing import Received
from dgr.wire.samehost.memory import RING, SharedMemory
from dgr.wire.streams import send_parts, stream_errors

__all__ = ["SharedStream"]

_RECORD = struct.Struct("<III")
#: Shorter bodies go over the socket.
_PLACED = 4096
#: Bytes that are written into a ring before the other side is told.
_PIECE = 1 << 20
#: Bytes that were read before the other side is told, where nothing else is said.
_GIVEN_BACK = RING // 4
#: Read size; a record's own bytes are few.
_READ = 65536


class Sink(Protocol):
    """What takes the bytes of a stream: a :class:`~dgr.wire.framing.Framer`."""

    error: FrameError | None

    @property
    def room(self) -> memoryview | None: ...

    def filled(self, n_bytes: int) -> list[Received]: ...

    def receive(self, data: memoryview) -> list[Received]: ...

    def refuse(self, error: FrameError) -> None: ...


class _Bytes:
    """A sink for bytes before there are frames; nothing may be placed then."""

    room = None

    def __init__(self) -> None:
        self.error: FrameError | None = None
        self.data = bytearray()

    def filled(self, _n_bytes: int) -> list[Received]:
        return []

    def receive(self, data: memoryview | bytearray) -> list[Received]:
        self.data += data
        return []

    def refuse(self, error: FrameError) -> None:
        self.error = error


class SharedStream(trio.abc.Stream):
    """One end; as a stream, and as a link uses it. It owns the socket and the memory."""

    def __init__(self, transport: trio.SocketStream, memory: SharedMemory) -> None:
        self._socket = transport.socket
        self._transport = transport
        self._memory = memory
        self._between = memoryview(bytearray(_READ))
        self._early = _Bytes()
        self._closed = False
        # What is written: where in the ring, and bytes of it that the other side has not given back.
        self._write_at = self._lent = 0
        self._changed = trio.lowlevel.ParkingLot()
        # What is read: the record under way, where in the ring, and bytes that were read and not given back.
        self._header = bytearray()
        self._inline = self._placed = 0
        self._read_at = self._owed = 0

    # --- writing ---

    @property
    def owes(self) -> bool:
        """Whether an empty record should be written, for what it gives back."""
        return self._owed >= _GIVEN_BACK

    #: Records are written by one task, whole.
    has_room: ClassVar[bool] = False

    def send_nowait(self, head: bytes, body: memoryview | None) -> tuple[bytes, memoryview | None]:
        return head, body

    async def send(self, head: bytes, body: memoryview | None) -> None:
        """Write a packet; ``body`` is not changed any more by anyone."""
        if body is None or body.nbytes < _PLACED:
            await self._write(head, body)
            return
        while body.nbytes:
            size = await self._place(body)
            body = body[size:]
            await self._write(head, None, size)
            head = b""

    async def _place(self, body: memoryview) -> int:
        """Copy the beginning of a body into the ring, once there is room; how much."""
        wanted = min(body.nbytes, _PIECE)
        while RING - self._lent < wanted and not self._closed:
            if self.owes:
                await self._write(b"", None)
            else:
                await self._changed.park()
        self._check_open()
        size = min(wanted, RING - self._write_at)
        self._memory.outgoing[self._write_at : self._write_at + size] = body[:size]
        self._write_at = (self._write_at + size) % RING
        self._lent += size
        return size

    async def _write(self, head: bytes, body: memoryview | None, placed: int = 0) -> None:
        inline = len(head) + (0 if body is None else body.nbytes)
        owed, self._owed = self._owed, 0
        record = _RECORD.pack(inline, placed, owed)
        parts = [memoryview(record + head)] if body is None else [memoryview(record + head), body]
        with stream_errors():
            await send_parts(self._socket, parts)

    # --- reading ---

    async def receive(self, sink: Sink, take: Callable[[list[Received]], None]) -> int:
        """Read once; returns the bytes read, 0 at the end. What is refused is kept in ``sink.error``."""
        if self._early.data and sink is not self._early:
            with contextlib.suppress(FrameError):
                take(sink.receive(memoryview(bytes(self._early.data))))
            self._early.data.clear()
        with stream_errors():
            came = await self._socket.recv_into(self._between)
        if not came:
            if self._header or self._inline or self._placed:
                raise trio.BrokenResourceError("cut inside a record")
            return 0
        self._check_open()
        data, owed = self._between[:came], self._owed
        with contextlib.suppress(FrameError):
            while sink.error is None and (data.nbytes or (self._placed and not self._inline)):
                if self._inline:
                    part, data = data[: self._inline], data[self._inline :]
                    self._inline -= part.nbytes
                    take(sink.receive(part))
                elif self._placed:
                    take(self._take_placed(sink))
                else:
                    data = self._take_record(data, sink)
        if self.owes:
            self._changed.unpark_all()
        return came + self._owed - owed

    def _take_record(self, data: memoryview, sink: Sink) -> memoryview:
        missing = _RECORD.size - len(self._header)
        self._header += data[:missing]
        if len(self._header) == _RECORD.size:
            self._inline, placed, given_back = _RECORD.unpack(self._header)
            self._header.clear()
            if placed > (room := RING - self._owed):
                sink.refuse(FrameError(f"{placed} bytes were announced in shared memory; there is room for {room}"))
            elif given_back > self._lent:
                sink.refuse(
                    FrameError(f"{given_back} bytes of shared memory were given back; {self._lent} had been written")
                )
            else:
                self._placed = placed
                if given_back:
                    self._lent -= given_back
                    self._changed.unpark_all()
        return data[missing:]

    def _take_placed(self, sink: Sink) -> list[Received]:
        """Copy what lies in the ring to where it belongs. It is not looked at before, and there not again."""
        room = sink.room
        if room is None:
            sink.refuse(FrameError(f"{self._placed} bytes in shared memory belong to no payload"))
            return []
        size = min(self._placed, room.nbytes, RING - self._read_at)
        room[:size] = self._memory.incoming[self._read_at : self._read_at + size]
        self._read_at = (self._read_at + size) % RING
        self._placed -= size
        self._owed += size
        return sink.filled(size)

    # --- as any stream, before there are frames ---

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._check_open()
        await trio.lowlevel.checkpoint()
        for start in range(0, view.nbytes, _READ):
            await self._write(b"", view[start : start + _READ])

    async def wait_send_all_might_not_block(self) -> None:
        await self._transport.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}, must be at least 1")
        data = self._early.data
        await trio.lowlevel.checkpoint()
        while not data:
            came = await self.receive(self._early, lambda _: None)
            if self._early.error is not None:
                raise trio.BrokenResourceError(str(self._early.error)) from self._early.error
            if not came:
                return b""
        found = bytes(data[:max_bytes])
        del data[: len(found)]
        return found

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._memory.close()
            self._changed.unpark_all()
        await self._transport.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this end was closed")
