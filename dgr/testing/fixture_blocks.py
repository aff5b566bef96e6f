"""Valid random blocks of every quantised type, for models that only have to run.

A block is random bits with its scale fields set, so that the values have a wanted size; nothing is quantised. The types
that model fixtures are made of have writers of their own in :mod:`dgr.testing.fixture_stream`, whose bytes are pinned;
the bytes made here are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dgr.errors import InputError
from dgr.model.ggml import GgmlType
from dgr.testing.fixture_stream import Stream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["BLOCK_TYPES", "random_blocks"]

#: Where a type keeps its f16 scale, and where and how large (in scales) its f16 minimum is, if it has one. The minimum
#: is chosen so that the values centre on zero.
_SCALES: dict[GgmlType, tuple[int, tuple[int, float] | None]] = {
    GgmlType.Q1_0: (0, None),
    GgmlType.Q4_0: (0, None),
    GgmlType.Q4_1: (0, (2, -7.5)),
    GgmlType.Q5_0: (0, None),
    GgmlType.Q5_1: (0, (2, -15.5)),
    GgmlType.Q8_0: (0, None),
    GgmlType.Q2_K: (80, (82, 1.5)),
    GgmlType.Q3_K: (108, None),
    GgmlType.Q4_K: (0, (2, 7.5)),
    GgmlType.Q5_K: (0, (2, 15.5)),
    GgmlType.Q6_K: (208, None),
    GgmlType.IQ1_S: (0, None),
    GgmlType.IQ2_XXS: (0, None),
    GgmlType.IQ2_XS: (0, None),
    GgmlType.IQ2_S: (0, None),
    GgmlType.IQ3_XXS: (0, None),
    GgmlType.IQ3_S: (0, None),
    GgmlType.IQ4_NL: (0, None),
    GgmlType.IQ4_XS: (0, None),
    GgmlType.TQ1_0: (52, None),
    GgmlType.TQ2_0: (64, None),
}

#: Types with scales of another form: IQ1_M spreads an f16 over nibbles, MXFP4 and NVFP4 have 8-bit exponents.
_OTHER = (GgmlType.IQ1_M, GgmlType.MXFP4, GgmlType.NVFP4)

#: Every type :func:`random_blocks` can write.
BLOCK_TYPES = frozenset({*_SCALES, *_OTHER})

#: Blocks from which the size of a type's values at scale 1 is measured.
_SAMPLE = 256


def _with_scales(kind: GgmlType, raw: npt.NDArray[np.uint8], d: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """The blocks with their scale fields set to ``d``, one per block."""
    import numpy as np

    def f16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
        return values.astype("<f2").view(np.uint8).reshape(-1, 2)

    blocks = raw.copy()
    if kind is GgmlType.IQ1_M:  # the f16's nibbles are the high nibbles of bytes 49, 51, 53, 55, lowest first
        bits = d.astype("<f2").view("<u2")
        for place in range(4):
            nibble = ((bits >> np.uint16(4 * place)) & np.uint16(15)).astype(np.uint8)
            column = 49 + 2 * place
            blocks[:, column] = (blocks[:, column] & 15) | (nibble << 4)
    elif kind is GgmlType.MXFP4:  # E8M0
        blocks[:, 0] = np.frexp(d)[1] - 1 + 127
    elif kind is GgmlType.NVFP4:  # UE4M3, bias 7, one per 16 values; the mantissa stays random
        exponent = np.clip(np.frexp(d)[1] - 1 + 7, 1, 15).astype(np.uint8)
        blocks[:, :4] = (exponent[:, None] << 3) | (raw[:, :4] & 7)
    else:
        at, minimum = _SCALES[kind]
        blocks[:, at : at + 2] = f16(d)
        if minimum is not None:
            at, factor = minimum
            blocks[:, at : at + 2] = f16(d * np.float32(factor))
    return blocks


def random_blocks(kind: GgmlType, stream: Stream, rms: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Blocks of a type, one per entry of ``rms``: the size its values shall have. Shape ``[blocks, bytes]``."""
    import gguf
    import numpy as np

    if kind not in BLOCK_TYPES:
        raise InputError(
            f"no blocks of type {kind.label} can be made; known: {', '.join(k.label for k in BLOCK_TYPES)}"
        )
    count = len(rms)
    raw = stream.raw(count * kind.block_bytes).reshape(count, kind.block_bytes)
    unit = 1.0
    if kind is not GgmlType.Q1_0:  # gguf cannot read it; its values are plus and minus the scale
        sample = raw[:_SAMPLE]
        blocks = _with_scales(kind, sample, np.ones(len(sample), np.float32))
        values = gguf.dequantize(blocks, gguf.GGMLQuantizationType(int(kind)))
        unit = float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
    return _with_scales(kind, raw, rms * np.float32(1 / unit))
