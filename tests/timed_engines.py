"""Stages whose batches take time of the mock clock: ``fixed`` seconds for each run of adjacent slots, ``each`` for a token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import trio

from dgr.engine.base import Output, Work
from dgr.stage import scheduler
from dgr.testing import offline as offline_module
from dgr.testing.engines.fake import FakeEngine

T = TypeVar("T")

#: Seconds of a batch: fixed, and for each token. As the 649 M fixture took on a CPU, and as a device would.
CPU, DEVICE = (0.026, 0.016), (0.030, 0.003)


class TimedEngine(FakeEngine):
    """Its runs take time, which its :class:`TimedThread` spends."""

    inline = False
    cost = CPU

    def run(self, batch: Sequence[Work]) -> list[Output]:
        fixed, each = type(self).cost
        runs = 1 + sum(after.slot != before.slot + 1 for before, after in itertools.pairwise(batch))
        TimedThread.owed = fixed * runs + each * sum(len(work.tokens) for work in batch)
        return super().run(batch)


class TimedThread:
    owed = 0.0

    def __init__(self, name: str) -> None:
        """As an engine's thread."""

    async def run(self, function: Callable[[], T], then: Callable[[T], None] | None = None) -> T:
        TimedThread.owed = 0.0
        result = function()
        await trio.sleep(TimedThread.owed)
        if then is not None:
            then(result)
        return result

    def stop(self) -> None:
        """There is no thread."""


def time_engines(monkeypatch: pytest.MonkeyPatch) -> type[TimedEngine]:
    """Let the engines of every made-up pipeline take time."""
    monkeypatch.setattr(offline_module, "FakeEngine", TimedEngine)
    monkeypatch.setattr(scheduler, "EngineThread", TimedThread)
    monkeypatch.setattr(TimedEngine, "cost", CPU)
    return TimedEngine
