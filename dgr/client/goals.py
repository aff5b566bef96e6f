"""What a caller wants of the tokens it commits, and how they are cut into chunks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import frozen

from dgr.engine.base import LogitsWanted
from dgr.wire import frames

__all__ = ["Goal"]


@frozen
class Goal:
    """What committing a transcript shall bring back."""

    #: Rows of logits are wanted from this position on (``rows`` given), or a token after the last one (``sampling``).
    rows_from: int | None = None
    sampling: frames.Sampling | None = None
    rows: Callable[[int, memoryview], None] | None = None

    @property
    def wants_answer(self) -> bool:
        return self.sampling is not None or self.rows is not None

    def chunks(self, begin: int, end: int, size: int) -> Iterator[tuple[int, int, LogitsWanted]]:
        """Cut ``begin..end`` into chunks of at most ``size`` tokens, each with the logits it shall give."""
        while begin < end:
            until = min(begin + size, end)
            if self.rows_from is not None and begin < self.rows_from:
                until = min(until, self.rows_from)
                yield begin, until, LogitsWanted.NONE
            elif self.rows_from is not None:
                yield begin, until, LogitsWanted.ALL
            else:
                yield begin, until, LogitsWanted.LAST if self.sampling and until == end else LogitsWanted.NONE
            begin = until
