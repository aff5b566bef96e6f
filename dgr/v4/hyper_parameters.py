"""DeepSeek V4 Flash: hyper-parameters and the layer schedule.

Every value the native graph depends on is here, checked against what llama.cpp accepts, so that a file it would abort
on is refused first (:func:`dgr.v4.metadata.from_metadata` reads one from a GGUF header). Upstream sources, at the
pin: ``src/models/deepseek4.cpp`` (keys, tensors, graph) and ``src/llama-model.cpp`` (generic keys).
"""

from __future__ import annotations

import math
from enum import StrEnum

from attrs import frozen

from dgr.core.route import LayerRange
from dgr.errors import InvalidLayerRange, UnsupportedModel

__all__ = [
    "ARCHITECTURE",
    "CSA_RATIO",
    "HCA_RATIO",
    "HC_STREAMS",
    "MAX_EXPERTS",
    "MAX_LAYERS",
    "MAX_SINKHORN_ITERATIONS",
    "V4_FLASH",
    "V4_FLASH_RATIOS",
    "YARN_BETAS",
    "HyperParameters",
    "LayerKind",
    "Yarn",
]

#: ``general.architecture`` of the only model this version runs.
ARCHITECTURE = "deepseek4"

#: Tokens per compressed row of a CSA layer (``DSV4_CSA_RATIO``); its rings overlap, so they hold twice as many.
CSA_RATIO = 4
#: Tokens per compressed row of an HCA layer (``DSV4_HCA_RATIO``).
HCA_RATIO = 128
#: Streams of the hyper-connection residual; ``build_hc_pre`` asserts this very number.
HC_STREAMS = 4
#: ``LLAMA_MAX_LAYERS``: upstream asserts ``block_count`` and the length of ``compress_ratios`` against it.
MAX_LAYERS = 512
#: ``LLAMA_MAX_EXPERTS``: upstream asserts ``expert_count`` against it.
MAX_EXPERTS = 1024
#: V4 has 20; a file that asks for many more only wants the time.
MAX_SINKHORN_ITERATIONS = 1000
#: ``hparams.yarn_beta_fast`` / ``yarn_beta_slow``: upstream never reads the V4 keys, so a file with others would lie.
YARN_BETAS = (32.0, 1.0)
#: The Hadamard rotation of the indexer works on 64 channels at a time (``ggml_mul_mat_hadamard``).
INDEXER_DIM_UNIT = 64

#: Compress ratio of each main layer of the published model.
V4_FLASH_RATIOS = (0, 0, *(CSA_RATIO, HCA_RATIO) * 20, CSA_RATIO)


class LayerKind(StrEnum):
    """What a main layer attends to, decided by its compress ratio."""

    #: Ratio 0: the sliding window only.
    SWA = "SWA"
    #: Ratio 4: the window and the top-k compressed rows, chosen by the indexer.
    CSA = "CSA"
    #: Ratio 128: the window and every compressed row.
    HCA = "HCA"


_KIND_OF_RATIO = {0: LayerKind.SWA, CSA_RATIO: LayerKind.CSA, HCA_RATIO: LayerKind.HCA}


@frozen
class Yarn:
    """YaRN scaling of the compressed layers' RoPE; SWA layers use none."""

    factor: float
    #: Context the frequencies were trained on, tokens.
    original_context: int
    beta_fast: float = YARN_BETAS[0]
    beta_slow: float = YARN_BETAS[1]


def _at_least(value: float, least: float, key: str, why: str) -> None:
    if not math.isfinite(value) or value < least:
        raise UnsupportedModel(f"{ARCHITECTURE}.{key} is {value}, but must be at least {least}: {why}")


