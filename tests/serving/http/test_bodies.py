"""Bodies of many requests at once: bounded all together, and whoever comes with a whole one is served."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest
import trio
import trio.testing
from serving.http.hostile_http import good_body
from serving.http.http_servers import Server, Stream, open_server

from dgr.serving.api.prompts import Thinking
from dgr.serving.connections.bodies import Bodies, Body
from dgr.serving.http import service
from dgr.serving.http.service import ServerOptions

PATH = "/v1/chat/completions"
MOST = 40_000
SMALL = ServerOptions(model="m", thinking=Thinking.OFF, max_body=MOST)


def test_the_one_that_has_been_coming_for_longest_gives_way() -> None:
    bodies = Bodies(100)
    with bodies.held() as whole, bodies.held() as empty, bodies.held() as old, bodies.held() as new:
        whole.grow(50)
        whole.is_whole = True
        old.grow(30)
        new.grow(30)
        assert (whole.gave_way, empty.gave_way, old.gave_way, new.gave_way) == (False, False, True, False)
        new.grow(30)  # nobody else is left that could
        assert new.gave_way
        assert bodies.size == 50
    assert bodies.size == 0


def test_one_alone_may_be_larger() -> None:
    """Its own limit is another one."""
    bodies = Bodies(100)
    with bodies.held() as one:
        one.grow(101)
        assert not one.gave_way


def _held_at_most(bodies: Bodies, rng: random.Random) -> int:
    """Bodies that begin, grow, are whole, and end at random; gives the most bytes that were held."""
    held: list[tuple[Body, ExitStack]] = []
    most = 0
    for _ in range(2000):
        match rng.randrange(4):
            case 0:
                stack = ExitStack()
                held.append((stack.enter_context(bodies.held()), stack))
            case 1 if held:
                _, stack = held.pop(rng.randrange(len(held)))
                stack.close()
            case 2 if held:
                held[rng.randrange(len(held))][0].is_whole = True
            case _:
                growing = [body for body, _ in held if not body.is_whole and not body.gave_way]
                if growing:
                    rng.choice(growing).grow(rng.randrange(1, 40))
        most = max(most, bodies.size)
    for _, stack in held:
        stack.close()
    assert bodies.size == 0
    return most


class _Generous(Bodies):
    """The mutant."""

    def make_room(self, growing: Body) -> None:
        pass


def test_there_are_never_more_bytes() -> None:
    assert _held_at_most(Bodies(300), random.Random(1)) <= 300
    assert _held_at_most(_Generous(300), random.Random(1)) > 300


async def _begin(server: Server, body: bytes, come: int) -> Stream:
    stream = await server.connect()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    await stream.sock.send_all(head + body[:come])
    return stream


async def test_slow_bodies_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_BODIES", 2)
    body = good_body(PATH)
    body += b" " * (MOST - len(body))
    async with open_server(options=SMALL) as server:
        slow = []
        for _ in range(5):
            slow.append(await _begin(server, body, MOST - 100))
            await trio.testing.wait_all_tasks_blocked(0.01)
        for stream in slow[:3]:  # two are held
            status, headers = await stream.head()
            assert (status, headers["retry-after"]) == (503, "1")
        whole = await _begin(server, body, MOST)
        assert (await whole.head())[0] == 200
        assert (await slow[3].head())[0] == 503
        await slow[4].sock.send_all(body[-100:])
        assert (await slow[4].head())[0] == 200
        for stream in [*slow, whole]:
            await stream.aclose()


async def test_a_client_that_leaves_while_others_are_read_is_noticed() -> None:
    body = good_body(PATH)
    body += b" " * (MOST - len(body))
    async with open_server(options=SMALL) as server:
        reading = server.service.reading
        async with reading:
            waiting = await _begin(server, body, MOST)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert reading.statistics().tasks_waiting == 1
            await waiting.aclose()
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert reading.statistics().tasks_waiting == 0
        assert (await server.chat("next")).status == 200
