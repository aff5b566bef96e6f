"""``dgr keys``: a private CA and per-host certificates for a first cluster."""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgr.cli.streams import print_json
from dgr.core.files.inputs import read_whole
from dgr.core.files.outputs import NewFile, write_new_files
from dgr.errors import InputError
from dgr.wire.credentials import MOST_PEM_BYTES, check_private_key

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

__all__ = ["make_keys", "register", "run"]

#: A host name, or a part of one; what else a certificate could name nobody can dial. With the underscores that container
#: tools put into names.
_NAME = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*"
)
#: Certificates of the CA hold ten times as long as those of hosts; a century is more than anyone's cluster.
_MOST_DAYS = 36_500


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "keys",
        help="make a private CA and certificates for hosts",
        description="Make a private CA (once) and a certificate and key for every HOST. A host's files are"
        " HOST.pem and HOST.key; every host also needs ca.pem. Keep ca.key where no stage runs.",
    )
    parser.add_argument("hosts", nargs="+", metavar="HOST", help="host names or IP addresses, as stages are reached")
    parser.add_argument("--out", default="keys", metavar="DIR", help="folder to write to (default: keys)")
    parser.add_argument("--days", type=int, default=365, metavar="N", help="days the certificates hold (default: 365)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.days <= _MOST_DAYS:
        raise InputError(f"--days is {args.days}; give 1 to {_MOST_DAYS}")
    written = make_keys(Path(args.out), args.hosts, args.days)
    if args.json:
        print_json({"files": [str(path) for path in written]})
    else:
        for path in written:
            print(path)
    return 0


def make_keys(folder: Path, hosts: list[str], days: int) -> list[Path]:
    """Make certificates for hosts; an existing CA is used again. Returns the paths written.

    Raises :class:`~dgr.errors.InputError`; no file was written then.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise InputError("dgr keys needs the extra 'keys': pip install '.[keys]' in its checkout") from error
    for host in hosts:
        if not _is_host(host) or host == "ca":
            raise InputError(
                f"{host!r} is not a host name or IP address; name hosts as stages are reached, without a port"
            )
        for path in (folder / f"{host}.pem", folder / f"{host}.key"):
            if os.path.lexists(path):
                raise InputError(
                    f"{path} exists already; remove {host}.pem and {host}.key to make a new certificate for {host}"
                )
    _make_folder(folder)
    files: list[NewFile] = []
    ca_path, ca_key_path = folder / "ca.pem", folder / "ca.key"
    if ca_path.exists() != ca_key_path.exists():
        raise InputError(f"{folder} holds only one of ca.pem and ca.key; restore the other, or choose an empty folder")
    if ca_path.exists():
        ca, ca_key = _load(ca_path, ca_key_path)
    else:
        ca_key = ec.generate_private_key(ec.SECP256R1())
        ca = _certificate("dgr cluster CA", [], ca_key, None, ca_key, days * 10)
        files += _pair(ca_path, ca, ca_key_path, ca_key)
    for host in dict.fromkeys(hosts):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(host, [host], key, ca, ca_key, days)
        files += _pair(folder / f"{host}.pem", certificate, folder / f"{host}.key", key)
    write_new_files(files)
    return [new.path for new in files]


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as failed:
        raise InputError(
            f"the folder {folder} cannot be made: {failed.strerror or failed}; give another --out"
        ) from failed


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _NAME.fullmatch(text) is not None
    return "%" not in text  # no zone of this host alone


def _load(path: Path, key_path: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    check_private_key(key_path)
    try:
        key = load_pem_private_key(read_whole(key_path, MOST_PEM_BYTES, "a private key"), password=None)
        certificate = x509.load_pem_x509_certificate(read_whole(path, MOST_PEM_BYTES, "a certificate"))
        certified = certificate.public_key()
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"cannot read the CA of {path} and {key_path}: {error}; choose another folder") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certified:
        raise InputError(f"{key_path} is not the elliptic-curve key of {path}; choose another folder for a new CA")
    if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise InputError(
            f"{path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}; make a new CA in another folder"
        )
    return certificate, key


def _certificate(
    name: str,
    hosts: list[str],
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    issuer_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(
            x509.BasicConstraints(ca=issuer is None, path_length=0 if issuer is None else None), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=issuer is None,
                crl_sign=issuer is None,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    )
    if hosts:
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]  # a stage is both
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName([_san(host) for host in hosts]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _san(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pair(path: Path, certificate: x509.Certificate, key_path: Path, key: ec.EllipticCurvePrivateKey) -> list[NewFile]:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return [NewFile(path, certificate.public_bytes(Encoding.PEM)), NewFile(key_path, pem, mode=0o600)]
