"""Sessions that come and go at random points of their lives, and what the process has grown by."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import random
import statistics
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import psutil
import trio
from attrs import frozen
from e2e.running import Open, Running
from fixture_types import Prompt

import dgr
from dgr.client.session import ClientSession
from dgr.core.values import ContextParams

__all__ = ["CONTEXT", "PER_HUNDRED", "SPLIT", "Course", "course", "growth"]

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
        self.fates = dict.fromkeys(
            ("unused", "prefilled", "read", "dropped", "cancelled", "evicted", "forked", "turns"), 0
        )
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
            elif fate == "forked":
                await session.prefill(tokens)
                async with session.fork() as other:
                    async for _ in other.generate([1], max_tokens=2, stop=()):
                        pass
            elif fate == "turns":
                for _ in range(3):
                    async for _ in session.generate(tokens[:20], max_tokens=2, stop=()):
                        pass
            elif fate != "unused":
                async for _ in session.generate(tokens, max_tokens=3, stop=()):
                    if fate == "dropped":
                        break

    async def end(self) -> None:
        while self._left_open:
            await self._left_open.pop().__aexit__(None, None, None)


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


@frozen
class Course:
    """What a process and its stages had after every so many sessions."""

    #: Sessions so far.
    sessions: tuple[int, ...]
    resident: tuple[int, ...]
    descriptors: tuple[int, ...]
    threads: tuple[int, ...]
    #: Leased slots and sessions of every stage while none is open, and bytes of its compute buffers.
    slots: tuple[tuple[int, ...], ...]
    compute: tuple[tuple[int, ...], ...]
    fates: dict[str, int]

    @property
    def slope(self) -> float:
        """Bytes of resident memory by which a hundred sessions grow the process: Theil-Sen, which no single step moves."""
        points = list(zip(self.sessions, self.resident, strict=True))
        return 100 * statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2))

    def grown(self) -> list[str]:
        """What is not flat, but for resident memory."""
        counted = {
            "descriptors": self.descriptors,
            "threads": self.threads,
            "slots": self.slots,
            "compute": self.compute,
        }
        return [f"{name}: {set(values)}" for name, values in counted.items() if len(set(values)) > 1]


def _descriptors() -> int:
    return psutil.Process().num_fds() if os.name == "posix" else 0


async def course(
    open_stages: Open,
    path: Path,
    prompt: Prompt,
    sessions: int,
    every: int,
    leak: Callable[[], None] = lambda: None,
    warm: int = 100,
) -> Course:
    """Open and end ``sessions`` sessions after a warm-up, and look at everything ``every`` so many of them."""
    seen: list[tuple[int, int, int, int, Sequence[int], Sequence[int]]] = []
    async with open_stages(path, SPLIT, CONTEXT, chunk=16, policy=dgr.ShardPolicy(min_idle=0)) as running:
        life = Life(running, prompt)
        for _ in range(warm):
            await life.one()
        for number in range(sessions + 1):
            if number % every == 0:
                await life.end()
                running.assert_slots_empty()
                shards = running.cluster.shards.values()
                slots = [n for shard in shards for n in (shard.statistics().sessions, len(shard.ledger.leases))]
                compute = [engine.memory().compute for engine in running.engines]
                threads = sum(thread.name == "dgr-engine" for thread in threading.enumerate())
                seen.append((number, resident(), _descriptors(), threads, tuple(slots), tuple(compute)))
            await life.one()
            leak()
        await life.end()
    numbers, bytes_, descriptors, threads_, slots_, compute_ = zip(*seen, strict=True)
    return Course(numbers, bytes_, descriptors, threads_, slots_, compute_, life.fates)
