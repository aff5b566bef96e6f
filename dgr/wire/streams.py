"""How packets and a transport meet: written with as few copies as the transport allows, and read into the framer.

Plain TCP takes a header and its fragment in one system call, wherever they lie, and reads a payload where it belongs. TLS and
whatever else is a stream takes and gives bytes; a memory transport passes on the sender's own. A transport may also be a
packet stream itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import trio

from dgr.errors import FrameError
from dgr.wire.framing import Framer, Received
from dgr.wire.memory import MemoryTransport

__all__ = ["PacketStream", "Take", "packet_stream", "send_parts", "stream_errors"]

#: Read size; larger reads are several times slower through TLS.
_READ = 65536
#: Bytes that are read between fragments and behind the rest of one: headers and messages.
_BETWEEN = 4096
#: Bytes that are read where nothing is under way: a token's frame is one read then, and copied once.
_FIRST = 65536 + _BETWEEN
#: Largest fragment that is copied to be written together with its headers: one boundary of a decoded token. A write of its
#: own for every header would cost a system call here, a packet on the wire and a wake-up on the other side.
_JOINED = 65536


#: Largest fragment that whoever sends copies into the socket's buffer itself; longer ones are the writer's, turn by turn.
_AT_ONCE = 1 << 17

#: What to do with frames as they become whole.
Take = Callable[[list[Received]], None]


@runtime_checkable
class PacketStream(Protocol):
    """A transport as a link uses it. Errors are those of :class:`trio.abc.Stream`."""

    @property
    def owes(self) -> bool:
        """Whether an empty packet should be written, for something that the transport itself has to say."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether :meth:`send_nowait` may write something."""
        ...

    def send_nowait(self, head: bytes, body: memoryview | None) -> tuple[bytes, memoryview | None] | None:
        """Write as much of a packet as is taken at once; returns what is left for :meth:`send`, which also raises what failed.

        Nothing may be under way. ``body`` is not changed any more by anyone.
        """
        ...

    async def send(self, head: bytes, body: memoryview | None) -> None:
        """Write a packet; ``body`` is not changed any more by anyone."""
        ...

    async def receive(self, framer: Framer, take: Take) -> int:
        """Read once; returns the bytes read, 0 at the end. What the framer refuses is kept in ``framer.error``."""
        ...


def packet_stream(transport: trio.abc.Stream) -> PacketStream:
    """The best way to use a transport."""
    if isinstance(transport, PacketStream):
        return transport
    if isinstance(transport, MemoryTransport):
        return _MemoryStream(transport)
    if type(transport) is trio.SocketStream and hasattr(transport.socket, "sendmsg"):
        return _SocketStream(transport)
    return _ByteStream(transport)


class _ByteStream:
    """TLS, and any other stream."""

    owes: ClassVar[bool] = False
    has_room: ClassVar[bool] = False

    def __init__(self, transport: trio.abc.Stream) -> None:
        self._transport = transport

    def send_nowait(self, head: bytes, body: memoryview | None) -> tuple[bytes, memoryview | None]:
        return head, body

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

    owes: ClassVar[bool] = False

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport

    @property
    def has_room(self) -> bool:
        return self._transport.has_room

    def send_nowait(self, head: bytes, body: memoryview | None) -> None:
        self._transport.hand_over(head, body)

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

    owes: ClassVar[bool] = False
    has_room: ClassVar[bool] = True

    def __init__(self, transport: trio.SocketStream) -> None:
        self._socket = transport.socket
        self._first = memoryview(bytearray(_FIRST))
        self._between = self._first[:_BETWEEN]

    def send_nowait(self, head: bytes, body: memoryview | None) -> tuple[bytes, memoryview | None] | None:
        if body is not None and body.nbytes > _AT_ONCE:
            return head, body
        try:
            sent = os.writev(self._socket.fileno(), [head] if body is None else [head, body])
        except OSError:  # there is no room, or the writer meets the same error
            return head, body
        if body is None:
            return None if sent == len(head) else (head[sent:], None)
        left = head[sent:], body[max(0, sent - len(head)) :]
        return left if left[1].nbytes else None

    async def send(self, head: bytes, body: memoryview | None) -> None:
        parts = [memoryview(head)] if body is None else [memoryview(head), body]
        with stream_errors():
            await send_parts(self._socket, parts)

    async def receive(self, framer: Framer, take: Take) -> int:
        room = None
        with contextlib.suppress(FrameError):
            room = framer.room
        with stream_errors():
            if room is None:
                buffer = self._between if framer.pending else self._first
                came = await self._socket.recv_into(buffer)
                rest = buffer[:came]
            else:
                came = (await self._socket.recvmsg_into([room, self._between]))[0]
                placed = min(came, room.nbytes)
                rest = self._between[: came - placed]
                take(framer.filled(placed))
        with contextlib.suppress(FrameError):
            take(framer.receive(rest))
        return came


async def send_parts(sock: trio.socket.SocketType, parts: Sequence[memoryview]) -> None:
    """Write bytes from where they lie, all of them, in order."""
    left = list(parts)
    while left:
        sent = await sock.sendmsg(left)
        while left and sent >= left[0].nbytes:
            sent -= left.pop(0).nbytes
        if left:
            left[0] = left[0][sent:]


@contextlib.contextmanager
def stream_errors() -> Iterator[None]:
    """Errors of a socket as a stream has them."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EBADF:
            raise trio.ClosedResourceError("this socket was already closed") from None
        raise trio.BrokenResourceError(f"socket connection broken: {error}") from error
