"""A stage's server: it takes links of pipelines and previous stages for one shard, and opens those to next stages."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

import trio
from attrs import frozen

from dgr.cluster.connect import LinkPolicy, arriving_limits, first_frame, open_greeted
from dgr.cluster.visitors import VisitorLog, says_something
from dgr.core.load import Side
from dgr.errors import DgrError, FrameError, InputError, InvalidRoute, Overloaded
from dgr.protocol.identity import check_alike, check_link, check_wants
from dgr.protocol.limits import limits_of
from dgr.protocol.lossless import require_packer
from dgr.stage.shard import Shard
from dgr.wire import frames
from dgr.wire.frames import Denied, Hello, Role, Welcome
from dgr.wire.handshake import HANDSHAKE_LIMITS, exchange_preamble
from dgr.wire.links import Link, LinkStatistics, open_link
from dgr.wire.nurseries import open_nursery
from dgr.wire.samehost.addresses import removing_files, socket_path
from dgr.wire.tcp import Transport, accept, address_of, names_host, parse_address, peer_names

__all__ = ["ServerStatistics", "StageServer"]

_log = logging.getLogger("dgr.links")


@frozen
class ServerStatistics:
    """A snapshot of a stage's server."""

    #: Links that came and are served now.
    links: int
    #: Connections whose handshake is under way.
    handshaking: int
    #: Links served since the start.
    accepted: int
    #: Connections since the start that never became links.
    refused: int
    #: Links to next stages: (own address, next stage's) -> counters.
    leaving: Mapping[tuple[str, str], LinkStatistics]
    #: What went over all links, ended ones too: (side, the other stage's address or "" for pipelines) -> counters.
    traffic: Mapping[tuple[Side, str], LinkStatistics]


