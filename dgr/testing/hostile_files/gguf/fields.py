"""Where the fields of a GGUF header lie: its counts, lengths, types, shapes and offsets, for whoever wants to lie in one."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from attrs import frozen

from dgr.gguf.reader import SCALAR_FORMATS, ValueType

__all__ = ["Field", "header_fields"]

_SIZES = {kind: struct.calcsize("<" + code) for kind, code in SCALAR_FORMATS.items()}


@frozen
class Field:
    """A number of a header."""

    #: ``count``, ``length``, ``type``, ``dimensions``, ``shape``, ``offset``, ``value``, ``version``.
    what: str
    at: int
    #: Bytes: 4 or 8, of an unsigned number.
    size: int


def header_fields(data: bytes) -> list[Field]:
    """All fields of a whole file, in order; elements of arrays are not among them, but for the lengths of texts."""
    return list(_Walk(data).fields())


class _Walk:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 4
        self._last = 0

    def _number(self, what: str, size: int) -> Field:
        (self._last,) = struct.unpack_from("<Q" if size == 8 else "<I", self._data, self._at)
        self._at += size
        return Field(what, self._at - size, size)

    def _text(self) -> Iterator[Field]:
        yield self._number("length", 8)
        self._at += self._last

    def _value(self) -> Iterator[Field]:
        yield self._number("type", 4)
        kind = ValueType(self._last)
        if kind is ValueType.STRING:
            yield from self._text()
        elif kind is ValueType.ARRAY:
            yield self._number("type", 4)
            element = ValueType(self._last)
            yield self._number("count", 8)
            count = self._last
            if element is ValueType.STRING:
                for _ in range(count):
                    yield from self._text()
            else:
                self._at += count * _SIZES[element]
        elif _SIZES[kind] in (4, 8):
            yield self._number("value", _SIZES[kind])
        else:
            self._at += _SIZES[kind]

    def fields(self) -> Iterator[Field]:
        yield self._number("version", 4)
        yield self._number("count", 8)
        n_tensors = self._last
        yield self._number("count", 8)
        n_keys = self._last
        for _ in range(n_keys):
            yield from self._text()
            yield from self._value()
        for _ in range(n_tensors):
            yield from self._text()
            yield self._number("dimensions", 4)
            for _ in range(self._last):
                yield self._number("shape", 8)
            yield self._number("type", 4)
            yield self._number("offset", 8)
