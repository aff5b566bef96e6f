"""The learned model in some weights, written once per machine and kept in dgr's cache folder."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path

from dgr.core.cache_dir import cache_dir
from dgr.selftest.fixture.cached import cached_file
from dgr.selftest.learned.model import KEPT, write_learned

__all__ = ["cached_learned"]


def cached_learned(weights: str = "mixed", *, source: str | os.PathLike[str] = KEPT) -> Path:
    """The learned model, or another ``source`` of its kind, in these weights, written unless it is there; read-only.

    The folder's name tells what it is made of and the code that makes it. Raises :class:`~dgr.errors.InputError` as
    :func:`~dgr.selftest.learned.model.write_learned` does.
    """
    digest = hashlib.blake2b(Path(source).read_bytes(), digest_size=8)
    digest.update(Path(__file__).with_name("model.py").read_bytes())
    folder = cache_dir() / "fixtures" / digest.hexdigest()
    return cached_file(folder, f"learned-{weights}.gguf", partial(write_learned, weights=weights, source=source))