class StageServer:
    """The network side of a stage: it takes links for one shard, and opens those to next stages.

    :meth:`dial` is given to :func:`~dgr.stage.shard.open_shard`; :meth:`serve` then listens for that shard.
    """

    def __init__(self, policy: LinkPolicy) -> None:
        self._policy = policy
        self._shard: Shard | None = None
        self._nursery: trio.Nursery | None = None
        self._next: dict[tuple[str, str], Link] = {}
        self._dialing: dict[tuple[str, str], trio.Lock] = {}
        self._visitors = VisitorLog()
        #: Whether this stage is reached by processes of its own user on this host alone, and so reaches no others.
        self._is_local = False
        self._links = self._handshaking = self._accepted = self._refused = 0

    @property
    def _served(self) -> Shard:
        assert self._shard is not None
        return self._shard

    def statistics(self) -> ServerStatistics:
        leaving = {pair: link.statistics() for pair, link in self._next.items()}
        traffic = {} if self._shard is None else self._shard.traffic.statistics()
        return ServerStatistics(self._links, self._handshaking, self._accepted, self._refused, leaving, traffic)

    # --- towards the next stage ---

    async def dial(self, own: str, successor: str) -> Link:
        """The boundary link to a next stage; the :data:`~dgr.stage.shard.Dialer` of a stage process."""
        assert self._nursery is not None
        if (socket_path(successor) is not None) is not self._is_local:
            raise InvalidRoute(
                f"stage {own} and its next stage {successor} are not reached alike; a route has unix: addresses alone, or none"
            )
        pair = own, successor
        lock = self._dialing.setdefault(pair, trio.Lock())
        try:
            async with lock:
                link = self._next.get(pair)
                if link is None:
                    await self._drop_unused()
                    if len(self._next) >= self._policy.max_links:
                        raise Overloaded(
                            f"this stage holds {len(self._next)} links to next stages, and takes no more than"
                            f" {self._policy.max_links}"
                        )
                    link = await self._nursery.start(self._hold, own, successor)
                return link
        finally:
            if not lock.locked():
                self._dialing.pop(pair, None)

    async def _drop_unused(self) -> None:
        """Routes come and go; a link to a stage that no route leads to any more is not kept beside a new one."""
        for pair, link in list(self._next.items()):
            making = self._dialing.get(pair)  # held until whoever had it made has it
            if not self._served.pushes_to(link) and not (making is not None and making.locked()):
                self._next.pop(pair, None)
                await link.aclose()

    async def _hold(
        self, own: str, successor: str, *, task_status: trio.TaskStatus[Link] = trio.TASK_STATUS_IGNORED
    ) -> None:
        ours = self._served.description
        started = False
        try:
            async with open_greeted(successor, self._policy, Hello(Role.STAGE, own, ours)) as (link, welcome, _):
                check_alike(f"stage {successor}", welcome.identity, ours)
                check_link(ours, welcome.identity)
                self._next[own, successor] = link
                started = True
                task_status.started(link)
                try:
                    with self._served.traffic.counting(Side.NEXT, successor, link):
                        await self._served.watch_successor(link)
                finally:
                    if self._next.get((own, successor)) is link:
                        del self._next[own, successor]
        except DgrError as error:
            if not started:
                raise
            _log.warning("link to stage %s: %s", successor, error)
        except Exception:
            if not started:
                raise
            _log.exception("link to stage %s ends by a defect; everything else goes on", successor)

    # --- from pipelines and previous stages ---

    async def serve(
        self,
        shard: Shard,
        listeners: list[trio.SocketListener],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Take links until cancelled. Nothing a peer does ends this."""
        require_packer(shard.description.context.wire)
        self._shard = shard
        self._is_local = all(socket_path(address_of(each)) is not None for each in listeners)
        with removing_files(listeners):
            async with open_nursery() as self._nursery:
                task_status.started()
                await trio.serve_listeners(self._take, listeners)

    async def _take(self, stream: trio.SocketStream) -> None:
        who = _where_from(stream)
        if self._handshaking >= self._policy.max_links:
            self._refused += 1
            self._visitors.left(
                who, Overloaded(f"{self._handshaking} connections are not greeted yet; this one was closed")
            )
            await trio.aclose_forcefully(stream)
            return
        self._handshaking += 1
        greeted = False
        transport: Transport = stream
        try:
            if not await says_something(stream, self._policy.handshake):
                _log.debug("%s: it left without a word, as health probes do", who)
                return
            credentials = self._policy.credentials
            context = None if credentials is None else credentials.context(server=True)
            transport = await accept(stream, context, self._policy.handshake)
            async with self._greet(transport) as (link, serve):
                greeted = True
                self._handshaking -= 1
                self._accepted += 1
                self._links += 1
                await serve(link)
        except (DgrError, OSError) as error:
            if greeted:
                _log.warning("%s: %s", who, error)
            else:
                self._visitors.left(who, error)
        except Exception:
            _log.exception("%s: the link ends by a defect; everything else goes on", who)
        finally:
            if greeted:
                self._links -= 1
            else:
                self._handshaking -= 1
                self._refused += 1
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(transport)

    @asynccontextmanager
    async def _greet(self, transport: Transport) -> AsyncIterator[tuple[Link, Callable[[Link], Awaitable[None]]]]:
        """A link that belongs here, and what serves it."""
        seconds = self._policy.handshake
        await exchange_preamble(transport, seconds)
        async with open_link(transport, HANDSHAKE_LIMITS, name="a new link", heartbeat=self._policy.heartbeat) as link:
            hello = (await first_frame(link, seconds, "Hello")).frame
            try:
                serve = self._admit(hello, transport)
            except (InputError, FrameError) as error:
                link.send_nowait(Denied(str(error)[:4096]))
                with trio.move_on_after(seconds):
                    await link.flush()
                raise
            assert isinstance(hello, Hello)
            link.name = f"from {hello.name!r}"
            limits = limits_of(self._served.description, within_host=link.within_host)
            link.send_nowait(Welcome(self._served.description, limits.under_way))
            link.apply_limits(limits, None, limits.under_way, incoming=arriving_limits(limits, hello.role))
            is_pipeline = hello.role is Role.PIPELINE
            side, peer = (Side.PIPELINE, "") if is_pipeline else (Side.PREVIOUS, hello.name)
            with self._served.traffic.counting(side, peer, link):
                yield link, serve

    def _admit(self, hello: frames.Frame, transport: Transport) -> Callable[[Link], Awaitable[None]]:
        """Check who it is and that it belongs here; returns what serves its link."""
        if not isinstance(hello, Hello):
            raise FrameError(f"a link begins with Hello, not with {type(hello).__name__}")
        if self._links >= self._policy.max_links:
            raise InputError(f"this stage serves {self._links} links, and takes no more than {self._policy.max_links}")
        ours = self._served.description
        check_wants(hello.wants, ours)
        if hello.role is Role.PIPELINE:
            return self._served.serve_control
        if hello.identity is None:
            raise FrameError("a stage must say what it is: its Hello has no identity")
        host = "" if socket_path(hello.name) is not None else parse_address(hello.name)[0]
        check_alike(f"stage {hello.name}", hello.identity, ours)
        check_link(hello.identity, ours)
        names = peer_names(transport)
        if names is not None and not names_host(names, host):
            raise InvalidRoute(
                f"the peer calls itself {hello.name}, but its certificate is for {', '.join(sorted(names)) or 'no host'}"
            )
        return partial(self._served.serve_boundary, peer=hello.name)


def _where_from(stream: trio.SocketStream) -> str:
    """The other end of a connection, for people."""
    if stream.socket.family == socket.AF_UNIX:
        return "from a process of this host"
    try:
        return "from {}:{}".format(*stream.socket.getpeername()[:2])
    except OSError:  # it is gone already
        return "from a peer that is gone"
