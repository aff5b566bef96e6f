"""ggml's tensor types and the bytes a row of each takes (``ggml_type`` in ``ggml.h``, sizes in ``ggml-common.h``)."""

from __future__ import annotations

from enum import IntEnum

from dgr.errors import InputError

__all__ = ["GgmlType", "foreign_type", "parse_type"]


class GgmlType(IntEnum):
    """``enum ggml_type``, the members a file may hold at the pin."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42

    @property
    def label(self) -> str:
        """Name as people write it: ``f16``, ``q8_0``, ``q4_K``."""
        name = self.name.lower()
        return name[:-1] + "K" if name.endswith("_k") else name

    @property
    def block_size(self) -> int:
        """Values per block; a row is whole blocks."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        return _BLOCKS[self][1]

    @property
    def is_matrix_operand(self) -> bool:
        """Whether a weight matrix may have this type: the rest abort in ``ggml_mul_mat`` or ``ggml_get_rows``."""
        return self not in _NOT_OPERANDS

    def row_bytes(self, n_values: int) -> int:
        """Bytes of ``n_values`` consecutive values (``ggml_row_size``); they must be whole blocks."""
        if n_values % self.block_size:
            raise InputError(
                f"a row of {n_values} values cannot have type {self.label}, whose blocks hold {self.block_size}"
            )
        return n_values // self.block_size * self.block_bytes


_BLOCKS: dict[GgmlType, tuple[int, int]] = {
    GgmlType.F32: (1, 4),
    GgmlType.F16: (1, 2),
    GgmlType.Q4_0: (32, 18),
    GgmlType.Q4_1: (32, 20),
    GgmlType.Q5_0: (32, 22),
    GgmlType.Q5_1: (32, 24),
    GgmlType.Q8_0: (32, 34),
    GgmlType.Q8_1: (32, 36),
    GgmlType.Q2_K: (256, 84),
    GgmlType.Q3_K: (256, 110),
    GgmlType.Q4_K: (256, 144),
    GgmlType.Q5_K: (256, 176),
    GgmlType.Q6_K: (256, 210),
    GgmlType.Q8_K: (256, 292),
    GgmlType.IQ2_XXS: (256, 66),
    GgmlType.IQ2_XS: (256, 74),
    GgmlType.IQ3_XXS: (256, 98),
    GgmlType.IQ1_S: (256, 50),
    GgmlType.IQ4_NL: (32, 18),
    GgmlType.IQ3_S: (256, 110),
    GgmlType.IQ2_S: (256, 82),
    GgmlType.IQ4_XS: (256, 136),
    GgmlType.I8: (1, 1),
    GgmlType.I16: (1, 2),
    GgmlType.I32: (1, 4),
    GgmlType.I64: (1, 8),
    GgmlType.F64: (1, 8),
    GgmlType.IQ1_M: (256, 56),
    GgmlType.BF16: (1, 2),
    GgmlType.TQ1_0: (256, 54),
    GgmlType.TQ2_0: (256, 66),
    GgmlType.MXFP4: (32, 17),
    GgmlType.NVFP4: (64, 36),
    GgmlType.Q1_0: (128, 18),
    GgmlType.Q2_0: (64, 18),
}

_NOT_OPERANDS = frozenset(
    {
        GgmlType.I8,
        GgmlType.I16,
        GgmlType.I32,
        GgmlType.I64,
        GgmlType.F64,
        GgmlType.Q8_1,
        GgmlType.Q8_K,
    }
)


#: Codes that llama.cpp has given up.
_REMOVED = {
    4: "q4_2", 5: "q4_3", 31: "q4_0_4_4", 32: "q4_0_4_8", 33: "q4_0_8_8", 36: "iq4_nl_4_4", 37: "iq4_nl_4_8", 38: "iq4_nl_8_8",
}  # fmt: skip
#: From here on ik_llama.cpp has types of its own (IQ4_KS, IQ2_K, Q8_0_R8, …).
_FIRST_OF_IK = 97


def foreign_type(code: int) -> str:
    """What a code stands for that is no :class:`GgmlType`: a type that was removed, one of a fork, or nothing known."""
    if code in _REMOVED:
        return f"the ggml type {code} ({_REMOVED[code]}), which llama.cpp has removed"
    if code >= _FIRST_OF_IK:
        return f"the ggml type {code}, of which only ik_llama.cpp knows"
    return f"the unknown ggml type {code}"


def parse_type(text: str) -> GgmlType:
    """A type by the name people write, in any case."""
    try:
        return GgmlType[text.upper()]
    except KeyError:
        names = ", ".join(member.label for member in GgmlType)
        raise InputError(f"unknown tensor type {text!r}; known types: {names}") from None
