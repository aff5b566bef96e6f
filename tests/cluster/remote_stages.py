"""Stages behind real sockets in this process, a faulty proxy before one of them, and peers that do not mean well.

What a test waits for is an event or a condition; the deadlines here are guards against hanging, never the measure.
"""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import conversations
import msgspec
import trio
import trustme

from dgr.client.events import Event
from dgr.client.pipeline import Pipeline, Timeouts, open_pipeline_on
from dgr.cluster.connect import LinkPolicy, RemoteConnector
from dgr.cluster.server import StageServer
from dgr.core.route import LayerRange, Route, StageRef
from dgr.core.values import ContextParams, StageIdentity
from dgr.errors import DgrError, LinkBroken
from dgr.protocol.limits import limits_of
from dgr.stage.shard import Shard, open_shard
from dgr.testing.engines.fake import FakeEngine, FakeModel
from dgr.testing.waits import until
from dgr.wire import frames
from dgr.wire.credentials import Credentials
from dgr.wire.frames import Denied, Hello, Role, Welcome
from dgr.wire.handshake import HANDSHAKE_LIMITS, exchange_preamble
from dgr.wire.links import Link, open_link
from dgr.wire.tcp import address_of, listen, parse_address

MODEL = FakeModel()
CONTEXT = ContextParams(n_ctx=96, n_batch=16, n_ubatch=8, n_seq_max=3)
WHOLE, TWO, THREE = ("0:6",), ("0:2", "2:6"), ("0:1", "1:4", "4:6")
PROMPT = list(b"In a hole in the ground there lived a hobbit.")
#: Seconds after which a test hangs.
HANG = 20.0
#: Short, so that a test need not wait; long enough for a busy machine.
HANDSHAKE = 1.0
#: Where it will pass in any case.
SHORT = 0.4
TIMEOUTS = Timeouts(reply=20.0, control=20.0, route=30.0)


async def answer_of(pipeline: Pipeline, prompt: Sequence[int] = PROMPT, count: int = 12) -> list[int]:
    async with pipeline.session() as session:
        return await conversations.take(session.generate(prompt, max_tokens=count))


def reference(prompt: Sequence[int] = PROMPT, count: int = 12) -> list[int]:
    """What the whole model, undisturbed, answers to a prompt."""
    return conversations.reference(prompt, count)


E = TypeVar("E", bound=Event)


async def next_event(events: trio.MemoryReceiveChannel[Event], kind: type[E]) -> E:
    """The next event of a kind; others are passed over."""
    async for event in events:
        if isinstance(event, kind):
            return event
    raise AssertionError(f"no {kind.__name__} came")


# --- stages ---


class Host:
    """What a stage process is made of."""

    def __init__(self, address: str, engine: FakeEngine, shard: Shard, server: StageServer) -> None:
        self.address = address
        self.engine = engine
        self.shard = shard
        self.server = server
        self.scope = trio.CancelScope()
        self.ended = trio.Event()

    @property
    def layers(self) -> LayerRange:
        return self.engine.describe().layers

    async def kill(self) -> None:
        """All its sockets close and its state is gone."""
        self.scope.cancel()
        await self.ended.wait()


