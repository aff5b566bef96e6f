"""How a client reaches stages in other processes: how a link to one is opened, and a pipeline over a route file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import evolve, field, frozen

from dgr.client.pace import CHUNK_SECONDS
from dgr.client.pipeline import Pipeline, Timeouts, open_pipeline_on
from dgr.cluster.route_file import RouteFile, read_route_file
from dgr.core.arguments import check_instance, flag, instance, number, optional, whole
from dgr.core.mtp import refuse_value
from dgr.core.values import StageIdentity
from dgr.engine.vocab import LlamaVocabulary
from dgr.errors import DeadlineExceeded, FrameError, InvalidRoute, LinkBroken, PeerRefused
from dgr.protocol.limits import limits_of
from dgr.v4.state_map import ContextShape
from dgr.wire.credentials import Credentials
from dgr.wire.frames import Denied, Hello, Role, Welcome
from dgr.wire.framing import Limits, Received
from dgr.wire.handshake import HANDSHAKE_LIMITS, exchange_preamble
from dgr.wire.links import Link, open_link
from dgr.wire.tcp import dial, peer_expiry

__all__ = ["LinkPolicy", "RemoteConnector", "arriving_limits", "first_frame", "open_greeted", "open_route"]


@frozen
class LinkPolicy:
    """How links between processes behave."""

    #: TLS credentials of this process; None: plain TCP, on loopback only unless ``allow_plain``.
    credentials: Credentials | None = field(default=None, validator=optional(instance(Credentials)))
    allow_plain: bool = field(default=False, validator=flag())
    #: Seconds for connecting, for TLS and for the handshake, each.
    handshake: float = field(default=10.0, validator=number(0, above=True))
    #: Seconds after which an idle link shows a sign of life; a peer silent for three is given up.
    heartbeat: float = field(default=2.0, validator=number(0, above=True))
    #: Links a stage holds at once, as many connections that are not greeted yet, and as many links to next stages; more
    #: are refused as they come.
    max_links: int = field(default=64, validator=whole(1))


def arriving_limits(limits: Limits, role: Role) -> Limits:
    """What may come from whoever opened a link: residuals from a stage, and no payload from anyone else."""
    return evolve(limits, n_vocab=0, boundary_width=limits.boundary_width if role is Role.STAGE else 0)


async def first_frame(link: Link, seconds: float, what: str) -> Received:
    with trio.move_on_after(seconds):
        async for received in link:
            return received
        raise LinkBroken(f"{link.name}: the other side closed the link instead of {what}")
    raise DeadlineExceeded(f"{link.name}: no {what} within {seconds:g} s")


@asynccontextmanager
async def open_greeted(
    address: str, policy: LinkPolicy, hello: Hello
) -> AsyncIterator[tuple[Link, Welcome, float | None]]:
    """A link to a stage, greeted and agreed on; and when the stage's certificate ends, where it has one."""
    transport = await dial(
        address, credentials=policy.credentials, allow_plain=policy.allow_plain, seconds=policy.handshake
    )
    try:
        await exchange_preamble(transport, policy.handshake, f"stage {address}")
    except BaseException:
        await trio.aclose_forcefully(transport)
        raise
    async with open_link(transport, HANDSHAKE_LIMITS, name=f"to {address}", heartbeat=policy.heartbeat) as link:
        link.send_nowait(hello)
        answer = (await first_frame(link, policy.handshake, "Welcome")).frame
        match answer:
            case Welcome():
                limits = limits_of(answer.identity, within_host=link.within_host)
                if answer.credit < limits.under_way // 2:
                    raise FrameError(
                        f"stage {address} takes {answer.credit} bytes of payload at a time; one boundary of"
                        f" {limits.n_batch} tokens is {limits.under_way // 2}"
                    )
                # A next stage answers without payloads; the tail sends logits to a client.
                incoming = arriving_limits(limits, Role.PIPELINE) if hello.role is Role.STAGE else None
                link.apply_limits(limits, answer.credit, incoming=incoming)
                yield link, answer, peer_expiry(transport)
            case Denied():
                raise PeerRefused(f"stage {address} refused the link: {answer.message}")
            case _:
                raise FrameError(f"stage {address} answered Hello with {type(answer).__name__}")


