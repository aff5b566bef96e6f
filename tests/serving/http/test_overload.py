"""Ten times what a server can answer: everybody gets an answer, a refusal at once, or a timeout by the deadline.

Stages take time of the mock clock, and the HTTP application is called without sockets, so a minute of it is the same each
time. Requests come at random; some are too long for the deadline, and some clients leave.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

import pytest
import trio
from attrs import frozen
from serving.http.chat_model import open_chat_model, spelled, vocabulary
from serving.http.http_servers import chat_body
from timed_engines import time_engines
from trio.testing import MockClock

from dgr.errors import QueueFull, RequestTimedOut
from dgr.serving.api.prompts import Thinking
from dgr.serving.engine import Job, ServingEngine, ServingLimits, open_serving
from dgr.serving.http.app import make_app
from dgr.serving.http.service import ServerOptions, Service
from dgr.serving.line import Line, Place

SLOTS, DEADLINE = 2, 12.0
LIMITS = ServingLimits(max_waiting=4, deadline=DEADLINE)
#: Seconds of load.
SPAN = 60.0
#: Longer than any step of a stage: a step that has begun ends.
STEP = 0.5
ANSWERED, REFUSED, LATE, LEFT = "answered", "refused", "late", "left"


@frozen
class Asked:
    """One request."""

    name: int
    tokens: int = 5
    stream: bool = False
    #: Seconds after which its client leaves.
    patience: float = math.inf


#: Asks, and says how it ended. Raises for any other end.
Ask = Callable[[Asked], Awaitable[str]]


# --- two ways in ---


@asynccontextmanager
async def library() -> AsyncIterator[tuple[ServingEngine, Ask]]:
    async with open_chat_model(1024, SLOTS) as model, open_serving(model.offline.pipeline, LIMITS) as engine:
        spend_time(model)

        async def ask(asked: Asked) -> str:
            began = trio.current_time()
            with trio.move_on_after(asked.patience):
                try:
                    async with engine.admit(Job(tuple(spelled(f"request {asked.name}")), asked.tokens)) as answer:
                        assert len([token async for token in answer]) == asked.tokens
                    return ANSWERED
                except QueueFull as full:
                    hint, end = full.retry_after or 0, REFUSED
                except RequestTimedOut:
                    hint, end = math.inf, LATE
                assert hint >= 1
                assert trio.current_time() - began <= (DEADLINE + STEP if end is LATE else 0)
                return end
            return LEFT

        yield engine, ask


@asynccontextmanager
async def http() -> AsyncIterator[tuple[ServingEngine, Ask]]:
    async with open_chat_model(1024, SLOTS) as model, open_serving(model.offline.pipeline, LIMITS) as engine:
        spend_time(model)
        app = make_app(Service.of(engine, vocabulary(), ServerOptions(model="m", thinking=Thinking.OFF)))

        async def ask(asked: Asked) -> str:
            body = chat_body(
                f"request {asked.name}",
                max_tokens=asked.tokens,
                ignore_eos=True,
                min_tokens=asked.tokens,
                stream=asked.stream,
            )
            began = trio.current_time()
            status, headers, raw = await exchange(app, json.dumps(body).encode(), asked.patience)
            took = trio.current_time() - began
            if not status:
                return LEFT
            if status == 429:
                assert took == 0
                assert int(headers["retry-after"]) >= 1
                return REFUSED
            said = [part for part in raw.split(b"\n\n") if part.startswith(b"data: ")] if asked.stream else []
            if status == 504 or (status == 200 and said and b'"deadline_exceeded"' in said[-1]):
                assert took <= DEADLINE + STEP
                return LATE
            assert status == 200
            if asked.stream:
                assert said[-1] == b"data: [DONE]"
            else:
                assert json.loads(raw)["usage"]["completion_tokens"] == asked.tokens
            return ANSWERED

        yield engine, ask


async def exchange(app: Any, body: bytes, patience: float) -> tuple[int, dict[str, str], bytes]:
    """One request to an ASGI application; status 0 if its client was told to be gone, after ``patience``."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
    }
    gone = trio.current_time() + patience
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    status, headers, parts = 0, dict[str, str](), list[bytes]()
    left: list[float] = []

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        await trio.sleep_until(gone)
        left.append(gone)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, headers
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return 0 if left else status, headers, b"".join(parts)


def spend_time(model: Any) -> None:
    for engine in model.offline.engines.values():
        engine.inline = False


# --- load ---


