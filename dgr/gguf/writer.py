"""A plain writer of GGUF files (version 3): a header of given keys and tensors, then data in the same order.

The counterpart of :mod:`dgr.gguf.reader`, with the same bounds: what this writes, that reads. Values are written as they
were stored, so a key copied from another file keeps its type and its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from attrs import frozen

from dgr.core.files.outputs import writing
from dgr.errors import InputError
from dgr.gguf.reader import (
    ALIGNMENT_KEY,
    DEFAULT_ALIGNMENT,
    SCALAR_FORMATS,
    MetaArray,
    MetaValue,
    ValueType,
    aligned,
)
from dgr.gguf.types import GgmlType

__all__ = ["Layout", "TensorForm", "encode_value", "lay_out", "u16", "u32", "writing", "zero_padding"]

_VERSION = 3
_MAX_NAME = 63
_MAX_KEY = 65535


def u16(value: int) -> MetaValue:
    """A 16-bit metadata value: what llama.cpp wants under ``split.no`` and ``split.count``."""
    return MetaValue(ValueType.UINT16, value)


def u32(value: int) -> MetaValue:
    """A 32-bit metadata value."""
    return MetaValue(ValueType.UINT32, value)


@frozen
class TensorForm:
    """A tensor without its data: what a header says of it, but for the place."""

    name: str
    #: Shape, fastest dimension first.
    ne: tuple[int, ...]
    type: GgmlType

    @property
    def n_bytes(self) -> int:
        n_rows = 1
        for dim in self.ne[1:]:
            n_rows *= dim
        return self.type.row_bytes(self.ne[0]) * n_rows


@frozen
class Layout:
    """Where everything of a file to be written goes."""

    header: bytes
    #: First byte of each tensor, from the start of the file.
    offsets: tuple[int, ...]
    alignment: int
    file_bytes: int


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def encode_value(stored: MetaValue) -> bytes:
    """The bytes of a metadata value, after its type."""
    if isinstance(stored.value, MetaArray):
        return struct.pack("<IQ", stored.value.element, len(stored.value)) + stored.value.raw
    if isinstance(stored.value, str):
        return _string(stored.value)
    try:
        return struct.pack("<" + SCALAR_FORMATS[stored.type], stored.value)
    except (struct.error, KeyError) as wrong:
        raise InputError(f"the metadata value {stored.value!r} is no {stored.type.name}") from wrong


def _entry(tensor: TensorForm, offset: int) -> bytes:
    if not 0 < len(tensor.name.encode()) <= _MAX_NAME or not 1 <= len(tensor.ne) <= 4 or min(tensor.ne) < 1:
        raise InputError(
            f"the tensor {tensor.name!r} of shape {list(tensor.ne)} does not fit a GGUF: names have 1 to {_MAX_NAME} bytes,"
            " shapes 1 to 4 dimensions of at least 1"
        )
    shape = struct.pack(f"<I{len(tensor.ne)}Q", len(tensor.ne), *tensor.ne)
    return _string(tensor.name) + shape + struct.pack("<IQ", tensor.type, offset)


def lay_out(metadata: Mapping[str, MetaValue], tensors: Sequence[TensorForm]) -> Layout:
    """Encode a header and place the tensors behind it, each aligned as ``general.alignment`` says (32 without it)."""
    stored = metadata.get(ALIGNMENT_KEY)
    alignment = DEFAULT_ALIGNMENT if stored is None else stored.value
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise InputError(f"{ALIGNMENT_KEY} is {alignment!r}, but must be a power of 2")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise InputError("two tensors of a GGUF cannot have one name")
    parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        if not 0 < len(key.encode()) <= _MAX_KEY:
            raise InputError(f"the key {key[:40]!r} has {len(key)} characters; a GGUF takes 1 to {_MAX_KEY} bytes")
        parts += (_string(key), struct.pack("<I", value.type), encode_value(value))
    relative = 0
    places = []
    for tensor in tensors:
        parts.append(_entry(tensor, relative))
        places.append(relative)
        relative += aligned(tensor.n_bytes, alignment)
    header = b"".join(parts)
    if tensors:
        header += bytes(aligned(len(header), alignment) - len(header))
    begin = len(header)
    return Layout(header, tuple(begin + place for place in places), alignment, begin + relative)


def zero_padding(n_bytes: int, alignment: int) -> bytes:
    """What must follow ``n_bytes`` of data for the next tensor to be aligned."""
    return bytes(aligned(n_bytes, alignment) - n_bytes)