class RemoteConnector:
    """Opens control links to stages over TCP; the :class:`~dgr.client.pipeline.Connector` of a client.

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
        #: By address: when a stage's certificate ends, seconds since 1970, as last shown.
        self.expiries: dict[str, float] = {}
        self._policy = policy
        self._hello = Hello(Role.PIPELINE, name, None, wants)
        self._artifact = artifact
        self._context = dict(context or {})

    @asynccontextmanager
    async def __call__(self, address: str) -> AsyncIterator[tuple[Link, StageIdentity]]:
        async with open_greeted(address, self._policy, self._hello) as (link, welcome, expiry):
            if expiry is not None:
                self.expiries[address] = expiry
            self._check(address, welcome.identity)
            yield link, welcome.identity

    def _check(self, address: str, identity: StageIdentity) -> None:
        if self._artifact is not None and identity.artifact != self._artifact:
            raise InvalidRoute(f"stage {address} runs artifact {identity.artifact}; the route is for {self._artifact}")
        for name, wanted in self._context.items():
            has = getattr(identity.context, name)
            rounded = ContextShape(wanted).n_ctx_seq if name == "n_ctx" else wanted  # as upstream rounds it
            if has not in (wanted, rounded):
                raise InvalidRoute(f"stage {address} runs with {name} = {has}; the route is for {wanted}")


@asynccontextmanager
async def open_route(
    route: str | Path | RouteFile,
    *,
    policy: LinkPolicy | None = None,
    model: str | Path | None = None,
    chunk: int | None = None,
    chunk_seconds: float = CHUNK_SECONDS,
    window: int | None = None,
    retries: int = 2,
    ahead: int = 0,
    timeouts: Timeouts | None = None,
    mtp: None = None,
) -> AsyncIterator[Pipeline]:
    """A pipeline over stages in other processes, as a route file names them; leaving the block closes its links.

    ``model``: a GGUF whose vocabulary to use (default: the route file's ``model``); without one, prompts are token ids and
    answers have no text. ``policy``: links (default: TLS with the route file's credentials). ``chunk``, ``chunk_seconds``,
    ``window``, ``retries``, ``ahead``, ``timeouts``: as in :func:`~dgr.client.pipeline.open_pipeline_on`, which also says what
    is raised when stages cannot be had. ``mtp`` is reserved: None. Raises :class:`~dgr.errors.InvalidRoute` for a bad route
    file, :class:`~dgr.errors.ArtifactError` for a bad ``model``, :class:`~dgr.errors.MtpNotExecutable`, and
    :class:`~dgr.errors.InputError` for any other value.
    """
    refuse_value("mtp", mtp)
    check_instance("route", route, str, Path, RouteFile)
    file = route if isinstance(route, RouteFile) else await trio.to_thread.run_sync(read_route_file, route)
    if policy is None:
        policy = LinkPolicy(credentials=None if file.tls is None else Credentials(*file.tls))
    check_instance("policy", policy, LinkPolicy)
    connector = RemoteConnector(policy, artifact=file.artifact, context=file.context)
    with ExitStack() as stack:
        path = model or file.model
        vocabulary = None if path is None else stack.enter_context(LlamaVocabulary(path))
        async with open_pipeline_on(
            connector,
            file.route,
            spares=file.spares,
            vocabulary=vocabulary,
            chunk=chunk,
            chunk_seconds=chunk_seconds,
            window=window,
            retries=retries,
            ahead=ahead,
            timeouts=timeouts,
        ) as pipeline:
            yield pipeline