@frozen(kw_only=True)
class HyperParameters:
    """Everything about a V4 model that does not live in a weight.

    Construction checks every value: an instance is one that llama.cpp loads without aborting.
    """

    #: Main layers; an MTP block, when there is one, follows them and is not counted.
    n_layers: int
    #: MTP blocks in the file behind the main layers: 0 or 1. dgr never runs them.
    n_mtp_layers: int = 0
    n_vocab: int
    #: Channels of one residual stream; the boundary has four of them.
    n_embd: int
    #: Context the model was trained for, tokens.
    context_length: int
    n_head: int
    #: Channels of a query head and of the one K head; V is K.
    head_dim: int
    #: Rotated channels: the last of each head and of each indexer head.
    rope_dim: int
    q_lora_rank: int
    #: Groups of the two-step output projection.
    o_groups: int
    o_lora_rank: int
    #: Sliding window in tokens, the query itself included.
    window: int
    indexer_heads: int
    indexer_dim: int
    #: Compressed rows a CSA query attends to at most.
    indexer_top_k: int
    n_expert: int
    n_expert_used: int
    n_expert_shared: int
    #: Hidden width of one expert.
    expert_ff: int
    expert_weights_scale: float
    expert_weights_norm: bool
    #: SwiGLU clamp of the routed experts, per block of the file (main layers, then MTP).
    swiglu_clamp_exp: tuple[float, ...]
    #: SwiGLU clamp of the shared expert, likewise.
    swiglu_clamp_shexp: tuple[float, ...]
    hc_streams: int = HC_STREAMS
    hc_sinkhorn_iterations: int
    hc_epsilon: float
    #: Layers ``0 .. hash_layers - 1`` pick experts by token id, from a table, and so need the ids.
    hash_layers: int
    #: Compress ratio of each main layer.
    compress_ratios: tuple[int, ...]
    rms_epsilon: float
    #: RoPE base of SWA layers.
    rope_base: float
    #: RoPE base of CSA and HCA layers.
    compress_rope_base: float
    yarn: Yarn

    def __attrs_post_init__(self) -> None:
        self._check_layers()
        self._check_attention()
        self._check_experts()
        self._check_hyper_connections()

    def _check_layers(self) -> None:
        if not 1 <= self.n_layers <= self.n_blocks <= MAX_LAYERS:
            raise UnsupportedModel(
                f"{ARCHITECTURE}.block_count gives {self.n_layers} main layers of {self.n_blocks} blocks;"
                f" llama.cpp takes 1 to {MAX_LAYERS}"
            )
        if self.n_mtp_layers not in (0, 1):
            raise UnsupportedModel(
                f"{ARCHITECTURE}.nextn_predict_layers is {self.n_mtp_layers}; V4 has at most 1 MTP block"
            )
        if len(self.compress_ratios) != self.n_layers:
            raise UnsupportedModel(
                f"{ARCHITECTURE}.attention.compress_ratios has {len(self.compress_ratios)} entries for"
                f" {self.n_layers} main layers"
            )
        for layer, ratio in enumerate(self.compress_ratios):
            if ratio not in _KIND_OF_RATIO:
                raise UnsupportedModel(
                    f"{ARCHITECTURE}.attention.compress_ratios[{layer}] is {ratio}; only 0, {CSA_RATIO} and {HCA_RATIO}"
                    " are supported"
                )
        for key, clamps in (("exp", self.swiglu_clamp_exp), ("shexp", self.swiglu_clamp_shexp)):
            if len(clamps) != self.n_blocks:
                raise UnsupportedModel(
                    f"{ARCHITECTURE}.swiglu_clamp_{key} has {len(clamps)} entries for {self.n_blocks} blocks"
                )
            for clamp in clamps:
                _at_least(clamp, 0.0, f"swiglu_clamp_{key}", "a clamp is a magnitude, 0 turns it off")
        for key, count, least in (
            ("embedding_length", self.n_embd, 1),
            ("vocab_size", self.n_vocab, 1),
            ("context_length", self.context_length, 1),
            ("hash_layer_count", self.hash_layers, 0),
        ):
            _at_least(count, least, key, "it is a count")
        if self.n_mtp_layers and self.hash_layers > self.n_layers:
            raise UnsupportedModel(
                f"{ARCHITECTURE}.hash_layer_count is {self.hash_layers}, beyond the {self.n_layers} main layers: the"
                " MTP block would be routed by token id"
            )

    def _check_attention(self) -> None:
        for key, count in (
            ("attention.head_count", self.n_head),
            ("attention.key_length", self.head_dim),
            ("attention.q_lora_rank", self.q_lora_rank),
            ("attention.output_group_count", self.o_groups),
            ("attention.output_lora_rank", self.o_lora_rank),
            ("attention.sliding_window", self.window),
            ("attention.indexer.head_count", self.indexer_heads),
            ("attention.indexer.key_length", self.indexer_dim),
            ("attention.indexer.top_k", self.indexer_top_k),
            ("rope.dimension_count", self.rope_dim),
            ("rope.scaling.original_context_length", self.yarn.original_context),
        ):
            _at_least(count, 1, key, "it is a count")
        if self.window > self.context_length:
            raise UnsupportedModel(
                f"{ARCHITECTURE}.attention.sliding_window is {self.window}, beyond the context length"
                f" {self.context_length}"
            )
        if self.n_head % self.o_groups:
            raise UnsupportedModel(
                f"{ARCHITECTURE}.attention.output_group_count is {self.o_groups}, which does not divide the"
                f" {self.n_head} heads"
            )
        if self.indexer_dim % INDEXER_DIM_UNIT:
            raise UnsupportedModel(
                f"{ARCHITECTURE}.attention.indexer.key_length is {self.indexer_dim}, but must be a multiple of"
                f" {INDEXER_DIM_UNIT} (Hadamard rotation)"
            )
        if self.rope_dim % 2 or self.rope_dim > min(self.head_dim, self.indexer_dim):
            raise UnsupportedModel(
                f"{ARCHITECTURE}.rope.dimension_count is {self.rope_dim}, but must be even and at most the key length"
                f" {self.head_dim} and the indexer key length {self.indexer_dim}"
            )
        for key, value in (
            ("attention.layer_norm_rms_epsilon", self.rms_epsilon),
            ("rope.freq_base", self.rope_base),
            ("attention.compress_rope_freq_base", self.compress_rope_base),
            ("rope.scaling.factor", self.yarn.factor),
        ):
            if not (math.isfinite(value) and value > 0):
                raise UnsupportedModel(f"{ARCHITECTURE}.{key} is {value}, but must be finite and above 0")
        betas = (self.yarn.beta_fast, self.yarn.beta_slow)
        if betas != YARN_BETAS:
            raise UnsupportedModel(
                f"{ARCHITECTURE}.rope.scaling.yarn_beta_fast/slow are {betas[0]}/{betas[1]}; llama.cpp ignores these"
                f" keys for V4 and would silently use {YARN_BETAS[0]}/{YARN_BETAS[1]}"
            )

    def _check_experts(self) -> None:
        if not 1 <= self.n_expert <= MAX_EXPERTS:
            raise UnsupportedModel(
                f"{ARCHITECTURE}.expert_count is {self.n_expert}; llama.cpp takes 1 to {MAX_EXPERTS}"
            )
        if not 1 <= self.n_expert_used <= self.n_expert:
            raise UnsupportedModel(
                f"{ARCHITECTURE}.expert_used_count is {self.n_expert_used}, but must be 1 to expert_count"
                f" ({self.n_expert})"
            )
        _at_least(self.n_expert_shared, 1, "expert_shared_count", "the graph always adds the shared expert")
        _at_least(self.expert_ff, 1, "expert_feed_forward_length", "it is a count")
        if not math.isfinite(self.expert_weights_scale):
            raise UnsupportedModel(
                f"{ARCHITECTURE}.expert_weights_scale is {self.expert_weights_scale}, but must be finite"
            )

    def _check_hyper_connections(self) -> None:
        if self.hc_streams != HC_STREAMS:
            raise UnsupportedModel(
                f"{ARCHITECTURE}.hyper_connection.count is {self.hc_streams}; the graph is written for {HC_STREAMS}"
            )
        if not 1 <= self.hc_sinkhorn_iterations <= MAX_SINKHORN_ITERATIONS:
            raise UnsupportedModel(
                f"{ARCHITECTURE}.hyper_connection.sinkhorn_iterations is {self.hc_sinkhorn_iterations}, but must be 1"
                f" (llama.cpp aborts on 0) to {MAX_SINKHORN_ITERATIONS}"
            )
        if not (math.isfinite(self.hc_epsilon) and self.hc_epsilon > 0):
            raise UnsupportedModel(
                f"{ARCHITECTURE}.hyper_connection.epsilon is {self.hc_epsilon}, but must be finite and above 0"
            )

    @property
    def n_blocks(self) -> int:
        """Blocks in the file: main layers and MTP."""
        return self.n_layers + self.n_mtp_layers

    @property
    def boundary_width(self) -> int:
        """Floats per token between two stages: the four residual streams (``n_embd_out`` upstream)."""
        return self.hc_streams * self.n_embd

    @property
    def whole(self) -> LayerRange:
        return LayerRange(0, self.n_layers)

    def ratio(self, block: int) -> int:
        """Compress ratio of a block; an MTP block has none."""
        return self.compress_ratios[block] if block < self.n_layers else 0

    def kind(self, layer: int) -> LayerKind:
        return _KIND_OF_RATIO[self.ratio(layer)]

    def layers_of(self, kind: LayerKind, layers: LayerRange) -> tuple[int, ...]:
        """Layers of one kind within a range, ascending."""
        return tuple(layer for layer in layers.layers if self.kind(layer) is kind)

    def is_hash_routed(self, layer: int) -> bool:
        """Whether a layer picks its experts by token id."""
        return layer < self.hash_layers

    def check_range(self, layers: LayerRange) -> None:
        """Refuse a range that reaches beyond the last main layer."""
        if layers.end > self.n_layers:
            mtp = f"; layer {self.n_layers} is the MTP block, which is reserved and never run"
            raise InvalidLayerRange(
                f"layer range {layers} ends beyond the last main layer; the model has {self.n_layers}"
                f" (0:{self.n_layers}){mtp if self.n_mtp_layers else ''}"
            )

    def is_head(self, layers: LayerRange) -> bool:
        return layers.begin == 0

    def is_tail(self, layers: LayerRange) -> bool:
        return layers.end == self.n_layers


#: DeepSeek V4 Flash as published (without an MTP block, which the ordinary conversion drops).
V4_FLASH = HyperParameters(
    n_layers=43,
    n_vocab=129280,
    n_embd=4096,
    context_length=1048576,
    n_head=64,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    window=128,
    indexer_heads=64,
    indexer_dim=128,
    indexer_top_k=512,
    n_expert=256,
    n_expert_used=6,
    n_expert_shared=1,
    expert_ff=2048,
    expert_weights_scale=1.5,
    expert_weights_norm=True,
    swiglu_clamp_exp=(10.0,) * 43,
    swiglu_clamp_shexp=(10.0,) * 43,
    hc_sinkhorn_iterations=20,
    hc_epsilon=1e-6,
    hash_layers=3,
    compress_ratios=V4_FLASH_RATIOS,
    rms_epsilon=1e-6,
    rope_base=10000.0,
    compress_rope_base=160000.0,
    yarn=Yarn(factor=16.0, original_context=65536),
)
