"""Resource limits for the length of a block."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["limited_files", "no_descriptors"]


@contextmanager
def limited_files(n_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond ``n_bytes``: what a full disk does, for one who writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process opens nothing more: no file, no socket, no connection that it takes. What is open stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
