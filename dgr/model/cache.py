"""Where dgr keeps what is slow to make again."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_dir"]


def cache_dir() -> Path:
    """The cache folder: ``DGR_CACHE_DIR``, else ``XDG_CACHE_HOME/dgr``, else ``~/.cache/dgr``."""
    if chosen := os.environ.get("DGR_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dgr"
