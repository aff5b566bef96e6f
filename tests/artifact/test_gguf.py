"""The header reader: what it reads, and that nothing but ArtifactError ever comes of a bad file."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dgr.artifact.artifact import Artifact
from dgr.errors import ArtifactError
from dgr.gguf.reader import MetaArray, MetaValue, ValueType, read_gguf
from dgr.gguf.types import GgmlType

Build = Callable[..., bytes]
F32 = int(GgmlType.F32)


def string(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def array(element: int, count: int, raw: bytes) -> bytes:
    return struct.pack("<IQ", element, count) + raw


ALL_TYPES = (
    ("a.u8", ValueType.UINT8, struct.pack("<B", 200)),
    ("a.i8", ValueType.INT8, struct.pack("<b", -3)),
    ("a.u16", ValueType.UINT16, struct.pack("<H", 60000)),
    ("a.i16", ValueType.INT16, struct.pack("<h", -30000)),
    ("a.u32", ValueType.UINT32, struct.pack("<I", 4000000000)),
    ("a.i32", ValueType.INT32, struct.pack("<i", -2000000000)),
    ("a.f32", ValueType.FLOAT32, struct.pack("<f", 0.5)),
    ("a.bool", ValueType.BOOL, b"\x01"),
    ("a.str", ValueType.STRING, string("grüß".encode())),
    ("a.raw", ValueType.STRING, string(b"\xff\xfe")),
    ("a.u64", ValueType.UINT64, struct.pack("<Q", 1 << 63)),
    ("a.i64", ValueType.INT64, struct.pack("<q", -(1 << 62))),
    ("a.f64", ValueType.FLOAT64, struct.pack("<d", 0.1)),
    ("a.ints", ValueType.ARRAY, array(ValueType.INT32, 3, struct.pack("<3i", 1, -2, 3))),
    ("a.strs", ValueType.ARRAY, array(ValueType.STRING, 3, string(b"x") + string(b"") + string("é".encode()))),
    ("a.none", ValueType.ARRAY, array(ValueType.FLOAT64, 0, b"")),
)


def write(tmp_path: Path, raw: bytes) -> Path:
    path = tmp_path / "file.gguf"
    path.write_bytes(raw)
    return path


def refused(tmp_path: Path, raw: bytes) -> str:
    path = write(tmp_path, raw)
    with pytest.raises(ArtifactError) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def plain(stored: MetaValue) -> object:
    return stored.value.values() if isinstance(stored.value, MetaArray) else stored.value


@pytest.mark.parametrize("version", [2, 3])
def test_reads_every_value_type(build_gguf: Build, tmp_path: Path, version: int) -> None:
    file = read_gguf(write(tmp_path, build_gguf(ALL_TYPES, version=version)))
    assert {key: plain(value) for key, value in file.metadata.items()} == {
        "a.u8": 200,
        "a.i8": -3,
        "a.u16": 60000,
        "a.i16": -30000,
        "a.u32": 4000000000,
        "a.i32": -2000000000,
        "a.f32": 0.5,
        "a.bool": True,
        "a.str": "grüß",
        "a.raw": "\udcff\udcfe",
        "a.u64": 1 << 63,
        "a.i64": -(1 << 62),
        "a.f64": 0.1,
        "a.ints": (1, -2, 3),
        "a.strs": ("x", "", "é"),
        "a.none": (),
    }
    assert file.version == version
    assert [value.type for value in file.metadata.values()] == [kind for _, kind, _ in ALL_TYPES]


def test_reads_tensor_table_with_alignment(build_gguf: Build, tmp_path: Path) -> None:
    pairs = [("general.alignment", ValueType.UINT32, struct.pack("<I", 64))]
    tensors = [("one", (3,), F32, 0), ("two", (32, 2, 1), int(GgmlType.Q8_0), 64)]
    raw = build_gguf(pairs, tensors, bytes(64 + 68), alignment=64)
    file = read_gguf(write(tmp_path, raw))
    assert file.alignment == 64
    assert file.data_offset % 64 == 0
    assert file.data_offset + 132 == file.file_bytes == len(raw)
    one, two = file.tensors.values()
    assert (one.name, one.ne, one.type, one.n_bytes, one.offset) == ("one", (3,), GgmlType.F32, 12, file.data_offset)
    assert (two.ne, two.type, two.n_bytes, two.offset) == ((32, 2, 1), GgmlType.Q8_0, 68, file.data_offset + 64)


def test_one_byte_short_is_refused(build_gguf: Build, tmp_path: Path) -> None:
    whole = build_gguf((), [("t", (4,), F32, 0)], bytes(16))
    assert read_gguf(write(tmp_path, whole)).tensors["t"].n_bytes == 16
    assert "ends at byte" in refused(tmp_path, whole[:-1])


def test_every_truncation_of_a_header_is_refused(build_gguf: Build, tmp_path: Path) -> None:
    raw = build_gguf(ALL_TYPES, [("t", (4,), F32, 0)], bytes(16))
    for length in range(len(raw)):
        refused(tmp_path, raw[:length])


def test_agrees_with_the_gguf_package(min_mixed: Path) -> None:
    theirs = gguf.GGUFReader(min_mixed)
    ours = read_gguf(min_mixed)
    assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert entry.ne == tuple(int(dim) for dim in tensor.shape)
        assert (int(entry.type), entry.n_bytes, entry.offset) == (
            int(tensor.tensor_type),
            tensor.n_bytes,
            tensor.data_offset,
        )
    known = {key for key in theirs.fields if not key.startswith("GGUF.")}
    assert known == set(ours.metadata)
    for key in known:
        contents = theirs.fields[key].contents()
        mine = plain(ours.metadata[key])
        assert mine == (tuple(contents) if isinstance(contents, list) else contents), key


HUGE = (1 << 64) - 1
BAD_FILES: dict[str, tuple[Callable[[Build], bytes], str]] = {
    "empty": (lambda _: b"", "the magic needs 4 bytes"),
    "magic": (lambda b: b(magic=b"GGML"), "b'GGML'"),
    "version 1": (lambda b: b(version=1), "version 1"),
    "version 4": (lambda b: b(version=4), "version 4"),
    "big-endian": (lambda b: b(version=3 << 24), "version 50331648"),
    "key count": (lambda b: b(n_pairs=HUGE), "claims 18446744073709551615 keys"),
    "tensor count": (lambda b: b(n_tensors=1 << 40), "claims 1099511627776 tensors"),
    "string length": (
        lambda b: b([("k", ValueType.STRING, struct.pack("<Q", HUGE))]),
        "needs 18446744073709551615 bytes",
    ),
    "array count": (
        lambda b: b([("k", ValueType.ARRAY, array(ValueType.UINT8, HUGE, b""))]),
        "claims 18446744073709551615 elements",
    ),
    "string array count": (
        lambda b: b([("k", ValueType.ARRAY, array(ValueType.STRING, 3, bytes(23)))]),
        "claims 3 elements",
    ),
    "string in array": (
        lambda b: b([("k", ValueType.ARRAY, array(ValueType.STRING, 1, struct.pack("<Q", 99)))]),
        "string 0 of",
    ),
    "nested array": (
        lambda b: b([("k", ValueType.ARRAY, array(ValueType.ARRAY, 1, array(ValueType.UINT8, 1, b"\0")))]),
        "array of arrays",
    ),
    "value type": (lambda b: b([("k", 13, b"\0")]), "unknown type 13"),
    "duplicate key": (lambda b: b([("k", ValueType.UINT8, b"\0")] * 2), "'k' occurs twice"),
    "empty key": (lambda b: b([("", ValueType.UINT64, bytes(8))]), "key 0 is 0 bytes long"),
    "alignment 0": (lambda b: b([("general.alignment", ValueType.UINT32, bytes(4))]), "general.alignment is 0"),
    "alignment 48": (
        lambda b: b([("general.alignment", ValueType.UINT32, struct.pack("<I", 48))]),
        "general.alignment is 48",
    ),
    "alignment type": (
        lambda b: b([("general.alignment", ValueType.UINT64, struct.pack("<Q", 32))]),
        "power of 2 as UINT32",
    ),
    "no dimensions": (lambda b: b((), [("t", (), F32, 0)], bytes(64)), "has 0 dimensions"),
    "five dimensions": (lambda b: b((), [("t", (1,) * 5, F32, 0)], bytes(64)), "has 5 dimensions"),
    "zero dimension": (lambda b: b((), [("t", (4, 0), F32, 0)], bytes(64)), "[4, 0]"),
    "overflow": (lambda b: b((), [("t", (1 << 32, 1 << 31), F32, 0)], bytes(64)), "overflows 64 bits"),
    "tensor type": (
        lambda b: b((), [("t", (4,), 43, 0)], bytes(64)),
        "has the unknown ggml type 43; use a file of stock",
    ),
    "removed type": (
        lambda b: b((), [("t", (4,), 31, 0)], bytes(64)),
        "the ggml type 31 (q4_0_4_4), which llama.cpp has removed; use a file of stock types (MXFP4, Q8_0,",
    ),
    "a fork's type": (
        lambda b: b((), [("t", (4,), 144, 0)], bytes(64)),
        "the ggml type 144, of which only ik_llama.cpp knows; use a file of stock types (MXFP4, Q8_0,",
    ),
    "another fork's type": (  # 129 bytes for 128 values, where ours has 18 bytes for 64
        lambda b: b((), [("t", (128, 2), int(GgmlType.Q2_0), 0), ("u", (4,), F32, 288)], bytes(320)),
        "type 42 is q2_0 here, and F8_E4M3_B128 in files for some forks: such a file cannot be read; use one of stock",
    ),
    "partial block": (lambda b: b((), [("t", (33,), int(GgmlType.Q8_0), 0)], bytes(64)), "rows of 33 values"),
    "misaligned": (lambda b: b((), [("t", (4,), F32, 8)], bytes(64)), "offset 8, not a multiple of 32"),
    "gap": (lambda b: b((), [("t", (4,), F32, 32)], bytes(64)), "offset 32, but the table implies 0"),
    "overlap": (
        lambda b: b((), [("t", (16,), F32, 0), ("u", (4,), F32, 32)], bytes(128)),
        "offset 32, but the table implies 64",
    ),
    "duplicate tensor": (
        lambda b: b((), [("t", (4,), F32, 0), ("t", (4,), F32, 32)], bytes(64)),
        "'t' occurs twice",
    ),
    "long name": (lambda b: b((), [("t" * 64, (4,), F32, 0)], bytes(64)), "64 bytes long, but must be 1 to 63"),
    "data": (lambda b: b((), [("t", (4,), F32, 0)], bytes(15)), "'t' ends at byte"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_refuses(build_gguf: Build, tmp_path: Path, case: str) -> None:
    make, message = BAD_FILES[case]
    assert message in refused(tmp_path, make(build_gguf))


def test_names_must_be_utf8(build_gguf: Build, tmp_path: Path) -> None:
    raw = build_gguf([("kk", ValueType.UINT8, b"\0")])
    assert "not UTF-8" in refused(tmp_path, raw.replace(b"kk", b"\xff\xff"))


def test_a_header_larger_than_the_limit_is_refused_unread(build_gguf: Build, tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    raw = build_gguf([("k", ValueType.ARRAY, array(ValueType.UINT8, 1 << 30, b""))])
    with path.open("wb") as file:
        file.write(raw)
        file.truncate(len(raw) + (1 << 30))  # a hole: takes no space
    with pytest.raises(ArtifactError, match="a header may take at most 268435456 bytes"):
        read_gguf(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="No such file"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ArtifactError, match="not a regular file"):
        read_gguf(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match="not a regular file"):
        read_gguf(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match="NUL"):
        read_gguf("a\0b")


@st.composite
def damage(draw: st.DrawFn, size: int) -> list[tuple[str, int, bytes]]:
    """A few overwritten, inserted or cut places in the first ``size`` bytes."""
    places = st.integers(0, size - 1)
    words = st.sampled_from(
        [b"\0", b"\xff", b"\x7f", b"\0" * 8, b"\xff" * 8, b"\xff" * 7 + b"\x7f", struct.pack("<Q", 9)]
    )
    change = st.tuples(st.sampled_from(["write", "insert", "cut", "truncate"]), places, words | st.binary(max_size=9))
    return draw(st.lists(change, min_size=1, max_size=4))


def damaged(raw: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    for kind, at, new in changes:
        match kind:
            case "write":
                raw = raw[:at] + new + raw[at + len(new) :]
            case "insert":
                raw = raw[:at] + new + raw[at:]
            case "cut":
                raw = raw[:at] + raw[at + len(new) + 1 :]
            case _:
                raw = raw[:at]
    return raw


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzzed_headers_only_ever_raise_artifact_errors(build_gguf: Build, tmp_path: Path, data: st.DataObject) -> None:
    tensors = [("one", (4, 2), F32, 0), ("two", (32,), int(GgmlType.Q8_0), 32)]
    raw = build_gguf(ALL_TYPES, tensors, bytes(66))
    path = write(tmp_path, damaged(raw, data.draw(damage(len(raw)))))
    try:
        file = read_gguf(path)
    except ArtifactError:
        return
    for stored in file.metadata.values():
        if isinstance(stored.value, MetaArray):
            assert len(stored.value.values()) == len(stored.value)
    assert all(tensor.offset + tensor.n_bytes <= file.file_bytes for tensor in file.tensors.values())


@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzzed_models_only_ever_raise_artifact_errors(min_mixed: Path, tmp_path: Path, data: st.DataObject) -> None:
    raw = min_mixed.read_bytes()
    size = read_gguf(min_mixed).data_offset
    path = write(tmp_path, damaged(raw, data.draw(damage(size))))
    try:
        artifact = Artifact.open(path)
        artifact.check(artifact.hp.whole)
    except ArtifactError:
        return
    assert artifact.identity


def test_sizes_of_every_type_match_the_gguf_package() -> None:
    theirs: dict[str, Any] = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    ours = {kind.name: (kind.block_size, kind.block_bytes) for kind in GgmlType}
    shared = (set(theirs) & set(ours)) - {"Q8_1"}  # the package counts its two f16 as f32
    assert ours["Q8_1"] == (32, 2 + 2 + 32)
    assert len(shared) >= 30
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    # Younger than the package (ggml-common.h at the pin).
    assert {name: ours[name] for name in ours if name not in theirs} == {
        name: size
        for name, size in {"NVFP4": (64, 36), "Q1_0": (128, 18), "Q2_0": (64, 18)}.items()
        if name not in theirs
    }
