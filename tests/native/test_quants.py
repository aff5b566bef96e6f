"""Blocks as numbers: upstream's reference code, reached through the shim, against PyPI's independent reader."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from dgr.engine.native import default_native
from dgr.engine.quants import dequantize
from dgr.errors import InputError
from dgr.gguf.types import GgmlType
from dgr.selftest.fixture.blocks import random_blocks
from dgr.selftest.fixture.presets import BLOCK_TYPES
from dgr.selftest.fixture.stream import Stream


@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES - {GgmlType.Q1_0}), ids=lambda kind: kind.label)
def test_blocks_have_the_values_that_another_reader_finds(kind: GgmlType) -> None:
    blocks = random_blocks(kind, Stream(3, kind.name), np.full(64, 0.5, np.float32))
    values = np.frombuffer(dequantize(kind, blocks.tobytes()), np.float32)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType(int(kind)))
    assert values.tobytes() == expected.astype(np.float32).tobytes()
    # About the size that was asked for: some scales are powers of two.
    assert 0.25 < float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) < 0.8


def test_a_block_of_one_bit_values_is_plus_and_minus_its_scale() -> None:
    """PyPI's reader does not know the type."""
    assert GgmlType.Q1_0.block_bytes == 18
    raw = np.frombuffer(np.float16(0.25).tobytes() + bytes(range(16)), np.uint8)
    bits = np.unpackbits(raw[2:], bitorder="little").astype(np.float32)
    values = np.frombuffer(dequantize(GgmlType.Q1_0, raw.tobytes()), np.float32)
    assert values.tolist() == (0.25 * (2 * bits - 1)).tolist()


@pytest.mark.parametrize("size", [0, 1, 33, 35, 67])
def test_what_is_not_whole_blocks_is_refused(size: int) -> None:
    with pytest.raises(
        InputError, match=rf"{size} bytes and \d+ values, must be whole blocks of 34 bytes and 32 values"
    ):
        dequantize(GgmlType.Q8_0, bytes(size))


@pytest.mark.parametrize(
    "kind", [GgmlType.F32, GgmlType.F16, GgmlType.BF16, GgmlType.I32, GgmlType.Q8_1, GgmlType.Q8_K]
)
def test_a_type_that_has_no_blocks_to_read_is_refused(kind: GgmlType) -> None:
    with pytest.raises(InputError, match=f"type {int(kind)} .* has no blocks that can be read"):
        dequantize(kind, bytes(kind.block_bytes))


@pytest.mark.parametrize("code", [-(2**31), -1, 2**31 - 1, 4, 5, 31, 32, 33, 36, 37, 38])
def test_a_number_that_is_not_a_type_is_refused(code: int) -> None:
    native = default_native()
    out = native.ffi.new("float[32]")
    status = native.lib.dgr_dequantize(code, b"x" * 34, 34, out, 32)
    with pytest.raises(InputError, match=rf"type (is )?{code}\b"):
        native.check(status, "values")


def test_absent_buffers_and_wrong_counts_are_refused() -> None:
    native = default_native()
    null, out = native.ffi.NULL, native.ffi.new("float[64]")
    for blocks, n_bytes, room, n_values in (
        (null, 34, out, 32),
        (b"x" * 34, 34, null, 32),
        (b"x" * 34, 34, out, 31),
        (b"x" * 34, 34, out, 64),
        (b"x" * 34, 2**64 - 1, out, 32),
    ):
        status = native.lib.dgr_dequantize(GgmlType.Q8_0, blocks, n_bytes, room, n_values)
        with pytest.raises(InputError, match="must be whole blocks"):
            native.check(status, "values")
