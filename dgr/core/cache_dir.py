"""Where dgr keeps what is slow to make again. A cache that is missing or cannot be written costs time only."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from dgr.core.files.outputs import write_file
from dgr.errors import InputError

__all__ = ["cache_dir", "keep", "one_at_a_time"]

_log = logging.getLogger(__name__)

#: A folder that cannot be: nothing is found in it and nothing kept.
_NOWHERE = Path(os.devnull) / "dgr"


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
def one_at_a_time(path: Path, what: str) -> Iterator[None]:
    """Let one process at a time do ``what``, by a lock on the file ``path``.

    Where there are no locks, as on some network file systems, processes may do the same work beside each other.
    """
    lock = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("wb")
        _lock(lock.fileno(), what)
    except OSError as failed:
        _log.info("no lock for %s (%s): other processes may do the same at once", what, failed.strerror or failed)
    try:
        yield
    finally:
        if lock is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            lock.close()


def _lock(descriptor: int, what: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("another process does %s; waiting for it", what)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
