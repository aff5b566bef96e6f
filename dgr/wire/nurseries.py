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
    lone: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        lone = _only_leaf(group)
        if lone is None:
            raise
    if lone is not None:
        context = lone.__context__
        try:
            raise lone
        finally:
            # What the caller is being unwound with (Cancelled, as a rule) is not what the error came of.
            lone.__context__ = context
            del lone, context  # break the cycle exception -> traceback -> frame -> exception


def _only_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    inner: BaseException = group
    while isinstance(inner, BaseExceptionGroup):
        if len(inner.exceptions) != 1:
            return None
        inner = inner.exceptions[0]
    return inner
