"""The HTTP server's own life: its sockets, its settings, and an end that leaves no stream in mid-air."""

from __future__ import annotations

import logging
import socket
import ssl
import sys
from contextlib import ExitStack
from pathlib import Path

import trio
from anycorn import Config
from attrs import field, frozen

from dgr.cluster.certificates import HttpsFiles
from dgr.core.files.inputs import check_file
from dgr.errors import InputError
from dgr.serving.connections.listener import Listener, most_connections
from dgr.serving.engine import ServingEngine
from dgr.serving.http.keys import App
from dgr.wire.credentials import MOST_PEM_BYTES, CertificateFiles, check_private_key
from dgr.wire.nurseries import open_nursery
from dgr.wire.tcp import is_loopback, parse_address, refused_listener

__all__ = ["HttpPolicy", "address_of", "bind", "check_reach", "run_server", "server_config"]

_log = logging.getLogger("dgr.serve")

#: Seconds a connection may be idle between two requests: longer than proxies and pooled clients keep theirs.
_KEEP_ALIVE = 90.0
#: Connections that wait to be accepted.
_BACKLOG = 512
#: Seconds for what is left once every answer has ended: last events on their way out.
_LAST_BYTES = 1.0
#: Most bytes of a request's head.
_MOST_HEAD = 64 << 10


@frozen
class HttpPolicy:
    """How a server treats its connections."""

    #: PEM files of certificate and key; None: plain HTTP.
    tls: tuple[Path, Path] | None = None
    #: Seconds for answers under way when the server is told to end.
    grace: float = 30.0
    #: Seconds in which a client must take 64 KiB of what was sent to it; its connection ends then.
    client_timeout: float = 30.0
    #: Connections at once; None: as :func:`~dgr.serving.connections.listener.most_connections` says.
    max_connections: int | None = None
    _https: list[HttpsFiles] = field(init=False, factory=list, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.grace <= 86400:
            raise InputError(f"grace is {self.grace:g} s; give 0 to 86400")
        if not 0.1 <= self.client_timeout <= 86400:
            raise InputError(f"the timeout of clients is {self.client_timeout:g} s; give 0.1 to 86400")
        if self.max_connections is not None and self.max_connections < 1:
            raise InputError(f"the most connections are {self.max_connections}; give 1 or more")

    @property
    def https(self) -> HttpsFiles | None:
        """The certificate, which may be replaced while the server runs. Raises :class:`~dgr.errors.InputError` at first."""
        if self.tls is not None and not self._https:
            self._https.append(_https_files(*self.tls))
        return self._https[0] if self._https else None


def _https_files(certificate: Path, key: Path) -> HttpsFiles:
    def load() -> ssl.SSLContext:
        check_private_key(key)
        try:
            for path in (certificate, key):
                check_file(path, MOST_PEM_BYTES, "a PEM file")
        except OSError as error:
            raise InputError(f"cannot load TLS files {certificate} and {key}: {error}") from error
        config = Config()
        _name_files(config, certificate, key)
        try:
            context = config.create_ssl_context()
        except OSError as error:  # an SSLError is one
            raise InputError(f"cannot load TLS files {certificate} and {key}: {error}") from error
        assert context is not None
        return context

    return HttpsFiles(certificate, key, CertificateFiles((certificate, key), load))


def _name_files(config: Config, certificate: Path, key: Path) -> None:
    # HTTP/2 has windows of its own: a client that never opens one acknowledges every byte and is not noticed by TCP.
    config.alpn_protocols = ["http/1.1"]
    config.certfile, config.keyfile = str(certificate), str(key)
    config.keyfile_password = ""  # a key with a pass phrase is an error: OpenSSL would ask for it on the terminal


def bind(address: str, policy: HttpPolicy) -> list[socket.socket]:
    """Listening sockets of ``HOST:PORT`` (port 0: any free one). Raises :class:`~dgr.errors.InputError`.

    They have one option (Linux: TCP_USER_TIMEOUT): a client whose host is gone is noticed in ``client_timeout`` too where the
    kernel has room for all that it is sent.
    """
    host, port = parse_address(address)
    sockets: list[socket.socket] = []
    with ExitStack() as stack:
        try:
            for family, kind, protocol, _, where in socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            ):
                if port == 0 and sockets:
                    break  # another address would have another port
                sock = stack.enter_context(socket.socket(family, kind, protocol))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                if sys.platform == "linux":
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * policy.client_timeout))
                sock.bind(where)
                sock.listen(_BACKLOG)
                sock.setblocking(False)
                sockets.append(sock)
        except OSError as error:
            raise refused_listener(address, error) from error
        stack.pop_all()
    return sockets


def address_of(sock: socket.socket) -> str:
    """``HOST:PORT`` of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_reach(sockets: list[socket.socket], *, has_keys: bool, allow_anyone: bool) -> None:
    """Refuse to answer anyone beyond this machine unless told so. Raises :class:`~dgr.errors.InputError`."""
    beyond = [address_of(sock) for sock in sockets if not is_loopback(sock.getsockname()[0])]
    if beyond and not has_keys and not allow_anyone:
        raise InputError(
            f"{beyond[0]} is not a loopback address and there are no API keys: anyone who reaches it could use the model; give"
            " --api-key-file FILE, or --allow-anyone where that is meant"
        )


def server_config() -> Config:
    """anycorn's settings."""
    config = Config()
    config.keep_alive_timeout = _KEEP_ALIVE
    config.h11_max_incomplete_size = _MOST_HEAD
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = _log
    config.loglevel = "WARNING"
    return config


async def run_server(
    app: App,
    engine: ServingEngine,
    sockets: list[socket.socket],
    policy: HttpPolicy,
    *,
    stop: trio.Event,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve on ``sockets``, and close them; until ``stop`` is set: then admit nobody, let answers end, and leave.

    An answer that takes longer than the grace ends with an error event, or a 503. Cancelled, it ends them at once.
    Raises :class:`~dgr.errors.InputError` for TLS files that cannot be used.
    """
    https = policy.https
    contexts = None if https is None else https.files.newest
    listener = Listener(
        app,
        server_config(),
        most=policy.max_connections or most_connections(),
        client_timeout=policy.client_timeout,
        contexts=contexts,
    )
    drained = trio.Event()

    async def drain() -> None:
        try:
            await stop.wait()
            await engine.drain(policy.grace)
        finally:
            engine.end_all()
            drained.set()

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        with trio.CancelScope(
            shield=True
        ):  # cancelled in mid-life it would end answers without a word: it is told to end
            await listener.serve(sockets, stop=drained, grace=_LAST_BYTES, task_status=task_status)

    async with open_nursery() as nursery:
        nursery.start_soon(drain)
        await nursery.start(run)
        task_status.started()
