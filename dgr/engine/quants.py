"""Quantised blocks as numbers, read by upstream's own code."""

from __future__ import annotations

from dgr.engine.native import default_native
from dgr.gguf.types import GgmlType

__all__ = ["dequantize"]


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
