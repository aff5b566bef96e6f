"""From a link that failed to what to do about it: by what can be found out here, not by which error came of it."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator, Mapping

import trio
from attrs import frozen

from dgr.cluster.certificates import SOON_DAYS
from dgr.errors import (
    DeadlineExceeded,
    DgrError,
    FrameError,
    InvalidRoute,
    LinkBroken,
    PeerRefused,
    SchemaMismatch,
)
from dgr.wire.credentials import Credentials, greet
from dgr.wire.samehost.addresses import socket_path
from dgr.wire.tcp import parse_address

__all__ = ["Finding", "causes", "certificate_step", "next_step", "own_findings", "peer_finding", "said_step"]

_DAY = 86_400.0
#: Seconds to find out whether a host takes connections at all.
_KNOCK = 3.0

#: OpenSSL's X509_V_ERR_…: what a refused certificate is refused for, as far as it tells what to do.
_NOT_YET_VALID, _EXPIRED = 9, 10
_SELF_SIGNED, _SELF_SIGNED_IN_CHAIN, _NO_ISSUER, _NO_ISSUER_AT_ALL = 18, 19, 20, 21
_OTHER_HOST, _OTHER_IP = 62, 64
_FOREIGN = "it is not of this host's CA: give all hosts certificates of one CA (`dgr keys`), and this host its ca.pem"
_NAMED = "its certificate is for other names: write one of those in the route file, or make one for this address (`dgr keys`)"
_OF_PEERS: Mapping[int, str] = {
    _EXPIRED: "the certificate there has expired: make a new one (`dgr keys`) and put it into its files: no restart is needed",
    _NOT_YET_VALID: "the certificate there is not valid yet: compare the clocks of both hosts",
    _SELF_SIGNED: _FOREIGN,
    _SELF_SIGNED_IN_CHAIN: _FOREIGN,
    _NO_ISSUER: _FOREIGN,
    _NO_ISSUER_AT_ALL: _FOREIGN,
    _OTHER_HOST: _NAMED,
    _OTHER_IP: _NAMED,
}
_OF_OWN: Mapping[int, tuple[str, str]] = {
    _EXPIRED: ("has expired", "make a new one with `dgr keys`, where the CA's key is"),
    _NOT_YET_VALID: ("is not valid yet", "set this host's clock, or wait until it is"),
}
#: What to do where a stage's own words say what is wrong.
_SAID: Mapping[type[DgrError], str] = {
    SchemaMismatch: "install the same dgr there as here, on the older side, and start its stage again",
    FrameError: "something else than a stage of this dgr version listens there: check the port, and that both sides use TLS"
    " or neither does",
    PeerRefused: "the stage says what differs: start it with the same model, context and dgr as the others",
    InvalidRoute: "make the stages alike, or correct the route file",
}


@frozen
class Finding:
    """Something about this host's own certificate that peers will hold against it, now or soon."""

    what: str
    next_step: str
    #: It works today.
    later: bool = False


def own_findings(credentials: Credentials | None, now: float | None = None) -> list[Finding]:
    """What peers see of this host's certificate, found out by greeting ourselves. Raises :class:`~dgr.errors.InputError`."""
    if credentials is None:
        return []
    now = time.time() if now is None else now
    verifier = credentials.fresh_context(server=True)
    findings = []
    for ca in verifier.get_ca_certs():
        findings += _dates(
            f"the CA's certificate {credentials.ca}", ca, now, "make a new CA and new certificates for all hosts"
        )
    if any(not finding.later for finding in findings):
        return findings
    name = f"this host's certificate {credentials.certificate}"
    try:
        certificate = _as_peers_see_it(credentials, verifier)
    except ssl.SSLCertVerificationError as error:
        what, step = _OF_OWN.get(
            error.verify_code,
            (f"is not one of {credentials.ca}: {error.verify_message}", "use files that `dgr keys` made together"),
        )
        return [*findings, Finding(f"{name} {what}", step)]
    except ssl.SSLError as error:
        return [*findings, Finding(f"{name} cannot be used: {error}", "use files that `dgr keys` made together")]
    return [*findings, *_dates(name, certificate, now, "make a new one with `dgr keys`, where the CA's key is")]


