"""Transports by address: where bytes leave the process.

Between hosts TLS 1.3 with certificates on both sides is the rule; plain TCP needs a loopback address or an explicit word.
Processes of one user on one host have ``unix:/PATH`` (:mod:`dgr.wire.samehost`), where neither is asked for.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import trio

from dgr.errors import DeadlineExceeded, InputError, LinkBroken
from dgr.wire.credentials import Credentials
from dgr.wire.samehost.addresses import listen_at, socket_path

if TYPE_CHECKING:
    from dgr.wire.samehost.stream import SharedStream

__all__ = [
    "Transport",
    "accept",
    "accept_tls",
    "address_of",
    "dial",
    "is_loopback",
    "listen",
    "names_host",
    "parse_address",
    "peer_expiry",
    "peer_names",
    "refused_listener",
]

Transport: TypeAlias = "trio.SocketStream | trio.SSLStream[trio.SocketStream] | SharedStream"

#: Seconds for telling a peer why its handshake failed, at most.
_LAST_WORDS = 1.0
_READ = 65536
_NAMED = "reach it by a name that its certificate lists, or make one for this name (`dgr keys`)"
#: What to do where a certificate is refused for something else than its CA, by OpenSSL's X509_V_ERR_…: not yet valid,
#: expired, other host name, other IP address.
_STEPS: Mapping[int, str] = {
    9: "compare the clocks of both hosts",
    10: "make a new one (`dgr keys`)",
    62: _NAMED,
    64: _NAMED,
}

_PORT = re.compile(r"[0-9]{1,5}")
#: Characters of names; a resolver knows no others, and none of a URL or a second port.
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def parse_address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT`` or ``[IPV6]:PORT``. Raises :class:`InputError`."""
    host, colon, port = text.rpartition(":")
    if text.startswith("unix:"):
        raise InputError(f"address {text!r} is one of this host alone; give HOST:PORT here, for example 127.0.0.1:7701")
    if "://" in text:
        raise InputError(f"address {text!r} is a URL; stages are reached at HOST:PORT, for example 10.0.0.1:7701")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if (
        not colon
        or not _PORT.fullmatch(port)
        or int(port) > 65535
        or not (_is_ipv6(host) if bracketed else _is_host(host))
    ):
        raise InputError(f"address {text!r} is not HOST:PORT with a port from 0 to 65535, for example 10.0.0.1:7701")
    return host, int(port)


def _is_host(host: str) -> bool:
    """Whether a resolver can be asked for it: it raises anything but OSError for what is not a name at all."""
    if ":" in host:
        return _is_ipv6(host)
    if not _NAME.fullmatch(host) or host.startswith("."):
        return False
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def _is_ipv6(host: str) -> bool:
    """Whether it is an IPv6 address, maybe with a zone."""
    try:
        return ipaddress.ip_address(host).version == 6 and host.isprintable() and " " not in host
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether a host never leaves this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_plain(host: str, credentials: Credentials | None, allow_plain: bool) -> None:
    """Refuse plain TCP beyond loopback unless it was asked for explicitly."""
    if credentials is None and not allow_plain and not is_loopback(host):
        raise InputError(
            f"{host} is not a loopback address and no TLS credentials were given; make some with `dgr keys`, or allow plain"
            " TCP explicitly"
        )


def refused_listener(address: str, error: OSError) -> InputError:
    """What to say of a place where nothing can listen."""
    known = {
        errno.EADDRINUSE: "; end what listens there, or give another port (0: any that is free)",
        errno.EADDRNOTAVAIL: "; give an address of this host",
        errno.EACCES: "; give a port from 1024 on",
    }
    return InputError(f"cannot listen on {address}: {error.strerror or error}{known.get(error.errno or 0, '')}")


async def listen(
    address: str, *, credentials: Credentials | None, allow_plain: bool = False
) -> list[trio.SocketListener]:
    """Bind ``HOST:PORT``: every address that the name has, or for port 0 (any free one) its first alone; or ``unix:/PATH``.

    Two addresses would have two free ports, and there is one to tell. Raises :class:`InputError`, for credentials that
    cannot be used too.
    """
    if (path := socket_path(address)) is not None:
        return [await listen_at(path)]
    host, port = parse_address(address)
    check_plain(host, credentials, allow_plain)
    if credentials is not None:
        credentials.context(server=True)
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise refused_listener(address, error) from error
    if port == 0:
        for listener in listeners[1:]:
            await listener.aclose()
        del listeners[1:]
    return listeners


def address_of(listener: trio.SocketListener) -> str:
    """Where a socket listens, as it is dialled."""
    name = listener.socket.getsockname()
    if listener.socket.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def accept(stream: trio.SocketStream, context: ssl.SSLContext | None, seconds: float) -> Transport:
    """The server's side of whatever a connection begins with, within a deadline: shared memory, TLS or nothing.

    Raises :class:`~dgr.errors.WireError`.
    """
    if stream.socket.family == socket.AF_UNIX:
        from dgr.wire.samehost.handshake import accept_shared  # it needs Linux

        return await accept_shared(stream, seconds)
    return await accept_tls(stream, context, seconds)


