"""What a service manager hears of a command: ready, what it does, about to end, and that its event loop turns.

The protocol is systemd's ``sd_notify``: datagrams of ``NAME=VALUE`` lines to the socket that ``NOTIFY_SOCKET`` names. Others
speak it too (podman, s6, dinit). Without the variable nothing is sent.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from dgr.text import one_line
from dgr.wire.nurseries import open_nursery

__all__ = ["Notifier", "open_notifier"]

_log = logging.getLogger("dgr.notify")

#: Seconds between two signs of life while a command starts, and what each asks for: weights take minutes, and a start that
#: hangs shall not last for ever.
_STARTING, _EXTENSION = 10.0, 60
#: Signs of life within the time that the watchdog allows.
_SIGNS = 3
#: Lines kept while the manager's socket takes nothing.
_MOST_UNSENT = 16


class Notifier:
    """Tells a service manager; made by :func:`open_notifier`. Nothing here raises or waits."""

    def __init__(self, address: str | None, watchdog: float | None) -> None:
        self._address = address
        #: Seconds after which a silent command is ended by the manager; None: never.
        self._watchdog = watchdog
        self._is_ready = False
        self._unsent: list[str] = []
        self._warned = False

    def ready(self, status: str) -> None:
        """It serves from now on."""
        self._is_ready = True
        self._send("READY=1", f"STATUS={one_line(status)}")

    def status(self, status: str) -> None:
        """What it is at, for people."""
        self._send(f"STATUS={one_line(status)}")

    def stopping(self) -> None:
        """It is about to end."""
        self._send("STOPPING=1", "STATUS=ending")

    async def _run(self) -> None:
        """Give signs of life, from the event loop: one that stands still gives none."""
        if self._address is None:
            return
        while not self._is_ready:
            self._send(f"EXTEND_TIMEOUT_USEC={_EXTENSION * 1_000_000}", *self._alive())
            await trio.sleep(min(_STARTING, (self._watchdog or _STARTING) / _SIGNS))
        while self._watchdog is not None:
            self._send(*self._alive())
            await trio.sleep(self._watchdog / _SIGNS)

    def _alive(self) -> list[str]:
        return [] if self._watchdog is None else ["WATCHDOG=1"]

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        self._unsent = [*self._unsent, *lines][-_MOST_UNSENT:]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto("\n".join(self._unsent).encode(errors="replace"), self._address)
        except OSError as error:
            if not self._warned:
                _log.warning("the service manager does not take what it is told: %s", error)
            self._warned = True
        else:
            self._unsent, self._warned = [], False


def _taken_from_environment() -> Notifier:
    """The notifier that the environment asks for. Its variables are taken out: they are not for child processes."""
    address, usec, pid = (os.environ.pop(name, None) for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"))
    if not address:
        return Notifier(None, None)
    if address[0] not in "/@":
        _log.warning(
            "NOTIFY_SOCKET is %r, which is neither a path nor an abstract socket (@name): nothing is sent", address
        )
        return Notifier(None, None)
    if address.startswith("@"):
        address = "\0" + address[1:]
    watchdog = None
    if usec is not None and pid in (None, str(os.getpid())):
        if usec.isascii() and usec.isdecimal() and int(usec[:20]) > 0:
            watchdog = int(usec[:20]) / 1e6
        else:
            _log.warning("WATCHDOG_USEC is %r, which is no number of microseconds: no signs of life are sent", usec)
    return Notifier(address, watchdog)


@asynccontextmanager
async def open_notifier(status: str) -> AsyncIterator[Notifier]:
    """Tell the service manager, if there is one, of this command for the length of the block.

    ``status``: what it is at first. Until it is ready, its time to start is extended again and again, while the event loop
    turns; from then on the watchdog hears of it.
    """
    notifier = _taken_from_environment()
    notifier.status(status)
    async with open_nursery() as nursery:
        nursery.start_soon(notifier._run)
        try:
            yield notifier
        finally:
            notifier.stopping()
            nursery.cancel_scope.cancel()
