"""Where an output goes: looked at before anything is spent on it.

A symbolic link is followed and stays. What exists and is not a regular file is not replaced: a character device, a pipe and
an open descriptor (``/dev/stdout``, ``/proc/self/fd/N``) are written into as they are; folders, block devices and sockets
are refused.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from dgr.errors import InputError

__all__ = ["Target", "find_target", "not_writable"]

#: Links in a row, as Linux counts (``MAXSYMLINKS``).
_MOST_LINKS = 40
#: Blanks and backslashes in ``/proc/self/mountinfo``.
_ESCAPED = re.compile(rb"\\(\d{3})")
_DESCRIPTORS = re.compile(r"/proc/(\d+)(?:/task/\d+)?/fd")


@frozen
class Target:
    """Where an output goes, looked at before there is anything to write. Made by :func:`find_target`."""

    #: As it was asked for.
    path: Path
    #: What is replaced or written into: links are followed.
    file: Path
    #: Written into as it is, not replaced.
    direct: bool
    #: The open descriptor of this process that it stands for.
    descriptor: int | None

    @property
    def is_standard_output(self) -> bool:
        """Whether what a command prints would get between the bytes."""
        if not self.direct or self.file == Path(os.devnull):
            return False
        with suppress(OSError):
            ours = self.file.stat() if self.descriptor is None else os.fstat(self.descriptor)
            return os.path.samestat(ours, os.fstat(1))
        return False

    def check_apart(self, *inputs: str | os.PathLike[str]) -> None:
        """Refuse to replace what is read. Raises :class:`~dgr.errors.InputError`."""
        for path in inputs:
            with suppress(OSError):
                if not self.direct and self.file.samefile(path):
                    raise not_writable(self.path, "it is what is read, by this or another name")


def not_writable(path: object, why: str | OSError) -> InputError:
    """The error that says of an output why it cannot be."""
    if isinstance(why, OSError):
        why = why.strerror or str(why)
    return InputError(f"{path} cannot be written: {why}; choose another place")


def find_target(path: str | os.PathLike[str]) -> Target:
    """Look at where an output shall go, before anything is spent on it.

    Raises :class:`~dgr.errors.InputError` when nothing can be written there: a folder, or none to write into, no right to,
    a block device, a link in a circle.
    """
    text = os.fspath(path)
    if "\0" in text:
        raise InputError(f"{text!r}: a path cannot hold a NUL; check the path")
    if text.endswith(os.sep) or not text:
        raise not_writable(text or repr(text), "it names a folder, not a file")
    try:
        file = _follow(Path(text))
        return _looked_at(Path(text), file)
    except FileNotFoundError as missing:
        raise not_writable(text, f"there is no folder {Path(missing.filename or text)}") from missing
    except OSError as failed:
        raise not_writable(text, failed) from failed


def _follow(path: Path) -> Path:
    """Where links lead: a name that is not a link, there or not, or an open descriptor."""
    for _ in range(_MOST_LINKS):
        folder = Path(os.path.realpath(path.parent, strict=True))
        path = folder / path.name
        if _DESCRIPTORS.fullmatch(str(folder)) or not path.is_symlink():
            return path
        path = folder / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _looked_at(path: Path, file: Path) -> Target:
    if owner := _DESCRIPTORS.fullmatch(str(file.parent)):
        return _open_descriptor(path, file, int(owner[1]))
    try:
        found = file.lstat()
    except FileNotFoundError:
        _check_folder(path, file, None)
        return Target(path, file, direct=False, descriptor=None)
    if stat.S_ISREG(found.st_mode):
        _check_folder(path, file, found)
        return Target(path, file, direct=False, descriptor=None)
    _check_special(path, file, found)
    if not _may(file, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return Target(path, file, direct=True, descriptor=None)


def _open_descriptor(path: Path, file: Path, owner: int) -> Target:
    """A descriptor under ``/proc``. Of this process it is used itself: opening it anew would begin at its first byte."""
    try:
        found = file.stat()
    except FileNotFoundError:
        raise not_writable(path, "no such descriptor is open") from None
    _check_special(path, file, found)
    if owner != os.getpid():
        return Target(path, file, direct=True, descriptor=None)
    if fcntl.fcntl(int(file.name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise not_writable(path, "the descriptor is open for reading only")
    return Target(path, file, direct=True, descriptor=int(file.name))


def _check_special(path: Path, file: Path, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise not_writable(path, "it is a folder")
    if stat.S_ISBLK(found.st_mode):
        raise not_writable(path, "it is a block device, and what it holds would be lost")
    if stat.S_ISSOCK(found.st_mode) and not _DESCRIPTORS.fullmatch(str(file.parent)):
        raise not_writable(path, "it is a socket")


def _check_folder(path: Path, file: Path, old: os.stat_result | None) -> None:
    """Refuse what a rename at the end would fail on."""
    folder = file.parent
    if not _may(folder, os.W_OK | os.X_OK):
        raise not_writable(path, f"no file can be made in {folder}, which is not writable")
    if old is None:
        return
    about, user = folder.stat(), os.geteuid()
    if about.st_mode & stat.S_ISVTX and user not in (0, about.st_uid, old.st_uid):
        raise not_writable(path, f"it belongs to another user, and {folder} lets nobody else replace it")
    if str(file) in _mount_points():
        raise not_writable(path, "it is mounted by itself, so it cannot be replaced in one step")


def _may(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _mount_points() -> set[str]:
    with suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
        return {os.fsdecode(_ESCAPED.sub(lambda one: bytes([int(one[1], 8)]), line.split()[4])) for line in lines}
    return set()