async def accept_tls(stream: trio.SocketStream, context: ssl.SSLContext | None, seconds: float) -> Transport:
    """The server's side of the TLS handshake, within a deadline. Raises :class:`LinkBroken`."""
    if context is None:
        return stream
    secure = trio.SSLStream(stream, context, server_side=True, https_compatible=False)
    await _handshake(secure, seconds, "a client")
    return secure


async def dial(
    address: str, *, credentials: Credentials | None, allow_plain: bool = False, seconds: float = 10.0
) -> Transport:
    """Connect to ``HOST:PORT``, with credentials over TLS with the host's name checked; or to ``unix:/PATH``.

    Raises :class:`LinkBroken` when the host refuses or presents a wrong certificate, :class:`DeadlineExceeded`.
    """
    if (path := socket_path(address)) is not None:
        from dgr.wire.samehost.handshake import dial_shared  # it needs Linux

        return await dial_shared(path, seconds)
    host, port = parse_address(address)
    check_plain(host, credentials, allow_plain)
    context = None if credentials is None else credentials.context(server=False)
    try:
        with trio.fail_after(seconds):
            stream = await trio.open_tcp_stream(host, port)
    except trio.TooSlowError:
        raise DeadlineExceeded(f"no connection to {address} within {seconds:g} s") from None
    except OSError as error:
        raise LinkBroken(f"cannot connect to {address}: {_reason(error)}") from error
    except RuntimeError as error:  # names are looked up in a thread
        raise LinkBroken(
            f"cannot look up {host}: {error}; give an IP address, or this process a higher limit"
        ) from error
    if context is None:
        return stream
    secure = trio.SSLStream(stream, context, server_hostname=host, https_compatible=False)
    await _handshake(secure, seconds, address)
    return secure


def _reason(error: OSError) -> str:
    """Trio tries every address a name has and reports them together; the first one's reason says most."""
    cause: BaseException | None = error.__cause__
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return str(cause or error)


async def _handshake(stream: trio.SSLStream[trio.SocketStream], seconds: float, who: str) -> None:
    try:
        with trio.fail_after(seconds):
            await stream.do_handshake()
    except trio.TooSlowError:
        await trio.aclose_forcefully(stream)
        raise DeadlineExceeded(f"{who} did not finish the TLS handshake within {seconds:g} s") from None
    except (trio.BrokenResourceError, ssl.SSLError) as error:
        with trio.move_on_after(_LAST_WORDS):
            await _say_why(stream)
        await trio.aclose_forcefully(stream)
        cause = error.__cause__ or error
        code = cause.verify_code if isinstance(cause, ssl.SSLCertVerificationError) else 0
        step = _STEPS.get(code, "both sides need certificates of one CA (`dgr keys`)")
        raise LinkBroken(f"TLS with {who} failed: {cause}; {step}") from error
    except trio.Cancelled:
        await trio.aclose_forcefully(stream)  # nobody else holds it yet
        raise


async def _say_why(stream: trio.SSLStream[trio.SocketStream]) -> None:
    """Send the alert of a failed handshake: trio keeps it (python-trio/trio#3413), and the other side learns nothing.

    Then hear the other side out: closing over bytes that nobody read would reset the connection, and the alert be lost.
    """
    outgoing: ssl.MemoryBIO | None = getattr(stream, "_outgoing", None)
    alert = b"" if outgoing is None else outgoing.read()
    if not alert:
        return
    transport = stream.transport_stream
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await transport.send_all(alert)
        await transport.send_eof()
        while await transport.receive_some(_READ):
            pass


def peer_names(stream: Transport) -> frozenset[str] | None:
    """Names in the other side's certificate; None over plain TCP, where nobody vouches for a name."""
    if not isinstance(stream, trio.SSLStream):
        return None
    certificate: Mapping[str, tuple[tuple[str, str], ...]] = stream.getpeercert() or {}
    return frozenset(value for _kind, value in certificate.get("subjectAltName", ()))


def peer_expiry(stream: Transport) -> float | None:
    """When the other side's certificate ends, seconds since 1970; None over plain TCP."""
    if not isinstance(stream, trio.SSLStream):
        return None
    certificate: Mapping[str, object] = stream.getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(certificate["notAfter"]))) if "notAfter" in certificate else None


def names_host(names: frozenset[str], host: str) -> bool:
    """Whether a certificate with these names is one of ``host``. IP addresses have many spellings, names two cases."""
    return _canonical(host) in {_canonical(name) for name in names}


def _canonical(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower()
