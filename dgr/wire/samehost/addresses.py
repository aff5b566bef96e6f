"""``unix:`` addresses: the sockets of one user on one host.

Who may connect is a matter of the file's permissions (0600) and of the kernel's word on who is at the other end: both sides
are of one user. Linux alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from dgr.errors import InputError, LinkBroken

__all__ = ["check_peer", "connect", "listen_at", "removing_files", "socket_path"]

_SCHEME = "unix:"
#: Bytes of a path in the kernel's ``sockaddr_un``, without the NUL.
_MOST_BYTES = 107
_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 128


def socket_path(address: str) -> Path | None:
    """The path of ``unix:/PATH``; None for an address of another kind. Raises :class:`InputError` for a bad one."""
    if not address.startswith(_SCHEME):
        return None
    path = address.removeprefix(_SCHEME)
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise InputError(f"address {address!r} is not unix:/PATH; name the socket by its whole path")
    if (n_bytes := len(os.fsencode(path))) > _MOST_BYTES:
        raise InputError(
            f"address {address!r} has a path of {n_bytes} bytes; the kernel takes {_MOST_BYTES} for a socket: choose a"
            " shorter one"
        )
    if sys.platform != "linux":
        raise InputError(f"address {address!r}: unix: addresses are there on Linux alone; use 127.0.0.1:PORT")
    return Path(path)


async def listen_at(path: Path) -> trio.SocketListener:
    """Listen at a path that this user alone may connect to. A socket that nobody listens at any more is replaced.

    Raises :class:`InputError`.
    """
    _remove_stale(path)
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(sock.fileno(), 0o600)  # bind makes the file with the mode of the socket
        await sock.bind(str(path))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise InputError(f"cannot listen on unix:{path}: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
    return trio.SocketListener(sock)


def _remove_stale(path: Path) -> None:
    """A process that was killed leaves its socket behind."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if stat.S_ISSOCK(path.lstat().st_mode):
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


@contextmanager
def removing_files(listeners: Iterable[trio.SocketListener]) -> Iterator[None]:
    """Remove the files of sockets that listen, after the block in which they are closed; not those of whoever came after."""
    paths = [Path(each.socket.getsockname()) for each in listeners if each.socket.family == socket.AF_UNIX]
    files = {path: _inode(path) for path in paths}
    try:
        yield
    finally:
        for path, inode in files.items():
            if inode is not None and _inode(path) == inode:
                path.unlink(missing_ok=True)


def _inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except OSError:
        return None


async def connect(path: Path) -> trio.SocketStream:
    """Connect to a socket of this user. Raises :class:`OSError`, and :class:`LinkBroken` for another user's."""
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        await sock.connect(str(path))
        check_peer(sock)
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


def check_peer(sock: trio.socket.SocketType) -> None:
    """Refuse whoever is not of this process's user, by the kernel's word. Raises :class:`LinkBroken`."""
    _pid, uid, _gid = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)  # type: ignore[attr-defined,unused-ignore]
    )
    if uid != os.geteuid():
        raise LinkBroken(
            f"the process at the other end is of user {uid}, this one of user {os.geteuid()}; run both as one user, or link"
            " them over TCP"
        )
