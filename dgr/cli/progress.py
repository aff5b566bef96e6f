"""What a command is busy with, on standard error, for people only."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from dgr.core.units import human_bytes

__all__ = ["Activity", "progress_bar", "say_above", "silent_bar"]

_WIDTH = 30
#: Seconds between two drawings.
_PAUSE = 0.1
#: Seconds after which a work that counts nothing, or nothing new, shows how long it has been going on.
_PATIENCE = 1.0


class Activity:
    """A line on a terminal that shows how far a work is, and that it goes on. Made by :func:`progress_bar`.

    Call it with (done, total), from any thread.
    """

    def __init__(self, what: str, amount: Callable[[int], str]) -> None:
        self._what, self._amount = what, amount
        self._began = self._drawn = time.monotonic()
        self._count: tuple[int, int] | None = None
        #: It is drawn now; it waits for the next count; the cursor stands behind other text.
        self._shown = self._rests = self._behind_text = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._clock = threading.Thread(target=self._tick, name="dgr-progress", daemon=True)
        self._clock.start()

    def __call__(self, done: int, total: int) -> None:
        with self._lock:
            if self._rests:
                self._rests, self._began = False, time.monotonic()
            first, self._count = self._count is None, (done, total)
            if first or done >= total or time.monotonic() - self._drawn >= _PAUSE:
                self._draw()

    def about(self, what: str) -> None:
        """Another work begins."""
        with self._lock:
            self._what, self._count, self._began = what, None, time.monotonic()

    def say(self, text: str, end: str = "\n", *, rest: bool = False, out: TextIO | None = None) -> None:
        """Print text on standard output, or ``out``, in place of the line. ``rest``: what is printed shows by itself that the
        work goes on, until there is something to count again."""
        with self._lock:
            self._clear()
            print(text, end=end, flush=True, file=out)
            self._rests, self._count = rest, None if rest else self._count
            self._behind_text = not (text + end).endswith("\n")

    def end(self) -> None:
        """Leave nothing on the terminal; idempotent."""
        self._ended.set()
        with self._lock:
            self._clear()
        self._clock.join()

    def _tick(self) -> None:
        while not self._ended.wait(_PATIENCE):
            with self._lock:
                if not self._ended.is_set() and not self._rests and time.monotonic() - self._drawn >= _PATIENCE:
                    self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        seconds = self._drawn - self._began
        if self._count is None:
            text = f"{self._what}: {seconds:.0f} s"
        else:
            done, total = self._count
            share = done / total if total else 1.0
            rate = self._amount(int(done / max(seconds, 1e-3)))
            facts = f"{share:4.0%} of {self._amount(total)}, {rate}/s, {seconds:.0f} s"
            width = min(_WIDTH, _columns() - len(self._what) - len(facts) - 5)
            bar = f" [{'#' * int(share * width):<{width}}]" if width > 0 else ""
            text = f"{self._what}{bar} {facts}"
        before = "\n" if self._behind_text else ""
        self._shown, self._behind_text = True, False
        _write(f"{before}\r{text[: _columns() - 1]}\x1b[K")

    def _clear(self) -> None:
        if self._shown:
            self._shown = False
            _write("\r\x1b[K")


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone: nobody watches any more
        print(text, end="", file=sys.stderr, flush=True)


def _columns() -> int:
    """A line that is longer than the terminal is wide could not be wiped."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def say_above(
    activity: Activity | None, text: str, end: str = "\n", *, rest: bool = False, out: TextIO | None = None
) -> None:
    """As :meth:`Activity.say`, also where nobody watches."""
    if activity is None:
        print(text, end=end, flush=True, file=out)
    else:
        activity.say(text, end, rest=rest, out=out)


@contextmanager
def silent_bar(_what: str) -> Iterator[Activity | None]:
    """As :func:`progress_bar` where nobody watches."""
    yield None


@contextmanager
def progress_bar(what: str, amount: Callable[[int], str] = human_bytes) -> Iterator[Activity | None]:
    """A callback that draws how much is done, of bytes or what else ``amount`` names; None where nobody watches.

    A work that never calls it shows its seconds.
    """
    if not sys.stderr.isatty():
        yield None
        return
    activity = Activity(what, amount)
    try:
        yield activity
    finally:
        activity.end()
