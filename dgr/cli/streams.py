"""The standard streams of a command: there, able to take every character, and written to the end or failed."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO

import trio

from dgr.core.files.inputs import MOST_TEXT_BYTES, too_long
from dgr.errors import InputError
from dgr.text import printable, utf8

__all__ = [
    "json_line",
    "open_standard_streams",
    "print_json",
    "read_prompt",
    "silence",
    "tell",
    "until_input_ends",
]

_STEP = 1 << 16
#: Byte order marks that say what a text is, if it is not UTF-8; the longer ones first.
_OTHER_ENCODINGS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_UTF8_MARK = b"\xef\xbb\xbf"


class _PatientFile(io.FileIO):
    """A descriptor that waits until it takes more, though whoever shares it made it non-blocking."""

    def write(self, data: Any) -> int:
        while (written := super().write(data)) is None:
            poll = select.poll()
            poll.register(self.fileno(), select.POLLOUT)
            poll.poll()
        return written


class _Output(io.TextIOWrapper):
    """Text to a descriptor; on a terminal without control characters, which may come from a model or a file."""

    shows_controls = True

    def write(self, text: str) -> int:
        super().write(text if self.shows_controls else printable(text))
        return len(text)


def _output(stream: TextIO, descriptor: int) -> TextIO:
    """The same stream, patient and able to take every character."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream  # somebody else's: a test's, a notebook's
    stream.reconfigure(errors="backslashreplace")
    try:
        if type(stream) is not io.TextIOWrapper or stream.fileno() != descriptor:
            return stream
    except OSError:  # it has no descriptor
        return stream
    stream.flush()
    output = _Output(
        io.BufferedWriter(_PatientFile(descriptor, "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering or stream.write_through,
    )
    output.shows_controls = descriptor != 1 or not output.isatty()  # a progress bar on standard error moves the cursor
    return output


def open_standard_streams() -> None:
    """Make all three streams usable, whatever the parent process left of them.

    One that is closed becomes /dev/null, its descriptor too: no socket may take the place that native code prints to.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free one, which is this
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115, PTH123 (it stays)
            setattr(sys, name, stream)
    sys.stdout, sys.stderr = _output(sys.stdout, 1), _output(sys.stderr, 2)


#: Who takes what :func:`tell` says, where it is not text.
_teller: Callable[[str], None] | None = None


def tell_through(teller: Callable[[str], None] | None) -> None:
    """Have ``teller`` take all that one :func:`tell` says from now on; None for standard error as it is."""
    global _teller
    _teller = teller


def tell(*lines: str) -> None:
    """Say lines on standard error; what nobody can take any more is dropped, for there is no other place to say it."""
    text = "\n".join(lines)
    if _teller is not None:
        _teller(text)
        return
    with contextlib.suppress(OSError, ValueError):
        print(printable(text), file=sys.stderr, flush=True)


def silence(stream: TextIO) -> None:
    """Drop what a stream could not write, so that the interpreter does not try again as it ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


def _plain(value: Any) -> Any:
    """What JSON can carry: numbers that are none are null, and text is UTF-8."""
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple | frozenset) else value


def json_line(value: Any) -> str:
    r"""A line of JSON in ASCII; a file name that is not UTF-8 has its odd bytes as ``\udcff``, spelled out."""
    return json.dumps(_plain(value))


def print_json(value: Any) -> None:
    """Print a :func:`json_line`."""
    print(json_line(value), flush=True)


def read_prompt(given: str) -> str:
    """The text of ``--prompt``, read from standard input where it is ``-``. Raises :class:`~dgr.errors.InputError`."""
    if given != "-":
        for at, letter in enumerate(given):
            if "\ud800" <= letter <= "\udfff":
                byte = (
                    f"byte 0x{ord(letter) - 0xDC00:02x}" if "\udc80" <= letter <= "\udcff" else f"U+{ord(letter):04X}"
                )
                raise InputError(f"--prompt is not UTF-8: {byte} follows {at} characters; convert it with iconv")
        what = "--prompt"
    else:
        given, what = _decoded(_read_input()), "standard input"
    if not given:
        raise InputError(f"{what} is empty: there is nothing to answer; give a prompt of at least one character")
    return given


def _read_input() -> bytes:
    """Standard input to its end, also where whoever shares it made it non-blocking."""
    buffer = getattr(sys.stdin, "buffer", None)
    if not isinstance(buffer, io.BufferedReader):
        return sys.stdin.read().encode("utf-8", "surrogateescape")  # a test's, a notebook's
    descriptor, data = buffer.fileno(), bytearray()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while True:
        poll.poll()
        with contextlib.suppress(BlockingIOError):  # another reader was faster
            if not (part := os.read(descriptor, _STEP)):
                return bytes(data)
            data += part
            if len(data) > MOST_TEXT_BYTES:
                raise too_long("standard input", MOST_TEXT_BYTES, "a prompt")


async def until_input_ends(then: Callable[[], None]) -> None:
    """Wait for the end of standard input, which comes with the parent process', and call ``then``."""
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stream:
        while await stream.receive_some(4096):
            continue
    then()


def _decoded(data: bytes) -> str:
    for mark, name in _OTHER_ENCODINGS.items():
        if data.startswith(mark):
            raise InputError(f"the prompt on standard input is {name}, not UTF-8; convert it: iconv -f {name} -t UTF-8")
    skipped = len(_UTF8_MARK) if data.startswith(_UTF8_MARK) else 0
    try:
        return data[skipped:].decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start + skipped
        raise InputError(
            f"the prompt on standard input is not UTF-8: byte 0x{data[at]:02x} at offset {at} ({error.reason}); convert it"
            " with iconv"
        ) from error
