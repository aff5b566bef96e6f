"""Hyper-parameters out of GGUF metadata, with every refusal naming key, value and limit.

Keys as ``src/llama-arch.cpp`` spells them and ``llama_model_base::load_hparams`` / ``load_arch_hparams`` (deepseek4)
read them. A key upstream would default is still required where the default would give another model without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from attrs import frozen

from dgr.errors import UnsupportedModel
from dgr.gguf.reader import MetaArray, MetaValue, ValueType
from dgr.v4.hyper_parameters import ARCHITECTURE, MAX_LAYERS, YARN_BETAS, HyperParameters, Yarn
from dgr.v4.tokenizer import vocabulary_size

__all__ = ["from_metadata"]

_T = TypeVar("_T", int, float, str, bool)

#: ``LLAMA_EXPERT_GATING_FUNC_TYPE_SQRT_SOFTPLUS``.
_SQRT_SOFTPLUS = 4

#: Parts of keys and names that belong to V4.1, whose layers read other layers' K across any cut.
_SHARED_KV_MARKS = ("kv_source_layer", "shared_kv_layers", "kv_share")

_V4_1 = (
    "DeepSeek V4.1 shares K rows between layers, so its state cannot be cut by layer; this version runs DeepSeek V4"
    " Flash only"
)

#: Metadata types that llama.cpp takes for each Python type (``GGUFMeta::GKV`` compares the type exactly).
_SCALAR_TYPES: dict[type, ValueType] = {
    int: ValueType.UINT32,
    float: ValueType.FLOAT32,
    str: ValueType.STRING,
    bool: ValueType.BOOL,
}
_ARRAY_TYPES: dict[type, tuple[ValueType, ...]] = {
    int: (ValueType.UINT32, ValueType.INT32),
    float: (ValueType.FLOAT32,),
}


@frozen
class _Keys:
    """Typed access to ``deepseek4.*``."""

    metadata: Mapping[str, MetaValue]

    def find(self, suffix: str) -> MetaValue | None:
        return self.metadata.get(f"{ARCHITECTURE}.{suffix}")

    def get(self, suffix: str, kind: type[_T], default: _T | None = None, *, missing: str = "") -> _T:
        """A scalar; refused when it is absent (without a default) or of another type."""
        stored = self.find(suffix)
        if stored is None:
            if default is not None:
                return default
            why = missing or "a DeepSeek V4 GGUF needs it"
            raise UnsupportedModel(f"the key {ARCHITECTURE}.{suffix} is missing: {why}; convert the model again")
        if stored.type is not _SCALAR_TYPES[kind] or not isinstance(stored.value, kind):
            raise UnsupportedModel(
                f"{ARCHITECTURE}.{suffix} is {_shown(stored)}, but llama.cpp takes {_SCALAR_TYPES[kind].name} only"
            )
        return stored.value

    def array(self, suffix: str, kind: type[_T]) -> tuple[_T, ...]:
        stored = self.find(suffix)
        if stored is None:
            raise UnsupportedModel(
                f"the key {ARCHITECTURE}.{suffix} is missing: a DeepSeek V4 GGUF needs it; convert the model again"
            )
        if not isinstance(stored.value, MetaArray) or stored.value.element not in _ARRAY_TYPES[kind]:
            raise UnsupportedModel(f"{ARCHITECTURE}.{suffix} is {_shown(stored)}, but must be an array of numbers")
        return tuple(item for item in stored.value.values() if isinstance(item, kind))

    def per_block(self, suffix: str, kind: type[_T], n_blocks: int) -> tuple[_T, ...]:
        """A scalar for all blocks, or an array with exactly one entry per block (``get_key_or_arr``)."""
        stored = self.find(suffix)
        if stored is None or not isinstance(stored.value, MetaArray):
            return (self.get(suffix, kind),) * n_blocks
        entries = self.array(suffix, kind)
        if len(entries) != n_blocks:
            raise UnsupportedModel(
                f"{ARCHITECTURE}.{suffix} has {len(entries)} entries, but must have one per block ({n_blocks})"
            )
        return entries

    def uniform(self, suffix: str, n_blocks: int) -> int:
        """A count that V4 has the same for every block, stored as scalar or array."""
        entries = self.per_block(suffix, int, n_blocks)
        if len(set(entries)) != 1:
            raise UnsupportedModel(
                f"{ARCHITECTURE}.{suffix} differs between blocks ({min(entries)} to {max(entries)}); V4 has one value"
            )
        return entries[0]


def _shown(stored: MetaValue) -> str:
    if isinstance(stored.value, MetaArray):
        return f"an array of {len(stored.value)} {stored.value.element.name}"
    return f"{stored.value!r} ({stored.type.name})"


def _check_architecture(metadata: Mapping[str, MetaValue]) -> None:
    stored = metadata.get("general.architecture")
    name = stored.value if stored is not None else None
    if not isinstance(name, str):
        raise UnsupportedModel("the key general.architecture is missing; give a GGUF of a language model")
    key = next((key for key in metadata if any(mark in key for mark in _SHARED_KV_MARKS)), None)
    if key is not None:
        raise UnsupportedModel(f"the key {key} marks a model whose layers share K rows. {_V4_1}")
    if name != ARCHITECTURE:
        if name.startswith(ARCHITECTURE) or name in ("deepseek-v4.1", "deepseek_v4_1"):
            raise UnsupportedModel(f"general.architecture is {name!r}. {_V4_1}")
        raise UnsupportedModel(
            f"general.architecture is {name!r}, but this version runs {ARCHITECTURE!r} (DeepSeek V4 Flash) only"
        )


def _count_blocks(keys: _Keys, has_tensor: Callable[[str], bool]) -> tuple[int, int]:
    """Main layers and MTP blocks; like upstream, an announced MTP block that is absent is no MTP block.

    ``llama_model_deepseek4::load_arch_hparams`` probes ``blk.{n_main}.nextn.eh_proj.weight`` and, when it is missing,
    counts every block as a main layer.
    """
    n_blocks = keys.get("block_count", int)
    if not 1 <= n_blocks <= MAX_LAYERS:
        raise UnsupportedModel(f"{ARCHITECTURE}.block_count is {n_blocks}; llama.cpp takes 1 to {MAX_LAYERS}")
    n_mtp = keys.get("nextn_predict_layers", int, 0)
    if n_mtp > n_blocks:
        raise UnsupportedModel(
            f"{ARCHITECTURE}.nextn_predict_layers is {n_mtp}, beyond {ARCHITECTURE}.block_count ({n_blocks})"
        )
    if n_mtp and not has_tensor(f"blk.{n_blocks - n_mtp}.nextn.eh_proj.weight"):
        n_mtp = 0
    return n_blocks - n_mtp, n_mtp


def _read_ratios(keys: _Keys, n_layers: int, n_mtp: int) -> tuple[int, ...]:
    suffix = "attention.compress_ratios"
    ratios = keys.array(suffix, int)
    if not n_layers + n_mtp <= len(ratios) <= MAX_LAYERS:
        raise UnsupportedModel(
            f"{ARCHITECTURE}.{suffix} has {len(ratios)} entries, but must have {n_layers + n_mtp} (block_count) to"
            f" {MAX_LAYERS}"
        )
    for block in range(n_layers, n_layers + n_mtp):
        if ratios[block]:
            raise UnsupportedModel(f"{ARCHITECTURE}.{suffix}[{block}] is {ratios[block]}, but an MTP block must have 0")
    return ratios[:n_layers]


def _read_yarn(keys: _Keys) -> Yarn:
    """YaRN keys; without one, upstream runs on with wrong rotations in every compressed layer."""
    effect = "without it llama.cpp would rotate the compressed layers' keys wrongly, without any error"
    scaling = keys.get("rope.scaling.type", str, missing=effect)
    if scaling != "yarn":
        raise UnsupportedModel(f"{ARCHITECTURE}.rope.scaling.type is {scaling!r}, but V4 needs 'yarn'")
    return Yarn(
        factor=keys.get("rope.scaling.factor", float, missing=effect),
        original_context=keys.get("rope.scaling.original_context_length", int, missing=effect),
        beta_fast=keys.get("rope.scaling.yarn_beta_fast", float, YARN_BETAS[0]),
        beta_slow=keys.get("rope.scaling.yarn_beta_slow", float, YARN_BETAS[1]),
    )


def _check_fixed(keys: _Keys, n_blocks: int, head_dim: int, rope_dim: int, n_expert: int) -> None:
    """Keys whose only supported value is V4's own, or that must agree with another."""
    if (n_kv := keys.uniform("attention.head_count_kv", n_blocks)) != 1:
        raise UnsupportedModel(f"{ARCHITECTURE}.attention.head_count_kv is {n_kv}, but V4 has 1 (multi-query)")
    if (gating := keys.get("expert_gating_func", int)) != _SQRT_SOFTPLUS:
        raise UnsupportedModel(
            f"{ARCHITECTURE}.expert_gating_func is {gating}, but V4 needs {_SQRT_SOFTPLUS} (sqrt-softplus)"
        )
    for suffix, expected, other in (
        ("attention.value_length", head_dim, "attention.key_length"),
        ("attention.key_length_swa", head_dim, "attention.key_length"),
        ("attention.value_length_swa", head_dim, "attention.key_length"),
        ("rope.dimension_count_swa", rope_dim, "rope.dimension_count"),
    ):
        default = None if suffix == "attention.value_length" else expected
        if (value := keys.get(suffix, int, default)) != expected:
            raise UnsupportedModel(
                f"{ARCHITECTURE}.{suffix} is {value}, but must equal {ARCHITECTURE}.{other} ({expected})"
            )
    groups = keys.get("expert_group_count", int, 0)
    if groups > 1 or (groups and n_expert <= groups):
        raise UnsupportedModel(f"{ARCHITECTURE}.expert_group_count is {groups}, but V4 routes without groups (0)")
    if not keys.get("attention.causal", bool, True):
        raise UnsupportedModel(f"{ARCHITECTURE}.attention.causal is False, but V4 is causal")


