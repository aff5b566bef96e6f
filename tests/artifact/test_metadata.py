"""Hyper-parameters from metadata: what is read, and each value that llama.cpp would abort on or misread."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from dgr.errors import ArtifactError, UnsupportedModel
from dgr.gguf.reader import GgufFile, MetaArray, MetaValue, ValueType, read_gguf
from dgr.selftest.fixture import write_fixture
from dgr.selftest.fixture.presets import PRESETS
from dgr.v4.hyper_parameters import V4_FLASH, HyperParameters
from dgr.v4.metadata import from_metadata


def u32(value: int) -> MetaValue:
    return MetaValue(ValueType.UINT32, value)


def f32(value: float) -> MetaValue:
    return MetaValue(ValueType.FLOAT32, value)


def ints(*values: int) -> MetaValue:
    return MetaValue(ValueType.ARRAY, MetaArray(ValueType.INT32, len(values), struct.pack(f"<{len(values)}i", *values)))


def floats(*values: float) -> MetaValue:
    return MetaValue(
        ValueType.ARRAY, MetaArray(ValueType.FLOAT32, len(values), struct.pack(f"<{len(values)}f", *values))
    )


def words(value: str) -> MetaValue:
    return MetaValue(ValueType.STRING, value)


@pytest.fixture(scope="module")
def header(min_model: Path) -> GgufFile:
    return read_gguf(min_model)


def read(header: GgufFile, **changes: MetaValue | None) -> HyperParameters:
    """The fixture's metadata with some ``deepseek4.*`` keys replaced, or removed by None."""
    metadata = dict(header.metadata)
    for key, value in changes.items():
        full = key if key.startswith(("general.", "tokenizer.")) else f"deepseek4.{key}"
        metadata.pop(full, None)
        if value is not None:
            metadata[full] = value
    return from_metadata(metadata, header.tensors.__contains__)


def test_reads_what_the_fixture_wrote(header: GgufFile) -> None:
    hp = read(header)
    preset = PRESETS["min"]
    assert (hp.n_layers, hp.n_mtp_layers, hp.n_blocks) == (4, 1, 5)
    assert hp.compress_ratios == (0, 0, 4, 128)
    kinds = [hp.kind(block).value for block in range(5)]
    assert kinds == ["SWA", "SWA", "CSA", "HCA", "SWA"]
    for name in (
        *("n_vocab", "n_embd", "n_head", "head_dim", "rope_dim", "q_lora_rank", "o_groups", "o_lora_rank", "window"),
        *("indexer_heads", "indexer_dim", "indexer_top_k", "n_expert", "n_expert_used", "n_expert_shared", "expert_ff"),
        *("expert_weights_scale", "expert_weights_norm", "hash_layers", "hc_streams", "hc_sinkhorn_iterations"),
        *("rope_base", "compress_rope_base", "context_length", "yarn"),
    ):
        assert getattr(hp, name) == getattr(preset, name), name
    assert hp.rms_epsilon == pytest.approx(1e-6)
    assert hp.hc_epsilon == pytest.approx(1e-6)
    assert hp.swiglu_clamp_exp == hp.swiglu_clamp_shexp == (10.0,) * 5
    assert hp.boundary_width == 128


@pytest.mark.slow
def test_the_real_widths_survive_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "real.gguf"
    write_fixture(path, preset="real", weights="mixed", sparse=True)
    file = read_gguf(path)
    hp = from_metadata(file.metadata, file.tensors.__contains__)
    assert hp.compress_ratios == V4_FLASH.compress_ratios
    assert (hp.n_vocab, hp.boundary_width, hp.indexer_top_k, hp.n_expert) == (129280, 16384, 512, 256)


def test_scalars_may_be_arrays_and_arrays_scalars(header: GgufFile) -> None:
    hp = read(
        header,
        **{
            "attention.head_count": ints(4, 4, 4, 4, 4),
            "expert_feed_forward_length": ints(32, 32, 32, 32, 32),
            "swiglu_clamp_exp": f32(7.0),
            "swiglu_clamp_shexp": None,
        },
    )
    assert (hp.n_head, hp.expert_ff) == (4, 32)
    assert hp.swiglu_clamp_exp == hp.swiglu_clamp_shexp == (7.0,) * 5


def test_an_announced_but_absent_mtp_block_is_none(header: GgufFile) -> None:
    # Older conversions: nextn_predict_layers = 1 with block_count 4; blk.3.nextn.* is not there.
    metadata = dict(header.metadata)
    metadata["deepseek4.block_count"] = u32(4)
    for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        metadata[f"deepseek4.{key}"] = floats(*[10.0] * 4)
    hp = from_metadata(metadata, lambda name: ".nextn." not in name)
    assert (hp.n_layers, hp.n_mtp_layers) == (4, 0)
    assert hp.compress_ratios == (0, 0, 4, 128)


