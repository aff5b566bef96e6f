"""The log of a command, on standard error: one line a record, whatever a peer or a file says in it."""

from __future__ import annotations

import logging
import time
from types import TracebackType

from dgr.errors import InputError
from dgr.text import one_line

__all__ = ["LEVELS", "start_logging"]

LEVELS = ("debug", "info", "warning", "error")
#: Seconds between two warnings that connections cannot be accepted; trio tries every tenth of a second.
_PAUSE = 10.0

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class _OneLine(logging.Formatter):
    """No text in a record begins a line of its own; those of a traceback are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802 (logging's name)
        return "\n".join(f"  {one_line(line)}" for line in super().formatException(ei).splitlines())


class _RefusedConnections(logging.Filter):
    """Trio's words on connections it cannot accept, a traceback every tenth of a second: one line now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._said = -_PAUSE

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info is None:
            return True
        now = time.monotonic()
        if now - self._said < _PAUSE:
            return False
        self._said = now
        error = record.exc_info[1]
        reason = error.strerror if isinstance(error, OSError) else error
        record.msg = (
            f"new connections wait, as none can be accepted: {reason}; raise the limit of open files (ulimit -n)"
        )
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.args, record.exc_info, record.exc_text = (), None, None
        return True


def start_logging(level: str) -> None:
    """Log from a level on. Raises :class:`~dgr.errors.InputError` for one that is none of :data:`LEVELS`."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise InputError(f"--log {level!r} is none of {', '.join(LEVELS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=number, handlers=[handler])
    trios = logging.getLogger("trio.serve_listeners")
    if not any(isinstance(one, _RefusedConnections) for one in trios.filters):
        trios.addFilter(_RefusedConnections())
