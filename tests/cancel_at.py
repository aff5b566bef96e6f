"""Cancelling at an exact moment of a program's life."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio


class CancelAt(trio.abc.Instrument):
    """Cancels a scope just before the ``step``-th step that any task takes."""

    def __init__(self, step: int, scope: trio.CancelScope) -> None:
        self.left = step
        self.scope = scope

    @property
    def reached(self) -> bool:
        """Whether there was such a step."""
        return self.left <= 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.scope.cancel()


@contextmanager
def cancelled_at(step: int) -> Iterator[CancelAt]:
    """A block that is cancelled at a step, where it has so many."""
    with trio.CancelScope() as scope:
        killer = CancelAt(step, scope)
        trio.lowlevel.add_instrument(killer)
        try:
            yield killer
        finally:
            trio.lowlevel.remove_instrument(killer)
