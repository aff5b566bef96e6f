"""Sessions come and go at random points, and the process does not grow."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import psutil
import pytest
import trio
from attrs import frozen
from e2e.running import Open, Running
from fixture_types import Model, Prompt

import dgr
from dgr.client.session import ClientSession
from dgr.core.values import ContextParams

CONTEXT = ContextParams(n_ctx=256, n_batch=64, n_ubatch=64, n_seq_max=3)
SPLIT = "0:2,2:5"
#: Bytes that a hundred sessions may leave behind.
PER_HUNDRED = 1 << 20


def resident() -> int:
    """Resident bytes, with what is free given back: else a leak hides in what the allocator kept from before."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


class Life:
    """Sessions one after another, each ended at a random point of its life."""

    def __init__(self, running: Running, prompt: Prompt) -> None:
        self.running = running
        self.prompt = prompt
        self.dice = random.Random(5)
        self.fates = dict.fromkeys(("unused", "prefilled", "read", "dropped", "cancelled", "evicted"), 0)
        self._left_open: list[AbstractAsyncContextManager[ClientSession]] = []

    async def one(self) -> None:
        fate = self.dice.choice(list(self.fates))
        self.fates[fate] += 1
        size = self.dice.choice((1, 4, 30, 65))
        tokens = self.prompt(size, seed=self.dice.randrange(1000))
        if fate == "evicted":  # left open: a later one takes its slot
            opened = self.running.pipeline.session()
            session = await opened.__aenter__()
            self._left_open.append(opened)
            await session.prefill(tokens)
            if len(self._left_open) > 4:
                await self._left_open.pop(0).__aexit__(None, None, None)
            return
        async with self.running.pipeline.session() as session:
            if fate == "prefilled":
                await session.prefill(tokens)
            elif fate == "cancelled":
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(session.prefill, tokens)
                        for _ in range(self.dice.randrange(1, 40)):
                            await trio.lowlevel.checkpoint()
                        scope.cancel()
            elif fate != "unused":
                async for _ in session.generate(tokens, max_tokens=3, stop=()):
                    if fate == "dropped":
                        break

    async def end(self) -> None:
        for opened in self._left_open:
            await opened.__aexit__(None, None, None)


@frozen
class Growth:
    """Bytes that a hundred sessions left behind: in each of three windows."""

    windows: tuple[float, ...]
    #: How often each way of ending came about.
    fates: dict[str, int]

    @property
    def steady(self) -> float:
        """What every window grew by: a leak is in all of them, a pool that fills is not."""
        return min(self.windows)


async def growth(
    open_stages: Open, path: Path, prompt: Prompt, sessions: int, leak: Callable[[], None] = lambda: None
) -> Growth:
    """Open and end sessions, after a warm-up that fills every pool."""
    async with open_stages(path, SPLIT, CONTEXT, chunk=16, policy=dgr.ShardPolicy(min_idle=0)) as running:
        life = Life(running, prompt)
        for _ in range(60):
            await life.one()
        marks = [resident()]
        for _ in range(3):
            for _ in range(sessions // 3):
                await life.one()
                leak()
            marks.append(resident())
        await life.end()
        running.assert_slots_empty()
        for shard in running.cluster.shards.values():
            assert (shard.statistics().sessions, shard.statistics().leased_bytes) == (0, 0)
    windows = tuple(300 * (after - before) / sessions for before, after in itertools.pairwise(marks))
    return Growth(windows, life.fates)


@pytest.mark.slow
async def test_300_sessions_leave_nothing_behind(model: Model, prompt: Prompt, open_stages: Open) -> None:
    grown = await growth(open_stages, model("f32", layers=5), prompt, 300)
    assert sum(grown.windows) / 3 < PER_HUNDRED, grown
    assert min(grown.fates.values()) > 20


@pytest.mark.slow
async def test_60_sessions_leave_nothing_behind(model: Model, prompt: Prompt, open_stages: Open) -> None:
    grown = await growth(open_stages, model("f32", layers=5), prompt, 60)
    assert grown.steady < PER_HUNDRED, grown


@pytest.mark.slow
async def test_a_leak_is_caught(model: Model, prompt: Prompt, open_stages: Open) -> None:
    leaked: list[bytes] = []
    grown = await growth(
        open_stages, model("f32", layers=5), prompt, 30, lambda: leaked.append(random.randbytes(100_000))
    )
    assert grown.steady > PER_HUNDRED, grown
