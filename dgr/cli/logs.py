"""The log of a command, on standard error: one line a record, whatever a peer or a file says in it; as text or as JSON."""

from __future__ import annotations

import logging
import os
import time
from datetime import UTC, datetime
from types import TracebackType

from dgr.cli.streams import json_line, tell_through
from dgr.core.log_fields import LOG_FIELDS
from dgr.errors import InputError
from dgr.text import one_line, printable

__all__ = ["FORMATS", "FORMAT_VARIABLE", "LEVELS", "log_format", "start_logging"]

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
#: Environment variable with the format where no flag says it.
FORMAT_VARIABLE = "DGR_LOG_FORMAT"
#: Seconds between two warnings that connections cannot be accepted; trio tries every tenth of a second.
_PAUSE = 10.0

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class _OneLine(logging.Formatter):
    """No text in a record begins a line of its own; those of a traceback are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        record.message = one_line(record.message)
        known = ", ".join(f"{name} {value}" for name, value in _fields(record).items())
        return super().formatMessage(record) + (f" [{known}]" if known else "")

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802 (logging's name)
        return "\n".join(f"  {one_line(line)}" for line in super().formatException(ei).splitlines())


class _Json(logging.Formatter):
    """One JSON object a record: time (RFC 3339, UTC), level, logger, message, what is known of :data:`LOG_FIELDS`, and
    the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(record.getMessage()),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = printable(self.formatException(record.exc_info))
        return json_line(line)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in LOG_FIELDS if hasattr(record, name)}


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


def log_format(given: str | None) -> str:
    """The format that a flag names, else the environment, else text. Raises :class:`~dgr.errors.InputError`."""
    where, name = ("--log-format", given) if given else (FORMAT_VARIABLE, os.environ.get(FORMAT_VARIABLE) or "text")
    if name not in FORMATS:
        raise InputError(f"{where} {name!r} is none of {', '.join(FORMATS)}")
    return name


def start_logging(level: str, form: str | None = None) -> None:
    """Log from a level on, in one of :data:`FORMATS` (None: what the environment says). In JSON what a command says on
    standard error beside its log is a record too. Raises :class:`~dgr.errors.InputError` for another level or format.
    """
    form = log_format(form)
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise InputError(f"--log {level!r} is none of {', '.join(LEVELS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _OneLine("%(levelname)s %(name)s: %(message)s"))
    tell_through(logging.getLogger("dgr").error if form == "json" else None)
    logging.basicConfig(level=number, handlers=[handler])
    trios = logging.getLogger("trio.serve_listeners")
    if not any(isinstance(one, _RefusedConnections) for one in trios.filters):
        trios.addFilter(_RefusedConnections())
