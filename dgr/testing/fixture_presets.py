"""Sizes and weight types a fixture model comes in."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from dgr.model.tensors import TensorKind
from dgr.model.v4 import V4_FLASH, HyperParameters, Yarn

__all__ = ["PRESETS", "WEIGHTS"]

#: YaRN as in V4 Flash, on a context small enough that a test can pass the trained length.
_YARN = Yarn(factor=16.0, original_context=256)


def _preset(**widths: Any) -> HyperParameters:
    return evolve(V4_FLASH, context_length=4096, yarn=_YARN, **widths)


#: Size presets: V4 Flash with other widths; schedule, window, hash layers, streams and norms stay V4's own.
PRESETS: dict[str, HyperParameters] = {
    # Small enough for unit tests of files.
    "min": _preset(
        n_embd=32, n_vocab=320, n_head=4, head_dim=16, rope_dim=8, q_lora_rank=32, o_groups=2, o_lora_rank=16,
        indexer_heads=16, indexer_dim=64, indexer_top_k=32, n_expert=4, n_expert_used=2, expert_ff=32,
    ),
    # The default: every part of the graph at work, a token in milliseconds.
    "tiny": _preset(
        n_embd=64, n_vocab=512, n_head=4, head_dim=32, rope_dim=16, q_lora_rank=32, o_groups=2, o_lora_rank=32,
        indexer_heads=16, indexer_dim=64, indexer_top_k=32, n_expert=8, n_expert_used=2, expert_ff=32,
    ),
    # Every matrix a multiple of 256 wide, as the K-quants need.
    "wide": _preset(
        n_embd=256, n_vocab=512, n_head=16, head_dim=32, rope_dim=16, q_lora_rank=256, o_groups=2, o_lora_rank=128,
        indexer_heads=16, indexer_dim=64, indexer_top_k=32, n_expert=4, n_expert_used=2, expert_ff=256,
    ),
    # 649 M parameters, for benchmarks.
    "big": _preset(
        n_embd=512, n_vocab=4096, n_head=16, head_dim=128, rope_dim=64, q_lora_rank=256, o_groups=8, o_lora_rank=128,
        indexer_heads=16, indexer_dim=64, indexer_top_k=128, n_expert=32, n_expert_used=6, expert_ff=256,
    ),
    # The published widths; only as a sparse file, for sizes.
    "real": V4_FLASH,
}  # fmt: skip

#: Type of a tensor by weights kind; kinds not named stay f32, as norms and biases always do.
WEIGHTS: dict[str, dict[TensorKind, str]] = {
    "f32": {},
    "f16": dict.fromkeys(
        (TensorKind.EMBEDDING, TensorKind.OUTPUT, TensorKind.DENSE, TensorKind.COMPRESSOR, TensorKind.EXPERT), "F16"
    ),
    # As a real conversion: MXFP4 experts, Q8_0 attention, BF16 embeddings, head and compressors.
    "mixed": {
        TensorKind.EMBEDDING: "BF16",
        TensorKind.OUTPUT: "BF16",
        TensorKind.DENSE: "Q8_0",
        TensorKind.COMPRESSOR: "BF16",
        TensorKind.EXPERT: "MXFP4",
    },
    # As a small download: Q2_K experts, everything else Q8_0.
    "mixed_q2_k": {
        TensorKind.EMBEDDING: "Q8_0",
        TensorKind.OUTPUT: "Q8_0",
        TensorKind.DENSE: "Q8_0",
        TensorKind.COMPRESSOR: "Q8_0",
        TensorKind.EXPERT: "Q2_K",
    },
    "q8_0": dict.fromkeys(
        (TensorKind.EMBEDDING, TensorKind.OUTPUT, TensorKind.DENSE, TensorKind.COMPRESSOR, TensorKind.EXPERT), "Q8_0"
    ),
    "q4_k": dict.fromkeys(
        (TensorKind.EMBEDDING, TensorKind.OUTPUT, TensorKind.DENSE, TensorKind.COMPRESSOR, TensorKind.EXPERT), "Q4_K"
    ),
}
