"""`dgr keys`: a private CA and certificates, in files that only their owner reads."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.commands import Result
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from dgr.cli import keys
from dgr.errors import InputError
from dgr.testing.limits import limited_files
from dgr.wire.credentials import Credentials
from dgr.wire.tcp import parse_address


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(path: Path) -> list[str]:
    found = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


def test_it_writes_a_ca_and_a_pair_for_every_host(run: Callable[..., Result], tmp_path: Path) -> None:
    folder = tmp_path / "cluster" / "keys"
    result = run("keys", "127.0.0.1", "stage-b.lan", "::1", "--out", folder, "--json")
    assert result.code == 0
    expected = ["ca.pem", "ca.key"]
    expected += [f"{host}.{kind}" for host in ("127.0.0.1", "stage-b.lan", "::1") for kind in ("pem", "key")]
    assert result.json() == {"files": [str(folder / name) for name in expected]}
    assert sorted(path.name for path in folder.iterdir()) == sorted(expected)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.glob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert [names(folder / f"{host}.pem") for host in ("127.0.0.1", "stage-b.lan", "::1")] == [
        ["127.0.0.1"], ["stage-b.lan"], ["::1"],
    ]  # fmt: skip


def test_certificates_are_of_the_ca_and_serve_both_sides(run: Callable[..., Result], tmp_path: Path) -> None:
    assert run("keys", "127.0.0.1", "--out", tmp_path).code == 0
    ca, host = certificate(tmp_path / "ca.pem"), certificate(tmp_path / "127.0.0.1.pem")
    host.verify_directly_issued_by(ca)
    assert host.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    limits = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (limits.value.ca, limits.value.path_length, limits.critical) == (True, 0, True)
    credentials = Credentials(*(tmp_path / name for name in ("ca.pem", "127.0.0.1.pem", "127.0.0.1.key")))
    for is_server in (True, False):
        context = credentials.context(server=is_server)
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    server, client = credentials.context(server=True), credentials.context(server=False)
    assert _greet(client, server, "127.0.0.1") == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for '127\.0\.0\.2'"):
        _greet(client, server, "127.0.0.2")


def _greet(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> str | None:
    """The TLS version that two sides agree on, without a network."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    left = list(sides)
    while left:
        for side in list(left):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            left.remove(side)
    return sides[0].version()


def test_a_ca_is_used_again_and_never_overwritten(run: Callable[..., Result], tmp_path: Path) -> None:
    run("keys", "10.0.0.1", "--out", tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    result = run("keys", "10.0.0.2", "--out", tmp_path)
    assert (result.code, result.out.split()) == (0, [str(tmp_path / "10.0.0.2.pem"), str(tmp_path / "10.0.0.2.key")])
    certificate(tmp_path / "10.0.0.2.pem").verify_directly_issued_by(certificate(tmp_path / "ca.pem"))
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


@pytest.mark.parametrize("left", ["10.0.0.1.pem", "10.0.0.1.key"])
def test_a_host_that_has_a_file_already_is_refused_and_nothing_is_written(
    left: str, run: Callable[..., Result], tmp_path: Path
) -> None:
    run("keys", "10.0.0.1", "--out", tmp_path)
    for name in {"10.0.0.1.pem", "10.0.0.1.key"} - {left}:
        (tmp_path / name).unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    result = run("keys", "10.0.0.3", "10.0.0.1", "--out", tmp_path)
    assert result.code == 2
    assert f"{tmp_path / left} exists already; remove 10.0.0.1.pem and 10.0.0.1.key" in result.err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_host_named_twice_has_one_certificate(run: Callable[..., Result], tmp_path: Path) -> None:
    assert run("keys", "a", "a", "--out", tmp_path).code == 0
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    "host", ["", "ca", "..", "a/b", "10.0.0.1:7701", "[::1]", "fe80::1%eth0", "a_b c", "bücher", "-a", "a..b", "x" * 64]
)
def test_what_is_no_host_is_refused(host: str, run: Callable[..., Result], tmp_path: Path) -> None:
    folder = tmp_path / "none"
    result = run("keys", "--out", folder, "--", "good", host)
    assert result.code == 2
    assert f"{host!r} is not a host name or IP address" in result.err
    assert not folder.exists()