class Hosts:
    """Stage processes in miniature; made by :func:`open_hosts`."""

    def __init__(self, nursery: trio.Nursery, policy: LinkPolicy, context: ContextParams, model: FakeModel) -> None:
        self.policy = policy
        self.context = context
        self.model = model
        self.running: list[Host] = []
        self._nursery = nursery

    async def start(
        self,
        layers: str,
        *,
        address: str = "127.0.0.1:0",
        engine: FakeEngine | None = None,
        policy: LinkPolicy | None = None,
        dial: Callable[[str, str], Awaitable[Link]] | None = None,
        room: int | None = None,
    ) -> Host:
        """``room``: bytes of a link's answers that the kernel keeps for this side; by default it is megabytes."""
        engine = engine or FakeEngine(LayerRange.parse(layers), self.context, model=self.model)
        host: Host = await self._nursery.start(self._run, engine, address, policy or self.policy, dial, room)
        return host

    async def start_all(self, split: Sequence[str], **options: Any) -> list[Host]:
        return [await self.start(layers, **options) for layers in split]

    async def restart(self, host: Host) -> Host:
        """The same stage at the same address, with no state."""
        await host.kill()
        return await self.start(str(host.layers), address=host.address)

    async def _run(
        self,
        engine: FakeEngine,
        address: str,
        policy: LinkPolicy,
        dial: Callable[[str, str], Awaitable[Link]] | None,
        room: int | None,
        *,
        task_status: trio.TaskStatus[Host],
    ) -> None:
        listeners = await listen(address, credentials=policy.credentials, allow_plain=policy.allow_plain)
        if room is not None:  # accepted sockets inherit it
            listeners[0].socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_SNDBUF, room)
        server = StageServer(policy)
        async with open_shard(engine, dial or server.dial, name=str(engine.describe().layers)) as shard:
            host = Host(address_of(listeners[0]), engine, shard, server)
            self.running.append(host)
            try:
                with host.scope:
                    async with trio.open_nursery() as nursery:
                        await nursery.start(server.serve, shard, listeners)
                        task_status.started(host)
            finally:
                self.running.remove(host)
        host.ended.set()

    def route(self, hosts: Sequence[Host]) -> Route:
        return Route(tuple(StageRef(host.address, host.layers) for host in hosts))

    def connector(self, **options: Any) -> RemoteConnector:
        return RemoteConnector(options.pop("policy", self.policy), **options)

    def pipeline(self, hosts: Sequence[Host], **options: Any) -> AbstractAsyncContextManager[Pipeline]:
        connect = options.pop("connect", None) or self.connector()
        options.setdefault("timeouts", TIMEOUTS)
        return open_pipeline_on(connect, self.route(hosts), **options)

    async def assert_serving(self, hosts: Sequence[Host], **options: Any) -> None:
        """A client who means well is served; afterwards nobody holds anything here."""
        async with self.pipeline(hosts, **options) as pipeline:
            assert await answer_of(pipeline, count=4) == reference(count=4)
        await self.assert_empty()

    async def assert_empty(self) -> None:
        """Nobody holds anything, but for links between stages, which stay for the next route."""
        await until(self._are_empty)
        for host in self.running:
            for slot in range(self.context.n_seq_max):
                assert host.engine.position(slot) == 0

    def _are_empty(self) -> bool:
        shards = [host.shard.statistics() for host in self.running]
        servers = [host.server.statistics() for host in self.running]
        between = sum(len(server.leaving) for server in servers)
        return (
            all((shard.routes, shard.sessions, shard.leased_bytes) == (0, 0, 0) for shard in shards)
            and all(server.handshaking == 0 for server in servers)
            and sum(server.links for server in servers) == between
        )


@asynccontextmanager
async def open_hosts(
    policy: LinkPolicy | None = None, *, context: ContextParams = CONTEXT, model: FakeModel = MODEL
) -> AsyncIterator[Hosts]:
    """A place for stages behind sockets; all of them end with the block."""
    with trio.fail_after(HANG):
        async with trio.open_nursery() as nursery:
            yield Hosts(nursery, policy or LinkPolicy(handshake=HANDSHAKE), context, model)
            nursery.cancel_scope.cancel()


# --- certificates ---


