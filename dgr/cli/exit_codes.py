"""What the exit code of a ``dgr`` command says."""

from __future__ import annotations

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED"]

#: Something failed that the caller did not cause.
FAILED = 1
#: The caller's act: a flag, a file, a model that cannot be.
BAD_INPUT = 2
INTERRUPTED = 130
