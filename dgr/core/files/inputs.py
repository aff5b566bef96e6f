"""Inputs that are read whole: up to a limit, for what a name leads to may have no end (``/dev/zero``, a pipe)."""

from __future__ import annotations

import os
import select
import stat
from pathlib import Path

import msgspec

from dgr.errors import InputError

__all__ = ["MOST_TEXT_BYTES", "NOT_JSON", "check_file", "read_whole", "too_long"]

#: Bytes of a prompt, or of a file of token ids: 64 for each token of the longest context that V4 was trained for (2^20).
MOST_TEXT_BYTES = 64 << 20
#: What msgspec raises for text that is no JSON, is of another type, is not UTF-8, or is nested deeper than it follows.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
#: Seconds in which a pipe must have something to say: one that nobody writes to would be waited for without end.
_PATIENCE = 30.0
_STEP = 1 << 20


def read_whole(path: str | Path, most: int, what: str) -> bytes:
    """The content of a file of at most ``most`` bytes; ``what`` it should be, for the error.

    Raises :class:`~dgr.errors.InputError` for one that is longer, and for a pipe that is silent; :exc:`OSError`.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:  # noqa: PTH123 (a descriptor)
        poll, data = select.poll(), bytearray()
        poll.register(file, select.POLLIN)
        while len(data) <= most:
            if not poll.poll(1000 * _PATIENCE):
                raise InputError(
                    f"{path} is not {what}: nothing came from it within {_PATIENCE:g} s; check where it leads"
                )
            part = file.read(min(_STEP, most + 1 - len(data)))
            if part is not None:  # None: another reader was faster
                data += part
            if part == b"":
                return bytes(data)
    raise too_long(str(path), most, what)


def check_file(path: Path, most: int, what: str) -> None:
    """Refuse what a library that opens names itself would read without end, or wait for.

    Raises :class:`~dgr.errors.InputError` for anything but a file of at most ``most`` bytes; :exc:`OSError`.
    """
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise InputError(f"{path} is not {what}: it is not a regular file; check where it leads")
    if about.st_size > most:
        raise too_long(str(path), most, what)


def too_long(name: str, most: int, what: str) -> InputError:
    """The error that says of an input that it does not end where it should."""
    return InputError(f"{name} is not {what}: it has more than {most} bytes; check where it leads")
