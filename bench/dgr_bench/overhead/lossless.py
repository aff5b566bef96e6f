"""What a lossless code saves on residuals, and how fast: planes of bytes (all first bytes, all second ones, …) under zstd.

    python -m dgr_bench.overhead.lossless MODEL.gguf LAYERS [TOKENS]

runs the model's first LAYERS layers over a prompt in exact numerics and prints, for each level of zstd and for each plane, the
share of bytes saved and the speed of packing and unpacking on one core. It needs the package ``zstandard``, which dgr does not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from dgr import Artifact, ContextParams, LayerRange, LlamaEngine
from dgr.core.values import LogitsWanted
from dgr.engine.base import Work
from dgr.selftest.chain import some_tokens

T = TypeVar("T")
_LEVELS = (-5, 1, 3)
_CHUNK = 64


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


def main(model: str, n_layers: str, n_tokens: str = "256") -> None:
    """Print the table."""
    import zstandard

    data = residuals(model, int(n_layers), int(n_tokens))
    megabytes = len(data) / 1e6
    print(f"{megabytes:.1f} MB of residuals, {len(data) // int(n_tokens)} bytes a token")
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
