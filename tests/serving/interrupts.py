"""Cancelling an asyncio task exactly at the k-th step that trio takes, over a made-up model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from msgspec.structs import replace

import dgr
from dgr.serving import embed
from dgr.testing.offline import Offline, open_fake_pipeline

SPLIT = "0:3,3:6"
CONTEXT = dgr.ContextParams(n_ctx=256, n_batch=64, n_ubatch=16, n_seq_max=4)
PROMPT = list(range(1, 21))
#: More turns of the loop than a cancellation takes to reach the bridge, by whatever way it is asked for.
_TURNS = 8
#: Seconds; a guard against hanging, never waited for.
GUARD = 20.0


class Interrupter(trio.abc.Instrument):
    """Halts trio before a step of its own, and lets the asyncio loop act and settle meanwhile."""

    def __init__(self) -> None:
        self._left = 0
        self._times = 0
        self._acted = False
        self._act: Callable[[], object] = lambda: None

    def arm(self, step: int, act: Callable[[], object], times: int = 1) -> None:
        """From the loop: ``act`` before the ``step``-th step from now, and before the ``times - 1`` that follow."""
        self._loop = asyncio.get_running_loop()
        self._act, self._times, self._acted, self._left = act, times, False, step

    def disarm(self) -> bool:
        """Whether it acted."""
        self._left = 0
        return self._acted

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if not self._left:
            return
        self._left -= 1
        if self._left == 0:
            settled, self._acted = threading.Event(), True
            self._loop.call_soon_threadsafe(self._do, settled)
            assert settled.wait(GUARD)
            self._times -= 1
            self._left = 1 if self._times else 0

    def _do(self, settled: threading.Event) -> None:
        self._act()
        self._turn(settled, _TURNS)

    def _turn(self, settled: threading.Event, left: int) -> None:
        if left:
            self._loop.call_soon(self._turn, settled, left - 1)
        else:
            settled.set()


class Fake:
    """A made-up pipeline whose trio side can be interrupted; ``embed_pipeline(fake.open)``."""

    def __init__(self) -> None:
        self.interrupter = Interrupter()
        self.offline: Offline | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[dgr.Pipeline]:
        trio.lowlevel.add_instrument(self.interrupter)
        async with open_fake_pipeline(SPLIT, context=CONTEXT) as self.offline:
            yield self.offline.pipeline


class Native(Fake):
    """The same of a real model."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self._model = model

    @asynccontextmanager
    async def open(self) -> AsyncIterator[dgr.Pipeline]:
        trio.lowlevel.add_instrument(self.interrupter)
        context = replace(CONTEXT, n_ubatch=32)
        async with dgr.open_pipeline(self._model, "0:3,3:7", context=context, chunk=16) as pipeline:
            yield pipeline


def undisturbed(n: int, prompt: list[int] = PROMPT, side: Fake | None = None) -> list[int]:
    """The same turn from trio."""

    async def run() -> list[int]:
        async with (side or Fake()).open() as pipeline, pipeline.session() as session:
            return [token.id async for token in session.generate(prompt, max_tokens=n, stop=())]

    return trio.run(run)


async def answer(session: embed.EmbeddedSession, prompt: list[int], n: int) -> list[int]:
    return [token.id async for token in await session.generate(prompt, max_tokens=n, stop=())]


def trio_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dgr-trio")]