def test_ratios_longer_than_the_blocks_are_cut(header: GgufFile) -> None:
    assert read(header, **{"attention.compress_ratios": ints(0, 0, 4, 128, 0, 0, 0)}).compress_ratios == (0, 0, 4, 128)


def test_the_tokenizer_decides_the_vocabulary(header: GgufFile) -> None:
    assert read(header, vocab_size=u32(7)).n_vocab == 320
    assert read(header, vocab_size=u32(7), **{"tokenizer.ggml.model": words("none")}).n_vocab == 7


REFUSED: dict[str, tuple[dict[str, MetaValue | None], str]] = {
    "llama": ({"general.architecture": words("llama")}, "'llama', but this version runs 'deepseek4'"),
    "no architecture": ({"general.architecture": None}, "general.architecture is missing"),
    "v4.1 architecture": ({"general.architecture": words("deepseek4_1")}, "V4.1 shares K rows"),
    "v4.1 keys": (
        {"attention.kv_source_layer_ids": ints(0, 0, 2, 2)},
        "kv_source_layer_ids marks a model whose layers",
    ),
    "shared kv": ({"attention.shared_kv_layers": u32(2)}, "V4.1 shares K rows"),
    "ratio 7": ({"attention.compress_ratios": ints(0, 0, 7, 128, 0)}, "compress_ratios[2] is 7; only 0, 4 and 128"),
    "negative ratio": ({"attention.compress_ratios": ints(0, 0, -4, 128, 0)}, "compress_ratios[2] is -4"),
    "mtp ratio": ({"attention.compress_ratios": ints(0, 0, 4, 128, 4)}, "compress_ratios[4] is 4, but an MTP block"),
    "short ratios": ({"attention.compress_ratios": ints(0, 0, 4, 128)}, "has 4 entries, but must have 5"),
    "513 ratios": ({"attention.compress_ratios": ints(*[0] * 513)}, "has 513 entries"),
    "float ratios": ({"attention.compress_ratios": floats(0, 0, 4, 128, 0)}, "must be an array of numbers"),
    "scalar ratios": ({"attention.compress_ratios": u32(4)}, "must be an array of numbers"),
    "block_count 0": ({"block_count": u32(0)}, "block_count is 0; llama.cpp takes 1 to 512"),
    "block_count 600": ({"block_count": u32(600)}, "block_count is 600"),
    "nextn beyond": ({"nextn_predict_layers": u32(6)}, "nextn_predict_layers is 6, beyond"),
    "short clamps": ({"swiglu_clamp_exp": floats(1, 2, 3, 4)}, "swiglu_clamp_exp has 4 entries, but must have one per"),
    "nan clamp": ({"swiglu_clamp_exp": f32(float("nan"))}, "swiglu_clamp_exp is nan"),
    "experts 0": ({"expert_count": u32(0)}, "expert_count is 0; llama.cpp takes 1 to 1024"),
    "experts 5000": ({"expert_count": u32(5000)}, "expert_count is 5000"),
    "experts used 0": ({"expert_used_count": u32(0)}, "expert_used_count is 0"),
    "experts used 5": ({"expert_used_count": u32(5)}, "expert_used_count is 5, but must be 1 to expert_count (4)"),
    "experts used vary": ({"expert_used_count": ints(2, 2, 1, 2, 2)}, "differs between blocks (1 to 2)"),
    "no shared expert": ({"expert_shared_count": u32(0)}, "expert_shared_count is 0"),
    "expert groups": ({"expert_group_count": u32(2)}, "expert_group_count is 2"),
    "one group of one": (
        {"expert_group_count": u32(1), "expert_count": u32(1), "expert_used_count": u32(1)},
        "expert_group_count is 1",
    ),
    "gating": ({"expert_gating_func": u32(2)}, "expert_gating_func is 2, but V4 needs 4"),
    "hc 2": ({"hyper_connection.count": u32(2), "embedding_length_out": u32(64)}, "hyper_connection.count is 2"),
    "hc width": ({"embedding_length_out": u32(32)}, "embedding_length_out is 32"),
    "sinkhorn 0": ({"hyper_connection.sinkhorn_iterations": u32(0)}, "sinkhorn_iterations is 0"),
    "sinkhorn huge": ({"hyper_connection.sinkhorn_iterations": u32(1001)}, "sinkhorn_iterations is 1001"),
    "hc epsilon": ({"hyper_connection.epsilon": f32(float("inf"))}, "epsilon is inf"),
    "kv heads": ({"attention.head_count_kv": u32(4)}, "head_count_kv is 4, but V4 has 1"),
    "kv heads missing": ({"attention.head_count_kv": None}, "head_count_kv is missing"),
    "value length": (
        {"attention.value_length": u32(8)},
        "value_length is 8, but must equal deepseek4.attention.key_length",
    ),
    "swa key length": ({"attention.key_length_swa": u32(8)}, "key_length_swa is 8"),
    "swa rope": ({"rope.dimension_count_swa": u32(4)}, "dimension_count_swa is 4"),
    "o_groups 0": ({"attention.output_group_count": u32(0)}, "output_group_count is 0"),
    "o_groups 3": (
        {"attention.output_group_count": u32(3)},
        "output_group_count is 3, which does not divide the 4 heads",
    ),
    "rope odd": ({"rope.dimension_count": u32(7)}, "dimension_count is 7, but must be even"),
    "rope wide": ({"rope.dimension_count": u32(18)}, "at most the key length 16"),
    "indexer 96": ({"attention.indexer.key_length": u32(96)}, "key_length is 96, but must be a multiple of 64"),
    "indexer 0": ({"attention.indexer.key_length": u32(0)}, "key_length is 0"),
    "top_k 0": ({"attention.indexer.top_k": u32(0)}, "top_k is 0"),
    "window 0": ({"attention.sliding_window": u32(0)}, "sliding_window is 0"),
    "window huge": ({"attention.sliding_window": u32(1 << 31)}, "sliding_window is 2147483648, beyond the context"),
    "hash over mtp": ({"hash_layer_count": u32(5)}, "hash_layer_count is 5"),
    "no causal": ({"attention.causal": MetaValue(ValueType.BOOL, False)}, "attention.causal is False"),
    "yarn type missing": (
        {"rope.scaling.type": None},
        "rope.scaling.type is missing: without it llama.cpp would rotate",
    ),
    "yarn factor missing": ({"rope.scaling.factor": None}, "rope.scaling.factor is missing: without it"),
    "yarn context missing": ({"rope.scaling.original_context_length": None}, "original_context_length is missing"),
    "linear scaling": ({"rope.scaling.type": words("linear")}, "rope.scaling.type is 'linear'"),
    "yarn betas": ({"rope.scaling.yarn_beta_fast": f32(16.0)}, "llama.cpp ignores these keys"),
    "yarn factor 0": ({"rope.scaling.factor": f32(0.0)}, "rope.scaling.factor is 0.0"),
    "rms epsilon": ({"attention.layer_norm_rms_epsilon": f32(-1.0)}, "rms_epsilon is -1.0"),
    "missing key": ({"attention.q_lora_rank": None}, "attention.q_lora_rank is missing"),
    "wrong type": (
        {"attention.q_lora_rank": f32(32.0)},
        "q_lora_rank is 32.0 (FLOAT32), but llama.cpp takes UINT32 only",
    ),
    "wide integer": ({"embedding_length": MetaValue(ValueType.UINT64, 32)}, "llama.cpp takes UINT32 only"),
    "array for scalar": ({"embedding_length": ints(32)}, "an array of 1 INT32"),
    "tokens": ({"tokenizer.ggml.tokens": ints(1, 2)}, "tokenizer.ggml.tokens is an array of 2 INT32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(header: GgufFile, case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(UnsupportedModel) as caught:
        read(header, **changes)
    assert message in str(caught.value)
    assert isinstance(caught.value, ArtifactError)


@pytest.mark.parametrize(
    "suffix",
    [
        *("block_count", "context_length", "embedding_length", "attention.head_count", "attention.key_length"),
        *("attention.value_length", "attention.sliding_window", "attention.indexer.head_count", "rope.freq_base"),
        *("attention.indexer.top_k", "attention.output_group_count", "attention.output_lora_rank", "expert_count"),
        *("attention.compress_ratios", "attention.compress_rope_freq_base", "hyper_connection.epsilon"),
        *("hyper_connection.count", "hyper_connection.sinkhorn_iterations", "hash_layer_count", "swiglu_clamp_exp"),
        *("expert_used_count", "expert_shared_count", "expert_feed_forward_length", "expert_weights_scale"),
        *("expert_weights_norm", "expert_gating_func", "attention.layer_norm_rms_epsilon", "rope.dimension_count"),
    ],
)
def test_every_key_the_graph_needs_is_demanded(header: GgufFile, suffix: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"deepseek4.{suffix} is missing"):
        read(header, **{suffix: None})


def test_probe_asks_for_the_block_behind_the_main_layers(header: GgufFile) -> None:
    asked: list[str] = []

    def has_tensor(name: str) -> bool:
        asked.append(name)
        return True

    from_metadata(header.metadata, has_tensor)
    assert asked == ["blk.4.nextn.eh_proj.weight"]
