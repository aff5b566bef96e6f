"""What the exit code of a command says, and how an error becomes one."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

from dgr.cli.streams import open_standard_streams, silence, tell
from dgr.errors import ArtifactError, DgrError, InputError

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED", "exit_code", "run_command"]

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


def run_command(program: str, command: Callable[[], int], interrupted: str = "") -> int:
    """Run a command; an error becomes one line on standard error and an exit code.

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
        tell(f"{program}: error: {error}")
        return exit_code(error)
    except MemoryError:
        tell(f"{program}: error: this process may take no more memory; free some, raise its limit, or ask for less")
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
            tell(f"{program}: error: standard output cannot be written: {error.strerror or error}")
        return code or FAILED
    except KeyboardInterrupt:
        silence(sys.stdout)
        return INTERRUPTED
    return code
