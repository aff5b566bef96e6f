"""A progress bar on standard error, for people only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dgr.model.digests import Progress
from dgr.model.units import human_bytes

__all__ = ["progress_bar"]

_WIDTH = 30
#: Seconds between two drawings.
_PAUSE = 0.1


@contextmanager
def progress_bar(what: str) -> Iterator[Progress | None]:
    """A callback that draws how many bytes are done; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    began = time.monotonic()
    drawn = 0.0

    def draw(done: int, total: int) -> None:
        nonlocal drawn
        now = time.monotonic()
        if now - drawn < _PAUSE and done < total:
            return
        drawn = now
        share = done / total if total else 1.0
        bar = "#" * int(share * _WIDTH)
        rate = human_bytes(int(done / max(now - began, 1e-3)))
        text = f"{what} [{bar:<{_WIDTH}}] {share:4.0%} of {human_bytes(total)}, {rate}/s"
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)

    try:
        yield draw
    finally:
        if drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
