"""Quantised blocks as numbers and numbers as blocks, by upstream's own code."""

from __future__ import annotations

from dgr.engine.native import default_native
from dgr.gguf.types import GgmlType

__all__ = ["dequantize", "quantize"]


def dequantize(kind: GgmlType, blocks: bytes) -> bytes:
    """The values of whole blocks of a quantised type as native float32 (``to_float`` of ``ggml_get_type_traits``).

    Raises :class:`~dgr.errors.InputError` for a type without blocks, and for bytes that are not whole blocks.
    """
    native = default_native()
    n_values = len(blocks) // kind.block_bytes * kind.block_size
    out = bytearray(4 * n_values)
    status = native.lib.dgr_dequantize(kind, blocks, len(blocks), native.ffi.from_buffer("float[]", out), n_values)
    native.check(status, f"values of {kind.label} blocks")
    return bytes(out)


def quantize(kind: GgmlType, values: bytes, width: int) -> bytes:
    """Native float32 in rows of ``width`` values, in a type: as it is, rounded or quantised (``ggml_quantize_chunk``).

    Raises :class:`~dgr.errors.InputError` for a type that holds no weights or needs an importance matrix, for rows that are
    not whole blocks, and for values that are not finite.
    """
    native = default_native()
    n_values = len(values) // 4
    out = bytearray(n_values // kind.block_size * kind.block_bytes)
    status = native.lib.dgr_quantize(
        kind, native.ffi.from_buffer("float[]", values), n_values, width, native.ffi.from_buffer(out), len(out)
    )
    native.check(status, f"values as {kind.label}")
    return bytes(out)