def from_metadata(metadata: Mapping[str, MetaValue], has_tensor: Callable[[str], bool]) -> HyperParameters:
    """Hyper-parameters of the model that the metadata describes.

    ``has_tensor`` tells whether the artifact holds a tensor of that name (for the MTP probe). Raises
    :class:`~dgr.errors.UnsupportedModel` for everything that this version, or llama.cpp, would not run.
    """
    _check_architecture(metadata)
    keys = _Keys(metadata)
    n_layers, n_mtp = _count_blocks(keys, has_tensor)
    n_blocks = n_layers + n_mtp
    head_dim = keys.get("attention.key_length", int)
    rope_dim = keys.get("rope.dimension_count", int)
    n_expert = keys.get("expert_count", int)
    _check_fixed(keys, n_blocks, head_dim, rope_dim, n_expert)
    n_embd = keys.get("embedding_length", int)
    streams = keys.get("hyper_connection.count", int)
    if (width := keys.get("embedding_length_out", int, streams * n_embd)) != streams * n_embd:
        raise UnsupportedModel(
            f"{ARCHITECTURE}.embedding_length_out is {width}, but must be hyper_connection.count x embedding_length"
            f" ({streams} x {n_embd})"
        )
    clamp_exp = keys.per_block("swiglu_clamp_exp", float, n_blocks)
    has_shared_clamp = keys.find("swiglu_clamp_shexp") is not None
    return HyperParameters(
        n_layers=n_layers,
        n_mtp_layers=n_mtp,
        n_vocab=vocabulary_size(metadata),
        n_embd=n_embd,
        context_length=keys.get("context_length", int),
        n_head=keys.uniform("attention.head_count", n_blocks),
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_lora_rank=keys.get("attention.q_lora_rank", int),
        o_groups=keys.get("attention.output_group_count", int),
        o_lora_rank=keys.get("attention.output_lora_rank", int),
        window=keys.get("attention.sliding_window", int),
        indexer_heads=keys.get("attention.indexer.head_count", int),
        indexer_dim=keys.get("attention.indexer.key_length", int),
        indexer_top_k=keys.get("attention.indexer.top_k", int),
        n_expert=n_expert,
        n_expert_used=keys.uniform("expert_used_count", n_blocks),
        n_expert_shared=keys.get("expert_shared_count", int),
        expert_ff=keys.uniform("expert_feed_forward_length", n_blocks),
        expert_weights_scale=keys.get("expert_weights_scale", float),
        expert_weights_norm=keys.get("expert_weights_norm", bool),
        swiglu_clamp_exp=clamp_exp,
        swiglu_clamp_shexp=keys.per_block("swiglu_clamp_shexp", float, n_blocks) if has_shared_clamp else clamp_exp,
        hc_streams=streams,
        hc_sinkhorn_iterations=keys.get("hyper_connection.sinkhorn_iterations", int),
        hc_epsilon=keys.get("hyper_connection.epsilon", float),
        hash_layers=keys.get("hash_layer_count", int),
        compress_ratios=_read_ratios(keys, n_layers, n_mtp),
        rms_epsilon=keys.get("attention.layer_norm_rms_epsilon", float),
        rope_base=keys.get("rope.freq_base", float),
        compress_rope_base=keys.get("attention.compress_rope_freq_base", float),
        yarn=_read_yarn(keys),
    )
