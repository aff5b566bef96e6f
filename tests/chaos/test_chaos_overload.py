"""Ten times what a server can answer, for minutes of real time, over sockets and through the library.

What is asserted are ratios to the same requests one after another in the same run, with client, server and stages on one event
loop: a slow machine is slow in both. The same under the mock clock, where every single end is looked at, is in
``tests/serving/http/test_overload.py``.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from statistics import median, quantiles

import pytest
import trio
from attrs import define, field
from serving.http import http_servers
from serving.http.chat_model import spelled
from serving.http.http_servers import Server, open_server

from dgr.errors import QueueFull, RequestTimedOut
from dgr.serving.engine import Job, ServingLimits
from dgr.serving.line import Line

SLOTS, TOKENS = 4, 8
LIMITS = ServingLimits(max_waiting=4, deadline=10.0)
#: Seconds of a stage's step, which takes no CPU: as a device's.
STEP = 0.05
#: Seconds without overload, and as many times with it.
SECONDS, TIMES = 60.0, 2
#: Of the goodput without overload, what is to be left of it.
FLAT = 0.8

Ask = Callable[[int], Awaitable[str]]


@define
class Load:
    """What became of requests."""

    seconds: float
    answered: list[float] = field(factory=list)
    refused: list[float] = field(factory=list)
    late: list[float] = field(factory=list)

    @property
    def goodput(self) -> float:
        """Answers a second."""
        return len(self.answered) / self.seconds

    def __str__(self) -> str:
        took = f"median {median(self.answered):.3f} s, 99th percentile {_high(self.answered):.3f} s"
        said = f"{self.goodput:.2f} answers a second, {took}; {len(self.late)} late"
        if self.refused:
            said += f"; {len(self.refused)} refused, median {1000 * median(self.refused):.1f} ms, 99th percentile"
            said += f" {1000 * _high(self.refused):.1f} ms"
        return said


def _high(values: list[float]) -> float:
    return quantiles(values, n=100)[98] if len(values) > 1 else values[0]


async def _one(load: Load, ask: Ask, name: int) -> None:
    began = time.perf_counter()
    end = await ask(name)
    getattr(load, end).append(time.perf_counter() - began)


async def one_after_another(ask: Ask, seconds: float) -> Load:
    """From as many clients as there are slots."""
    load, until = Load(seconds), trio.current_time() + seconds

    async def client(name: int) -> None:
        while trio.current_time() < until:
            await _one(load, ask, name)

    async with trio.open_nursery() as nursery:
        for name in range(SLOTS):
            nursery.start_soon(client, name)
    return load


async def at_random(ask: Ask, seconds: float, per_second: float) -> Load:
    """From whoever comes."""
    load, dice, until, name = Load(seconds), random.Random(1), trio.current_time() + seconds, 1000
    async with trio.open_nursery() as nursery:
        while trio.current_time() < until:
            nursery.start_soon(_one, load, ask, name)
            name += 1
            await trio.sleep(dice.expovariate(per_second))
    return load


@asynccontextmanager
async def _server() -> AsyncIterator[Server]:
    async with open_server(n_ctx=1024, sessions=SLOTS, limits=LIMITS) as server:
        tail = server.model.offline.engines["stage-2"]
        tail.inline, tail.watch = False, lambda _: time.sleep(STEP)
        yield server


@asynccontextmanager
async def http() -> AsyncIterator[Ask]:
    async with _server() as server:

        async def ask(name: int) -> str:
            fields = {"max_tokens": TOKENS, "min_tokens": TOKENS, "ignore_eos": True}
            status = (await server.chat(f"request {name}", **fields)).status
            return {200: "answered", 429: "refused", 504: "late"}[status]

        yield ask


@asynccontextmanager
async def library() -> AsyncIterator[Ask]:
    async with _server() as server:

        async def ask(name: int) -> str:
            try:
                async with server.engine.admit(Job(tuple(spelled(f"request {name}")), TOKENS)) as answer:
                    assert len([token async for token in answer]) == TOKENS
            except QueueFull:
                return "refused"
            except RequestTimedOut:
                return "late"
            return "answered"

        yield ask


async def check(
    way: Callable[[], AbstractAsyncContextManager[Ask]], seconds: float, report: Callable[[object], None]
) -> None:
    async with way() as ask:
        calm = await one_after_another(ask, seconds)
        full = await at_random(ask, TIMES * seconds, 10 * calm.goodput)
    report(f"{way.__name__}: one after another: {calm}\n{way.__name__}: ten times that: {full}")
    assert full.goodput >= FLAT * calm.goodput, "goodput falls"
    assert len(full.refused) > 5 * len(full.answered), "hardly anybody is refused"
    assert _high(full.refused) < median(calm.answered), "a refusal takes as long as an answer"
    rounds = 1 + math.ceil((LIMITS.max_waiting + 1) / SLOTS)
    assert _high(full.answered) <= 1.5 * rounds * _high(calm.answered), "whoever is let in waits without bound"


@pytest.mark.chaos
@pytest.mark.parametrize("way", [http, library])
async def test_ten_times_the_load_leaves_goodput_as_it_is(
    way: Callable[[], AbstractAsyncContextManager[Ask]],
    monkeypatch: pytest.MonkeyPatch,
    report: Callable[[object], None],
) -> None:
    seconds = float(os.environ.get("DGR_CHAOS_SECONDS") or SECONDS)
    monkeypatch.setattr(http_servers, "HANG", 60 + 4 * TIMES * seconds)
    await check(way, seconds, report)


@pytest.mark.slow
async def test_a_line_that_takes_anybody_is_found(
    monkeypatch: pytest.MonkeyPatch, report: Callable[[object], None]
) -> None:
    """The mutant: nobody is refused, all wait, and hardly anybody is answered in time."""
    monkeypatch.setattr(Line, "_refuse_beyond_bounds", lambda *_: None)
    monkeypatch.setattr(http_servers, "HANG", 120)
    with pytest.raises((AssertionError, ExceptionGroup)):
        await check(library, 3.0, report)
