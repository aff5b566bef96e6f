"""Nurseries for code in which the nursery is an implementation detail, and what an error means beside a cancellation.

A caller of ``async with dgr.open_pipeline(...)`` cannot know how many nurseries lie inside. It must be able to write
``except ContextLimitExceeded`` around it, and to put a timeout around it. Three rules make that so:

- An error that is alone leaves as itself, also when tasks beside it were being cancelled: what is cancelled is the
  business of the scope that was cancelled, and every checkpoint tells that again.
- What the block itself raised leaves as it is, an exception group too.
- Links and stages end because their user is being cancelled or interrupted, and not the other way round:
  :func:`cancelled_first`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import trio

from dgr.errors import SessionError, WireError

__all__ = ["cancelled_first", "open_nursery"]


@asynccontextmanager
async def open_nursery() -> AsyncIterator[trio.Nursery]:
    """Like :func:`trio.open_nursery`, but one lone exception leaves as itself, not in a group.

    Several exceptions still leave as a group, without the cancellations among them.
    """
    block: BaseException | None = None
    lone: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            except BaseException as error:
                block = error
                raise
    except BaseExceptionGroup as group:
        lone = _lone(group, block)
        if lone is None:
            _cancelled, rest = group.split(trio.Cancelled)
            assert rest is not None
            if rest is group:
                raise
            raise rest from None
    finally:
        del block  # break the cycle exception -> traceback -> frame -> exception
    if lone is not None:
        context = lone.__context__
        try:
            raise lone
        finally:
            # What the caller is being unwound with (mostly Cancelled) is not what the error came of.
            lone.__context__ = context
            del lone, context  # as above


class cancelled_first:  # noqa: N801 (a context manager, read as a phrase)
    """A caller who is being cancelled hears that, and not what broke on the way."""

    async def __aenter__(self) -> None:
        return

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, WireError | SessionError):
            await trio.lowlevel.checkpoint_if_cancelled()


def _lone(group: BaseExceptionGroup[BaseException], block: BaseException | None) -> BaseException | None:
    """The only exception of a group, but for cancellations; a cancellation when there is nothing else.

    What the block raised counts as one. Scopes take their cancellations out of groups and build new ones of what is left,
    so a group of the block's is known by what is in it.
    """
    found = {id(error): error for error in _leaves(group)}
    others = {key for key, error in found.items() if not isinstance(error, trio.Cancelled)}
    if leaving := [key for key in others if isinstance(found[key], KeyboardInterrupt | SystemExit)]:
        others = {*leaving, *(key for key in others if not isinstance(found[key], WireError | SessionError))}
    if not others:
        return next(iter(found.values()))
    if isinstance(block, BaseExceptionGroup):
        blocks = {id(error) for error in _leaves(block)}
        if others <= blocks:
            return block if blocks <= found.keys() else block.subgroup(lambda error: id(error) in found)
    return found[others.pop()] if len(others) == 1 else None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error
