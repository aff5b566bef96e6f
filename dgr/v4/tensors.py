"""The tensors of a V4 model: which names, of which shape, belong to which layer and to which stage.

Shapes are ``ne``, fastest dimension first, as GGUF and ggml write them. Source at the pin:
``llama_model_deepseek4::load_arch_tensors`` in ``src/models/deepseek4.cpp``, names in ``src/llama-arch.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto

from attrs import frozen

from dgr.core.route import LayerRange
from dgr.v4.hyper_parameters import CSA_RATIO, HyperParameters

__all__ = ["TensorKind", "TensorSpec", "block_tensors", "head_tensors", "range_tensors", "tail_tensors"]


class TensorKind(Enum):
    """What a tensor does; decides which types it may have."""

    #: Token embeddings.
    EMBEDDING = auto()
    #: The language-model head.
    OUTPUT = auto()
    #: Matrix of attention, indexer, shared expert or MTP projection.
    DENSE = auto()
    #: Matrix of a compressor.
    COMPRESSOR = auto()
    #: Matrices of the routed experts, one per expert.
    EXPERT = auto()
    #: Router matrix.
    ROUTER = auto()
    #: Mixing matrix of a hyper-connection.
    HC_MIX = auto()
    HC_BASE = auto()
    HC_SCALE = auto()
    #: Weight of an RMS norm.
    NORM = auto()
    #: One attention sink per head.
    SINK = auto()
    #: Absolute position embedding of a compressor.
    APE = auto()
    #: Selection bias of the router.
    EXPERT_BIAS = auto()
    #: Token id -> expert ids (int32).
    HASH_TABLE = auto()
    #: Factor of a quantised matrix (NVFP4 files).
    SCALE = auto()

    @property
    def is_matrix(self) -> bool:
        """Whether the tensor is a matrix operand that may be quantised."""
        return self in _MATRICES


_MATRICES = frozenset(
    {
        TensorKind.EMBEDDING,
        TensorKind.OUTPUT,
        TensorKind.DENSE,
        TensorKind.COMPRESSOR,
        TensorKind.EXPERT,
        TensorKind.ROUTER,
        TensorKind.HC_MIX,
        TensorKind.APE,
    }
)


@frozen
class TensorSpec:
    """A tensor that a V4 file must (or may) hold."""

    name: str
    #: Shape, fastest dimension first.
    ne: tuple[int, ...]
    kind: TensorKind
    required: bool = True
    #: Other shape of the same data that the loader takes (``TENSOR_ALLOW_RESHAPE``).
    also: tuple[int, ...] | None = None

    def fits(self, ne: Sequence[int]) -> bool:
        """Whether a stored shape is this tensor's; trailing ones do not count."""
        return any(_trimmed(ne) == _trimmed(shape) for shape in (self.ne, self.also) if shape is not None)

    @property
    def n_elements(self) -> int:
        return math.prod(self.ne)


def _trimmed(ne: Sequence[int]) -> tuple[int, ...]:
    dims = tuple(ne)
    while len(dims) > 1 and dims[-1] == 1:
        dims = dims[:-1]
    return dims


def head_tensors(hp: HyperParameters) -> tuple[TensorSpec, ...]:
    """Globals of the stage that owns layer 0."""
    return (TensorSpec("token_embd.weight", (hp.n_embd, hp.n_vocab), TensorKind.EMBEDDING),)


def tail_tensors(hp: HyperParameters) -> tuple[TensorSpec, ...]:
    """Globals of the stage that owns the last main layer; there is no tied fallback for ``output``."""
    hc = hp.hc_streams
    return (
        TensorSpec("output_norm.weight", (hp.n_embd,), TensorKind.NORM),
        TensorSpec("output.weight", (hp.n_embd, hp.n_vocab), TensorKind.OUTPUT),
        TensorSpec("output_hc_fn.weight", (hp.boundary_width, hc), TensorKind.HC_MIX),
        TensorSpec("output_hc_base.weight", (hc,), TensorKind.HC_BASE),
        TensorSpec("output_hc_scale.weight", (1,), TensorKind.HC_SCALE),
    )


