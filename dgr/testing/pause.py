"""A stage that is busy for as long as a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dgr.stage.shard import Shard

__all__ = ["is_paused", "pause"]


@asynccontextmanager
async def pause(shard: Shard) -> AsyncIterator[None]:
    """Nothing runs on a shard for the length of the block, as behind a long step: frames queue, slots are not cleared."""
    async with shard.scheduler.engine_lock:
        yield


def is_paused(shard: Shard) -> bool:
    """Whether the shard's engine is taken, by a :func:`pause` or by what runs on it."""
    return shard.scheduler.engine_lock.locked()
