"""Runs a slow step of the build, and shows that it goes on: one line that is redrawn on a terminal, one now and then elsewhere.

    python watch.py TITLE -- COMMAND...

What the command prints is kept for the case that it fails. Of ninja's own count, ``[12/80]``, the line makes a time that is
left. It is standard Python alone: it runs before anything is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

__all__ = ["watched"]

#: Seconds between two lines, where each is drawn over the last one and where it stays.
_REDRAWN, _PRINTED = 0.5, 4.0
#: Lines of a failed command that are shown.
_SHOWN = 200
_COUNT = re.compile(r"^\[(\d+)/(\d+)\]")


class _Line:
    """What is said about one step, on standard error."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._began = time.monotonic()
        self._counted: tuple[int, int] | None = None
        self._terminal = sys.stderr.isatty()
        self._ended = threading.Event()
        self._clock = threading.Thread(target=self._tick, daemon=True)
        self._clock.start()

    def count(self, line: str) -> None:
        """Take note of ninja's count, where a line of output has it."""
        if (found := _COUNT.match(line)) is not None:
            self._counted = int(found[1]), int(found[2])

    def end(self, word: str) -> None:
        """The last line, which stays."""
        self._ended.set()
        self._clock.join()
        seconds = time.monotonic() - self._began
        self._say(f"{self._title}: {word} after {seconds:.0f} s" if seconds >= 1 else f"{self._title}: {word}", "\n")

    def _tick(self) -> None:
        while not self._ended.wait(_REDRAWN if self._terminal else _PRINTED):
            self._say(f"{self._title}: {self._state()}", "" if self._terminal else "\n")

    def _state(self) -> str:
        seconds = time.monotonic() - self._began
        if self._counted is None:
            return f"{seconds:.0f} s"
        done, total = self._counted
        left = f", about {seconds / done * (total - done):.0f} s left" if done >= 3 else ""
        return f"{done} of {total}, {seconds:.0f} s{left}"

    def _say(self, text: str, end: str) -> None:
        before, after = ("\r", "\x1b[K") if self._terminal else ("", "")
        print(f"{before}{text}{after}", end=end, file=sys.stderr, flush=True)


def watched(title: str, *command: str | Path) -> int:
    """Run a command in silence, but for the line about it; its output follows if it fails. Returns the exit status."""
    environment = os.environ | {"NINJA_STATUS": "[%f/%t] "}
    line, kept = _Line(title), deque[str](maxlen=_SHOWN)
    try:
        with subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        ) as process:
            assert process.stdout is not None
            for text in process.stdout:
                kept.append(text)
                line.count(text)
    except BaseException:
        line.end("stopped")
        raise
    if process.returncode == 0:
        line.end("done")
    else:
        line.end(f"FAILED with exit status {process.returncode}")
        sys.stderr.writelines(kept)
    return process.returncode


def main() -> None:
    words = sys.argv[1:]
    if len(words) < 3 or words[1] != "--":
        sys.exit("usage: python watch.py TITLE -- COMMAND...")
    try:
        status = watched(words[0], *words[2:])
    except OSError as error:
        sys.exit(f"{words[2]}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(status)


if __name__ == "__main__":
    main()
