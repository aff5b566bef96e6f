"""Text that others wrote, made fit to be shown: a peer's name, a file's key, a path that is not UTF-8."""

from __future__ import annotations

import re

__all__ = ["one_line", "printable", "reason_of", "utf8"]

#: What a terminal acts upon (C0, DEL, C1), what breaks a line, what turns the reading direction around, and surrogates.
_UNFIT = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT = re.compile(f"[{_UNFIT}]")
_IN_LINE = re.compile(f"[\\t\\n{_UNFIT}]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def one_line(text: str) -> str:
    r"""The text on one line that moves no cursor: control characters, line breaks and surrogates as ``\x1b``, ``\n``..."""
    return _IN_LINE.sub(_escaped, text)


def printable(text: str) -> str:
    """As :func:`one_line`, but tabs and line feeds stay: for text that may have several lines."""
    return _IN_TEXT.sub(_escaped, text)


def utf8(text: str) -> str:
    r"""The text with lone surrogates as ``\udcff``, so that UTF-8 and JSON can carry it; all else as it is."""
    return _SURROGATE.sub(_escaped, text)


def reason_of(error: BaseException) -> str:
    """What an error says, or else what it came of; where neither says anything, the name of the latter's class."""
    return str(error) or str(error.__cause__ or "") or type(error.__cause__ or error).__name__
