"""Fixture models, written once per machine and kept in dgr's cache folder."""

from __future__ import annotations

import atexit
import hashlib
import inspect
import os
import shutil
import tempfile
import threading
from functools import lru_cache
from pathlib import Path

from dgr.model import tensors, v4
from dgr.model.cache import cache_dir
from dgr.testing import (
    fixture,
    fixture_blocks,
    fixture_metadata,
    fixture_presets,
    fixture_stream,
    fixture_vocab,
)

__all__ = ["cached_fixture"]

#: Everything that decides the bytes of a fixture.
_SOURCES = (
    fixture,
    fixture_blocks,
    fixture_metadata,
    fixture_presets,
    fixture_stream,
    fixture_vocab,
    tensors,
    v4,
)

_writing = threading.Lock()


@lru_cache(maxsize=1)
def _writer_digest() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for module in _SOURCES:
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@lru_cache(maxsize=1)
def _own_folder() -> Path:
    """Where the cache cannot be written: a folder that goes with this process."""
    folder = tempfile.mkdtemp(prefix="dgr-fixtures-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def cached_fixture(
    weights: str = "f32", *, preset: str | None = None, layers: int = 43, mtp: bool = False, seed: int = 0
) -> Path:
    """A fixture model with these properties (:func:`dgr.testing.fixture.write_fixture`), written unless it is there.

    The file's name tells its properties and a digest of the code that writes it, so that old files are not mistaken for
    new ones. Treat it as read-only.
    """
    folder = cache_dir() / "fixtures" / _writer_digest()
    path = folder / f"{preset or 'default'}-{weights}-{layers}{'-mtp' if mtp else ''}-{seed}.gguf"
    with _writing:
        if path.exists():
            return path
        if not _can_write(folder):
            path = _own_folder() / path.name
            if path.exists():
                return path
        fixture.write_fixture(path, weights=weights, preset=preset, layers=layers, mtp=mtp, seed=seed)
    return path