class Authority:
    """A private CA, and credentials of hosts as files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._ca = trustme.CA()
        self.ca = folder / "ca.pem"
        folder.mkdir()
        self._ca.cert_pem.write_to_path(self.ca)

    def credentials(
        self, *names: str, common_name: str | None = None, days: tuple[float, float] | None = None
    ) -> Credentials:
        """A certificate for ``names`` (or for none, with a common name), signed by this CA.

        ``days``: from now on, when it begins to be valid and ends; the past is below zero.
        """
        times: dict[str, Any] = {}
        if days is not None:
            now = datetime.datetime.now(datetime.UTC)
            times = {
                name: now + datetime.timedelta(days=n)
                for name, n in zip(("not_before", "not_after"), days, strict=True)
            }
        issued = self._ca.issue_cert(*names, common_name=common_name, **times)
        self._count += 1
        certificate, key = self._folder / f"{self._count}.pem", self._folder / f"{self._count}.key"
        issued.cert_chain_pems[0].write_to_path(certificate)
        issued.private_key_pem.write_to_path(key)
        key.chmod(0o600)
        return Credentials(self.ca, certificate, key)

    def policy(self, *names: str, **options: Any) -> LinkPolicy:
        return LinkPolicy(credentials=self.credentials(*names), **{"handshake": HANDSHAKE, **options})


# --- peers by hand ---


def identity(split: str = "0:2", *, of: ContextParams = CONTEXT, **changes: Any) -> StageIdentity:
    """What a stage of these layers says of itself, but for ``changes``."""
    return msgspec.structs.replace(FakeEngine(LayerRange.parse(split), of).describe(), **changes)


@asynccontextmanager
async def connected(
    address: str, credentials: Credentials | None = None, *, room: int | None = None
) -> AsyncIterator[trio.SocketStream | trio.SSLStream[trio.SocketStream]]:
    """A transport to a stage before any word of ours. ``room``: bytes of answers that the kernel keeps for us."""
    host, port = parse_address(address)
    sock = trio.socket.socket()
    if room is not None:
        sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, room)
    await sock.connect((host, port))
    plain = trio.SocketStream(sock)
    stream: trio.SocketStream | trio.SSLStream[trio.SocketStream] = plain
    if credentials is not None:
        stream = trio.SSLStream(plain, credentials.context(server=False), server_hostname=host)
    try:
        yield stream
    finally:
        await trio.aclose_forcefully(stream)


@asynccontextmanager
async def greeted(
    address: str, hello: frames.Frame, credentials: Credentials | None = None, *, room: int | None = None
) -> AsyncIterator[tuple[Link, frames.Frame]]:
    """A link to a stage after ``hello``, and the answer to it."""
    async with connected(address, credentials, room=room) as transport:
        await exchange_preamble(transport, HANG)
        async with open_link(transport, HANDSHAKE_LIMITS, name=f"to {address}") as link:
            link.send_nowait(hello)
            answer = (await anext(link)).frame
            if isinstance(answer, Welcome):
                about = FakeEngine(answer.identity.layers, CONTEXT, model=MODEL).describe()
                link.apply_limits(limits_of(about), None)
            yield link, answer


async def denied(address: str, hello: frames.Frame, credentials: Credentials | None = None) -> str:
    """Why a stage refuses a Hello; the link is closed after it."""
    async with greeted(address, hello, credentials) as (link, answer):
        assert isinstance(answer, Denied), answer
        await assert_closed(link)
        return answer.message


async def assert_closed(link: Link) -> None:
    """The other side ends a link, with nothing more to say."""
    try:
        async for received in link:
            assert isinstance(received.frame, frames.Ping | frames.Pong), received.frame
    except LinkBroken:
        pass  # with bytes of ours unread it is a reset


def client(name: str = "a client", wants: tuple[str, ...] = ("decode",)) -> Hello:
    return Hello(Role.PIPELINE, name, None, wants)


def stage(name: str, split: str = "0:2", **changes: Any) -> Hello:
    return Hello(Role.STAGE, name, identity(split, **changes))


def is_pong(frame: frames.Frame, nonce: int) -> bool:
    """Whether a frame answers a Ping; each says another time."""
    return isinstance(frame, frames.Pong) and frame.nonce == nonce


async def read_to_end(stream: trio.abc.ReceiveStream) -> bytes:
    """Everything until the other side ends the connection, in whatever way."""
    data = bytearray()
    try:
        while part := await stream.receive_some(65536):
            data += part
    except trio.BrokenResourceError:
        pass
    return bytes(data)


@asynccontextmanager
async def impostor(said: bytes) -> AsyncIterator[str]:
    """Something that listens, says ``said`` to whoever comes, and no more."""

    async def talk(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(said)
            await read_to_end(stream)

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, talk, [listener])
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def failure(action: Callable[[], Awaitable[object]]) -> DgrError:
    """The error that something ends with."""
    try:
        await action()
    except DgrError as error:
        return error
    raise AssertionError("it went well")
