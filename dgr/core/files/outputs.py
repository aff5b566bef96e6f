"""Files that appear under their name when they are complete: the one way in which dgr writes.

The new content goes into a temporary file beside the target, is brought to the disk, and takes the target's name in one
step. A writer that fails, or is told to end, leaves the target as it was and nothing beside it. One that was killed leaves
``.NAME.HOST-PID-RANDOM.part``, which the next writer into that folder removes. Two writers never share a file: the last
one to finish wins, whole. What may be written to, and what is written into as it is: :mod:`dgr.core.files.targets`.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import secrets
import select
import signal
import socket
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import psutil
from attrs import frozen

from dgr.core.files.targets import Target, find_target, not_writable

__all__ = ["NewFile", "removed_on_signals", "write_file", "write_new_files", "writing"]

_UNFINISHED = re.compile(r"\..*\.(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}\.part", re.DOTALL)
#: Bytes of the target's name in that of its temporary file: some file systems take 143 in all.
_NAME_BYTES = 80
#: What ends a process by default and can be answered: a supervisor's word, and a terminal that is closed.
_DEADLY = (signal.SIGTERM, signal.SIGHUP)
#: File systems that cannot bring a file to the disk on demand, or make a hard link, say so by one of these.
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EMLINK}


@frozen
class NewFile:
    """A small file to be made by :func:`write_new_files`."""

    path: Path
    content: bytes
    #: Permission bits, narrowed by the umask.
    mode: int = 0o666


# --- what is left behind ----------------------------------------------------------------------------------------------

#: What this process would leave behind if it ended now, with its process id: a forked child shall not remove it.
_unfinished: dict[Path, int] = {}


@lru_cache(maxsize=1)
def _here() -> str:
    """Stands for this host and its process ids: the ids of another container on the same files are not ours."""
    facts = socket.gethostname()
    with suppress(OSError):
        facts += str(Path("/proc/self/ns/pid").readlink())
    return hashlib.blake2b(facts.encode(errors="surrogateescape"), digest_size=4).hexdigest()


def _temporary(target: Path) -> Path:
    name = os.fsdecode(os.fsencode(target.name)[:_NAME_BYTES])
    return target.with_name(f".{name}.{_here()}-{os.getpid()}-{secrets.token_hex(4)}.part")


def _is_left_over(path: Path, pid: int) -> bool:
    if pid == os.getpid():
        return path not in _unfinished
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _sweep(folder: Path) -> None:
    """Remove what writers left that were killed."""
    with suppress(OSError):
        for path in folder.iterdir():
            match = _UNFINISHED.fullmatch(path.name)
            if match is not None and match["host"] == _here() and _is_left_over(path, int(match["pid"])):
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a file, or a folder of files."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            for inner in path.iterdir():
                inner.unlink()
            path.rmdir()
        else:
            path.unlink()


def _on_signal(number: int, _frame: FrameType | None) -> None:
    """Remove what is unfinished, and end as the signal would have ended this process without us."""
    for path, owner in list(_unfinished.items()):
        if owner == os.getpid():
            _remove(path)
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


@contextmanager
def removed_on_signals(path: Path) -> Iterator[None]:
    """A file, or a folder of files, that is removed when SIGTERM or SIGHUP ends this process within the block.

    A program that answers the signal itself is left to it: its block ends as any other. Only the main thread can set an
    answer; in other threads the path counts while a block of the main thread is open.
    """
    in_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in _DEADLY if in_main and signal.getsignal(number) is signal.SIG_DFL]
    _unfinished[path] = os.getpid()
    try:
        for number in ours:
            signal.signal(number, _on_signal)
        yield
    finally:
        _unfinished.pop(path, None)
        for number in ours:
            if signal.getsignal(number) is _on_signal:
                signal.signal(number, signal.SIG_DFL)


# --- a file under way -------------------------------------------------------------------------------------------------


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has had enough, as `| head` has
    except OSError as failed:
        raise not_writable(path, failed) from failed


class _Raw(io.FileIO):
    """A descriptor whose failures say which output they are of. One that does not block is waited for."""

    def __init__(self, descriptor: int, path: Path) -> None:
        super().__init__(descriptor, "wb")
        self._path = path

    def write(self, data: Any) -> int:
        while True:
            with _translated(self._path):
                count: int | None = super().write(data)
            if count is not None:
                return count
            room = select.poll()
            room.register(self.fileno(), select.POLLOUT)
            room.poll()

    def truncate(self, size: int | None = None) -> int:
        with _translated(self._path):
            return super().truncate(size)


def _create(part: Path, path: Path, mode: int) -> io.BufferedWriter:
    with _translated(path):
        return io.BufferedWriter(_Raw(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), path))


def _settle(file: BinaryIO, old: os.stat_result | None) -> None:
    """Bring content to the disk, under the mode and the owner of the file it replaces, where these can be set."""
    file.flush()
    if old is not None:
        made = os.fstat(file.fileno())
        if (made.st_uid, made.st_gid) != (old.st_uid, old.st_gid):
            with suppress(OSError):
                os.fchown(file.fileno(), old.st_uid, old.st_gid)
        with suppress(OSError):  # a file system that keeps no modes; it stays its owner's alone
            os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
    try:
        os.fsync(file.fileno())
    except OSError as failed:
        if failed.errno not in _UNSUPPORTED:
            raise


def _settle_folder(folder: Path) -> None:
    """Bring a new name to the disk; the content is there already, so that a failure loses nothing."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# --- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def writing(path: str | os.PathLike[str] | Target, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file that appears under its name when the block ends well, and not at all when it fails.

    ``mode``: permission bits of a new file, narrowed by the umask; those of a file that is there stay. Write in order: the
    target may be a pipe. Raises :class:`~dgr.errors.InputError` when it cannot be written, :exc:`BrokenPipeError` as it is.
    """
    target = path if isinstance(path, Target) else find_target(path)
    with _directly(target) if target.direct else _beside(target, mode) as file:
        yield file


@contextmanager
def _directly(target: Target) -> Iterator[BinaryIO]:
    with _translated(target.path):
        if target.descriptor is not None:
            descriptor = os.dup(target.descriptor)
        else:
            descriptor = os.open(target.file, os.O_WRONLY | os.O_TRUNC | os.O_NOCTTY)
    with io.BufferedWriter(_Raw(descriptor, target.path)) as file:
        yield file


@contextmanager
def _beside(target: Target, mode: int) -> Iterator[BinaryIO]:
    _sweep(target.file.parent)
    part = _temporary(target.file)
    with removed_on_signals(part):
        try:
            old = _current(target)
            with _create(part, target.path, mode if old is None else stat.S_IMODE(old.st_mode) & 0o700) as file:
                yield file
                with _translated(target.path):
                    _settle(file, _current(target))
            with _translated(target.path):
                part.replace(target.file)
            _settle_folder(target.file.parent)
        finally:
            _remove(part)


def _current(target: Target) -> os.stat_result | None:
    """The file that is about to be replaced, if any."""
    with _translated(target.path):
        try:
            found = target.file.lstat()
        except FileNotFoundError:
            return None
    if not stat.S_ISREG(found.st_mode):
        raise not_writable(target.path, "meanwhile it became something else than a file")
    return found


def write_file(path: str | os.PathLike[str] | Target, content: bytes, mode: int = 0o666) -> None:
    """Write a whole file in one step, as :func:`writing` does."""
    with writing(path, mode) as file:
        file.write(content)


def write_new_files(files: Sequence[NewFile]) -> None:
    """Make several small files, all of them or none; what is there already is never touched.

    Raises :class:`~dgr.errors.InputError` naming the one that exists or cannot be written.
    """
    with ExitStack() as stack:
        parts = []
        for new in files:
            find_target(new.path)
            _sweep(new.path.parent)
            part = _temporary(new.path)
            stack.enter_context(removed_on_signals(part))
            stack.callback(_remove, part)
            with _create(part, new.path, new.mode) as file, _translated(new.path):
                file.write(new.content)
                _settle(file, None)
            parts.append(part)
        _publish(files, parts)
    for folder in {new.path.parent for new in files}:
        _settle_folder(folder)


def _publish(files: Sequence[NewFile], parts: Sequence[Path]) -> None:
    """Name all files, or none; a signal waits until it is decided. SIGKILL alone could come between two names."""
    made: list[Path] = []
    waiting = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_DEADLY})
    try:
        for new, part in zip(files, parts, strict=True):
            with _translated(new.path):
                _take_new_name(part, new.path)
            made.append(new.path)
    except BaseException:
        for path in made:
            _remove(path)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, waiting)


def _take_new_name(part: Path, path: Path) -> None:
    try:
        path.hardlink_to(part)
    except OSError as failed:
        if failed.errno not in _UNSUPPORTED:
            raise
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # the name is ours from here on
        try:
            part.replace(path)
        except OSError:
            _remove(path)
            raise
