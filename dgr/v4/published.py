"""The V4 Flash files that people download, by the types of their tensors.

From the repositories' own listings. Where a listing gives types without saying which layers have them, the layers here are
one choice; for kernels and loaders only the types count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import field, frozen

from dgr.gguf.types import GgmlType
from dgr.v4.tensors import TensorKind, TensorSpec

__all__ = ["PUBLISHED", "PublishedFile", "inexact_types"]

#: (words that the name has, blocks, type): the first that fits counts.
_Rule = tuple[tuple[str, ...], range, GgmlType]

_ALL_BLOCKS = range(1 << 16)


@frozen
class PublishedFile:
    """One file, or several of the same types."""

    #: Who publishes it, and which file it is.
    title: str
    #: Type by kind; kinds that are not named are F32, hash tables I32.
    kinds: Mapping[TensorKind, GgmlType] = field(repr=False)
    #: Tensors that have another type than their kind.
    rules: tuple[_Rule, ...] = field(default=(), repr=False)

    def type_of(self, spec: TensorSpec) -> GgmlType:
        """The type that a tensor has in the file."""
        if spec.kind is TensorKind.HASH_TABLE:
            return GgmlType.I32
        if spec.kind in self.kinds:
            block = int(spec.name.split(".")[1]) if spec.name.startswith("blk.") else -1
            for words, blocks, kind in self.rules:
                if any(word in spec.name for word in words) and (block in blocks or blocks is _ALL_BLOCKS):
                    return kind
        return self.kinds.get(spec.kind, GgmlType.F32)

    @property
    def matrix_types(self) -> frozenset[GgmlType]:
        """Types of weight matrices, which decide whether exact numerics hold."""
        return frozenset((*self.kinds.values(), *(kind for _, _, kind in self.rules), GgmlType.F32))


def _all(kind: GgmlType, *kinds: TensorKind) -> dict[TensorKind, GgmlType]:
    return dict.fromkeys(kinds, kind)


#: As llama.cpp converts the checkpoint: the experts bit for bit, FP8 matrices as Q8_0.
_CONVERTED = {
    **_all(GgmlType.BF16, TensorKind.EMBEDDING, TensorKind.OUTPUT, TensorKind.ROUTER, TensorKind.COMPRESSOR),
    TensorKind.DENSE: GgmlType.Q8_0,
    TensorKind.EXPERT: GgmlType.MXFP4,
}
#: What small downloads have beside their experts.
_F16_AND_Q8 = {
    **_all(GgmlType.F16, TensorKind.EMBEDDING, TensorKind.ROUTER, TensorKind.COMPRESSOR),
    **_all(GgmlType.F16, TensorKind.APE, TensorKind.HC_MIX),
    **_all(GgmlType.Q8_0, TensorKind.DENSE, TensorKind.OUTPUT),
}
_F16_INDEXER: _Rule = (("indexer.",), _ALL_BLOCKS, GgmlType.F16)
_DOWN, _UP = ("ffn_down_exps",), ("ffn_gate_exps", "ffn_up_exps")


def _mixture() -> tuple[_Rule, ...]:
    """Layers of different weight, as importance gives them: every type from IQ1_M to Q6_K somewhere."""
    up = (GgmlType.IQ1_M, GgmlType.IQ2_XXS, GgmlType.IQ2_XS, GgmlType.IQ3_XXS, GgmlType.Q3_K, GgmlType.IQ2_S)
    down = (GgmlType.IQ2_XXS, GgmlType.Q2_K, GgmlType.IQ3_S, GgmlType.IQ4_XS, GgmlType.Q4_K, GgmlType.Q5_K)
    layers = [range(index, 1 << 16, len(up)) for index in range(len(up))]
    rules: list[_Rule] = [(_UP, blocks, kind) for blocks, kind in zip(layers, up, strict=True)]
    rules += [(_DOWN, blocks, kind) for blocks, kind in zip(layers, down, strict=True)]
    return (
        *rules,
        (("attn_kv.", "attn_output_b."), _ALL_BLOCKS, GgmlType.Q6_K),
        (("_shexp",), _ALL_BLOCKS, GgmlType.Q5_K),
    )


#: By a short name, which ``dgr fixture --weights`` takes.
PUBLISHED: dict[str, PublishedFile] = {
    "published_mxfp4": PublishedFile(
        "llama.cpp's own conversion; bartowski MXFP4; unsloth UD-Q8_K_XL",
        _CONVERTED,
        ((("indexer.proj",), _ALL_BLOCKS, GgmlType.BF16),),
    ),
    "published_q2": PublishedFile(
        "antirez q2", {**_F16_AND_Q8, TensorKind.EXPERT: GgmlType.IQ2_XXS}, (_F16_INDEXER, (_DOWN, _ALL_BLOCKS, GgmlType.Q2_K))
    ),
    "published_q2_q4": PublishedFile(
        "antirez q2-q4",
        {**_F16_AND_Q8, TensorKind.EXPERT: GgmlType.IQ2_XXS},
        (_F16_INDEXER, ((*_UP, *_DOWN), range(37, 43), GgmlType.Q4_K), (_DOWN, _ALL_BLOCKS, GgmlType.Q2_K)),
    ),
    "published_q4": PublishedFile("antirez q4", {**_F16_AND_Q8, TensorKind.EXPERT: GgmlType.Q4_K}, (_F16_INDEXER,)),
    "published_iq1_m": PublishedFile(
        "lvyufeng IQ1_M",
        {**_F16_AND_Q8, TensorKind.EXPERT: GgmlType.IQ1_M},
        (_F16_INDEXER, ((*_UP, *_DOWN), range(2), GgmlType.Q2_K)),
    ),
    "published_iq3_xxs": PublishedFile(
        "tarruda 3.15 bpw", {**_F16_AND_Q8, TensorKind.EXPERT: GgmlType.IQ3_XXS}, (_F16_INDEXER,)
    ),
    "published_q2_k": PublishedFile(
        "tarruda 2.73 bpw", {**_F16_AND_Q8, TensorKind.EXPERT: GgmlType.Q2_K}, (_F16_INDEXER,)
    ),
    "published_mixture": PublishedFile(
        "unsloth UD-IQ1_M to UD-Q6_K",
        {
            **_F16_AND_Q8,
            TensorKind.EXPERT: GgmlType.IQ2_XXS,
            TensorKind.EMBEDDING: GgmlType.Q4_K,
            TensorKind.OUTPUT: GgmlType.Q6_K,
        },
        (_F16_INDEXER, *_mixture()),
    ),
}  # fmt: skip


def inexact_types(published: PublishedFile, exact: Iterable[str]) -> tuple[str, ...]:
    """Types of a published file that are not among those known to be exact."""
    return tuple(sorted({kind.label for kind in published.matrix_types} - set(exact)))
