"""What a lossless code saves on residuals, and how fast: ``f32+zstd`` as stages have it, against planes of bytes under zstd.

    python -m dgr_bench.links.lossless MODEL.gguf LAYERS [TOKENS]

runs the model's first LAYERS layers over a prompt in exact numerics and prints the share of bytes saved and the speed of
packing and unpacking on one core: of :mod:`dgr.protocol.planes`, and for each level of zstd of all planes (all first bytes,
all second ones, …), with the share of each plane. It needs the package ``zstandard`` (extra ``zstd``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from dgr import Artifact, ContextParams, LayerRange, LlamaEngine
from dgr.core.values import LogitsWanted
from dgr.engine.base import Work
from dgr.protocol.planes import pack, unpack
from dgr.selftest.chain import some_tokens

T = TypeVar("T")
_LEVELS = (-5, 1, 3)
_CHUNK = 64
#: Bytes of one token of V4 Flash.
_TOKEN = 65536


def residuals(model: str, n_layers: int, n_tokens: int) -> bytes:
    """What leaves the first layers for a prompt."""
    artifact = Artifact.open(model)
    context = ContextParams(n_ctx=max(256, n_tokens), n_batch=_CHUNK, n_ubatch=_CHUNK)
    engine = LlamaEngine(artifact, LayerRange(0, n_layers), context)
    tokens = some_tokens(n_tokens, artifact.hp.n_vocab)
    try:
        found = b""
        for at in range(0, n_tokens, _CHUNK):
            work = Work(0, at, tuple(tokens[at : at + _CHUNK]), None, LogitsWanted.NONE)
            found += bytes(engine.run([work])[0].residual or b"")
        return found
    finally:
        engine.stop()


def planes(data: bytes) -> bytes:
    """The bytes of float32 values, plane by plane."""
    return np.frombuffer(data, np.uint8).reshape(-1, 4).T.tobytes()


def values(data: bytes) -> bytes:
    """The inverse of :func:`planes`."""
    return np.frombuffer(data, np.uint8).reshape(4, -1).T.tobytes()


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    found = call()
    return found, time.perf_counter() - began


def _say_own(data: bytes) -> None:
    packed = pack(data)
    if packed is None:
        print("f32+zstd: nothing saved; such residuals travel as they are")
        return
    rounds = []
    for _ in range(5):
        _, there = _timed(partial(pack, data))
        again, back = _timed(partial(unpack, packed, len(data)))
        if again != data:
            raise AssertionError("what was unpacked is not what was packed")
        rounds.append((there, back))
    there, back = (sorted(side)[len(rounds) // 2] for side in zip(*rounds, strict=True))
    megabytes = len(data) / 1e6
    print(
        f"f32+zstd: {1 - packed.nbytes / len(data):.1%} saved; packing {megabytes / there:.0f} MB/s, unpacking"
        f" {megabytes / back:.0f} MB/s; one token of {_TOKEN // 1024} KiB:"
        f" {1e3 * _timed(partial(pack, data[:_TOKEN]))[1]:.2f} ms"
    )


def main(model: str, n_layers: str, n_tokens: str = "256") -> None:
    """Print the table."""
    import zstandard

    data = residuals(model, int(n_layers), int(n_tokens))
    megabytes = len(data) / 1e6
    print(f"{megabytes:.1f} MB of residuals, {len(data) // int(n_tokens)} bytes a token")
    _say_own(data)
    for level in _LEVELS:
        pack, unpack = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        packed, there = _timed(lambda pack=pack: pack.compress(planes(data)))  # type: ignore[misc]
        again, back = _timed(lambda packed=packed, unpack=unpack: values(unpack.decompress(packed)))  # type: ignore[misc]
        if again != data:
            raise AssertionError("what was unpacked is not what was packed")
        each = [
            len(pack.compress(planes(data)[at : at + len(data) // 4])) for at in range(0, len(data), len(data) // 4)
        ]
        shares = ", ".join(f"{1 - 4 * size / len(data):.1%}" for size in each)
        print(
            f"zstd {level}: {1 - len(packed) / len(data):.1%} saved (planes from the lowest byte: {shares}); packing"
            f" {megabytes / there:.0f} MB/s, unpacking {megabytes / back:.0f} MB/s"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
