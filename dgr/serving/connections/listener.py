"""The sockets of an HTTP server: connections are bounded, make room for others, and end one by one."""

from __future__ import annotations

import logging
import math
import resource
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import trio
from anycorn import Config
from anycorn.utils import wrap_app
from attrs import mutable

from dgr.serving.connections.connection import Connection, Host
from dgr.wire.nurseries import open_nursery
from dgr.wire.tcp import Transport

__all__ = ["Listener", "most_connections"]

_log = logging.getLogger("dgr.http")

#: Seconds for a client's TLS handshake.
_HANDSHAKE = 15.0
#: Seconds in which one line of a kind is logged; what comes meanwhile is counted.
_PAUSE = 60.0
#: Connections where the limit of open files says nothing smaller.
_MOST = 1024
#: Kinds of lines that are remembered.
_KINDS = 64


def most_connections() -> int:
    """Connections that leave half of the descriptors this process may have to links and files."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(8, min(_MOST, soft // 2))


@mutable
class _Said:
    at: float
    kept_back: int = 0


class Listener:
    """Takes connections for an application.

    ``most`` of them at once: one more closes the one whose client has been silent, or in the middle of a request, for the
    longest; where all are being answered it is closed itself. ``client_timeout``: seconds in which a client must take 64 KiB
    of what it asked for. ``contexts``: the TLS context for a connection that begins now.
    """

    def __init__(
        self,
        app: Any,
        config: Config,
        *,
        most: int,
        client_timeout: float,
        contexts: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._host = Host(wrap_app(app, 0, "asgi"), config, client_timeout)
        self._contexts = contexts
        self._most = most
        self._open: set[Connection] = set()
        #: These, and those that were let go and are not gone yet.
        self._held: set[Connection] = set()
        #: When all of it ends, in trio's time.
        self._ends = math.inf
        self._said: dict[object, _Said] = {}

    @property
    def connections(self) -> int:
        """Connections that are open and not about to be closed."""
        return len(self._open)

    async def serve(
        self,
        sockets: Sequence[socket.socket],
        *,
        stop: trio.Event,
        grace: float,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve on listening sockets, and close them. Nothing a client does ends this.

        Once ``stop`` is set nobody is let in, who waits is let go, and answers under way have ``grace`` seconds.
        """
        listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(sock)) for sock in sockets]
        async with open_nursery() as clients:
            async with open_nursery() as accepting:
                accepting.start_soon(partial(trio.serve_listeners, self._take, listeners, handler_nursery=clients))
                task_status.started()
                await stop.wait()
                accepting.cancel_scope.cancel()
            await self._host.context.terminated.set()
            self._ends = clients.cancel_scope.deadline = trio.current_time() + grace
            for connection in self._held:
                connection.end_by(self._ends)
                if connection.waits_since is not None:
                    connection.let_go()

    async def _take(self, plain: trio.SocketStream) -> None:
        try:
            connection = Connection(self._host, plain.socket.getpeername(), plain.socket.getsockname())
        except OSError:  # gone already
            await trio.aclose_forcefully(plain)
            return
        if not self._has_room():
            self._tell(
                "full", "%s: %d connections are being answered, the most at once; it was closed", connection, self._most
            )
            await trio.aclose_forcefully(plain)
            return
        self._open.add(connection)
        self._held.add(connection)
        connection.end_by(self._ends)
        try:
            stream = await self._greet(plain, connection)
            if stream is not None:
                await connection.run(stream)
        except* Exception as group:
            defect = _first(group)
            self._tell(
                type(defect), "%s: the connection ends by a defect; everything else goes on", connection, defect=defect
            )
        finally:
            self._open.discard(connection)
            self._held.discard(connection)
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(plain)

    def _has_room(self) -> bool:
        if len(self._open) < self._most:
            return True
        waiting = [(since, id(one), one) for one in self._open if (since := one.waits_since) is not None]
        if not waiting:
            return False
        _, _, oldest = min(waiting)
        self._open.discard(oldest)
        oldest.let_go()
        self._tell(
            "room", "%s: closed without a whole request, to make room: %d connections are the most", oldest, self._most
        )
        return True

    async def _greet(self, plain: trio.SocketStream, connection: Connection) -> Transport | None:
        """The stream that HTTP is spoken on; None for who cannot."""
        if self._contexts is None:
            return plain
        stream = trio.SSLStream(plain, self._contexts(), server_side=True, https_compatible=True)
        with connection.patient(_HANDSHAKE):
            try:
                await stream.do_handshake()
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self._tell("tls", "%s: no TLS: %s", connection, error.__cause__ or "it left")
                return None
            return stream
        return None

    def _tell(self, kind: object, line: str, *words: object, defect: BaseException | None = None) -> None:
        """Log one line a minute and kind: strangers must not fill a disk with what they are told."""
        now = trio.current_time()
        said = self._said.get(kind)
        level = logging.ERROR if defect is not None else logging.INFO if kind == "tls" else logging.WARNING
        if said is not None and now - said.at < _PAUSE:
            said.kept_back += 1
            _log.debug(line, *words, exc_info=defect)
            return
        more = f" ({said.kept_back} more since the last such line)" if said is not None and said.kept_back else ""
        _log.log(level, line + more, *words, exc_info=defect)
        if len(self._said) >= _KINDS:
            self._said.clear()
        self._said[kind] = _Said(now)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
