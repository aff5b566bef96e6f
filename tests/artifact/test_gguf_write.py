"""The writer of GGUF files: what it writes, the reader reads back as the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dgr.errors import InputError
from dgr.gguf.reader import ALIGNMENT_KEY, MetaArray, MetaValue, ValueType, read_gguf
from dgr.gguf.types import GgmlType
from dgr.gguf.writer import TensorForm, lay_out, u16, u32
from dgr.selftest.fixture import edit_gguf


def write(path: Path, metadata: dict[str, MetaValue], tensors: list[TensorForm]) -> None:
    layout = lay_out(metadata, tensors)
    path.write_bytes(layout.header + bytes(layout.file_bytes - len(layout.header)))


VALUES = {
    "int": u32(7),
    "short": u16(65535),
    "negative": MetaValue(ValueType.INT64, -(1 << 63)),
    "float": MetaValue(ValueType.FLOAT32, 0.5),
    "double": MetaValue(ValueType.FLOAT64, 0.1),
    "yes": MetaValue(ValueType.BOOL, True),
    "text": MetaValue(ValueType.STRING, "naïve \udcff"),
    "empty": MetaValue(ValueType.STRING, ""),
    "ids": MetaValue(ValueType.ARRAY, MetaArray(ValueType.INT32, 2, b"\1\0\0\0\2\0\0\0")),
    "words": MetaValue(ValueType.ARRAY, MetaArray(ValueType.STRING, 1, b"\2" + bytes(7) + b"hi")),
}


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_reads_back_as_it_was_written(tmp_path: Path, alignment: int | None) -> None:
    metadata = VALUES | ({} if alignment is None else {ALIGNMENT_KEY: u32(alignment)})
    tensors = [
        TensorForm("a", (3,), GgmlType.F32),
        TensorForm("b", (32, 2, 1, 3), GgmlType.Q8_0),
        TensorForm("c", (256,), GgmlType.Q2_K),
    ]
    write(tmp_path / "x.gguf", metadata, tensors)
    file = read_gguf(tmp_path / "x.gguf")
    assert dict(file.metadata) == metadata
    assert [(t.name, t.ne, t.type, t.n_bytes) for t in file.tensors.values()] == [
        (t.name, t.ne, t.type, t.n_bytes) for t in tensors
    ]
    assert [t.n_bytes for t in tensors] == [12, 204, 84]
    assert all(tensor.offset % (alignment or 32) == 0 for tensor in file.tensors.values())
    assert lay_out(metadata, tensors).offsets == tuple(tensor.offset for tensor in file.tensors.values())


def test_a_header_alone(tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", {"split.no": u16(1)}, [])
    assert read_gguf(tmp_path / "x.gguf").tensors == {}


def test_an_unchanged_copy_of_a_model_is_the_same_file(min_model: Path, tmp_path: Path) -> None:
    copy = edit_gguf(min_model, tmp_path / "copy.gguf")
    assert copy.read_bytes() == min_model.read_bytes()


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"": u32(1)}, [], "1 to 65535 bytes"),
        ({"x" * 65536: u32(1)}, [], "has 65536 characters"),
        ({"x": u32(1 << 32)}, [], "4294967296 is no UINT32"),
        ({"x": MetaValue(ValueType.INT8, 128)}, [], "128 is no INT8"),
        ({ALIGNMENT_KEY: u32(24)}, [], "general.alignment is 24"),
        ({}, [("", (1,))], "does not fit a GGUF"),
        ({}, [("x" * 64, (1,))], "does not fit a GGUF"),
        ({}, [("x", ())], "does not fit a GGUF"),
        ({}, [("x", (1, 1, 1, 1, 1))], "does not fit a GGUF"),
        ({}, [("x", (4, 0))], "does not fit a GGUF"),
        ({}, [("x", (1,)), ("x", (2,))], "cannot have one name"),
    ],
)
def test_refuses_what_no_reader_takes(metadata: dict[str, MetaValue], tensors: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        lay_out(metadata, [TensorForm(name, ne, GgmlType.F32) for name, ne in tensors])


def test_rows_are_whole_blocks() -> None:
    with pytest.raises(InputError, match="33 values cannot have type q8_0"):
        lay_out({}, [TensorForm("x", (33,), GgmlType.Q8_0)])
