"""Memory for payloads: what is reserved costs nothing until it is filled, and what is filled is touched once.

A ``bytearray`` of a given size is zeroed when it is made, and one that grows faults in every page of 4 KiB by itself: for
32 MiB either takes longer than copying them. An anonymous mapping in huge pages does neither.
"""

from __future__ import annotations

import mmap
import sys

__all__ = ["new_buffer"]

#: Smaller buffers come from the allocator, which has their pages at hand.
_MAPPED = 1 << 20


def new_buffer(n_bytes: int) -> memoryview:
    """A writable buffer of so many bytes, whatever is in it; it is given back with the last view of it.

    Raises :class:`MemoryError` when the process has no room for it.
    """
    if n_bytes < _MAPPED or sys.platform != "linux":
        return memoryview(bytearray(n_bytes))
    try:
        pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no room for {n_bytes} bytes: {error}") from None
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return memoryview(pages)  # a kernel without huge pages: the same memory, slower
    return memoryview(pages)
