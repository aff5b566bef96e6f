"""Blocking work beside the event loop, also where the system gives no thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """Call ``function`` in a thread of trio's; where none can be started (a limit of processes), here: everybody waits then."""
    begun = False

    def call() -> T:
        nonlocal begun
        begun = True
        return function()

    try:
        return await trio.to_thread.run_sync(call)
    except RuntimeError:
        if begun:
            raise
    return function()
