"""Stages in other processes: how a link to one is opened, and how a stage takes links."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import frozen

from dgr.engine.base import EngineDescription
from dgr.engine.vocab import LlamaVocabulary
from dgr.errors import DeadlineExceeded, DgrError, FrameError, InvalidRoute, LinkBroken, PeerRefused
from dgr.model.route_file import RouteFile, read_route_file
from dgr.runtime.identity import check_alike, check_neighbours, check_wants, describe_identity, identity_of
from dgr.runtime.pipeline import Pipeline, Timeouts, open_pipeline_on
from dgr.runtime.shard import Shard, limits_of
from dgr.wire import frames
from dgr.wire.frames import Denied, Hello, Role, Welcome
from dgr.wire.framing import Received
from dgr.wire.handshake import HANDSHAKE_LIMITS, exchange_preamble
from dgr.wire.links import Link, open_link
from dgr.wire.nurseries import open_nursery
from dgr.wire.tcp import Credentials, Transport, accept_tls, dial, parse_address, peer_names

__all__ = ["LinkPolicy", "RemoteConnector", "StageServer", "open_route"]

_log = logging.getLogger("dgr.links")


@frozen
class LinkPolicy:
    """How links between processes behave."""

    #: TLS credentials of this process; None: plain TCP, on loopback only unless ``allow_plain``.
    credentials: Credentials | None = None
    allow_plain: bool = False
    #: Seconds for connecting, for TLS and for the handshake, each.
    handshake: float = 10.0
    #: Seconds after which an idle link shows a sign of life; a peer silent for three is given up.
    heartbeat: float = 2.0
    #: Links a stage holds at once; more are closed as they come.
    max_links: int = 64


async def _first_frame(link: Link, seconds: float, what: str) -> Received:
    with trio.move_on_after(seconds):
        async for received in link:
            return received
        raise LinkBroken(f"{link.name}: the other side closed the link instead of {what}")
    raise DeadlineExceeded(f"{link.name}: no {what} within {seconds:g} s")


@asynccontextmanager
async def _open(address: str, policy: LinkPolicy, hello: Hello) -> AsyncIterator[tuple[Link, Welcome]]:
    """A link to a stage, greeted and agreed on."""
    transport = await dial(
        address, credentials=policy.credentials, allow_plain=policy.allow_plain, seconds=policy.handshake
    )
    try:
        await exchange_preamble(transport, policy.handshake)
    except BaseException:
        await trio.aclose_forcefully(transport)
        raise
    async with open_link(transport, HANDSHAKE_LIMITS, name=f"to {address}", heartbeat=policy.heartbeat) as link:
        link.send_nowait(hello)
        answer = (await _first_frame(link, policy.handshake, "Welcome")).frame
        match answer:
            case Welcome():
                link.agree(limits_of(describe_identity(answer.identity)), answer.credit)
                yield link, answer
            case Denied():
                raise PeerRefused(f"stage {address} refused the link: {answer.message}")
            case _:
                raise FrameError(f"stage {address} answered Hello with {type(answer).__name__}")


class RemoteConnector:
    """Opens control links to stages over TCP; the :class:`~dgr.runtime.pipeline.Connector` of a client.

    ``artifact`` and ``context``: what the stages must be and run with, where the caller knows.
    """

    def __init__(
        self,
        policy: LinkPolicy,
        *,
        name: str = "pipeline",
        wants: tuple[str, ...] = ("decode",),
        artifact: str | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        self._policy = policy
        self._hello = Hello(Role.PIPELINE, name, None, wants)
        self._artifact = artifact
        self._context = dict(context or {})

    @asynccontextmanager
    async def __call__(self, address: str) -> AsyncIterator[tuple[Link, EngineDescription]]:
        async with _open(address, self._policy, self._hello) as (link, welcome):
            self._check(address, welcome.identity)
            yield link, describe_identity(welcome.identity)

    def _check(self, address: str, identity: frames.Identity) -> None:
        if self._artifact is not None and identity.artifact != self._artifact:
            raise InvalidRoute(f"stage {address} runs artifact {identity.artifact}; the route is for {self._artifact}")
        for name, wanted in self._context.items():
            if (has := getattr(identity.context, name)) != wanted:
                raise InvalidRoute(f"stage {address} runs with {name} = {has}; the route is for {wanted}")


@asynccontextmanager
async def open_route(
    route: str | Path | RouteFile,
    *,
    policy: LinkPolicy | None = None,
    model: str | Path | None = None,
    chunk: int | None = None,
    window: int | None = None,
    retries: int = 2,
    timeouts: Timeouts | None = None,
) -> AsyncIterator[Pipeline]:
    """A pipeline over stages in other processes, as a route file names them.

    ``model``: a GGUF whose vocabulary to use (default: the route file's ``model``); without one, prompts are token ids and
    answers have no text. ``policy``: links (default: TLS with the route file's credentials).
    """
    file = route if isinstance(route, RouteFile) else await trio.to_thread.run_sync(read_route_file, route)
    if policy is None:
        policy = LinkPolicy(credentials=None if file.tls is None else Credentials(*file.tls))
    connector = RemoteConnector(policy, artifact=file.artifact, context=file.context)
    with ExitStack() as stack:
        path = model or file.model
        vocabulary = None if path is None else stack.enter_context(LlamaVocabulary(path))
        async with open_pipeline_on(
            connector,
            file.route,
            vocabulary=vocabulary,
            chunk=chunk,
            window=window,
            retries=retries,
            timeouts=timeouts,
        ) as pipeline:
            yield pipeline


class StageServer:
    """Takes links for one shard, and opens those to next stages."""

    def __init__(self, policy: LinkPolicy) -> None:
        self._policy = policy
        self._shard: Shard | None = None
        self._nursery: trio.Nursery | None = None
        self._next: dict[tuple[str, str], Link] = {}
        self._dialing: dict[tuple[str, str], trio.Lock] = {}
        self._links = 0

    @property
    def _served(self) -> Shard:
        assert self._shard is not None
        return self._shard

    # --- towards the next stage ---

    async def dial(self, own: str, successor: str) -> Link:
        """The boundary link to a next stage; the :data:`~dgr.runtime.shard.Dialer` of a stage process."""
        assert self._nursery is not None
        pair = own, successor
        async with self._dialing.setdefault(pair, trio.Lock()):
            link = self._next.get(pair)
            if link is None:
                link = await self._nursery.start(self._hold, own, successor)
                self._next[pair] = link
            return link

    async def _hold(
        self, own: str, successor: str, *, task_status: trio.TaskStatus[Link] = trio.TASK_STATUS_IGNORED
    ) -> None:
        ours = identity_of(self._served.description)
        started = False
        try:
            async with _open(successor, self._policy, Hello(Role.STAGE, own, ours)) as (link, welcome):
                check_alike(f"stage {successor}", welcome.identity, ours)
                check_neighbours(ours, welcome.identity)
                started = True
                task_status.started(link)
                await self._served.watch_successor(link)
        except DgrError as error:
            if not started:
                raise
            _log.warning("link to stage %s: %s", successor, error)
        finally:
            self._next.pop((own, successor), None)

    # --- from pipelines and previous stages ---

    async def serve(
        self,
        shard: Shard,
        listeners: list[trio.SocketListener],
        context: ssl.SSLContext | None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Take links until cancelled. Nothing a peer does ends this."""
        self._shard = shard
        async with open_nursery() as self._nursery:
            task_status.started()
            await trio.serve_listeners(partial(self._take, context), listeners)

    async def _take(self, context: ssl.SSLContext | None, stream: trio.SocketStream) -> None:
        if self._links >= self._policy.max_links:
            _log.warning("%d links are open; closing a new one", self._links)
            await trio.aclose_forcefully(stream)
            return
        self._links += 1
        try:
            transport = await accept_tls(stream, context, self._policy.handshake)
            await self._greet(transport)
        except DgrError as error:
            _log.warning("a link was refused or broke: %s", error)
        except OSError as error:
            _log.warning("a connection failed before it was a link: %s", error)
        finally:
            self._links -= 1
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)

    async def _greet(self, transport: Transport) -> None:
        seconds = self._policy.handshake
        await exchange_preamble(transport, seconds)
        async with open_link(transport, HANDSHAKE_LIMITS, name="a new link", heartbeat=self._policy.heartbeat) as link:
            hello = (await _first_frame(link, seconds, "Hello")).frame
            try:
                serve = self._admit(hello, transport)
            except (InvalidRoute, FrameError) as error:
                link.send_nowait(Denied(str(error)[:4096]))
                with trio.move_on_after(seconds):
                    await link.flush()
                raise
            assert isinstance(hello, Hello)
            link.name = f"from {hello.name}"
            limits = limits_of(self._served.description)
            link.send_nowait(Welcome(identity_of(self._served.description), limits.under_way))
            link.agree(limits, None)
            await serve(link)

    def _admit(self, hello: frames.Frame, transport: Transport) -> Callable[[Link], Awaitable[None]]:
        """Who is it, and does it belong here? Gives what serves its link."""
        if not isinstance(hello, Hello):
            raise FrameError(f"a link begins with Hello, not with {type(hello).__name__}")
        ours = identity_of(self._served.description)
        check_wants(hello.wants, ours)
        if hello.role is Role.PIPELINE:
            return self._served.serve_control
        if hello.identity is None:
            raise FrameError("a stage must say what it is: its Hello has no identity")
        check_alike(f"stage {hello.name}", hello.identity, ours)
        check_neighbours(hello.identity, ours)
        names = peer_names(transport)
        if names and parse_address(hello.name)[0] not in names:
            raise InvalidRoute(
                f"the peer calls itself {hello.name}, but its certificate is for {', '.join(sorted(names))}"
            )
        return partial(self._served.serve_boundary, peer=hello.name)
