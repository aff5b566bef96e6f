"""How two processes of one host come to share memory: a word from whoever connects, and a descriptor for an answer."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import trio

from dgr.errors import DeadlineExceeded, FrameError, LinkBroken
from dgr.text import reason_of
from dgr.wire.samehost.addresses import check_peer, connect
from dgr.wire.samehost.memory import SharedMemory, make_memory, take_memory
from dgr.wire.samehost.stream import SharedStream

__all__ = ["accept_shared", "dial_shared"]

T = TypeVar("T")

#: Said by whoever connects, and with the descriptor by the other side.
_WORD = b"dgr-shm\1"
_DESCRIPTOR = array.array("i").itemsize


async def accept_shared(stream: trio.SocketStream, seconds: float) -> SharedStream:
    """The listening side: hear the word, make the memory and pass it on.

    Raises :class:`LinkBroken` for a process of another user, :class:`FrameError`, :class:`DeadlineExceeded`.
    """
    check_peer(stream.socket)
    return SharedStream(stream, await _within(seconds, "a client", lambda: _offer(stream)))


async def _offer(stream: trio.SocketStream) -> SharedMemory:
    await _hear(stream.socket)
    memory, descriptor = make_memory()
    try:
        await stream.socket.sendmsg([_WORD], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
    except BaseException:
        memory.close()
        raise
    finally:
        os.close(descriptor)
    return memory


async def dial_shared(path: Path, seconds: float) -> SharedStream:
    """The side that connects: say the word, look at the memory that comes and map it.

    Raises :class:`LinkBroken` when nobody listens or who does is another user, :class:`FrameError` for memory that is not
    what it should be, :class:`DeadlineExceeded`.
    """
    address = f"unix:{path}"
    try:
        with trio.fail_after(seconds):
            stream = await connect(path)
    except trio.TooSlowError:
        raise DeadlineExceeded(f"no connection to {address} within {seconds:g} s") from None
    except OSError as error:
        raise LinkBroken(f"cannot connect to {address}: {error.strerror or error}") from error
    try:
        return SharedStream(stream, await _within(seconds, address, lambda: _ask(stream)))
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise


async def _ask(stream: trio.SocketStream) -> SharedMemory:
    await stream.send_all(_WORD)
    descriptors: list[int] = []
    try:
        await _hear(stream.socket, descriptors)
        if len(descriptors) != 1:
            raise FrameError(f"the other side passed {len(descriptors)} descriptors; a link has memory of one")
        return take_memory(descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


async def _hear(sock: trio.socket.SocketType, descriptors: list[int] | None = None) -> None:
    """Read the word; with a list, the descriptors that come with it. Without one the kernel drops what comes."""
    heard = b""
    while len(heard) < len(_WORD):
        if descriptors is None or heard:
            part = await sock.recv(len(_WORD) - len(heard))
        else:
            room = socket.CMSG_SPACE(2 * _DESCRIPTOR)
            part, said, _, _ = await sock.recvmsg(len(_WORD), room, socket.MSG_CMSG_CLOEXEC)
            for level, kind, data in said:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors += array.array("i", data[: len(data) - len(data) % _DESCRIPTOR])
        if not part:
            raise LinkBroken("the other side closed the link before it said what it is")
        heard += part
    if heard != _WORD:
        raise FrameError(f"the other side is not dgr: its first bytes are {heard!r}")


async def _within(seconds: float, who: str, exchange: Callable[[], Coroutine[Any, Any, T]]) -> T:
    try:
        with trio.fail_after(seconds):
            return await exchange()
    except trio.TooSlowError:
        raise DeadlineExceeded(f"{who} did not agree on shared memory within {seconds:g} s") from None
    except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise LinkBroken(f"{who} closed the link before memory was shared: {reason_of(error)}") from error
