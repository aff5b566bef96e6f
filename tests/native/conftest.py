"""The native part alone: a small model of its own, and the shim called as C."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dgr.selftest.fixture import write_fixture

ROOT = Path(__file__).resolve().parents[2]
CFFI_BUILD = ROOT / "cffi_build"


@pytest.fixture(scope="session")
def five_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A V4 file of the first five layers; tests copy it before they change it."""
    path = tmp_path_factory.mktemp("native") / "five.gguf"
    write_fixture(path, layers=5)
    return path


@pytest.fixture(scope="session")
def build_scripts() -> Iterator[tuple[ModuleType, ModuleType]]:
    """The modules ``llama_cpp`` and ``build_native``, which are scripts of the build and no part of the package."""
    sys.path.insert(0, str(CFFI_BUILD))
    try:
        import build_native  # type: ignore[import-not-found]  # on sys.path here alone
        import llama_cpp  # type: ignore[import-not-found]  # on sys.path here alone

        yield llama_cpp, build_native
    finally:
        sys.path.remove(str(CFFI_BUILD))
