"""Raw numbers for fixture tensors: the same bytes on every platform and every numpy.

A stream is SplitMix64 over a counter, keyed by (seed, tensor name). Values are made from its bits with integer
arithmetic, exact float32 steps and IEEE-rounded products only: no numpy generator and no libm function takes part.
Quantised tensors are written as valid blocks directly, never by quantising floats.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Stream", "bfloat16", "mxfp4_blocks", "q4_k_blocks", "q8_0_blocks"]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

#: Root mean square of the sixteen E2M1 values, each as likely: sqrt(137 / 16).
_E2M1_RMS = math.sqrt(137 / 16)
#: Root mean square of a 4-bit quant q - 7.5.
_Q4_RMS = math.sqrt((16**2 - 1) / 12)
#: Mean of the 6-bit scales written into Q4_K blocks, 32 .. 63.
_Q4K_SCALE_MEAN = 47.5


class Stream:
    """Uniform random bits of one tensor, read in order."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.blake2b(f"dgr-fixture/1/{seed}/{name}".encode(), digest_size=8).digest()
        self._key = int.from_bytes(digest, "little")
        self._next = 0

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """The next ``count`` 64-bit words."""
        import numpy as np

        x = np.arange(self._next + 1, self._next + 1 + count, dtype=np.uint64)
        self._next += count
        x *= np.uint64(_GOLDEN)
        x += np.uint64(self._key)
        x ^= x >> np.uint64(30)
        x *= np.uint64(_MIX_1)
        x ^= x >> np.uint64(27)
        x *= np.uint64(_MIX_2)
        x ^= x >> np.uint64(31)
        return x

    def raw(self, count: int) -> npt.NDArray[np.uint8]:
        """The next ``count`` bytes (whole words are used up)."""
        import numpy as np

        return self.words(-(-count // 8)).astype("<u8", copy=False).view(np.uint8)[:count]

    def integers(self, count: int) -> npt.NDArray[np.uint32]:
        """The next ``count`` 32-bit integers (whole words are used up)."""
        return self.words(-(-count // 2)).astype("<u8", copy=False).view("<u4")[:count]

    def uniform(self, count: int, scale: float, centre: float = 0.0) -> npt.NDArray[np.float32]:
        """float32 in ``centre - scale .. centre + scale``: a 24-bit integer, one product, one sum."""
        import numpy as np

        bits = (self.integers(count) >> np.uint32(8)).astype(np.int32)
        bits -= np.int32(1 << 23)
        values = bits.astype(np.float32)
        values *= np.float32(scale / (1 << 23))
        if centre:
            values += np.float32(centre)
        return values


def bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Round finite float32 to bfloat16, ties to even, as little-endian bytes."""
    import numpy as np

    bits = values.astype("<f4", copy=False).view("<u4")
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    raw: npt.NDArray[np.uint8] = rounded.astype("<u2").view(np.uint8)
    return raw


def _block_scales(stream: Stream, count: int, scale: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """One factor per block, within a quarter of ``scale``."""
    factors = stream.uniform(count, 0.25, 1.0)
    factors *= scale
    return factors


def q8_0_blocks(stream: Stream, rms: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Q8_0 blocks (``block_q8_0``: f16 scale, 32 int8), one per entry of ``rms``; shape ``[blocks, 34]``."""
    import numpy as np

    count = len(rms)
    blocks = np.empty((count, 34), np.uint8)
    scales = _block_scales(stream, count, rms * np.float32(math.sqrt(3) / 127))
    blocks[:, :2] = scales.astype("<f2").view(np.uint8).reshape(count, 2)
    quants = stream.raw(count * 32).reshape(count, 32)
    blocks[:, 2:] = np.where(quants == 128, np.uint8(127), quants)  # -128 is not a value a quantiser writes
    return blocks


def mxfp4_blocks(stream: Stream, rms: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """MXFP4 blocks (``block_mxfp4``: E8M0 exponent, 32 E2M1 nibbles); shape ``[blocks, 17]``."""
    import numpy as np

    count = len(rms)
    blocks = np.empty((count, 17), np.uint8)
    # frexp is exact: floor(log2(x)) = exponent - 1; the block's exponent is that or one more.
    _, exponents = np.frexp(rms * np.float32(1 / _E2M1_RMS))
    jitter = (stream.integers(count) & np.uint32(1)).astype(np.int32)
    blocks[:, 0] = (exponents.astype(np.int32) - 1 + jitter + 127).astype(np.uint8)
    blocks[:, 1:] = stream.raw(count * 16).reshape(count, 16)
    return blocks


def q4_k_blocks(stream: Stream, rms: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Q4_K super-blocks (``block_q4_K``: d, dmin, 12 bytes of 6-bit scales and mins, 256 nibbles); ``[blocks, 144]``.

    A value is ``d * scale * q - dmin * min``; with ``dmin`` = 7.5 d and mins near the scales, values centre on zero.
    """
    import numpy as np

    count = len(rms)
    blocks = np.empty((count, 144), np.uint8)
    d = _block_scales(stream, count, rms * np.float32(1 / (_Q4_RMS * _Q4K_SCALE_MEAN)))
    blocks[:, 0:2] = d.astype("<f2").view(np.uint8).reshape(count, 2)
    blocks[:, 2:4] = (d * np.float32(7.5)).astype("<f2").view(np.uint8).reshape(count, 2)
    bits = stream.raw(count * 8).reshape(count, 8)
    scales = (bits & 31) + np.uint8(32)
    mins = np.minimum(scales + (bits >> 6) - np.uint8(1), 63)
    low, high, low_min, high_min = scales[:, :4], scales[:, 4:], mins[:, :4], mins[:, 4:]
    blocks[:, 4:8] = low | ((high >> 4) << 6)
    blocks[:, 8:12] = low_min | ((high_min >> 4) << 6)
    blocks[:, 12:16] = (high & 15) | ((high_min & 15) << 4)
    blocks[:, 16:] = stream.raw(count * 128).reshape(count, 128)
    return blocks
