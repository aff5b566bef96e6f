"""Sessions come and go at random points, and the process does not grow."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random

import psutil
import pytest
import trio

from dgr.engine.base import ContextParams

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

    def __init__(self, running, prompt) -> None:
        self.running = running
        self.prompt = prompt
        self.dice = random.Random(5)
        self.fates = dict.fromkeys(("unused", "prefilled", "read", "dropped", "cancelled", "evicted"), 0)
        self._left_open = []

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


async def growth(open_stages, path, prompt, sessions: int, leak=lambda: None) -> tuple[float, dict[str, int]]:
    """Bytes per hundred sessions, after a warm-up that fills every pool; and how the sessions ended."""
    async with open_stages(path, SPLIT, CONTEXT, chunk=16) as running:
        life = Life(running, prompt)
        for _ in range(60):
            await life.one()
        before = resident()
        for _ in range(sessions):
            await life.one()
            leak()
        grown = resident() - before
        await life.end()
        running.assert_slots_empty()
        for shard in running.cluster.shards.values():
            assert (shard.statistics().sessions, shard.statistics().leased_bytes) == (0, 0)
    return 100 * grown / sessions, life.fates


@pytest.mark.slow
async def test_300_sessions_leave_nothing_behind(model, prompt, open_stages):
    per_hundred, fates = await growth(open_stages, model("f32", layers=5), prompt, 300)
    assert per_hundred < PER_HUNDRED
    assert min(fates.values()) > 20


async def test_60_sessions_leave_nothing_behind(model, prompt, open_stages):
    per_hundred, _ = await growth(open_stages, model("f32", layers=5), prompt, 60)
    assert per_hundred < PER_HUNDRED


async def test_a_leak_is_caught(model, prompt, open_stages):
    leaked = []
    per_hundred, _ = await growth(
        open_stages, model("f32", layers=5), prompt, 40, lambda: leaked.append(random.randbytes(20_000))
    )
    assert per_hundred > PER_HUNDRED