class Load:
    """What became of the requests of a span of seconds."""

    def __init__(self, ask: Ask, seed: int, span: float) -> None:
        self.ends: Counter[str] = Counter()
        #: Answers that were complete within the time.
        self.goodput = 0
        #: Seconds that the answers took.
        self.took: list[float] = []
        self._ask = ask
        self._dice = random.Random(seed)
        self._name = 1000 * seed
        self._until = trio.current_time() + span

    def _request(self) -> Asked:
        """One in sixteen cannot be complete by the deadline, and one in eight of the clients leaves."""
        dice = self._dice
        self._name += 1
        tokens = 900 if dice.random() < 1 / 16 else dice.randint(3, 8)
        patience = dice.uniform(0.1, 6) if dice.random() < 1 / 8 else math.inf
        return Asked(self._name, tokens, dice.random() < 0.5, patience)

    async def _one(self, asked: Asked) -> None:
        began = trio.current_time()
        try:
            end = await self._ask(asked)
        except AssertionError as error:
            end = f"wrong: {error}"
        self.ends[end] += 1
        if end == ANSWERED:
            self.took.append(trio.current_time() - began)
        self.goodput += end == ANSWERED and trio.current_time() < self._until

    async def one_after_another(self) -> None:
        """From as many clients as there are slots: nobody waits."""

        async def client() -> None:
            while trio.current_time() < self._until:
                await self._one(self._request())

        async with trio.open_nursery() as nursery:
            for _ in range(SLOTS):
                nursery.start_soon(client)

    async def at_random(self, per_second: float) -> None:
        """From whoever comes, however many others wait."""
        async with trio.open_nursery() as nursery:
            while trio.current_time() < self._until:
                nursery.start_soon(self._one, self._request())
                await trio.sleep(self._dice.expovariate(per_second))


async def check(way: Callable[[], Any], span: float = SPAN) -> None:
    async with way() as (engine, ask):
        unloaded = Load(ask, 1, span)
        await unloaded.one_after_another()
        assert set(unloaded.ends) == {ANSWERED, LATE, LEFT}
        loaded = Load(ask, 2, span)
        await loaded.at_random(10 * unloaded.goodput / span)
        assert set(loaded.ends) == {ANSWERED, REFUSED, LATE, LEFT}
        assert loaded.goodput >= 0.9 * unloaded.goodput
        assert loaded.ends[REFUSED] > 5 * loaded.ends[ANSWERED]
        # Whoever was let in waits for those before it, as often as the line has rounds, and then takes as long as any other.
        rounds = 1 + math.ceil((LIMITS.max_waiting + 1) / SLOTS)
        assert median(loaded.took) <= rounds * median(unloaded.took)
        assert (engine.line.running, engine.line.waiting, engine.line.waiting_tokens) == (0, 0, 0)
        assert not engine._answers
        assert not any(kept.in_use for kept in engine.sessions._kept)
        assert await ask(Asked(0)) == ANSWERED
    assert engine.sessions.kept == 0


@pytest.fixture(autouse=True)
def _timed(monkeypatch: pytest.MonkeyPatch) -> None:
    time_engines(monkeypatch).cost = (0.1, 0.001)


@pytest.mark.parametrize("way", [library, http])
async def test_everybody_is_answered_refused_at_once_or_told_by_the_deadline(
    autojump_clock: MockClock, way: Callable[[], Any]
) -> None:
    await check(way)


@pytest.mark.chaos
@pytest.mark.parametrize("way", [library, http])
async def test_minutes_of_ten_times_the_load_change_nothing(autojump_clock: MockClock, way: Callable[[], Any]) -> None:
    await check(way, 5 * 60.0)


def takes_anybody(_: Line, _tokens: int) -> None:
    """A line without bounds: all wait so long that hardly anybody is answered in time."""


def keeps_the_place(line: Line, place: Place) -> None:
    """A waiter that has gone keeps its place, and gets a slot that nobody gives back."""
    if place.turn.is_set():
        leave(line, place)


leave = Line.leave


@pytest.mark.slow
@pytest.mark.parametrize("way", [library, pytest.param(http, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("method", "mutant"),
    [("_refuse_beyond_bounds", takes_anybody), ("leave", keeps_the_place)],
    ids=["no bound", "place"],
)
async def test_a_line_that_is_wrong_is_caught(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, way: Callable[[], Any], method: str, mutant: Any
) -> None:
    monkeypatch.setattr(Line, method, mutant)
    with pytest.raises(AssertionError):
        await check(way)
