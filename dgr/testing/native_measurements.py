"""What the test extension measures: the time of each operation of a graph, and what the machine can do at best.

A stage that is filled stands where a long prompt would have brought it, without the prompt: prompts of a million tokens take
hours on a few cores, and the work of the next token does not depend on what the rows hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import msgspec

from dgr.testing.state_inspector import InspectedEngine, inspector_native

__all__ = ["MeasuredEngine", "Operation", "Roof", "measure_roof"]


class Roof(StrEnum):
    """What a machine does at best, in the order of ``dgr_probe_roof_kind``."""

    #: Bytes a second, reading memory.
    READ = "read"
    #: Bytes a second, STREAM's triad.
    TRIAD = "triad"
    #: Multiplications and additions a second of float32.
    F32 = "f32"
    #: Of pairs of bfloat16, summed up as float32.
    BF16 = "bf16"
    #: Of 8-bit integers, summed up as 32-bit ones.
    INT8 = "int8"


def measure_roof(kind: Roof, threads: int, seconds: float = 1.0, n_bytes: int = 1 << 30) -> float:
    """The best rate of repeated runs; 0 where the CPU has no instruction for it, or none that the extension knows.

    ``n_bytes``: of memory, for the kinds that read it; they should be far more than any cache holds.
    """
    native = inspector_native()
    out = native.ffi.new("double *")
    native.check(native.lib.dgr_probe_roof(list(Roof).index(kind), threads, seconds, n_bytes, out), f"the {kind} rate")
    return float(out[0])


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """Operations of one kind on one weight, or with one name, all layers together."""

    op: str
    #: Of the weight, such as ``attn_q_a``, else of the result; empty where ggml made it up.
    name: str
    #: Type of the weight; empty where there is none.
    weight: str
    calls: int
    seconds: float


class MeasuredEngine(InspectedEngine):
    """A native stage that can be put anywhere in a context, and times its operations."""

    def fill(self, tokens: int, slot: int = 0, seed: int = 0) -> None:
        """Make an empty slot look as if so many tokens had been committed; its rows hold random values of a usual size."""
        self._native.check(
            self._native.lib.dgr_probe_fill(self._handle, slot, tokens, seed),
            f"filling slot {slot} with {tokens} tokens",
        )

    @contextmanager
    def profile(self) -> Iterator[list[Operation]]:
        """Time every operation that runs within the block; the list is filled at its end, slowest first."""
        found: list[Operation] = []
        self._native.check(self._native.lib.dgr_probe_profile(self._handle, True), "profiling")
        try:
            yield found
            found += sorted(self._timed(), key=lambda one: -one.seconds)
        finally:
            self._native.check(self._native.lib.dgr_probe_profile(self._handle, False), "profiling")

    def _timed(self) -> list[Operation]:
        ffi, lib = self._native.ffi, self._native.lib
        n = ffi.new("size_t *")
        self._native.check(lib.dgr_probe_profile_read(self._handle, ffi.NULL, 0, n), "profiling")
        out = ffi.new("dgr_probe_op[]", n[0])
        self._native.check(lib.dgr_probe_profile_read(self._handle, out, n[0], n), "profiling")

        def text(chars: object) -> str:
            return str(ffi.string(chars).decode("utf-8", "replace"))

        return [
            Operation(
                op=text(one.op), name=text(one.name), weight=text(one.weight), calls=one.calls, seconds=one.ns / 1e9
            )
            for one in out
        ]
