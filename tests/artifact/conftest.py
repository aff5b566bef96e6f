"""Files for the model tests: a small fixture model, and a writer of hand-made (and wrong) GGUF files."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dgr.gguf.reader import ValueType
from dgr.selftest.fixture import write_fixture

Pair = tuple[str, ValueType, bytes]
Tensor = tuple[str, Sequence[int], int, int]


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


@pytest.fixture(scope="session")
def min_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers (SWA, SWA, CSA, HCA) and the MTP block."""
    path = tmp_path_factory.mktemp("models") / "min.gguf"
    write_fixture(path, preset="min", layers=4, mtp=True)
    return path


@pytest.fixture(scope="session")
def min_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``min_model`` in four files, with its manifest: the path of the first. Copy before changing."""
    path = tmp_path_factory.mktemp("parts") / "min.gguf"
    return Path(write_fixture(path, preset="min", layers=4, mtp=True, parts=4).path)


@pytest.fixture(scope="session")
def min_mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same four layers without MTP, in quantised types."""
    path = tmp_path_factory.mktemp("models") / "mixed.gguf"
    write_fixture(path, preset="min", layers=4, weights="mixed")
    return path


@pytest.fixture(scope="session")
def build_gguf() -> Callable[..., bytes]:
    """Bytes of a GGUF: ``pairs`` of (key, type, encoded value), ``tensors`` of (name, ne, type, offset), data."""

    def build(
        pairs: Sequence[Pair] = (),
        tensors: Sequence[Tensor] = (),
        data: bytes = b"",
        *,
        magic: bytes = b"GGUF",
        version: int = 3,
        n_pairs: int | None = None,
        n_tensors: int | None = None,
        alignment: int = 32,
    ) -> bytes:
        out = magic + struct.pack("<I", version)
        out += struct.pack("<Q", len(tensors) if n_tensors is None else n_tensors)
        out += struct.pack("<Q", len(pairs) if n_pairs is None else n_pairs)
        for key, kind, value in pairs:
            out += text(key) + struct.pack("<I", kind) + value
        for name, ne, code, offset in tensors:
            out += text(name) + struct.pack("<I", len(ne)) + struct.pack(f"<{len(ne)}Q", *ne)
            out += struct.pack("<IQ", code, offset)
        return out + bytes(-len(out) % alignment if tensors else 0) + data

    return build
