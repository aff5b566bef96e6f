"""Certificates and keys in PEM files, read again when the files change.

A context is made of files that fit together, and serves until newer ones do: a set that is written file by file, or that is
broken, changes nothing but what :attr:`CertificateFiles.problem` says. Links that are open keep what they began with.
"""

from __future__ import annotations

import logging
import ssl
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from attrs import field, frozen

from dgr.core.files.inputs import check_file
from dgr.errors import InputError

__all__ = ["MOST_PEM_BYTES", "CertificateFiles", "Credentials", "check_private_key", "expiry_of", "greet"]

T = TypeVar("T")

_log = logging.getLogger("dgr.certificates")

#: A certificate or a key takes a thousandth of it; what is longer is something else, or has no end.
MOST_PEM_BYTES = 1 << 20
#: OpenSSL's X509_V_FLAG_NO_CHECK_TIME: a certificate's dates are read, not judged.
_ANY_TIME = 0x200000


def check_private_key(key: Path) -> None:
    """Refuse a private key that every user of this host may read or replace. Raises :class:`~dgr.errors.InputError`."""
    try:
        mode = stat.S_IMODE(key.stat().st_mode)
    except OSError:
        return  # loading it says why
    if mode & 0o007:
        raise InputError(
            f"{key}: mode {mode:04o} lets every user of this host use the private key; run chmod 600 on it, and make another"
            " one (`dgr keys`) where others may have read it"
        )


class CertificateFiles(Generic[T]):
    """What is made of files that may be replaced while it serves: a context, or several that belong together.

    ``load``: makes it of the files as they are; raises :class:`~dgr.errors.InputError`, also from here the first time.
    """

    def __init__(self, files: Sequence[Path], load: Callable[[], T]) -> None:
        self.files = tuple(files)
        #: Why the files as they are now are not in use; None when they are.
        self.problem: str | None = None
        self._load = load
        self._seen = self._signature()
        self._made = load()

    def newest(self) -> T:
        """For a handshake that begins now. Files that cannot be used leave the former in force."""
        signature = self._signature()
        if signature != self._seen:
            self._seen = signature
            try:
                self._made = self._load()
            except InputError as error:
                self.problem = str(error)
                _log.warning("newer certificates are not in use, the former ones are: %s", error)
            else:
                self.problem = None
                _log.info("new handshakes use the newer %s", ", ".join(map(str, self.files)))
        return self._made

    def _signature(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(map(_stamp, self.files))


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev, found.st_mode, found.st_ctime_ns


@frozen
class Credentials:
    """PEM files of one host: the private CA both sides trust, this host's certificate and its key."""

    ca: Path
    certificate: Path
    key: Path
    #: A client's context and a server's; of the first use of either on.
    _live: list[CertificateFiles[tuple[ssl.SSLContext, ssl.SSLContext]]] = field(
        init=False, factory=list, eq=False, repr=False
    )
    #: When what is in use ends.
    _dates: dict[str, float] = field(init=False, factory=dict, eq=False, repr=False)

    def context(self, *, server: bool) -> ssl.SSLContext:
        """TLS 1.3 only, and a certificate from our CA demanded of the other side; of the newest files that can be used.

        Raises :class:`~dgr.errors.InputError` when the first ones cannot.
        """
        if not self._live:
            files = (self.ca, self.certificate, self.key)
            self._live.append(CertificateFiles(files, self._fresh_contexts))
        return self._live[0].newest()[server]

    def _fresh_contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        return self.fresh_context(server=False), self.fresh_context(server=True)

    def fresh_context(self, *, server: bool) -> ssl.SSLContext:
        """As :meth:`context`, of the files as they are now. Raises :class:`~dgr.errors.InputError`."""
        purpose = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(purpose)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.hostname_checks_common_name = False  # a certificate is of the hosts it lists, never of its own title
        check_private_key(self.key)
        try:
            for path in (self.ca, self.certificate, self.key):
                check_file(path, MOST_PEM_BYTES, "a PEM file")
            context.load_verify_locations(self.ca)
            # A key with a pass phrase is an error: OpenSSL would ask for it on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except OSError as error:  # an SSLError is one
            raise InputError(
                f"cannot load TLS credentials {self.ca}, {self.certificate}, {self.key}: {error}; `dgr keys` makes a set"
            ) from error
        return context

    @property
    def problem(self) -> str | None:
        """Why newer files are not in use; None when the newest are."""
        return self._live[0].problem if self._live else None

    def expiries(self) -> Mapping[str, float]:
        """When what is in use ends, seconds since 1970: ``ca`` (the earliest of its file) and ``own``, as far as it is known.

        Raises :class:`~dgr.errors.InputError` as :meth:`context`.
        """
        found = self.context(server=True).get_ca_certs()
        if self.problem is None:  # else the files are not what is in use
            self._dates.clear()
            if found:
                self._dates["ca"] = min(float(ssl.cert_time_to_seconds(str(ca["notAfter"]))) for ca in found)
            if (own := expiry_of(self.certificate, self.key)) is not None:
                self._dates["own"] = own
        return dict(self._dates)


def expiry_of(certificate: Path, key: Path) -> float | None:
    """When a server's certificate ends, seconds since 1970; None when that cannot be told.

    The standard library shows the dates of a certificate that it verified: ours is verified by itself, at any time.
    """
    shower, verifier = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    verifier.check_hostname = False
    verifier.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _ANY_TIME
    try:
        for path in (certificate, key):
            check_file(path, MOST_PEM_BYTES, "a PEM file")
        shower.load_cert_chain(certificate, key, password="")
        verifier.load_verify_locations(certificate)
        shown = greet(verifier, shower)
    except (InputError, OSError):  # an SSLError is one
        return None
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def greet(client: ssl.SSLContext, server: ssl.SSLContext) -> Mapping[str, object]:
    """What one of two contexts shows the other, whichever verifies: a handshake in memory. Raises :class:`ssl.SSLError`."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    near, far = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    for side in (near, far, near):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    far.do_handshake()
    return near.getpeercert() or far.getpeercert() or {}