@pytest.mark.parametrize("days", ["0", "-1", "36501", "99999999999"])
def test_days_that_cannot_be_are_refused(days: str, run: Callable[..., Result], tmp_path: Path) -> None:
    result = run("keys", "a", "--days", days, "--out", tmp_path / "none")
    assert result.code == 2
    assert f"--days is {days}; give 1 to 36500" in result.err


@pytest.mark.parametrize("host", ["my_stage_1", "_a", "a_", "a_b.my_net", "A_1"])
def test_names_that_container_tools_make_have_certificates(
    host: str, run: Callable[..., Result], tmp_path: Path
) -> None:
    assert run("keys", "--out", tmp_path, host).code == 0
    assert names(tmp_path / f"{host}.pem") == [host]
    parse_address(f"{host}:7701")  # as a route file has it
    credentials = Credentials(*(tmp_path / name for name in ("ca.pem", f"{host}.pem", f"{host}.key")))
    server, client = credentials.context(server=True), credentials.context(server=False)
    assert _greet(client, server, host) == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        _greet(client, server, f"x{host}")


def test_a_certificate_is_of_the_hosts_it_lists_and_not_of_its_own_title(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    """OpenSSL falls back on the common name where there is no list, unless it is told not to."""
    run("keys", "a", "--out", tmp_path)
    ca, ca_key = keys._load(tmp_path / "ca.pem", tmp_path / "ca.key")
    key = ec.generate_private_key(ec.SECP256R1())
    titled = keys._certificate("stage.lan", [], key, ca, ca_key, 1)
    (tmp_path / "t.pem").write_bytes(titled.public_bytes(Encoding.PEM))
    (tmp_path / "t.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "t.key").chmod(0o600)
    server = Credentials(*(tmp_path / name for name in ("ca.pem", "t.pem", "t.key"))).context(server=True)
    client = Credentials(*(tmp_path / name for name in ("ca.pem", "a.pem", "a.key"))).context(server=False)
    with pytest.raises(ssl.SSLCertVerificationError):
        _greet(client, server, "stage.lan")


@pytest.mark.parametrize(
    ("mode", "taken"), [(0o600, True), (0o400, True), (0o640, True), (0o644, False), (0o602, False)]
)
def test_a_private_key_that_every_user_may_use_is_refused(
    mode: int, taken: bool, run: Callable[..., Result], tmp_path: Path
) -> None:
    run("keys", "a", "--out", tmp_path)
    (tmp_path / "link.key").symlink_to("a.key")
    (tmp_path / "a.key").chmod(mode)
    for name in ("a.key", "link.key"):
        credentials = Credentials(tmp_path / "ca.pem", tmp_path / "a.pem", tmp_path / name)
        if taken:
            credentials.context(server=True)
        else:
            with pytest.raises(InputError, match=rf"{name}: mode {mode:04o} lets every user .* chmod 600"):
                credentials.context(server=True)


def test_the_key_of_a_ca_that_every_user_can_read_signs_nothing(run: Callable[..., Result], tmp_path: Path) -> None:
    run("keys", "a", "--out", tmp_path)
    (tmp_path / "ca.key").chmod(0o644)
    result = run("keys", "b", "--out", tmp_path)
    assert result.code == 2
    assert "ca.key: mode 0644 lets every user" in result.err
    assert not (tmp_path / "b.pem").exists()


@pytest.mark.parametrize("room", [0, 100, 300])
def test_a_full_disk_leaves_no_file_and_blocks_nothing(room: int, run: Callable[..., Result], tmp_path: Path) -> None:
    with limited_files(room):
        result = run("keys", "a", "b", "--out", tmp_path)
    assert result.code == 2
    assert "cannot be written: File too large" in result.err
    assert list(tmp_path.iterdir()) == []
    assert run("keys", "a", "b", "--out", tmp_path).code == 0


@pytest.mark.parametrize("place", ["a file", "a device", "below a file", "a dangling link"])
def test_a_place_that_is_no_folder_is_refused(place: str, run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("absent")
    out = {"a file": tmp_path / "file", "a device": "/dev/null", "below a file": tmp_path / "file" / "x"}
    result = run("keys", "a", "--out", out.get(place, tmp_path / "link"))
    assert result.code == 2
    assert "cannot be made" in result.err
    assert (tmp_path / "file").read_bytes() == b"old"


def test_days_hold(run: Callable[..., Result], tmp_path: Path) -> None:
    assert run("keys", "a", "--days", "36500", "--out", tmp_path).code == 0
    one = certificate(tmp_path / "a.pem")
    assert (one.not_valid_after_utc - one.not_valid_before_utc).days == 36500


@pytest.mark.parametrize("missing", ["ca.pem", "ca.key"])
def test_half_a_ca_is_refused(missing: str, run: Callable[..., Result], tmp_path: Path) -> None:
    run("keys", "a", "--out", tmp_path)
    (tmp_path / missing).unlink()
    result = run("keys", "b", "--out", tmp_path)
    assert result.code == 2
    assert "holds only one of ca.pem and ca.key" in result.err
    assert not (tmp_path / "b.pem").exists()


def test_a_ca_that_is_none_is_refused(run: Callable[..., Result], tmp_path: Path) -> None:
    run("keys", "a", "--out", tmp_path)
    other = tmp_path / "other"
    run("keys", "a", "--out", other)
    (tmp_path / "ca.key").write_bytes((other / "ca.key").read_bytes())
    assert "is not the elliptic-curve key of" in run("keys", "b", "--out", tmp_path).err
    (tmp_path / "ca.key").write_text("no key")
    result = run("keys", "b", "--out", tmp_path)
    assert result.code == 2
    assert "cannot read the CA" in result.err


def test_an_expired_ca_is_refused(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    expired = keys._certificate("dgr cluster CA", [], key, None, key, 0)  # over as it is made
    (tmp_path / "ca.pem").write_bytes(expired.public_bytes(Encoding.PEM))
    (tmp_path / "ca.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "ca.key").chmod(0o600)
    with pytest.raises(InputError, match="expired on"):
        keys.make_keys(tmp_path, ["a"], 1)


@pytest.mark.parametrize("wrong", ["ca.pem", "a.pem", "a.key"])
def test_credentials_that_cannot_be_loaded_say_so(wrong: str, run: Callable[..., Result], tmp_path: Path) -> None:
    run("keys", "a", "--out", tmp_path)
    (tmp_path / wrong).write_text("nothing of the kind")
    credentials = Credentials(*(tmp_path / name for name in ("ca.pem", "a.pem", "a.key")))
    with pytest.raises(InputError, match=r"cannot load TLS credentials .*`dgr keys` makes a set"):
        credentials.context(server=True)


def test_a_key_with_a_pass_phrase_is_an_error_and_not_a_question(run: Callable[..., Result], tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, load_pem_private_key

    run("keys", "a", "--out", tmp_path)
    key = load_pem_private_key((tmp_path / "a.key").read_bytes(), None)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (tmp_path / "a.key").write_bytes(pem)
    credentials = Credentials(*(tmp_path / name for name in ("ca.pem", "a.pem", "a.key")))
    with pytest.raises(InputError, match="cannot load TLS credentials"):
        credentials.context(server=True)


def test_a_ca_whose_key_is_no_point_of_its_curve_is_refused(run: Callable[..., Result], tmp_path: Path) -> None:
    run("keys", "a", "--out", tmp_path)
    path = tmp_path / "ca.pem"
    point = certificate(path).public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    told = certificate(path).public_bytes(Encoding.DER)
    spoilt = told.replace(point, point[:-1] + bytes([point[-1] ^ 1]))
    assert spoilt != told
    path.write_text(ssl.DER_cert_to_PEM_cert(spoilt))
    result = run("keys", "b", "--out", tmp_path)
    assert (result.code, "cannot read the CA" in result.err) == (2, True)
