"""What the exit code of a command says, and how an error becomes one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from dgr.errors import DgrError, InputError

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED", "run_command"]

#: Something failed that the caller did not cause.
FAILED = 1
#: The caller's act: a flag, a file, a model that cannot be.
BAD_INPUT = 2
INTERRUPTED = 130


def run_command(program: str, command: Callable[[], int], interrupted: str = "") -> int:
    """Run a command; an error becomes one line on standard error and an exit code.

    ``interrupted``: what is said when the user interrupts it.
    """
    try:
        return int(command())
    except InputError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except (DgrError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output went away, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        print(f"{program}: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        if interrupted:
            print(f"{program}: {interrupted}", file=sys.stderr)
        return INTERRUPTED
