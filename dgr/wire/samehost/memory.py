"""Memory that two processes have mapped: a ring for each direction, of a size that nobody can change.

The side that listens makes it, as a memfd sealed against shrinking and growing, and passes it on. The other side believes
neither its size nor its seals before it has looked: reading memory that was cut off would end the process (SIGBUS).
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os

from dgr.errors import FrameError, LinkBroken

__all__ = ["RING", "SharedMemory", "make_memory", "take_memory"]

#: Bytes of a ring: as many as stay in a core's caches between the two copies.
RING = 8 << 20
_SIZE = 2 * RING
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedMemory:
    """A mapping of both rings; closing it gives it back."""

    def __init__(self, descriptor: int, *, made_here: bool) -> None:
        try:
            self._pages = mmap.mmap(descriptor, _SIZE)
        except OSError as error:
            raise LinkBroken(f"{_SIZE} bytes of memory cannot be shared: {error}") from error
        both = memoryview(self._pages)
        first, second = both[:RING], both[RING:]
        both.release()
        #: What this side writes, and what it reads.
        self.outgoing, incoming = (second, first) if made_here else (first, second)
        self.incoming = incoming.toreadonly()
        incoming.release()

    def close(self) -> None:
        """Unmap; idempotent."""
        self.outgoing.release()
        self.incoming.release()
        self._pages.close()


def _new_descriptor(n_bytes: int) -> int:
    descriptor = os.memfd_create("dgr-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, n_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_memory() -> tuple[SharedMemory, int]:
    """New memory, and a descriptor of it to be passed on and closed. Raises :class:`LinkBroken`."""
    try:
        descriptor = _new_descriptor(_SIZE)
    except OSError as error:
        raise LinkBroken(f"{_SIZE} bytes of memory cannot be shared: {error}") from error
    try:
        return SharedMemory(descriptor, made_here=True), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def take_memory(descriptor: int) -> SharedMemory:
    """Map memory that came from the other side; the descriptor stays the caller's. Raises :class:`FrameError`."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise FrameError(f"the other side passed a descriptor that is not memory: {error.strerror}") from error
    if seals & _SEALS != _SEALS:
        raise FrameError(f"the other side passed memory with seals {seals:#x}; without {_SEALS:#x} it could be resized")
    about = os.fstat(descriptor)
    if about.st_dev != _device():
        raise FrameError("the other side passed memory in huge pages, which may run out while it is read")
    if about.st_size != _SIZE:
        raise FrameError(f"the other side passed {about.st_size} bytes of memory; this version of dgr shares {_SIZE}")
    return SharedMemory(descriptor, made_here=False)


@functools.cache
def _device() -> int:
    """Where the kernel keeps plain memory of this kind."""
    descriptor = _new_descriptor(0)
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)