def block_tensors(hp: HyperParameters, block: int) -> tuple[TensorSpec, ...]:
    """Tensors ``blk.{block}.*`` of a main layer, or of the MTP block behind the last one."""
    specs: list[TensorSpec] = []

    def add(
        suffix: str,
        ne: tuple[int, ...],
        kind: TensorKind,
        *,
        required: bool = True,
        also: tuple[int, ...] | None = None,
    ) -> None:
        specs.append(TensorSpec(f"blk.{block}.{suffix}", ne, kind, required, also))

    hc_mix = (2 + hp.hc_streams) * hp.hc_streams
    embd, head_dim, n_expert, ff = hp.n_embd, hp.head_dim, hp.n_expert, hp.expert_ff
    shared_ff = ff * hp.n_expert_shared

    add("attn_norm.weight", (embd,), TensorKind.NORM)
    add("attn_sinks.weight", (hp.n_head,), TensorKind.SINK)
    add("attn_q_a.weight", (embd, hp.q_lora_rank), TensorKind.DENSE)
    add("attn_q_a_norm.weight", (hp.q_lora_rank,), TensorKind.NORM)
    add("attn_q_b.weight", (hp.q_lora_rank, hp.n_head * head_dim), TensorKind.DENSE)
    add("attn_kv.weight", (embd, head_dim), TensorKind.DENSE)
    add("attn_kv_a_norm.weight", (head_dim,), TensorKind.NORM)
    group = hp.n_head * head_dim // hp.o_groups
    add(
        "attn_output_a.weight",
        (group, hp.o_lora_rank * hp.o_groups),
        TensorKind.DENSE,
        also=(group, hp.o_lora_rank, hp.o_groups),
    )
    add("attn_output_b.weight", (hp.o_groups * hp.o_lora_rank, embd), TensorKind.DENSE)
    for part in ("attn", "ffn"):
        add(f"hc_{part}_fn.weight", (hp.boundary_width, hc_mix), TensorKind.HC_MIX)
        add(f"hc_{part}_base.weight", (hc_mix,), TensorKind.HC_BASE)
        add(f"hc_{part}_scale.weight", (3,), TensorKind.HC_SCALE)

    ratio = hp.ratio(block)
    if ratio:
        width = (2 if ratio == CSA_RATIO else 1) * head_dim
        add("attn_compressor_kv.weight", (embd, width), TensorKind.COMPRESSOR)
        add("attn_compressor_gate.weight", (embd, width), TensorKind.COMPRESSOR)
        add("attn_compressor_ape.weight", (width, ratio), TensorKind.APE)
        add("attn_compressor_norm.weight", (head_dim,), TensorKind.NORM)
    if ratio == CSA_RATIO:
        dim = hp.indexer_dim
        add("indexer.proj.weight", (embd, hp.indexer_heads), TensorKind.DENSE)
        add("indexer.attn_q_b.weight", (hp.q_lora_rank, hp.indexer_heads * dim), TensorKind.DENSE)
        add("indexer_compressor_kv.weight", (embd, 2 * dim), TensorKind.COMPRESSOR)
        add("indexer_compressor_gate.weight", (embd, 2 * dim), TensorKind.COMPRESSOR)
        add("indexer_compressor_ape.weight", (2 * dim, ratio), TensorKind.APE)
        add("indexer_compressor_norm.weight", (dim,), TensorKind.NORM)

    add("ffn_gate_inp.weight", (embd, n_expert), TensorKind.ROUTER)
    if hp.is_hash_routed(block):
        add("ffn_gate_tid2eid.weight", (hp.n_expert_used, hp.n_vocab), TensorKind.HASH_TABLE)
    else:
        add("exp_probs_b.bias", (n_expert,), TensorKind.EXPERT_BIAS)
    add("exp_probs_b_vl.bias", (n_expert,), TensorKind.EXPERT_BIAS, required=False)
    add("ffn_norm.weight", (embd,), TensorKind.NORM)
    add("ffn_gate_exps.weight", (embd, ff, n_expert), TensorKind.EXPERT)
    add("ffn_down_exps.weight", (ff, embd, n_expert), TensorKind.EXPERT)
    add("ffn_up_exps.weight", (embd, ff, n_expert), TensorKind.EXPERT)
    add("ffn_gate_shexp.weight", (embd, shared_ff), TensorKind.DENSE)
    add("ffn_down_shexp.weight", (shared_ff, embd), TensorKind.DENSE)
    add("ffn_up_shexp.weight", (embd, shared_ff), TensorKind.DENSE)
    for part in ("gate", "down", "up"):
        for factor in ("scale", "input_scale"):
            add(f"ffn_{part}_exps.{factor}", (n_expert,), TensorKind.SCALE, required=False)
            add(f"ffn_{part}_shexp.{factor}", (1,), TensorKind.SCALE, required=False)

    if block >= hp.n_layers:
        add("nextn.eh_proj.weight", (2 * embd, embd), TensorKind.DENSE)
        add("nextn.enorm.weight", (embd,), TensorKind.NORM)
        add("nextn.hnorm.weight", (embd,), TensorKind.NORM)
        add("nextn.embed_tokens.weight", (embd, hp.n_vocab), TensorKind.EMBEDDING, required=False)
        add("nextn.shared_head_head.weight", (embd, hp.n_vocab), TensorKind.OUTPUT, required=False)
        add("nextn.shared_head_norm.weight", (embd,), TensorKind.NORM, required=False)
    return tuple(specs)


def range_tensors(hp: HyperParameters, layers: LayerRange) -> tuple[TensorSpec, ...]:
    """Every tensor a stage of that range loads: its layers, and the globals of head and tail."""
    hp.check_range(layers)
    specs = list(head_tensors(hp)) if hp.is_head(layers) else []
    for layer in layers.layers:
        specs += block_tensors(hp, layer)
    if hp.is_tail(layers):
        specs += tail_tensors(hp)
    return tuple(specs)
