"""What a stage says of connections that never became links: health probes, scanners, clients with the wrong credentials."""

from __future__ import annotations

import logging
import socket
from collections import OrderedDict

import trio
from attrs import mutable

from dgr.errors import DeadlineExceeded, DgrError

__all__ = ["VisitorLog", "says_something"]

_log = logging.getLogger("dgr.links")

#: Seconds in which one host has one warning of a kind; what comes meanwhile is counted.
_PAUSE = 60.0
#: Hosts and kinds that are remembered; the longest silent ones are forgotten first.
_KEPT = 256


async def says_something(stream: trio.SocketStream, seconds: float) -> bool:
    """Whether a new connection says anything, without taking it; False: it was closed at once, as health probes do.

    Whoever opens a link speaks first. Raises :class:`~dgr.errors.DeadlineExceeded`.
    """
    with trio.move_on_after(seconds):
        try:
            return bool(await stream.socket.recv(1, socket.MSG_PEEK))
        except OSError:  # a probe that resets
            return False
    raise DeadlineExceeded(f"it said nothing within {seconds:g} s")


@mutable
class _Said:
    at: float
    kept_back: int = 0


class VisitorLog:
    """One line a minute, host and kind of failure, for the rest a count; a probe is told at debug alone."""

    def __init__(self) -> None:
        self._said: OrderedDict[tuple[str, type[Exception]], _Said] = OrderedDict()

    def left(self, who: str, error: DgrError | OSError) -> None:
        """A connection ended before it was a link. ``who``: the other end, as ``from HOST:PORT``."""
        key = who.rpartition(":")[0], type(error)
        now = trio.current_time()
        said = self._said.pop(key, None)
        if said is not None and now - said.at < _PAUSE:
            said.kept_back += 1
            self._said[key] = said
            _log.debug("%s: it was not taken as a link: %s", who, error)
            return
        more = f" ({said.kept_back} more of its host since the last such line)" if said and said.kept_back else ""
        _log.warning("%s: it was not taken as a link: %s%s", who, error, more)
        self._said[key] = _Said(now)
        while len(self._said) > _KEPT:
            self._said.popitem(last=False)
