"""Certificates of a program that runs for long: newer files are taken without a restart, and an end that is near is told."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import trio
from attrs import field, frozen, mutable

from dgr.wire.credentials import CertificateFiles, Credentials, expiry_of

__all__ = [
    "SOON_DAYS",
    "CertificateReport",
    "CertificateSource",
    "Deadlines",
    "HttpsFiles",
    "report_of",
    "sources_of",
    "watch",
]

_log = logging.getLogger("dgr.certificates")

#: Days before its end from which a certificate is spoken of.
SOON_DAYS = 14
_DAY = 86_400.0
#: Seconds between two looks at the files; a handshake looks at them too.
_LOOK = 60.0


class CertificateSource(Protocol):
    """Certificates in use: those of links, or those of an HTTP server."""

    @property
    def problem(self) -> str | None:
        """Why newer files are not in use; None when the newest are."""
        ...

    def expiries(self) -> Mapping[str, float]:
        """By what they are: when those in use end, seconds since 1970."""
        ...


@frozen
class HttpsFiles:
    """The certificate of an HTTP server, whose contexts ``files`` makes."""

    certificate: Path
    key: Path
    files: CertificateFiles[ssl.SSLContext]
    _dates: dict[str, float] = field(init=False, factory=dict, eq=False, repr=False)

    @property
    def problem(self) -> str | None:
        return self.files.problem

    def expiries(self) -> Mapping[str, float]:
        """When it ends, as ``https``; nothing where that cannot be told."""
        self.files.newest()
        if self.problem is None and (end := expiry_of(self.certificate, self.key)) is not None:
            self._dates["https"] = end
        return dict(self._dates)


@frozen
class CertificateReport:
    """What a program tells of its certificates."""

    #: By what they are (``own``, ``ca``, ``https``): when those in use end, seconds since 1970.
    expiries: Mapping[str, float]
    #: Why newer files are not in use, one for each set of files.
    problems: tuple[str, ...]


def report_of(sources: tuple[CertificateSource, ...]) -> CertificateReport:
    """Look at the files, and tell what is in use."""
    expiries = {name: end for source in sources for name, end in source.expiries().items()}
    return CertificateReport(expiries, tuple(source.problem for source in sources if source.problem is not None))


@mutable
class Deadlines:
    """Which ends of certificates are to be told now: once a day, from two weeks before."""

    _told: dict[str, tuple[float, float]] = field(factory=dict)

    def due(self, expiries: Mapping[str, float], now: float) -> list[str]:
        """What to say. ``now``: seconds since 1970."""
        said = []
        for name, end in expiries.items():
            if end - now > SOON_DAYS * _DAY:
                continue
            told_end, told_at = self._told.get(name, (0.0, 0.0))
            if told_end == end and 0 <= now - told_at < _DAY:
                continue
            self._told[name] = end, now
            when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(end))
            left = f"in {(end - now) / _DAY:.1f} days" if end > now else "and every new handshake with it fails"
            said.append(
                f"the certificate `{name}` {'ends' if end > now else 'ended'} on {when}, {left}: put a newer one into its"
                " files, no restart is needed"
            )
        return said


async def watch(*sources: CertificateSource, now: Callable[[], float] = time.time, look: float = _LOOK) -> None:
    """Take newer files within ``look`` seconds though nobody greets us, and log ends that are near. Until cancelled."""
    deadlines = Deadlines()
    while True:
        for line in deadlines.due(report_of(sources).expiries, now()):
            _log.warning("%s", line)
        await trio.sleep(look)


def sources_of(*found: Credentials | HttpsFiles | None) -> tuple[CertificateSource, ...]:
    """Those that are there."""
    return tuple(one for one in found if one is not None)