def peer_finding(address: str, end: float, now: float | None = None) -> Finding | None:
    """What to say of a stage's certificate that is good today and ends at ``end``, seconds since 1970."""
    if end - (time.time() if now is None else now) >= SOON_DAYS * _DAY:
        return None
    when = time.strftime("%b %e %H:%M:%S %Y GMT", time.gmtime(end))
    step = "make a new one with `dgr keys`, and put it into the files there: no restart is needed"
    return Finding(f"the certificate of stage {address} expires on {when}", step, later=True)


def _dates(name: str, certificate: Mapping[str, object], now: float, step: str) -> list[Finding]:
    begin, end = (ssl.cert_time_to_seconds(str(certificate[key])) for key in ("notBefore", "notAfter"))
    if now > end:
        return [Finding(f"{name} expired on {certificate['notAfter']}", step)]
    if now < begin:
        return [
            Finding(f"{name} is valid from {certificate['notBefore']} on", "set this host's clock, or wait until it is")
        ]
    if end - now < SOON_DAYS * _DAY:
        return [Finding(f"{name} expires on {certificate['notAfter']}", step, later=True)]
    return []


def _as_peers_see_it(credentials: Credentials, verifier: ssl.SSLContext) -> Mapping[str, object]:
    """Greet ourselves without a network; the certificate, verified. Raises :class:`ssl.SSLError`."""
    shower = credentials.fresh_context(server=False)
    shower.check_hostname, shower.verify_mode = False, ssl.CERT_NONE  # the other side is this process
    return greet(shower, verifier)


def certificate_step(error: BaseException) -> str | None:
    """What to do where a peer's certificate was refused here; None where it was not."""
    codes = (cause.verify_code for cause in causes(error) if isinstance(cause, ssl.SSLCertVerificationError))
    return next((_OF_PEERS[code] for code in codes if code in _OF_PEERS), None)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came of; trio groups the failures of the addresses that a name has."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for one in error.exceptions:
                yield from causes(one)
        error = error.__cause__


def said_step(error: DgrError, more: Mapping[type[DgrError], str] | None = None) -> str:
    """What to do where the error says what is wrong. ``more``: what is known of its place, before what is known of all."""
    steps = [step for kind, step in (*(more or {}).items(), *_SAID.items()) if isinstance(error, kind)]
    return steps[0] if steps else "see the message; `dgr doctor --log info` shows more"


async def next_step(address: str, error: DgrError, credentials: Credentials | None, *, own_is_bad: bool) -> str:
    """What to do about a link to a stage that failed. ``own_is_bad``: this host's certificate is known not to do."""
    found = list(causes(error))
    if (step := certificate_step(error)) is not None:
        return step
    if any(isinstance(cause, socket.gaierror) for cause in found):
        return "the name is not known on this host: correct it in the route file, or in DNS"
    if not isinstance(error, LinkBroken | DeadlineExceeded):
        return said_step(error)
    if any(isinstance(cause, ConnectionRefusedError | FileNotFoundError) for cause in found):
        return "nothing listens there: start the stage there (dgr stage), and check its address"
    if socket_path(address) is not None:
        denied = any(isinstance(cause, PermissionError) for cause in found)
        return "the socket is another user's: run stages and clients as one user" if denied else said_step(error)
    if not await _takes_connections(address):
        return "the host takes no connection: see whether it is up, and check address, routes and firewall"
    if isinstance(error, DeadlineExceeded):
        return (
            "the host takes connections and does not answer: see whether the stage is still loading, stopped or overloaded,"
            " and whether a firewall drops packets"
        )
    if own_is_bad:
        return "something listens there and ended the link: mend this host's certificate first"
    if credentials is None:
        return (
            "something listens there and ended the link: it may want TLS (--tls-ca, --tls-cert, --tls-key), or hold as many"
            " links as it takes; its log says why"
        )
    return (
        "something listens there and ended the link: it does not take this host's certificate, or it speaks without TLS; its"
        " log says why"
    )


async def _takes_connections(address: str) -> bool:
    with trio.move_on_after(_KNOCK):
        try:
            if (path := socket_path(address)) is not None:
                stream = await trio.open_unix_socket(path)
            else:
                stream = await trio.open_tcp_stream(*parse_address(address))
        except (OSError, RuntimeError):  # no connection, or no thread to look the name up in
            return False
        await trio.aclose_forcefully(stream)
        return True
    return False
