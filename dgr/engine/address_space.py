"""Limits of address space: asked about before native code is, which ends the process where a small allocation fails."""

from __future__ import annotations

import mmap

from dgr.core.host import memory_limits
from dgr.core.units import human_bytes
from dgr.errors import BudgetExceeded

__all__ = ["check_address_space", "has_address_limit"]


def has_address_limit() -> bool:
    """Whether this process may only have so much address space (``ulimit -v``), or data in it (``ulimit -d``)."""
    return bool(memory_limits())


def check_address_space(n_bytes: int, what: str) -> None:
    """Refuse work that would not fit below ``ulimit -v`` or ``ulimit -d``.

    ``n_bytes``: what all of it takes. They are asked of the system and given back. Raises
    :class:`~dgr.errors.BudgetExceeded`; nothing is done where there is no limit.
    """
    if not has_address_limit():
        return
    try:
        mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError, OverflowError, ValueError):
        limit = min(memory_limits())
        raise BudgetExceeded(
            f"{what} takes {n_bytes} B ({human_bytes(n_bytes)}) of address space, more than is left below the limit of"
            f" {limit} B ({human_bytes(limit)}): raise it (`ulimit -v`, `ulimit -d`), lower n_ctx, or own fewer layers"
        ) from None
