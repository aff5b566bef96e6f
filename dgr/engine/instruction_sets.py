"""Which instruction sets the kernels of this build need, and what this CPU has besides.

A build from source has the kernels of the CPU that it was made on, a portable one those of x86-64-v3. On a CPU that lacks one
of the sets the first kernel would end the process; so a build is asked before it runs anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dgr.core.host import cpu_flags, cpu_name
from dgr.errors import EngineError

__all__ = ["check_cpu", "missing_sets", "unused_sets"]

#: ggml's names of what kernels are compiled for -> the kernel's words (Linux) for a CPU that can run them.
_FLAGS: dict[str, frozenset[str]] = {
    "SSE3": frozenset({"pni"}),
    "SSSE3": frozenset({"ssse3"}),
    "AVX": frozenset({"avx"}),
    "AVX_VNNI": frozenset({"avx_vnni"}),
    "AVX2": frozenset({"avx2"}),
    "F16C": frozenset({"f16c"}),
    "FMA": frozenset({"fma"}),
    "BMI2": frozenset({"bmi2"}),
    "AVX512": frozenset({"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"}),
    "AVX512_VBMI": frozenset({"avx512vbmi"}),
    "AVX512_VNNI": frozenset({"avx512_vnni"}),
    "AVX512_BF16": frozenset({"avx512_bf16"}),
    "AMX_INT8": frozenset({"amx_int8", "amx_tile"}),
    "NEON": frozenset({"asimd"}),
    "FP16_VA": frozenset({"asimdhp"}),
    "DOTPROD": frozenset({"asimddp"}),
    "MATMUL_INT8": frozenset({"i8mm"}),
    "SVE": frozenset({"sve"}),
    "SME": frozenset({"sme"}),
}


def missing_sets(built: Iterable[str], flags: Collection[str]) -> tuple[str, ...]:
    """Of the sets that kernels were compiled for, those that a CPU with such flags lacks."""
    return tuple(name for name in built if not _FLAGS.get(name, frozenset()) <= set(flags))


def unused_sets(built: Iterable[str], flags: Collection[str] | None = None) -> tuple[str, ...]:
    """Sets that this CPU has, or one with such flags, and that kernels were not compiled for."""
    flags = cpu_flags() if flags is None else flags
    return tuple(name for name, needed in _FLAGS.items() if needed <= set(flags or ()) and name not in built)


def check_cpu(built: Iterable[str]) -> None:
    """Refuse a build with kernels for another CPU. Raises :class:`~dgr.errors.EngineError` before one of them runs."""
    flags = cpu_flags()
    if flags is not None and (missing := missing_sets(built, flags)):
        raise EngineError(
            f"this build of dgr has kernels for {', '.join(missing)}, which this CPU ({cpu_name()}) lacks; install the portable"
            " wheel, or build dgr on this machine"
        )
