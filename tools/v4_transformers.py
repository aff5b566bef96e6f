"""The V4 of ``transformers`` with a dgr model's hyper-parameters, and how its weights are called in a GGUF.

Both ways: a trained model becomes a GGUF, and a GGUF is loaded to be compared with. A fused matrix on one side is two on the
other; every other tensor is the same numbers under another name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dgr.v4.hyper_parameters import CSA_RATIO, HCA_RATIO, HyperParameters

__all__ = ["build_model", "config_of", "from_state", "load_weights"]

#: A tensor by its name in a GGUF, C order: [.., ne1, ne0].
Tensors = Mapping[str, npt.NDArray[Any]]


def config_of(hp: HyperParameters) -> DeepseekV4Config:
    """The configuration, with every value given: the defaults are another model's."""
    if len({*hp.swiglu_clamp_exp, *hp.swiglu_clamp_shexp}) != 1:
        raise ValueError("transformers has one SwiGLU limit for all layers")
    return DeepseekV4Config(
        vocab_size=hp.n_vocab,
        hidden_size=hp.n_embd,
        moe_intermediate_size=hp.expert_ff,
        num_hidden_layers=hp.n_layers,
        num_attention_heads=hp.n_head,
        num_key_value_heads=1,
        head_dim=hp.head_dim,
        q_lora_rank=hp.q_lora_rank,
        num_experts_per_tok=hp.n_expert_used,
        n_routed_experts=hp.n_expert,
        n_shared_experts=hp.n_expert_shared,
        scoring_func="sqrtsoftplus",
        norm_topk_prob=hp.expert_weights_norm,
        routed_scaling_factor=hp.expert_weights_scale,
        max_position_embeddings=hp.context_length,
        rope_theta=hp.rope_base,
        compress_rope_theta=hp.compress_rope_base,
        qk_rope_head_dim=hp.rope_dim,
        partial_rotary_factor=hp.rope_dim / hp.head_dim,
        compress_ratios=list(hp.compress_ratios),
        compress_rates={"compressed_sparse_attention": CSA_RATIO, "heavily_compressed_attention": HCA_RATIO},
        num_hash_layers=hp.hash_layers,
        hc_mult=hp.hc_streams,
        hc_sinkhorn_iters=hp.hc_sinkhorn_iterations,
        hc_eps=hp.hc_epsilon,
        swiglu_limit=hp.swiglu_clamp_exp[0],
        sliding_window=hp.window,
        o_groups=hp.o_groups,
        o_lora_rank=hp.o_lora_rank,
        index_n_heads=hp.indexer_heads,
        index_head_dim=hp.indexer_dim,
        index_topk=hp.indexer_top_k,
        num_nextn_predict_layers=0,
        rms_norm_eps=hp.rms_epsilon,
        rope_parameters={
            "main": {
                "rope_type": "default",
                "rope_theta": hp.rope_base,
                "partial_rotary_factor": hp.rope_dim / hp.head_dim,
            },
            "compress": {
                "rope_type": "yarn",
                "rope_theta": hp.compress_rope_base,
                "partial_rotary_factor": hp.rope_dim / hp.head_dim,
                "factor": hp.yarn.factor,
                "original_max_position_embeddings": hp.yarn.original_context,
                "beta_fast": hp.yarn.beta_fast,
                "beta_slow": hp.yarn.beta_slow,
                "attention_factor": 1.0,
            },
        },
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
    )


def build_model(hp: HyperParameters) -> DeepseekV4ForCausalLM:
    """A model in float32, weights as ``transformers`` initialises them (the hash tables are zeroes)."""
    config = config_of(hp)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return DeepseekV4ForCausalLM(config).to(torch.float32)


@frozen
class _Name:
    """A tensor on both sides; ``part`` is (index, of) where the other side holds several in one, along their rows."""

    gguf: str
    state: str
    part: tuple[int, int] = (0, 1)


def _names(hp: HyperParameters) -> Iterator[_Name]:
    yield _Name("token_embd.weight", "model.embed_tokens.weight")
    yield _Name("output_norm.weight", "model.norm.weight")
    yield _Name("output.weight", "lm_head.weight")
    for part in ("fn", "base", "scale"):
        yield _Name(f"output_hc_{part}.weight", f"model.hc_head.hc_{part}")
    for layer in range(hp.n_layers):
        for ours, theirs in _layer_names(hp, layer):
            yield _Name(f"blk.{layer}.{ours}", f"model.layers.{layer}.{theirs}")
        for index, ours in enumerate(("ffn_gate_exps", "ffn_up_exps")):
            yield _Name(f"blk.{layer}.{ours}.weight", f"model.layers.{layer}.mlp.experts.gate_up_proj", part=(index, 2))


