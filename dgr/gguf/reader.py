"""A bounds-checked reader of GGUF headers (versions 2 and 3), in pure Python.

Nothing in a file is trusted: every count and length is checked against the bytes that are left before anything is
allocated, and whatever llama.cpp would refuse or abort on in the container itself is refused here with the place named
(``gguf_init_from_reader`` in ``ggml/src/gguf.cpp``). Tensor data is not read, only located.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from attrs import field, frozen

from dgr.errors import ArtifactError
from dgr.gguf.types import GgmlType, foreign_type

__all__ = [
    "ALIGNMENT_KEY",
    "DEFAULT_ALIGNMENT",
    "SCALAR_FORMATS",
    "GgufFile",
    "MetaArray",
    "MetaValue",
    "TensorInfo",
    "ValueType",
    "aligned",
    "read_gguf",
]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
#: A header is metadata; the largest known (tokenizers of several 100 k tokens) take some 20 MiB.
_MAX_HEADER_BYTES = 256 << 20
#: What published models are made of.
_STOCK = "MXFP4, Q8_0, Q4_K, Q2_K, IQ2_XXS, …"
#: Forks number types of their own after the last one that they know.
_HINT_42 = (
    "type 42 is q2_0 here, and F8_E4M3_B128 in files for some forks: such a file cannot be read; use one of stock types"
    f" ({_STOCK}), or fetch the file again if it is q2_0"
)
#: ``GGML_MAX_DIMS``.
_MAX_DIMS = 4
#: ``GGML_MAX_NAME`` counts the final NUL.
_MAX_TENSOR_NAME = 63
_MAX_KEY = 65535
_INT64_MAX = (1 << 63) - 1
#: Fewest bytes of a key-value pair: length, 1-byte key, type, 1-byte value.
_MIN_PAIR_BYTES = 8 + 1 + 4 + 1
#: Fewest bytes of a tensor entry: length, 1-byte name, dimension count, one dimension, type, offset.
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_READ_STEP = 1 << 20


class ValueType(IntEnum):
    """``gguf_type``."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


#: ``struct`` code of each scalar type.
SCALAR_FORMATS = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
_SIZES = {kind: struct.calcsize("<" + code) for kind, code in SCALAR_FORMATS.items()}

Scalar = int | float | bool | str


@frozen
class MetaArray:
    """An array of one element type, kept as the file's bytes and decoded when asked."""

    element: ValueType
    count: int
    #: The elements as stored, without the array's type and count.
    raw: bytes = field(repr=False)

    def __len__(self) -> int:
        return self.count

    def values(self) -> tuple[Scalar, ...]:
        """All elements. Strings that are not UTF-8 keep their bytes as surrogates."""
        if self.element is ValueType.STRING:
            return tuple(self._strings())
        return struct.unpack(f"<{self.count}{SCALAR_FORMATS[self.element]}", self.raw)

    def _strings(self) -> Iterator[str]:
        at = 0
        for _ in range(self.count):
            (length,) = struct.unpack_from("<Q", self.raw, at)
            yield self.raw[at + 8 : at + 8 + length].decode("utf-8", "surrogateescape")
            at += 8 + length


@frozen
class MetaValue:
    """One metadata value and its type in the file."""

    type: ValueType
    value: Scalar | MetaArray


@frozen
class TensorInfo:
    """One entry of the tensor table."""

    name: str
    #: Shape, fastest dimension first.
    ne: tuple[int, ...]
    type: GgmlType
    #: First byte, counted from the start of the file.
    offset: int
    n_bytes: int


@frozen
class GgufFile:
    """Header of one GGUF file."""

    path: Path
    version: int
    metadata: Mapping[str, MetaValue] = field(repr=False)
    #: By name, in file order.
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    alignment: int
    #: Where tensor data begins.
    data_offset: int
    file_bytes: int


