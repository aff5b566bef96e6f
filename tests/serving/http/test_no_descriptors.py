"""A process that may open nothing more answers on what is open, and takes connections again once it may."""

from __future__ import annotations

import logging
import socket

import pytest
import trio
import trio.testing
from serving.http.hostile_http import good_body
from serving.http.http_servers import Server, Stream, open_server

from dgr.serving.api.prompts import Thinking
from dgr.serving.http.service import ServerOptions
from dgr.serving.monitor.endpoint import open_endpoint
from dgr.serving.monitor.stage import StageMonitor
from dgr.testing.limits import no_descriptors
from dgr.wire.tcp import parse_address

GETS = ["/v1/models", "/health", "/ready", "/status", "/metrics", "/", "/openapi.json"]
POSTS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]


async def _asked(stream: Stream, path: str) -> int:
    method, body = ("POST", good_body(path)) if path in POSTS else ("GET", None)
    await stream.send(method, path, body, {"host": "localhost"})
    status, headers = await stream.head()
    await stream.rest(headers)
    return status


def _defects(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def test_every_path_answers_on_a_connection_that_is_open(caplog: pytest.LogCaptureFixture) -> None:
    options = ServerOptions(model="m", thinking=Thinking.OFF, stage_metrics=True)
    async with open_server(options=options) as server:
        stream = await server.connect()
        assert await _asked(stream, "/status") == 200
        with no_descriptors():
            told = {path: await _asked(stream, path) for path in [*GETS, *POSTS]}
        await stream.aclose()
        assert told == {path: await _again(server, path) for path in told}
    assert _defects(caplog) == []


async def _again(server: Server, path: str) -> int:
    stream = await server.connect()
    try:
        return await _asked(stream, path)
    finally:
        await stream.aclose()


async def test_a_stages_metrics_are_told(caplog: pytest.LogCaptureFixture) -> None:
    async with open_endpoint("127.0.0.1:0", StageMonitor()) as (address,):
        stream = Stream(await trio.open_tcp_stream(*parse_address(address)))
        assert await _asked(stream, "/health") == 200
        with no_descriptors():
            assert [await _asked(stream, path) for path in ("/metrics", "/health")] == [200, 200]
        await stream.aclose()
    assert _defects(caplog) == []


async def _knock(address: str) -> None:
    """A connection that comes while it cannot be taken, and is answered later."""
    with trio.socket.socket() as sock:
        with no_descriptors():
            await sock.connect(parse_address(address))
            await trio.testing.wait_all_tasks_blocked(0.05)
        stream = Stream(trio.SocketStream(sock))
        assert await _asked(stream, "/health") == 200


async def test_connections_are_taken_again(caplog: pytest.LogCaptureFixture) -> None:
    async with open_server() as server, open_endpoint("127.0.0.1:0", StageMonitor()) as (address,):
        for each in (server.address, address):
            await _knock(each)
        assert await _chats(server)
    assert {record.name for record in caplog.records if record.levelno >= logging.ERROR} <= {"trio.serve_listeners"}


async def _chats(server: Server) -> bool:
    return (await server.chat("still there")).status == 200


def test_the_limit_is_one() -> None:
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        socket.socket()
