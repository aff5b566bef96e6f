"""Strangers at the HTTP ports: a refusal of their own act for each, never a 500, and nothing left of them."""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from serving.http.hostile_http import WAYS, WORDS, Idle, good_body, storm, strike
from serving.http.http_servers import Server, Stream, open_server

from dgr.serving.api.prompts import Thinking
from dgr.serving.engine import ServingLimits
from dgr.serving.http import server as http_server
from dgr.serving.http.server import HttpPolicy
from dgr.serving.http.service import ServerOptions
from dgr.serving.monitor.endpoint import open_endpoint
from dgr.serving.monitor.stage import StageMonitor
from dgr.testing.waits import until
from dgr.wire.tcp import parse_address

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
         "/v1/models", "/v1/models/m", "/health", "/ready", "/status", "/metrics", "/", "/openapi.json"]  # fmt: skip
ONCE = len(WORDS) * len(WAYS)
SMALL = ServerOptions(model="m", thinking=Thinking.OFF, max_body=60_000)


@pytest.fixture(autouse=True)
def defects_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def defects(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@asynccontextmanager
async def attacked(caplog: pytest.LogCaptureFixture, **options: Any) -> AsyncIterator[Server]:
    """A server that answers as before after the block, and holds nothing."""
    async with open_server(
        options=SMALL, limits=ServingLimits(sessions=2, max_waiting=4, deadline=5), **options
    ) as server:
        before = (await server.chat("the same", seed=1)).json()["choices"]
        idle = await Idle.now()
        yield server
        await idle.again()  # whoever left is noticed at once: this is a guard alone
        assert (server.engine.line.running, server.engine.line.waiting) == (0, 0)
        assert (await server.chat("the same", seed=1)).json()["choices"] == before
        assert defects(caplog) == []


async def test_strangers_are_told_what_they_did_and_nothing_is_left_of_them(caplog: pytest.LogCaptureFixture) -> None:
    async with attacked(caplog) as server:
        told = await storm(server.address, PATHS, 1, ONCE)
        assert told[400] > 10
        assert told[200] > 2  # some were in order, or pipelined


async def test_strangers_at_a_stages_metrics(caplog: pytest.LogCaptureFixture) -> None:
    async with open_endpoint("127.0.0.1:0", StageMonitor()) as (address,):
        idle = await Idle.now()
        told = await storm(address, ["/metrics", "/health", "/ready"], 1, ONCE)
        assert told[400] > 2
        assert told[200] > 2
        await idle.again()
    assert defects(caplog) == []


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(10, 15))
async def test_thousands_of_strangers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("serving.http.http_servers.HANG", 600)
    async with attacked(caplog) as server:
        await storm(server.address, PATHS, seed, 1000)
    async with open_endpoint("127.0.0.1:0", StageMonitor()) as (address,):
        idle = await Idle.now()
        await storm(address, ["/metrics", "/health", "/ready"], seed, 500)
        await idle.again()
    assert defects(caplog) == []


_H2C = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: "
_WEB_SOCKET = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-"


@pytest.mark.parametrize(
    "offer",
    [_H2C + b"\xff\xfe", _H2C + b"!!!", _H2C + b"AAMAAABkAARAAAAAAAIAAAAA", _WEB_SOCKET + b"extensions: \xff",
     _WEB_SOCKET + b"key: dGhlIHNhbXBsZSBub25jZQ=="],
)  # fmt: skip
async def test_an_offer_of_another_protocol_is_not_taken_up(caplog: pytest.LogCaptureFixture, offer: bytes) -> None:
    """Settings or extensions that are no text ended the server, and with --metrics the stage."""
    async with open_endpoint("127.0.0.1:0", StageMonitor()) as (address,):
        stream = Stream(await trio.open_tcp_stream(*parse_address(address)))
        for _ in range(2):
            await stream.sock.send_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + offer + b"\r\n\r\n")
            status, headers = await stream.head()
            assert (status, await stream.rest(headers)) == (200, b'{"status":"ok"}')
        await stream.aclose()
    assert defects(caplog) == []


