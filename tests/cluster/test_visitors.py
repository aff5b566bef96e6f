"""What a stage says of connections that never become links, and what of a peer's words reaches its log."""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import unicodedata
from typing import Any

import pytest
import trio
from cluster.remote_stages import SHORT, Host, denied, identity, open_hosts

from dgr.cli.logs import _OneLine, _RefusedConnections
from dgr.cluster import visitors
from dgr.cluster.connect import LinkPolicy
from dgr.cluster.visitors import VisitorLog
from dgr.errors import FrameError, LinkBroken
from dgr.testing.waits import until
from dgr.wire.frames import Hello, Role
from dgr.wire.tcp import parse_address


async def knock(host: Host, said: bytes = b"", *, reset: bool = False) -> None:
    """Connect, say something, leave; return when the stage has noticed."""
    refused = host.server.statistics().refused
    stream = await trio.open_tcp_stream(*parse_address(host.address))
    async with stream:
        if said:
            await stream.send_all(said)
        if reset:
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await until(lambda: host.server.statistics().refused > refused)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
async def test_a_health_probe_is_no_warning(reset: bool, policy: LinkPolicy, caplog: pytest.LogCaptureFixture) -> None:
    async with open_hosts(policy) as hosts:
        whole = await hosts.start("0:6")
        with caplog.at_level(logging.DEBUG, "dgr.links"):
            for _ in range(5):
                await knock(whole, reset=reset)
        assert warnings(caplog) == []
        assert caplog.text.count("it left without a word, as health probes do") == 5
        async with hosts.pipeline([whole]) as pipeline, pipeline.session() as session:
            await session.prefill([1, 2, 3])


async def test_strangers_of_one_host_have_one_warning(policy: LinkPolicy, caplog: pytest.LogCaptureFixture) -> None:
    async with open_hosts(policy) as hosts:
        whole = await hosts.start("0:6")
        for _ in range(5):
            await knock(whole, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100))
        (said,) = warnings(caplog)
        assert "it was not taken as a link: " in said
        assert "refused us" not in said


async def test_one_that_says_nothing_is_given_up_within_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    async with open_hosts(LinkPolicy(handshake=SHORT)) as hosts:
        whole = await hosts.start("0:6")
        async with await trio.open_tcp_stream(*parse_address(whole.address)):
            await until(lambda: whole.server.statistics().refused == 1)
        assert [f"said nothing within {SHORT:g} s" in said for said in warnings(caplog)] == [True]


async def test_what_was_kept_back_is_counted(caplog: pytest.LogCaptureFixture, autojump_clock: trio.abc.Clock) -> None:
    log = VisitorLog()
    for port in range(3):
        log.left(f"from 10.0.0.1:{port}", FrameError("not dgr"))
    log.left("from 10.0.0.1:9", LinkBroken("TLS failed"))
    log.left("from 10.0.0.2:9", FrameError("not dgr"))
    assert len(warnings(caplog)) == 3  # one of each host and kind
    await trio.sleep(visitors._PAUSE)
    log.left("from 10.0.0.1:7", FrameError("not dgr"))
    assert warnings(caplog)[-1] == (
        "from 10.0.0.1:7: it was not taken as a link: not dgr (2 more of its host since the last such line)"
    )


async def test_many_hosts_are_not_remembered_for_good() -> None:
    log = VisitorLog()
    for host in range(3 * visitors._KEPT):
        log.left(f"from 10.0.{host}:1", FrameError("not dgr"))
    assert len(log._said) == visitors._KEPT


async def test_a_peers_words_begin_no_line_and_move_no_cursor(caplog: pytest.LogCaptureFixture) -> None:
    forged = "x\nERROR forged\r\x1b[2J\x9b31m\u2028\u202e"
    async with open_hosts() as hosts:
        tail = await hosts.start("2:6")
        for field in ("adapter", "architecture", "artifact", "runtime", "kernel_fingerprint"):
            changes: dict[str, Any] = {field: forged}
            said = await denied(tail.address, Hello(Role.STAGE, "127.0.0.1:1", identity(**changes)))
            assert unfit(said) == []
        await denied(tail.address, Hello(Role.STAGE, forged, identity()))
        await denied(tail.address, Hello(Role.PIPELINE, forged, None, (forged,)))
    assert caplog.records
    for record in caplog.records:
        assert unfit(record.getMessage()) == []
        assert unfit(_OneLine().format(record)) == []


def unfit(text: str) -> list[str]:
    return [letter for letter in text if unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") or letter == "\u202e"]


def test_a_log_line_is_one_line_whoever_wrote_it() -> None:
    formatter = _OneLine("%(levelname)s %(name)s: %(message)s")
    record = logging.LogRecord("a", logging.INFO, "", 0, "%s", ("x\nERROR forged\x1b[2J",), None)
    assert formatter.format(record) == r"INFO a: x\nERROR forged\x1b[2J"
    try:
        raise ValueError("x\nERROR forged\x1b[2J")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    first, *others = formatter.format(record).split("\n")
    assert first.startswith("INFO a: ")
    assert others
    assert all(line.startswith("  ") and "\x1b" not in line for line in others)


def test_connections_that_cannot_be_accepted_are_one_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """As trio logs them: with a traceback, every tenth of a second."""
    shown, now = _RefusedConnections(), 1000.0
    monkeypatch.setattr("dgr.cli.logs.time.monotonic", lambda: now)
    passed = []
    for _ in range(300):
        try:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        except OSError as error:
            about = (type(error), error, error.__traceback__)
            record = logging.LogRecord(
                "trio.serve_listeners", logging.ERROR, "", 0, "accept returned %s", ("EMFILE",), about
            )
        if shown.filter(record):
            passed.append(record)
        now += 0.1
    assert len(passed) == 3
    assert {record.getMessage() for record in passed} == {
        "new connections wait, as none can be accepted: Too many open files; raise the limit of open files (ulimit -n)"
    }
    assert all(record.exc_info is None for record in passed)


async def test_a_stage_without_descriptors_left_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The real words of trio: if they change, so must the filter."""

    class Full(trio.abc.Listener[trio.abc.Stream]):
        def __init__(self) -> None:
            self.tries = 0

        async def accept(self) -> trio.SocketStream:
            self.tries += 1
            if self.tries > 2:
                await trio.sleep_forever()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        async def aclose(self) -> None: ...

    monkeypatch.setattr(logging.getLogger("trio.serve_listeners"), "filters", [])  # a command may have been run here
    full = Full()

    async def nobody(_stream: trio.abc.Stream) -> None:
        raise AssertionError("somebody was accepted")

    async def serve() -> None:
        await trio.serve_listeners(nobody, [full])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        await until(lambda: full.tries == 3)
        nursery.cancel_scope.cancel()
    shown = _RefusedConnections()
    assert [shown.filter(record) for record in caplog.records] == [True, False]
