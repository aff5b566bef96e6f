"""How packets and a transport meet: written with as few copies as the transport allows, and read into the framer.

Plain TCP takes a header and its fragment in one system call, wherever they lie, and reads a payload where it belongs. TLS and
whatever else is a stream takes and gives bytes; a memory transport passes on the sender's own.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Protocol

import trio

from dgr.errors import FrameError
from dgr.wire.framing import Framer, Received
from dgr.wire.memory import MemoryTransport

__all__ = ["PacketStream", "packet_stream"]

#: Read size; larger reads are several times slower through TLS.
_READ = 65536
#: Bytes that are read where no payload's are known to come, and behind the rest of a fragment: headers and messages.
_BETWEEN = 4096
#: Largest fragment that is copied to be written together with its headers: one boundary of a decoded token. A write of its
#: own for every header would cost a system call here, a packet on the wire and a wake-up on the other side.
_JOINED = 65536


#: What to do with frames as they become whole.
Take = Callable[[list[Received]], None]


class PacketStream(Protocol):
    """A transport as a link uses it. Errors are those of :class:`trio.abc.Stream`."""

    async def send(self, head: bytes, body: memoryview | None) -> None:
        """Write a packet; ``body`` is not changed any more by anyone."""
        ...

    async def receive(self, framer: Framer, take: Take) -> int:
        """Read once; returns the bytes read, 0 at the end. What the framer refuses is kept in ``framer.error``."""
        ...


def packet_stream(transport: trio.abc.Stream) -> PacketStream:
    """The best way to use a transport."""
    if isinstance(transport, MemoryTransport):
        return _MemoryStream(transport)
    if type(transport) is trio.SocketStream and hasattr(transport.socket, "sendmsg"):
        return _SocketStream(transport)
    return _ByteStream(transport)


class _ByteStream:
    """TLS, and any other stream."""

    def __init__(self, transport: trio.abc.Stream) -> None:
        self._transport = transport

    async def send(self, head: bytes, body: memoryview | None) -> None:
        if body is None:
            await self._transport.send_all(head)
        elif body.nbytes <= _JOINED:
            await self._transport.send_all(b"".join((head, body)))
        else:
            await self._transport.send_all(head)
            await self._transport.send_all(body)

    async def receive(self, framer: Framer, take: Take) -> int:
        data = await self._transport.receive_some(_READ)
        with contextlib.suppress(FrameError):
            take(framer.receive(data))
        return len(data)


class _MemoryStream:
    """A pipe inside this process."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport

    async def send(self, head: bytes, body: memoryview | None) -> None:
        await self._transport.wait_room()
        self._transport.hand_over(head, body)

    async def receive(self, framer: Framer, take: Take) -> int:
        data, came = await self._transport.receive_lasting(), 0
        while data and framer.error is None:
            came += len(data)
            with contextlib.suppress(FrameError):
                take(framer.receive(data, lasting=True))
            data = self._transport.receive_nowait()
        return came


class _SocketStream:
    """Plain TCP: scatter and gather."""

    def __init__(self, transport: trio.SocketStream) -> None:
        self._socket = transport.socket
        self._between = memoryview(bytearray(_BETWEEN))

    async def send(self, head: bytes, body: memoryview | None) -> None:
        parts = [memoryview(head)] if body is None else [memoryview(head), body]
        with _stream_errors():
            while parts:
                sent = await self._socket.sendmsg(parts)
                while parts and sent >= parts[0].nbytes:
                    sent -= parts.pop(0).nbytes
                if parts:
                    parts[0] = parts[0][sent:]

    async def receive(self, framer: Framer, take: Take) -> int:
        room = None
        with contextlib.suppress(FrameError):
            room = framer.room
        with _stream_errors():
            if room is None:
                came = await self._socket.recv_into(self._between)
                rest = self._between[:came]
            else:
                came = (await self._socket.recvmsg_into([room, self._between]))[0]
                placed = min(came, room.nbytes)
                rest = self._between[: came - placed]
                take(framer.filled(placed))
        with contextlib.suppress(FrameError):
            take(framer.receive(rest))
        return came


@contextlib.contextmanager
def _stream_errors() -> Iterator[None]:
    """Errors of a socket as a stream has them."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EBADF:
            raise trio.ClosedResourceError("this socket was already closed") from None
        raise trio.BrokenResourceError(f"socket connection broken: {error}") from error
