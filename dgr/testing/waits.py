"""Waiting for what no event announces."""

from __future__ import annotations

from collections.abc import Callable

import trio

from dgr.errors import DeadlineExceeded

__all__ = ["until"]

#: Seconds between two looks.
_PAUSE = 0.002


async def until(condition: Callable[[], object], seconds: float = 20.0, what: str = "what was waited for") -> None:
    """Look at a condition again and again until it holds.

    Raises :class:`~dgr.errors.DeadlineExceeded` naming ``what`` after ``seconds``: a guard against hanging.
    """
    with trio.move_on_after(seconds):
        while not condition():  # noqa: ASYNC110 (what it is for)
            await trio.sleep(_PAUSE)
        return
    raise DeadlineExceeded(f"{what} did not come within {seconds:g} s")