# --- more of them than there is room for ---


async def test_whoever_is_slow_to_ask_makes_room(caplog: pytest.LogCaptureFixture) -> None:
    """Slow-loris: heads and bodies that never end hold no place that somebody else could use."""
    async with attacked(caplog, policy=HttpPolicy(grace=0, max_connections=8)) as server:
        closed, held = 0, []

        async def hold(begin: bytes) -> None:
            nonlocal closed
            stream = await trio.open_tcp_stream(*parse_address(server.address))
            held.append(stream)
            await stream.send_all(begin)
            with suppress(trio.BrokenResourceError):
                await stream.receive_some()
            closed += 1

        async with trio.open_nursery() as nursery:
            for index in range(40):
                head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
                nursery.start_soon(hold, [b"", head[:20], head, head + b"content-length: 99\r\n\r\n{"][index % 4])
            await until(lambda: closed >= 32)
            assert (await server.chat("in between")).status == 200
            nursery.cancel_scope.cancel()
        for stream in held:
            await trio.aclose_forcefully(stream)
    assert "to make room" in caplog.text


async def test_who_is_being_answered_is_not_closed_for_others(caplog: pytest.LogCaptureFixture) -> None:
    async with attacked(caplog, policy=HttpPolicy(grace=0, max_connections=1)) as server:
        server.model.hold(after=2)
        stream = await server.stream({"messages": [{"role": "user", "content": "go on"}], "stream": True})
        await until(lambda: server.model.is_waiting)
        with pytest.raises((EOFError, trio.BrokenResourceError)):
            await server.ask("GET", "/health")
        server.model.release()
        assert [event async for event in stream.events()][-1] == "data: [DONE]"
        await stream.aclose()
    assert "are being answered, the most at once" in caplog.text


async def test_a_head_that_never_ends_is_given_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte is a sign of life, and none of them a request."""
    monkeypatch.setattr(http_server, "_KEEP_ALIVE", 0.3)
    async with attacked(caplog) as server:
        stream = await trio.open_tcp_stream(*parse_address(server.address))
        with trio.fail_after(20):
            try:
                while True:
                    await stream.send_all(b"a")
                    with trio.move_on_after(0.02):
                        if not await stream.receive_some():
                            break
            except trio.BrokenResourceError:
                pass
        await stream.aclose()


async def test_a_descriptor_too_many_ends_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, failures = trio.SocketListener.accept, list[int]()

    async def accept(listener: trio.SocketListener) -> trio.SocketStream:
        stream = await right(listener)
        if failures:
            failed = failures.pop()
            await trio.aclose_forcefully(stream)
            raise OSError(failed, os.strerror(failed))
        return stream

    monkeypatch.setattr(trio.SocketListener, "accept", accept)
    async with open_server(options=SMALL) as server:
        failures += [errno.EMFILE, errno.ENFILE]
        for _ in range(2):
            with pytest.raises((EOFError, trio.BrokenResourceError)):
                await server.ask("GET", "/health")
        assert (await server.chat("still there")).status == 200


async def test_a_defect_ends_one_connection(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a protocol that breaks on what somebody sends."""

    async def broken(*_: object) -> None:
        raise UnicodeError("a header that is no text")

    async with open_server(options=SMALL) as server:
        waiting = await server.connect()
        with monkeypatch.context() as patch:
            patch.setattr("dgr.serving.connections.connection._Http11._check_protocol", broken)
            for _ in range(3):
                assert await strike(server.address, "/health", "right", "at once", random.Random(1)) == []
        await waiting.send("POST", "/v1/completions", good_body("/v1/completions"))
        assert (await waiting.head())[0] == 200
        await waiting.aclose()
    assert [record.getMessage().partition(": ")[2] for record in caplog.records if record.levelno == logging.ERROR] == [
        "the connection ends by a defect; everything else goes on"
    ]
