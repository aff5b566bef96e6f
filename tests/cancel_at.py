"""Cancelling at an exact moment of a program's life."""

from __future__ import annotations

import trio


class CancelAt(trio.abc.Instrument):
    """Cancels a scope just before the ``step``-th step that any task takes."""

    def __init__(self, step: int, scope: trio.CancelScope) -> None:
        self.left = step
        self.scope = scope

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.scope.cancel()
