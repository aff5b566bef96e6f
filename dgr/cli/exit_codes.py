"""What the exit code of a command says, and how an error becomes one."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

from dgr.cli.streams import open_standard_streams, silence, tell
from dgr.errors import ArtifactError, DgrError, InputError

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED", "exit_code", "next_step", "run_command"]

#: Something failed that the caller did not cause.
FAILED = 1
#: The caller's act: a flag, a file that is missing, damaged or out of reach, a model that cannot be.
BAD_INPUT = 2
INTERRUPTED = 130

#: Errors of a path that was given: it leads to nothing, to something else, or to what this user may not touch.
_PATH_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
#: States of the machine in which a file cannot be read, and which pass: the same arguments may work in a moment.
_STATES = frozenset(
    {
        errno.EAGAIN, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOLCK, errno.ENOMEM,
        errno.ENOSPC, errno.ESTALE, errno.ETIMEDOUT,
    }
)  # fmt: skip


def exit_code(error: DgrError | OSError) -> int:
    """The exit code of a command that an error ended: whose act it was, the caller's or the machine's."""
    if isinstance(error, InputError):
        return BAD_INPUT
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _STATES:
            return FAILED
        cause = cause.__cause__
    return BAD_INPUT if isinstance(error, (ArtifactError, *_PATH_ERRORS)) else FAILED


def next_step(error: DgrError | OSError | MemoryError) -> str:
    """What to do about an error that ends a command, and in brackets the name under which ``docs/errors.md`` has it."""
    match error:
        case DgrError():
            step = error.next_step
        case MemoryError():
            step = "free some, raise the limit of this process (ulimit -v, a control group), or ask for less"
        case _ if exit_code(error) == BAD_INPUT:
            step = "check that the path is there, is what it should be, and is this user's to read or write"
        case _:
            step = "free what is short (space, descriptors, the address) and give the same command again"
    return f"{step} [{type(error).__name__}]"


def run_command(program: str, command: Callable[[], int], interrupted: str = "") -> int:
    """Run a command; an error becomes two lines on standard error, what is wrong and what to do, and an exit code.

    Output that could not be written to its end is a failure too. ``interrupted``: what is said when the user interrupts
    it. Raises :class:`SystemExit` where argparse does, after ``--help``, say.
    """
    open_standard_streams()
    try:
        code = _outcome(program, command, interrupted)
    except SystemExit as end:
        raise SystemExit(_flushed(program, int(end.code or 0))) from None
    return _flushed(program, code)


def _outcome(program: str, command: Callable[[], int], interrupted: str) -> int:
    try:
        return int(command())
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        return FAILED
    except (DgrError, OSError) as error:
        tell(f"{program}: error: {error}", f"{program}: next: {next_step(error)}")
        return exit_code(error)
    except MemoryError as error:
        tell(f"{program}: error: this process may take no more memory", f"{program}: next: {next_step(error)}")
        return FAILED
    except KeyboardInterrupt:
        if interrupted:
            tell(f"{program}: {interrupted}")
        return INTERRUPTED


def _flushed(program: str, code: int) -> int:
    """The exit code, once everything is written; what is left in a buffer after that is lost."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)
        return code or FAILED
    except OSError as error:
        silence(sys.stdout)
        if not code:
            tell(
                f"{program}: error: standard output cannot be written: {error.strerror or error}",
                f"{program}: next: free space where it leads, or write elsewhere [{type(error).__name__}]",
            )
        return code or FAILED
    except KeyboardInterrupt:
        silence(sys.stdout)
        return INTERRUPTED
    return code
