"""Blocks as numbers: upstream's reference code, reached through the shim, against PyPI's independent reader."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from dgr.engine.native import default_native
from dgr.engine.quants import dequantize, quantize
from dgr.errors import InputError
from dgr.gguf.types import GgmlType
from dgr.selftest.fixture.blocks import random_blocks
from dgr.selftest.fixture.presets import BLOCK_TYPES
from dgr.selftest.fixture.stream import Stream, bfloat16


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


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=pytest.mark.slow if kind in (GgmlType.IQ1_M, GgmlType.IQ2_S) else ()
        )  # large tables are made
        for kind in sorted(BLOCK_TYPES - {GgmlType.Q1_0, GgmlType.IQ2_XXS, GgmlType.IQ2_XS, GgmlType.IQ1_S})
    ],
    ids=lambda kind: kind.label,
)
def test_numbers_become_the_nearest_blocks(kind: GgmlType) -> None:
    """As near as the type's bits allow, row by row, and the same whether rows come together or alone."""
    width = 512
    values = Stream(5, kind.name).uniform(4 * width, 1.0)
    blocks = quantize(kind, values.tobytes(), width)
    assert len(blocks) == 4 * kind.row_bytes(width)
    again = np.frombuffer(dequantize(kind, blocks), np.float32)
    assert np.corrcoef(values, again)[0, 1] > (0.7 if kind.block_bytes * 8 < 2.5 * kind.block_size else 0.92)
    rows = [quantize(kind, row.tobytes(), width) for row in values.reshape(4, width)]
    assert b"".join(rows) == blocks


@pytest.mark.parametrize(("kind", "written"), [(GgmlType.F32, "<f4"), (GgmlType.F16, "<f2"), (GgmlType.BF16, None)])
def test_numbers_are_rounded_where_a_type_has_no_blocks(kind: GgmlType, written: str | None) -> None:
    values = Stream(6, "round").uniform(64, 3.0)
    expected = bfloat16(values).tobytes() if written is None else values.astype(written).tobytes()
    assert quantize(kind, values.tobytes(), 32) == expected


@pytest.mark.parametrize(
    "kind", [GgmlType.I32, GgmlType.Q8_1, GgmlType.Q8_K, GgmlType.IQ2_XXS, GgmlType.IQ2_XS, GgmlType.IQ1_S]
)
def test_a_type_that_numbers_are_not_written_in_is_refused(kind: GgmlType) -> None:
    with pytest.raises(InputError, match="is not one that numbers are written in"):
        quantize(kind, bytes(4 * 256), 256)


@pytest.mark.parametrize(("n_values", "width"), [(0, 32), (48, 48), (64, 48), (33, 32), (64, 0)])
def test_what_is_not_whole_rows_is_refused(n_values: int, width: int) -> None:
    with pytest.raises(
        InputError, match=rf"{n_values} values in rows of {width} .* must be whole rows of whole blocks"
    ):
        quantize(GgmlType.Q8_0, bytes(4 * n_values), width)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [GgmlType.F16, GgmlType.Q8_0, GgmlType.Q4_K])
def test_numbers_that_are_not_finite_are_refused(kind: GgmlType, value: float) -> None:
    values = np.zeros(256, np.float32)
    values[77] = value
    with pytest.raises(InputError, match="value 77 is not finite"):
        quantize(kind, values.tobytes(), 256)


@pytest.mark.parametrize("code", [-(2**31), -1, 2**31 - 1, 4, 5, 31, 36])
def test_no_number_that_is_not_a_type_is_written_in(code: int) -> None:
    native = default_native()
    values, out = native.ffi.new("float[32]"), native.ffi.new("char[256]")
    status = native.lib.dgr_quantize(code, values, 32, 32, out, 34)
    with pytest.raises(InputError, match=rf"type (is )?{code}\b"):
        native.check(status, "values")
