"""The metadata of a fixture model; PyPI's ``gguf`` does not know V4's keys, so they are written by their raw names."""

from __future__ import annotations

from typing import Any

from dgr.model.v4 import ARCHITECTURE, HyperParameters
from dgr.testing.fixture_vocab import CHAT_TEMPLATE, Vocabulary

__all__ = ["add_metadata"]

#: ``LLAMA_EXPERT_GATING_FUNC_TYPE_SQRT_SOFTPLUS``.
_SQRT_SOFTPLUS = 4


def add_metadata(writer: Any, hp: HyperParameters, vocab: Vocabulary, name: str) -> None:
    """Give a ``gguf.GGUFWriter`` every key a real conversion writes, by its raw name."""

    def key(suffix: str) -> str:
        return f"{ARCHITECTURE}.{suffix}"

    writer.add_string("general.type", "model")
    writer.add_string("general.name", name)
    ratios = [*hp.compress_ratios, *[0] * hp.n_mtp_layers]
    for suffix, value in (
        ("vocab_size", hp.n_vocab),
        ("context_length", hp.context_length),
        ("embedding_length", hp.n_embd),
        ("embedding_length_out", hp.boundary_width),
        ("block_count", hp.n_blocks),
        ("attention.head_count", hp.n_head),
        ("attention.head_count_kv", 1),
        ("attention.key_length", hp.head_dim),
        ("attention.value_length", hp.head_dim),
        ("attention.q_lora_rank", hp.q_lora_rank),
        ("attention.sliding_window", hp.window),
        ("attention.indexer.head_count", hp.indexer_heads),
        ("attention.indexer.key_length", hp.indexer_dim),
        ("attention.indexer.top_k", hp.indexer_top_k),
        ("attention.output_group_count", hp.o_groups),
        ("attention.output_lora_rank", hp.o_lora_rank),
        ("hyper_connection.count", hp.hc_streams),
        ("hyper_connection.sinkhorn_iterations", hp.hc_sinkhorn_iterations),
        ("hash_layer_count", hp.hash_layers),
        ("expert_count", hp.n_expert),
        ("expert_used_count", hp.n_expert_used),
        ("expert_shared_count", hp.n_expert_shared),
        ("expert_feed_forward_length", hp.expert_ff),
        ("expert_gating_func", _SQRT_SOFTPLUS),
        ("rope.dimension_count", hp.rope_dim),
        ("rope.scaling.original_context_length", hp.yarn.original_context),
    ):
        writer.add_uint32(key(suffix), value)
    if hp.n_mtp_layers:
        writer.add_uint32(key("nextn_predict_layers"), hp.n_mtp_layers)
    for suffix, number in (
        ("attention.layer_norm_rms_epsilon", hp.rms_epsilon),
        ("attention.compress_rope_freq_base", hp.compress_rope_base),
        ("hyper_connection.epsilon", hp.hc_epsilon),
        ("expert_weights_scale", hp.expert_weights_scale),
        ("rope.freq_base", hp.rope_base),
        ("rope.scaling.factor", hp.yarn.factor),
        ("rope.scaling.yarn_beta_fast", hp.yarn.beta_fast),
        ("rope.scaling.yarn_beta_slow", hp.yarn.beta_slow),
    ):
        writer.add_float32(key(suffix), number)
    writer.add_bool(key("expert_weights_norm"), hp.expert_weights_norm)
    writer.add_string(key("rope.scaling.type"), "yarn")
    writer.add_array(key("attention.compress_ratios"), ratios)
    writer.add_array(key("swiglu_clamp_exp"), list(hp.swiglu_clamp_exp))
    writer.add_array(key("swiglu_clamp_shexp"), list(hp.swiglu_clamp_shexp))

    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "joyai-llm")
    writer.add_array("tokenizer.ggml.tokens", list(vocab.tokens))
    writer.add_array("tokenizer.ggml.token_type", [int(kind) for kind in vocab.types])
    if vocab.merges:
        writer.add_array("tokenizer.ggml.merges", list(vocab.merges))
    writer.add_uint32("tokenizer.ggml.bos_token_id", vocab.bos)
    writer.add_uint32("tokenizer.ggml.eos_token_id", vocab.eos)
    writer.add_uint32("tokenizer.ggml.padding_token_id", vocab.pad)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_bool("tokenizer.ggml.add_eos_token", False)
    writer.add_string("tokenizer.chat_template", CHAT_TEMPLATE)
