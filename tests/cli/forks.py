"""A command in a fork of this process, with standard streams as a parent process may leave them: real descriptors, no start-up.

A fork has everything imported already, so that every command can be tried with every kind of stream.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from attrs import frozen

from dgr.cli import main

#: Seconds after which a command hangs.
HANG = 60


@frozen
class Ended:
    """How a command ended, and what it left on its streams."""

    code: int
    out: bytes
    err: bytes


def forked(
    argv: Sequence[object],
    *,
    out: Path,
    stdin: bytes = b"",
    closed: Sequence[int] = (),
    stdout: int | None = None,
    encoding: str = "utf-8",
    entry: Callable[[list[str]], int] = main,
) -> Ended:
    """Run a command to its end. ``out``: a folder for what it prints; ``stdout``: a descriptor to print to instead."""
    pid = begin(argv, out=out, stdin=stdin, closed=closed, stdout=stdout, encoding=encoding, entry=entry)
    return ended(pid, out)


def begin(
    argv: Sequence[object],
    *,
    out: Path,
    stdin: bytes = b"",
    closed: Sequence[int] = (),
    stdout: int | None = None,
    encoding: str = "utf-8",
    entry: Callable[[list[str]], int] = main,
) -> int:
    """The process id of a command that is under way; :func:`ended` waits for it."""
    (out / "stdin").write_bytes(stdin)
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.alarm(HANG)
        files = [os.open(out / "stdin", os.O_RDONLY)]
        files += [os.open(out / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("stdout", "stderr")]
        if stdout is not None:
            files[1] = stdout
        for target, descriptor in enumerate(files):
            os.dup2(descriptor, target)
        os.closerange(3, 256)
        for descriptor in closed:
            os.close(descriptor)
        _leave(_as_the_interpreter_would(argv, closed, encoding, entry))
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        os._exit(99)


def ended(pid: int, out: Path) -> Ended:
    _, status = os.waitpid(pid, 0)
    texts = [(out / name).read_bytes() if (out / name).exists() else b"" for name in ("stdout", "stderr")]
    assert b"Traceback" not in b"".join(texts), texts[1].decode(errors="replace")
    return Ended(os.waitstatus_to_exitcode(status), *texts)


def _as_the_interpreter_would(
    argv: Sequence[object], closed: Sequence[int], encoding: str, entry: Callable[[list[str]], int]
) -> int:
    sys.stdin = None if 0 in closed else open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115 (it stays)
    for descriptor, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        stream = None
        if descriptor not in closed:
            buffer = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
            stream = io.TextIOWrapper(buffer, encoding=encoding, errors=errors, line_buffering=descriptor == 2)
        setattr(sys, name, stream)
    try:
        code = int(entry([os.fspath(word) if isinstance(word, Path) else str(word) for word in argv]))
    except SystemExit as left:
        code = int(left.code or 0)
    for end in (sys.stdout, sys.stderr):
        try:
            if end is not None:
                end.flush()
        except OSError:
            return 120  # as the interpreter does, when it cannot write what is left
    return code


def _leave(code: int) -> NoReturn:
    os._exit(code)


@contextlib.contextmanager
def pipe(size: int) -> Iterator[tuple[int, int]]:
    """A pipe of that many bytes whose writing end does not block: (to read, to write)."""
    import fcntl

    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, size)
    os.set_blocking(write, False)
    try:
        yield read, write
    finally:
        os.close(read)
        with contextlib.suppress(OSError):
            os.close(write)
