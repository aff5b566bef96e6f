"""Resource limits for the length of a block."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["limited_files"]


@contextmanager
def limited_files(n_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond ``n_bytes``: what a full disk does, for one who writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