def aligned(n_bytes: int, alignment: int) -> int:
    """``n_bytes`` rounded up to a multiple of ``alignment``."""
    return -(-n_bytes // alignment) * alignment


class _Reader:
    """Reads forward through a file, never past its end, never more than the header limit."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.size = size
        self.at = 0
        self._file = file
        self._buffer = bytearray()

    def fail(self, message: str, hint: str = "the file is damaged or incomplete; fetch it again") -> ArtifactError:
        return ArtifactError(f"{self.path}: {message}; {hint}")

    @property
    def left(self) -> int:
        return self.size - self.at

    def need(self, n_bytes: int, what: str) -> int:
        """Make the next ``n_bytes`` available and step over them; returns where they begin in the buffer."""
        if n_bytes > self.left:
            raise self.fail(f"{what} needs {n_bytes} bytes at offset {self.at}, but only {self.left} are left")
        end = self.at + n_bytes
        if end > _MAX_HEADER_BYTES:
            raise self.fail(f"{what} ends at byte {end}, but a header may take at most {_MAX_HEADER_BYTES} bytes")
        while len(self._buffer) < end:
            step = self._file.read(min(_READ_STEP, self.size - len(self._buffer)))
            if not step:
                raise self.fail(f"the file ended at byte {len(self._buffer)} while being read, {self.size} expected")
            self._buffer += step
        begin, self.at = self.at, end
        return begin

    def take(self, n_bytes: int, what: str) -> bytes:
        begin = self.need(n_bytes, what)
        return bytes(self._buffer[begin : begin + n_bytes])

    def scalar(self, kind: ValueType, what: str) -> int | float | bool:
        begin = self.need(_SIZES[kind], what)
        value: int | float | bool = struct.unpack_from("<" + SCALAR_FORMATS[kind], self._buffer, begin)[0]
        return value

    def integer(self, kind: ValueType, what: str) -> int:
        return int(self.scalar(kind, what))

    def string(self, what: str) -> bytes:
        return self.take(self.integer(ValueType.UINT64, f"length of {what}"), what)

    def name(self, what: str, most: int) -> str:
        """A key or tensor name: not empty, not too long, UTF-8."""
        length = self.integer(ValueType.UINT64, f"length of {what}")
        if not 0 < length <= most:
            raise self.fail(f"{what} is {length} bytes long, but must be 1 to {most}")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8: {raw[:40]!r}") from None

    def value_type(self, what: str) -> ValueType:
        code = self.integer(ValueType.UINT32, f"type of {what}")
        try:
            return ValueType(code)
        except ValueError:
            raise self.fail(f"{what} has the unknown type {code}; known types are 0 to {max(ValueType)}") from None

    def array(self, what: str) -> MetaArray:
        element = self.value_type(f"elements of {what}")
        if element is ValueType.ARRAY:
            raise self.fail(f"{what} is an array of arrays, which llama.cpp does not read", "convert the model again")
        count = self.integer(ValueType.UINT64, f"count of {what}")
        least = 8 if element is ValueType.STRING else _SIZES[element]
        if count > self.left // least:
            raise self.fail(f"{what} claims {count} elements, but only {self.left} bytes are left")
        begin = self.at
        if element is ValueType.STRING:
            for index in range(count):
                self.need(self.integer(ValueType.UINT64, what), f"string {index} of {what}")
        else:
            self.need(count * least, what)
        return MetaArray(element, count, bytes(self._buffer[begin : self.at]))

    def value(self, what: str) -> MetaValue:
        kind = self.value_type(what)
        if kind is ValueType.ARRAY:
            return MetaValue(kind, self.array(what))
        if kind is ValueType.STRING:
            return MetaValue(kind, self.string(what).decode("utf-8", "surrogateescape"))
        return MetaValue(kind, self.scalar(kind, what))


def _read_metadata(reader: _Reader, count: int) -> dict[str, MetaValue]:
    metadata: dict[str, MetaValue] = {}
    for index in range(count):
        key = reader.name(f"key {index}", _MAX_KEY)
        if key in metadata:
            raise reader.fail(f"the key {key!r} occurs twice", "convert the model again")
        metadata[key] = reader.value(f"the value of {key!r}")
    return metadata


def _read_alignment(reader: _Reader, metadata: Mapping[str, MetaValue]) -> int:
    stored = metadata.get(ALIGNMENT_KEY)
    if stored is None:
        return DEFAULT_ALIGNMENT
    value = stored.value
    if stored.type is not ValueType.UINT32 or not isinstance(value, int) or value <= 0 or value & (value - 1):
        raise reader.fail(f"{ALIGNMENT_KEY} is {value!r} ({stored.type.name}), but must be a power of 2 as UINT32")
    return value


def _read_tensor(reader: _Reader, index: int) -> TensorInfo:
    """One entry; ``offset`` is still relative to the start of the data."""
    name = reader.name(f"the name of tensor {index}", _MAX_TENSOR_NAME)
    n_dims = reader.integer(ValueType.UINT32, f"the dimension count of {name!r}")
    if not 1 <= n_dims <= _MAX_DIMS:
        raise reader.fail(f"tensor {name!r} has {n_dims} dimensions, but must have 1 to {_MAX_DIMS}")
    ne = tuple(reader.integer(ValueType.UINT64, f"the shape of {name!r}") for _ in range(n_dims))
    n_elements = 1
    for dim in ne:
        n_elements *= dim
    if not 0 < n_elements <= _INT64_MAX:
        raise reader.fail(f"tensor {name!r} has the shape {list(ne)}, which is empty or overflows 64 bits")
    code = reader.integer(ValueType.UINT32, f"the type of {name!r}")
    try:
        kind = GgmlType(code)
    except ValueError:
        raise reader.fail(
            f"tensor {name!r} has {foreign_type(code)}", f"use a file of stock types ({_STOCK}), or a newer dgr"
        ) from None
    if ne[0] % kind.block_size:
        raise reader.fail(
            f"tensor {name!r} of type {kind.label} has rows of {ne[0]} values, not a multiple of {kind.block_size}"
        )
    n_bytes = n_elements // kind.block_size * kind.block_bytes
    return TensorInfo(name, ne, kind, reader.integer(ValueType.UINT64, f"the offset of {name!r}"), n_bytes)


def _place(reader: _Reader, entries: list[TensorInfo], alignment: int, data_offset: int) -> dict[str, TensorInfo]:
    """Check every offset (tensors lie one after another, each aligned, as llama.cpp demands) and make it absolute."""
    tensors: dict[str, TensorInfo] = {}
    expected, seen = 0, set[GgmlType]()
    for entry in entries:
        if entry.name in tensors:
            raise reader.fail(f"the tensor {entry.name!r} occurs twice", "convert the model again")
        if entry.offset % alignment:
            raise reader.fail(f"tensor {entry.name!r} has the offset {entry.offset}, not a multiple of {alignment}")
        if entry.offset != expected:
            message = f"tensor {entry.name!r} has the offset {entry.offset}, but the table implies {expected}"
            raise reader.fail(message, _HINT_42) if GgmlType.Q2_0 in seen else reader.fail(message)
        begin = data_offset + entry.offset
        if begin + entry.n_bytes > reader.size:
            raise reader.fail(
                f"tensor {entry.name!r} ends at byte {begin + entry.n_bytes}, but the file has {reader.size} bytes"
            )
        tensors[entry.name] = TensorInfo(entry.name, entry.ne, entry.type, begin, entry.n_bytes)
        expected += aligned(entry.n_bytes, alignment)
        seen.add(entry.type)
    return tensors


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Read and check the header of a GGUF file.

    Raises :class:`~dgr.errors.ArtifactError` for everything that is wrong with the file, its absence included.
    """
    path = Path(path)
    if "\0" in str(path):
        raise ArtifactError(f"{str(path)!r}: a path cannot hold a NUL; check the path")
    try:
        # Asked before opening: opening a pipe would wait for its writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ArtifactError(f"{path}: not a regular file; give the path of a .gguf file")
        with path.open("rb", buffering=0) as file:
            return _read(_Reader(path, file, os.fstat(file.fileno()).st_size))
    except OSError as failed:
        raise ArtifactError(f"{path}: cannot be read: {failed.strerror or failed}; check the path") from failed


def _read(reader: _Reader) -> GgufFile:
    magic = reader.take(4, "the magic")
    if magic != _MAGIC:
        raise reader.fail(f"the file begins with {magic!r}, not {_MAGIC!r}", "give a .gguf file")
    version = reader.integer(ValueType.UINT32, "the version")
    if version not in _VERSIONS:
        raise reader.fail(f"GGUF version {version} is not 2 or 3 (little-endian)", "convert the model again")
    n_tensors = reader.integer(ValueType.UINT64, "the tensor count")
    n_pairs = reader.integer(ValueType.UINT64, "the key count")
    if n_pairs > reader.left // _MIN_PAIR_BYTES:
        raise reader.fail(f"the header claims {n_pairs} keys, but only {reader.left} bytes are left")
    if n_tensors > reader.left // _MIN_TENSOR_BYTES:
        raise reader.fail(f"the header claims {n_tensors} tensors, but only {reader.left} bytes are left")
    metadata = _read_metadata(reader, n_pairs)
    alignment = _read_alignment(reader, metadata)
    entries = [_read_tensor(reader, index) for index in range(n_tensors)]
    data_offset = aligned(reader.at, alignment) if entries else reader.at
    tensors = _place(reader, entries, alignment, data_offset)
    return GgufFile(reader.path, version, metadata, tensors, alignment, data_offset, reader.size)
