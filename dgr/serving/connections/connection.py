"""One HTTP/1.1 connection on trio: a client's bytes into anycorn's protocol, and what that says back.

anycorn's own server takes connections in a task whose first error ends it, and with it the server: a descriptor too many, or a
header that its upgrade to HTTP/2 cannot read. So sockets, deadlines and ends are ours; requests and responses stay anycorn's.
"""

from __future__ import annotations

import math
from contextlib import suppress

import h11
import trio
from anycorn import Config
from anycorn.events import Closed, Event, RawData, Updated
from anycorn.protocol.h11 import H11Protocol
from anycorn.task_group import TaskGroup
from anycorn.typing import AppWrapper, ConnectionState, TLSExtension
from anycorn.worker_context import WorkerContext

from dgr.wire.tcp import Transport

__all__ = ["Connection"]

_READ = 65536
#: Seconds for a client that was told the end to read it: a connection that is closed with bytes unread takes the answer along.
_LINGER = 1.0
_BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError)
#: States of h11 in which a client has something to say before it can be answered.
_SPEAKING = (h11.IDLE, h11.SEND_BODY)


class _Http11(H11Protocol):
    """HTTP/1.1 and no other: an offer to upgrade is not seen, and a request of HTTP/2 is one like any other."""

    async def _check_protocol(self, event: h11.Request) -> None:
        pass

    async def _create_stream(self, request: h11.Request) -> None:
        kept = [(name, value) for name, value in request.headers if name != b"upgrade"]
        if len(kept) < len(request.headers):
            request = h11.Request(
                method=request.method, target=request.target, headers=kept, http_version=request.http_version
            )
        await super()._create_stream(request)


class Connection:
    """What one client and the application say to each other."""

    def __init__(self, app: AppWrapper, config: Config, context: WorkerContext, plain: trio.SocketStream) -> None:
        self._app = app
        self._config = config
        self._context = context
        self._stream: Transport = plain
        self._client = _address(plain.socket.getpeername())
        self._server = _address(plain.socket.getsockname())
        self._protocol: _Http11 | None = None
        self._sending = trio.Lock()
        self._ends = self._let_go = False
        self._since = trio.current_time()
        self._patience = trio.CancelScope()

    def __str__(self) -> str:
        return "from a client" if self._client is None else "from {}:{}".format(*self._client)

    @property
    def waits_since(self) -> float | None:
        """Since when the client has to speak (trio's clock); None while a whole request of its is being answered."""
        if self._protocol is None or self._protocol.connection.their_state in _SPEAKING:
            return self._since
        return None

    def patient(self, seconds: float) -> trio.CancelScope:
        """A scope for waiting on the client, for so long at most and until :meth:`let_go`."""
        self._patience = trio.CancelScope(deadline=trio.current_time() + seconds)
        if self._let_go:
            self._patience.cancel()
        return self._patience

    def let_go(self) -> None:
        """Wait for nothing more of the client."""
        self._let_go = True
        self._patience.cancel()

    async def run(self, stream: Transport) -> None:
        """Answer on ``stream`` until either side has had enough, then close it. Raises what is a defect, perhaps in a group."""
        self._stream = stream
        tls = TLSExtension() if isinstance(stream, trio.SSLStream) else None
        try:
            async with TaskGroup() as group:
                self._protocol = _Http11(
                    self._app,
                    self._config,
                    self._context,
                    group,
                    ConnectionState({}),
                    self._client,
                    self._server,
                    self._take,
                    tls,
                )
                with self.patient(self._config.keep_alive_timeout):
                    await self._read(self._protocol)
                await self._protocol.handle(Closed())
        finally:
            with trio.move_on_after(_LINGER) as last, suppress(*_BROKEN):
                last.shield = True
                await stream.aclose()
            if last.cancelled_caught:
                await trio.aclose_forcefully(stream)

    async def _read(self, protocol: _Http11) -> None:
        with suppress(*_BROKEN):
            while data := await self._stream.receive_some(_READ):
                if not self._ends:
                    await protocol.handle(RawData(data=bytes(data)))

    async def _take(self, event: Event) -> None:
        """What the protocol has for this side."""
        assert self._protocol is not None
        match event:
            case RawData(data=data):
                async with self._sending:
                    try:
                        with trio.CancelScope(shield=True):  # half of an answer would be another answer
                            await self._stream.send_all(data)
                    except _BROKEN:
                        self.let_go()  # what else it asked for, nobody reads
                        await self._protocol.handle(Closed())
            case Updated(idle=is_idle):
                self._since = trio.current_time()
                self._patience.deadline = self._since + self._config.keep_alive_timeout if is_idle else math.inf
            case Closed():
                await self._hang_up(self._protocol)
            case _:
                raise TypeError(f"{type(event).__name__} is not of a plain HTTP/1.1 connection")

    async def _hang_up(self, protocol: _Http11) -> None:
        self._ends = True
        self._patience.deadline = min(self._patience.deadline, trio.current_time() + _LINGER)
        if isinstance(self._stream, trio.SocketStream):
            with suppress(*_BROKEN):
                await self._stream.send_eof()
        await protocol.handle(Closed())


def _address(name: object) -> tuple[str, int] | None:
    match name:
        case (str(host), int(port), *_):
            return host, port
    return None
