"""Certificates of programs that run for long: newer files are taken, broken ones change nothing, ends are told in time."""

from __future__ import annotations

import logging
import ssl
import time
from pathlib import Path

import pytest
import trio
import trio.testing
from attrs import evolve, frozen
from cluster.remote_stages import TWO, Authority, answer_of, open_hosts, reference

from dgr.cluster.certificates import Deadlines, report_of, watch
from dgr.cluster.connect import LinkPolicy
from dgr.errors import InputError, LinkBroken
from dgr.wire import credentials as module
from dgr.wire.credentials import Credentials, greet

DAY = 86_400.0


def replace(old: Credentials, new: Credentials) -> None:
    """Put newer files into the place of older ones, one after another."""
    for name in ("ca", "certificate", "key"):
        source, target = getattr(new, name), getattr(old, name)
        if source != target:
            target.write_bytes(source.read_bytes())


def shown(server: Credentials, client: Credentials) -> str:
    """The serial number of the certificate that a server shows in a handshake that begins now."""
    dialer = client.context(server=False)
    dialer.check_hostname = False
    return str(greet(dialer, server.context(server=True))["serialNumber"])


def test_new_handshakes_use_newer_files(authority: Authority) -> None:
    server, client = authority.credentials("127.0.0.1", days=(-1, 1)), authority.credentials("client", days=(-1, 1))
    before = shown(server, client)
    assert shown(server, client) == before
    replace(server, authority.credentials("127.0.0.1", days=(-1, 30)))
    assert shown(server, client) != before
    assert report_of((server,)).expiries["own"] == pytest.approx(time.time() + 30 * DAY, abs=60)


def test_a_kept_context_would_be_seen(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: what the files were at the start is what they are."""
    monkeypatch.setattr(module, "_stamp", lambda _: None)
    server, client = authority.credentials("127.0.0.1"), authority.credentials("client")
    before = shown(server, client)
    replace(server, authority.credentials("127.0.0.1"))
    assert shown(server, client) == before


@pytest.mark.parametrize("broken", ["certificate", "key", "ca"])
@pytest.mark.parametrize("how", ["other", "empty", "gone", "open to all"])
def test_newer_files_that_cannot_be_used_change_nothing_but_what_is_said(
    broken: str, how: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    client = authority.credentials("client")
    server = evolve(authority.credentials("127.0.0.1"), ca=client.ca.with_name("own.pem"))
    server.ca.write_bytes(client.ca.read_bytes())
    good = {name: getattr(server, name).read_bytes() for name in ("ca", "certificate", "key")}
    before = shown(server, client)
    expiries = report_of((server,)).expiries
    path: Path = getattr(server, broken)
    match how:
        case "other" if broken != "ca":
            path.write_bytes(getattr(authority.credentials("127.0.0.1"), broken).read_bytes())
        case "open to all" if broken == "key":
            path.chmod(0o644)
        case "empty":
            path.write_bytes(b"")
        case "gone":
            path.unlink()
        case _:
            return  # another CA is one, and everyone may read a certificate
    assert shown(server, client) == before
    report = report_of((server,))
    assert report.expiries == expiries
    (problem,) = report.problems
    shown(server, client)
    assert [problem in record.getMessage() for record in caplog.records] == [True]  # once for each change of the files
    path.write_bytes(good[broken])
    path.chmod(0o600)
    assert shown(server, client) == before
    assert report_of((server,)).problems == ()


def test_the_first_files_must_do(authority: Authority) -> None:
    server = authority.credentials("127.0.0.1")
    server.key.unlink()
    for _ in range(2):
        with pytest.raises(InputError, match="cannot load TLS credentials"):
            server.context(server=True)


async def test_a_route_goes_on_over_a_new_ca_without_a_restart(tmp_path: Path) -> None:
    """Both sides of every link rotate: certificates of another CA, which takes over while the stages serve."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    credentials = old.credentials("127.0.0.1")
    async with open_hosts(LinkPolicy(credentials=credentials)) as hosts:
        stages = await hosts.start_all(TWO)
        async with hosts.pipeline(stages) as pipeline:
            assert await answer_of(pipeline) == reference()
            replace(credentials, new.credentials("127.0.0.1"))
            assert await answer_of(pipeline) == reference()  # open links go on
            async with hosts.pipeline(stages) as another:
                assert await answer_of(another) == reference()
        stale = hosts.connector(policy=old.policy("127.0.0.1"))
        with pytest.raises(LinkBroken, match="certificate"):
            async with stale(stages[0].address):
                raise AssertionError("a certificate of the former CA was taken")


# --- ends that are near ---


def test_an_end_is_told_once_a_day_from_two_weeks_before() -> None:
    deadlines, end = Deadlines(), 100 * DAY
    told = [hour / 24 for hour in range(80 * 24, 103 * 24, 6) if deadlines.due({"own": end}, hour / 24 * DAY)]
    assert told == [86.0 + day for day in range(17)]
    assert Deadlines().due({"own": end, "ca": 1000 * DAY}, 99.5 * DAY) == [
        "the certificate `own` ends on 1970-04-11 00:00 UTC, in 0.5 days: put a newer one into its files, no restart is needed"
    ]
    assert "ended on 1970-04-11 00:00 UTC" in Deadlines().due({"own": end}, 101 * DAY)[0]


def test_a_newer_certificate_that_ends_soon_too_is_told_at_once() -> None:
    deadlines = Deadlines()
    assert deadlines.due({"own": 5 * DAY}, 0)
    assert not deadlines.due({"own": 5 * DAY}, 10)
    assert deadlines.due({"own": 6 * DAY}, 10)


@frozen
class Fixed:
    """Certificates with a given end."""

    end: float
    problem: str | None = None

    def expiries(self) -> dict[str, float]:
        return {"own": self.end}


async def test_the_watch_tells_day_after_day(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    with trio.move_on_after(3.5 * DAY):
        await watch(Fixed(10 * DAY), now=trio.current_time, look=3600)
    assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 4


def test_dates_of_an_expired_certificate_are_told_too(authority: Authority) -> None:
    expired = authority.credentials("127.0.0.1", days=(-30, -2))
    assert report_of((expired,)).expiries["own"] == pytest.approx(time.time() - 2 * DAY, abs=60)
    with pytest.raises(ssl.SSLError):  # reading a date does not make it good
        greet(expired.context(server=False), authority.credentials("x").context(server=True))
