"""Where dgr keeps what is slow to make again. A cache that is missing or cannot be written costs time only."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from dgr.core.files.outputs import write_file
from dgr.errors import InputError

__all__ = ["cache_dir", "keep", "one_at_a_time"]

_log = logging.getLogger(__name__)

#: A folder that cannot be: nothing is found in it and nothing kept.
_NOWHERE = Path(os.devnull) / "dgr"

#: Bytes of a note on how far a work is.
_NOTE = 48
#: Seconds between two looks at a lock that somebody else holds.
_POLL = 0.1


def cache_dir() -> Path:
    """The cache folder: ``DGR_CACHE_DIR``, else ``XDG_CACHE_HOME/dgr``, else ``~/.cache/dgr``, absolute.

    Without a home it is a folder of this user under the temporary one, which is told once; without that, nothing is kept.
    """
    if chosen := os.environ.get("DGR_CACHE_DIR"):
        return Path(chosen).absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if not base.is_absolute():  # "should be ignored", says the XDG base directory specification
        try:
            base = Path.home() / ".cache"
        except RuntimeError:  # no HOME, and a user id without an entry
            return _homeless()
    return base / "dgr" if base.is_absolute() else _homeless()


@lru_cache(maxsize=1)
def _homeless() -> Path:
    folder = _NOWHERE
    with suppress(OSError):
        folder = _own_temporary_folder() or _NOWHERE
    kept = "nothing is kept for the next start" if folder is _NOWHERE else f"the cache is in {folder}"
    _log.warning("there is no home folder, so %s; name a folder in DGR_CACHE_DIR", kept)
    return folder


def _own_temporary_folder() -> Path | None:
    """``dgr-UID`` under the temporary folder, None when another user has made or may write it: verdicts lie there."""
    folder = Path(tempfile.gettempdir()) / f"dgr-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return folder if is_own else None


def keep(path: Path, content: bytes) -> str | None:
    """Write a file of the cache; says why it could not be, None when it was."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
    except OSError as failed:
        return f"{path.parent} cannot be made: {failed.strerror or failed}"
    except InputError as failed:
        return str(failed)
    return None


@contextmanager
def one_at_a_time(
    path: Path, what: str, watch: Callable[[bytes], None] | None = None
) -> Iterator[Callable[[bytes], None]]:
    """Let one process at a time do ``what``, by a lock on the file ``path``.

    The block gets a function that leaves a short note of how far it is, padded to one length; ``watch`` is called with the
    notes of whoever is waited for. Where there are no locks, as on some network file systems, processes may do the same work
    beside each other.
    """
    lock = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(path, what, watch)
    except OSError as failed:
        _log.info("no lock for %s (%s): other processes may do the same at once", what, failed.strerror or failed)

    def note(text: bytes) -> None:
        if lock is not None:
            with suppress(OSError):
                os.pwrite(lock, text.ljust(_NOTE)[:_NOTE], 0)

    try:
        yield note
    finally:
        held, lock = lock, None  # a note that comes late must not go into whatever gets the same number
        if held is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            os.close(held)


def _lock(path: Path, what: str, watch: Callable[[bytes], None] | None) -> int:
    """A descriptor of the file, locked. Whoever held it before has removed it: then it is another file."""
    told = False
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _try_lock(lock):
                if not told:
                    _log.info("another process does %s; waiting for it", what)
                    told = True
                time.sleep(_POLL)
                if watch is not None:
                    watch(os.pread(lock, _NOTE, 0).strip())
            with suppress(FileNotFoundError):
                if os.fstat(lock).st_ino == path.stat().st_ino:
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