def _layer_names(hp: HyperParameters, layer: int) -> Iterator[tuple[str, str]]:
    yield "attn_norm.weight", "input_layernorm.weight"
    yield "ffn_norm.weight", "post_attention_layernorm.weight"
    yield "attn_sinks.weight", "self_attn.sinks"
    for ours, theirs in (
        ("attn_q_a", "q_a_proj"),
        ("attn_q_a_norm", "q_a_norm"),
        ("attn_q_b", "q_b_proj"),
        ("attn_kv", "kv_proj"),
        ("attn_kv_a_norm", "kv_norm"),
        ("attn_output_a", "o_a_proj"),
        ("attn_output_b", "o_b_proj"),
    ):
        yield f"{ours}.weight", f"self_attn.{theirs}.weight"
    for ours, theirs in (("attn", "attn_hc"), ("ffn", "ffn_hc")):
        for part in ("fn", "base", "scale"):
            yield f"hc_{ours}_{part}.weight", f"{theirs}.{part}"
    ratio = hp.ratio(layer)
    if ratio:
        yield from _compressor_names("attn_compressor", "self_attn.compressor")
    if ratio == CSA_RATIO:
        yield from _compressor_names("indexer_compressor", "self_attn.compressor.indexer")
        yield "indexer.attn_q_b.weight", "self_attn.compressor.indexer.q_b_proj.weight"
        yield "indexer.proj.weight", "self_attn.compressor.indexer.scorer.weights_proj.weight"
    yield "ffn_gate_inp.weight", "mlp.gate.weight"
    if hp.is_hash_routed(layer):
        yield "ffn_gate_tid2eid.weight", "mlp.gate.tid2eid"
    else:
        yield "exp_probs_b.bias", "mlp.gate.e_score_correction_bias"
    yield "ffn_down_exps.weight", "mlp.experts.down_proj"
    for part in ("gate", "down", "up"):
        yield f"ffn_{part}_shexp.weight", f"mlp.shared_experts.{part}_proj.weight"


def _compressor_names(ours: str, theirs: str) -> Iterator[tuple[str, str]]:
    yield f"{ours}_kv.weight", f"{theirs}.kv_proj.weight"
    yield f"{ours}_gate.weight", f"{theirs}.gate_proj.weight"
    yield f"{ours}_ape.weight", f"{theirs}.position_bias"
    yield f"{ours}_norm.weight", f"{theirs}.kv_norm.weight"


def from_state(hp: HyperParameters, state: Mapping[str, torch.Tensor]) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a GGUF out of a ``state_dict``; ids of experts as int32, all else as float32.

    Raises :class:`ValueError` where the state has a tensor that no GGUF has a place for: the conversion would lose it.
    """
    found: dict[str, npt.NDArray[Any]] = {}
    used = set()
    for name in _names(hp):
        index, count = name.part
        values = state[name.state].detach().cpu()
        used.add(name.state)
        values = values.chunk(count, dim=-2)[index] if count > 1 else values
        kind = torch.int32 if name.gguf.endswith("tid2eid.weight") else torch.float32
        found[name.gguf] = values.to(kind).contiguous().numpy()
    if rest := sorted(set(state) - used):
        raise ValueError(f"no tensor of a GGUF holds {rest[0]} ({len(rest)} in all)")
    return found


def load_weights(model: DeepseekV4ForCausalLM, hp: HyperParameters, tensor: Callable[[str], npt.NDArray[Any]]) -> None:
    """Fill a model with the tensors of a GGUF, each asked for by its name; every weight of the model is set."""
    state = model.state_dict()
    filled: dict[str, dict[int, torch.Tensor]] = {}
    for name in _names(hp):
        filled.setdefault(name.state, {})[name.part[0]] = torch.from_numpy(np.array(tensor(name.gguf)))
    for key, parts in filled.items():
        values = torch.cat([parts[index] for index in sorted(parts)], dim=-2) if len(parts) > 1 else parts[0]
        if values.numel() != state[key].numel():
            raise ValueError(f"{key} has {tuple(state[key].shape)} values, the file {tuple(values.shape)}")
        filled_shape = values.reshape(state[key].shape)
        state[key] = filled_shape.to(state[key].dtype)
    missing = sorted(set(state) - set(filled))
    if missing:
        raise ValueError(f"the file has nothing for {missing[0]} ({len(missing)} in all)")
    model.load_state_dict(state)
