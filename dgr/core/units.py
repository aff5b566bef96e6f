"""Sizes as people read them."""

from __future__ import annotations

__all__ = ["human_bytes"]


def human_bytes(n_bytes: int) -> str:
    """``271466496`` -> ``258.89 MiB``."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{n_bytes} B" if unit == "B" else f"{size:.2f} {unit}"
