"""A nursery for code in which the nursery is an implementation detail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

__all__ = ["open_nursery"]


@asynccontextmanager
async def open_nursery() -> AsyncIterator[trio.Nursery]:
    """Like :func:`trio.open_nursery`, but one lone exception leaves as itself, not in a group of one.

    A caller of ``async with dgr.open_pipeline(...)`` cannot know how many nurseries lie inside; it must be able to write
    ``except ContextLimitExceeded``. Several exceptions still leave as a group.
    """
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        lone: BaseException = group
        while isinstance(lone, BaseExceptionGroup) and len(lone.exceptions) == 1:
            lone = lone.exceptions[0]
        if lone is group or isinstance(lone, BaseExceptionGroup):
            raise
        try:
            raise lone
        finally:
            del lone  # break the cycle exception -> traceback -> frame -> exception
