"""Inputs that are read whole: up to a limit, for what a name leads to may have no end (``/dev/zero``, a pipe)."""

from __future__ import annotations

from pathlib import Path

from dgr.errors import InputError

__all__ = ["MOST_TEXT_BYTES", "read_whole", "too_long"]

#: Bytes of a prompt, or of a file of token ids: 64 for each token of the longest context that V4 was trained for (2^20).
MOST_TEXT_BYTES = 64 << 20


def read_whole(path: str | Path, most: int, what: str) -> bytes:
    """The content of a file of at most ``most`` bytes; ``what`` it should be, for the error.

    Raises :class:`~dgr.errors.InputError` for one that is longer, and :exc:`OSError`.
    """
    with Path(path).open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise too_long(str(path), most, what)
    return data


def too_long(name: str, most: int, what: str) -> InputError:
    """The error that says of an input that it does not end where it should."""
    return InputError(f"{name} is not {what}: it has more than {most} bytes; check where it leads")
