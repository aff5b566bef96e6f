"""A progress bar over the units of a run, on standard error, for people only."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm

__all__ = ["Progress"]


class Progress:
    """Weights of units done, of all; a unit's name stands beside the bar while it runs."""

    def __init__(self, what: str, total: float) -> None:
        self._what = what
        self._bar = tqdm(
            total=total,
            desc=what,
            disable=not sys.stderr.isatty(),
            bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed}, about {remaining} left",
            leave=False,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def begin(self, unit: str) -> None:
        """Say what is being measured."""
        self._bar.set_description_str(f"{self._what}: {unit}")

    def done(self, weight: float = 1.0) -> None:
        """A unit of that weight is measured, or was before."""
        self._bar.update(weight)
