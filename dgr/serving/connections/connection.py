"""One HTTP/1.1 connection on trio: a client's bytes into anycorn's protocol, and what that says back.

anycorn's own server takes connections in a task whose first error ends it, and with it the server: a descriptor too many, or a
header that its upgrade to HTTP/2 cannot read. So sockets, deadlines and ends are ours; requests and responses stay anycorn's.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

import h11
import trio
from anycorn import Config
from anycorn.events import Closed, Event, RawData, Updated
from anycorn.protocol.h11 import H11Protocol
from anycorn.typing import AppWrapper, ConnectionState, TLSExtension
from anycorn.worker_context import EventWrapper, WorkerContext
from attrs import field, frozen

from dgr.serving.connections.inbox import Applications
from dgr.wire.nurseries import open_nursery
from dgr.wire.tcp import Transport

__all__ = ["Connection", "Host"]

_READ = 65536
#: Bytes that a client must take in the time it has for them.
_PIECE = 65536
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


class _Turn(EventWrapper):
    """When a connection's next request is read: after the answer to the one before. Its client is heard meanwhile."""

    def __init__(self, listen: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._listen = listen

    async def wait(self) -> None:
        async with open_nursery() as nursery:
            nursery.start_soon(self._listen)
            await super().wait()
            nursery.cancel_scope.cancel()


@frozen
class Host:
    """What answers on connections, and on what terms."""

    app: AppWrapper
    config: Config
    #: Seconds in which a client must take 64 KiB of what it asked for.
    client_timeout: float
    context: WorkerContext = field(init=False, factory=lambda: WorkerContext(None))


class Connection:
    """What one client and the application say to each other. ``client``, ``server``: names of the socket's two ends."""

    def __init__(self, host: Host, client: object, server: object) -> None:
        self._host = host
        self._config = host.config
        self._client, self._server = _address(client), _address(server)
        self._stream: Transport | None = None
        self._protocol: _Http11 | None = None
        self._sending = trio.Lock()
        self._sends = trio.CancelScope()
        self._ahead = bytearray()
        self._ends = self._let_go = self._is_deaf = False
        self._last = math.inf
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

    def end_by(self, when: float) -> None:
        """Send nothing after that time (trio's clock), whatever is not said yet."""
        self._last = when
        self._sends.deadline = min(self._sends.deadline, when)

    async def run(self, stream: Transport) -> None:
        """Answer on ``stream`` until either side has had enough, then close it. Raises what is a defect, perhaps in a group."""
        self._stream = stream
        tls = TLSExtension() if isinstance(stream, trio.SSLStream) else None
        try:
            async with Applications() as group:
                self._protocol = _Http11(
                    self._host.app,
                    self._config,
                    self._host.context,
                    group,
                    ConnectionState({}),
                    self._client,
                    self._server,
                    self._take,
                    tls,
                )
                self._protocol.can_read = _Turn(self._listen_ahead)
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
        while data := bytes(self._ahead) or await self._hear():
            self._ahead.clear()
            if not self._ends:
                await protocol.handle(RawData(data=data))

    async def _hear(self) -> bytes:
        """What the client says; nothing once it has left."""
        assert self._stream is not None
        with suppress(*_BROKEN):
            return bytes(await self._stream.receive_some(_READ))
        return b""

    async def _listen_ahead(self) -> None:
        """Keep what the client asks for beside, some of it, and notice that it leaves."""
        while len(self._ahead) < _READ:
            data = await self._hear()
            if not data:
                self.let_go()
                return
            if not self._ends:
                self._ahead += data

    async def _take(self, event: Event) -> None:
        """What the protocol has for this side."""
        assert self._protocol is not None
        match event:
            case RawData(data=data):
                async with self._sending:
                    if not await self._send(data):
                        self.let_go()  # what else it asked for, nobody reads
                        await self._protocol.handle(Closed())
            case Updated(idle=is_idle):
                self._since = trio.current_time()
                self._patience.deadline = self._since + self._config.keep_alive_timeout if is_idle else math.inf
            case Closed():
                await self._hang_up(self._protocol)
            case _:
                raise TypeError(f"{type(event).__name__} is not of a plain HTTP/1.1 connection")

    async def _send(self, data: bytes) -> bool:
        """Whether the client took it, each piece in its time.

        Half of an answer would be another answer: whoever is cancelled waits for the rest, and after a piece that was not
        taken there is no other.
        """
        assert self._stream is not None
        for begin in range(0, len(data), _PIECE):
            if self._is_deaf:
                break
            self._is_deaf = True
            deadline = min(self._last, trio.current_time() + self._host.client_timeout)
            with suppress(*_BROKEN), trio.CancelScope(deadline=deadline, shield=True) as self._sends:
                await self._stream.send_all(data[begin : begin + _PIECE])
                self._is_deaf = False
        return not self._is_deaf

    async def _hang_up(self, protocol: _Http11) -> None:
        self._ends = True
        self._patience.deadline = min(self._patience.deadline, trio.current_time() + _LINGER)
        if isinstance(self._stream, trio.abc.HalfCloseableStream):
            with suppress(*_BROKEN):
                await self._stream.send_eof()
        await protocol.handle(Closed())


def _address(name: object) -> tuple[str, int] | None:
    match name:
        case (str(host), int(port), *_):
            return host, port
    return None
