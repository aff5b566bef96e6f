"""The code of wire type ``f32+zstd``: the bytes of float32 values, those that repeat packed. It needs the extra ``zstd``.

Of a residual's values the bytes of sign and exponent repeat; those of the mantissa are as good as random. A packed payload
of n values holds the lower halves (2n bytes), the third bytes (n), and the fourth ones as one zstd frame, which must be
shorter than n.

The frame's own header must say n bytes before anything is unpacked, so a receiver allocates what it expected and no more.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import zstandard

from dgr.core.buffers import new_buffer
from dgr.errors import FrameError

__all__ = ["pack", "unpack"]

#: zstd's fastest level that codes literals at all; higher ones find nothing more.
_LEVEL = 1
#: Values that are taken apart, or put together, before the next ones.
_BLOCK = 64 * 1024


class _Codec(threading.local):
    """Of each thread its own: a context serves one call at a time, and making one costs more than packing a token."""

    def __init__(self) -> None:
        self.packer = zstandard.ZstdCompressor(level=_LEVEL)
        self.unpacker = zstandard.ZstdDecompressor()


@functools.cache
def _codec() -> _Codec:
    return _Codec()


def _bytes_of(data: bytes | bytearray | memoryview) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def _blocks(n_values: int) -> Iterator[tuple[int, int]]:
    """Values in pieces that stay in a core's cache while their bytes are sorted."""
    for begin in range(0, n_values, _BLOCK):
        yield begin, min(begin + _BLOCK, n_values)


def pack(payload: bytes | bytearray | memoryview) -> memoryview | None:
    """Pack little-endian float32 values; None when that would not make them fewer bytes."""
    values = _bytes_of(payload)
    n_values = values.size // 4
    packed, top = new_buffer(values.size), np.empty(n_values, np.uint8)
    parts = _bytes_of(packed)
    lower, third = parts[: 2 * n_values].view("<u2"), parts[2 * n_values : 3 * n_values]
    for begin, end in _blocks(n_values):
        block = values[4 * begin : 4 * end]
        lower[begin:end], third[begin:end], top[begin:end] = block.view("<u2")[::2], block[2::4], block[3::4]
    frame = _codec().packer.compress(top.data)
    if len(frame) >= n_values:
        return None
    packed[3 * n_values : 3 * n_values + len(frame)] = frame
    return packed[: 3 * n_values + len(frame)].toreadonly()


def unpack(packed: bytes | memoryview, n_bytes: int) -> memoryview:
    """The ``n_bytes`` of float32 values that were packed. Raises :class:`FrameError`, for more than that before unpacking."""
    n_values = n_bytes // 4
    parts, frame = _bytes_of(packed), bytes(memoryview(packed)[3 * n_values :])
    try:
        about = zstandard.get_frame_parameters(frame)
        if about.content_size != n_values or about.dict_id:
            raise FrameError(
                f"a packed residual holds a zstd frame of {about.content_size} bytes; its boundary has {n_values} values"
            )
        top = _codec().unpacker.decompress(frame, max_output_size=n_values, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError(f"a packed residual is no zstd frame: {error}") from error
    if len(top) != n_values:
        raise FrameError(f"a packed residual unpacks to {len(top)} bytes; its boundary has {n_values} values")
    found = new_buffer(n_bytes)
    values, fourth = _bytes_of(found), _bytes_of(top)
    lower, third = parts[: 2 * n_values].view("<u2"), parts[2 * n_values : 3 * n_values]
    for begin, end in _blocks(n_values):
        block = values[4 * begin : 4 * end]
        block.view("<u2")[::2], block[2::4], block[3::4] = lower[begin:end], third[begin:end], fourth[begin:end]
    return found
