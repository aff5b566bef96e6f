"""Every wait on an HTTP client has a bound: clients that stop at any point, against connections on the mock clock."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from anycorn import Config
from anycorn.task_group import TaskGroup
from anycorn.utils import wrap_app
from anycorn.worker_context import EventWrapper
from attrs import frozen

from dgr.serving.api.errors import ApiError
from dgr.serving.connections import connection as connections
from dgr.serving.connections.bodies import Bodies
from dgr.serving.connections.connection import Connection, Host
from dgr.serving.http import streams
from dgr.serving.http.keys import Receive, Scope, Send
from dgr.serving.http.server import HttpPolicy, server_config
from dgr.serving.http.streams import ClientLeft, read_body, send_events, send_whole, while_connected

Client = Callable[[trio.abc.Stream], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PAUSE, TAKES, BODY, END = server_config().keep_alive_timeout, HttpPolicy().client_timeout, streams._BODY, 1.0
#: Seconds of the mock clock; nothing that ends takes as long.
HANG = 1000.0
LARGE = bytes(1 << 20)


# --- applications ---


async def reads(_: Scope, receive: Receive, send: Send) -> None:
    try:
        with Bodies(1 << 20).held() as body:
            await read_body(receive, 1 << 20, body)
    except ApiError as error:
        await send({"type": "http.response.start", "status": error.status, "headers": []})
        await send({"type": "http.response.body", "body": b""})
    except ClientLeft:
        return
    else:
        await send_whole(send, b"{}")


async def reads_nothing(_: Scope, receive: Receive, send: Send) -> None:
    await send_whole(send, b"{}")


async def gives_much(_: Scope, receive: Receive, send: Send) -> None:
    await send_whole(send, LARGE)


async def gives_events(_: Scope, receive: Receive, send: Send) -> None:
    async def produce(emit: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            await emit(b"data: " + bytes(1000) + b"\n\n")

    try:
        await send_events(receive, send, produce, lambda: b":\n\n", 10.0)
    except ClientLeft:
        return


async def takes_long(_: Scope, receive: Receive, send: Send) -> None:
    try:
        await while_connected(receive, trio.sleep_forever)
    except ClientLeft:
        return


# --- clients ---

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


async def says(data: bytes, stream: trio.abc.Stream) -> None:
    """And then neither speaks nor reads."""
    await stream.send_all(data)
    await trio.sleep_forever()


async def drips(data: bytes, byte: bytes, stream: trio.abc.Stream) -> None:
    await stream.send_all(data)
    while True:
        await stream.send_all(byte)
        await trio.sleep(1)


async def sips(data: bytes, stream: trio.abc.Stream) -> None:
    """Reads a byte a second."""
    await stream.send_all(data)
    while await stream.receive_some(1):  # noqa: ASYNC110 (the clock is the client's own)
        await trio.sleep(1)


async def leaves(data: bytes, stream: trio.abc.Stream) -> None:
    await stream.send_all(data)
    await trio.sleep(5)
    await stream.aclose()


async def reads_one(data: bytes, stream: trio.abc.Stream) -> None:
    """Reads the answers to what it said, and is silent."""
    await stream.send_all(data)
    while await stream.receive_some(65536):
        continue


@frozen
class Case:
    app: App
    client: Client
    #: Seconds after which the connection has ended.
    bound: float


CASES = {
    "says nothing": Case(reads, partial(says, b""), PAUSE),
    "half a head": Case(reads, partial(says, GET[:20]), PAUSE),
    "a head without end": Case(reads, partial(drips, GET[:-2], b"a"), PAUSE),
    "no body": Case(reads, partial(says, POST), BODY + TAKES + END),
    "a body without end": Case(reads, partial(drips, POST, b"a"), BODY + TAKES + END),
    "no chunk": Case(reads, partial(says, CHUNKED), BODY + TAKES + END),
    "chunks without end": Case(reads, partial(drips, CHUNKED, b"1\r\na\r\n"), BODY + TAKES + END),
    "a body nobody asks for": Case(reads_nothing, partial(says, CHUNKED + 100 * b"1\r\na\r\n"), TAKES + END),
    "a body nobody asks for, its answer read": Case(
        reads_nothing, partial(reads_one, CHUNKED + 100 * b"1\r\na\r\n"), END
    ),
    "a body nobody asks for, and gone": Case(reads_nothing, partial(leaves, CHUNKED + 100 * b"1\r\na\r\n"), 5 + END),
    "a pause without end": Case(reads, partial(reads_one, GET), PAUSE),
    "an answer that is not read": Case(gives_much, partial(says, GET), TAKES + END),
    "an answer that is sipped": Case(gives_much, partial(sips, GET), TAKES + END),
    "an answer that is not read, and more asked for": Case(gives_much, partial(says, 50 * GET), TAKES + END),
    "events that are not read": Case(gives_events, partial(says, GET), TAKES + END),
    "events that are sipped": Case(gives_events, partial(sips, GET), TAKES + END),
    "no answer yet, and gone": Case(takes_long, partial(leaves, GET), 5 + END),
    "no answer yet, more asked for, and gone": Case(takes_long, partial(leaves, 50 * GET), 5 + END),
    "a refusal that is not read": Case(reads, partial(says, b"\0\r\n\r\n"), TAKES + END),
    "a hundred times continue": Case(
        reads, partial(says, b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n"), TAKES + END
    ),
}  # fmt: skip


async def lasts(case: Case, *, end_by: float = math.inf, config: Config | None = None, takes: float = TAKES) -> float:
    """Seconds after which a connection has ended, with all that answers on it; infinity where it has not."""
    answering = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal answering
        answering += 1
        try:
            await case.app(scope, receive, send)
        finally:
            answering -= 1

    async def talk(stream: trio.abc.Stream) -> None:
        try:
            await case.client(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    run_app: Any = app
    host = Host(wrap_app(run_app, 0, "asgi"), config or server_config(), takes)
    one = Connection(host, ("127.0.0.1", 1), ("127.0.0.1", 2))
    ours, theirs = trio.testing.lockstep_stream_pair()
    run: Any = one.run
    began, lasted = trio.current_time(), math.inf
    async with trio.open_nursery() as nursery:

        async def give_up() -> None:
            await trio.sleep(HANG)
            one.end_by(trio.current_time())
            nursery.cancel_scope.cancel()

        nursery.start_soon(give_up)
        nursery.start_soon(talk, theirs)
        if end_by < math.inf:
            nursery.start_soon(_end, one, end_by)
        await run(ours)
        lasted = trio.current_time() - began
        nursery.cancel_scope.cancel()
    assert answering == 0
    return lasted


async def _end(one: Connection, after: float) -> None:
    """What a listener does at its end."""
    await trio.sleep(after)
    one.end_by(trio.current_time())
    one.let_go()


@pytest.mark.parametrize("name", CASES)
async def test_every_wait_on_a_client_has_its_bound(name: str, autojump_clock: trio.testing.MockClock) -> None:
    assert await lasts(CASES[name]) <= CASES[name].bound


@pytest.mark.parametrize("name", CASES)
async def test_no_client_holds_the_servers_end(name: str, autojump_clock: trio.testing.MockClock) -> None:
    """The application's own end is the listener's: it cancels it."""
    case = CASES[name]
    if case.app is takes_long:
        return
    assert await lasts(case, end_by=2) <= 2 + END


class _Deaf(EventWrapper):
    def __init__(self, _: object) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        ({"Applications": TaskGroup}, "a body nobody asks for, and gone"),
        ({"Applications": TaskGroup}, "a body nobody asks for, its answer read"),
        ({"_Turn": _Deaf}, "no answer yet, more asked for, and gone"),
        ({"takes": math.inf}, "an answer that is not read"),
        ({"takes": math.inf}, "events that are not read"),
        ({"_PIECE": 1 << 30, "takes": math.inf}, "an answer that is sipped"),
        ({"keep_alive": math.inf}, "a head without end"),
    ],
)
async def test_a_bound_that_is_missing_is_missed(
    mutant: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    config, takes, case = server_config(), TAKES, CASES[name]
    for key, value in mutant.items():
        match key:
            case "keep_alive":
                config.keep_alive_timeout = value
            case "takes":
                takes = value
            case _:
                monkeypatch.setattr(connections, key, value)
    assert await lasts(case, config=config, takes=takes) > case.bound
