"""Files as they are found: what runs, split as whole, and what is refused before llama.cpp sees it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Model, Prompt

from dgr.artifact.artifact import Artifact
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams
from dgr.engine.llama import LlamaEngine
from dgr.errors import ArtifactError, InvalidLayerRange, UnsupportedModel
from dgr.gguf.reader import MetaArray, MetaValue, ValueType, read_gguf
from dgr.gguf.types import GgmlType
from dgr.gguf.writer import TensorForm, u32
from dgr.selftest.chain import cut_at
from dgr.selftest.fixture import edit_gguf
from dgr.selftest.llama_chain import open_chain

CONTEXT = ContextParams(n_ctx=512)
N_LAYERS = 7
CUTS = (2, 3)


def f32(value: float) -> MetaValue:
    return MetaValue(ValueType.FLOAT32, value)


def text(value: str) -> MetaValue:
    return MetaValue(ValueType.STRING, value)


def ints(*values: int) -> MetaValue:
    return MetaValue(ValueType.ARRAY, MetaArray(ValueType.INT32, len(values), struct.pack(f"<{len(values)}i", *values)))


def floats(*values: float) -> MetaValue:
    return MetaValue(
        ValueType.ARRAY, MetaArray(ValueType.FLOAT32, len(values), struct.pack(f"<{len(values)}f", *values))
    )


def v4(**keys: MetaValue | None) -> dict[str, MetaValue | None]:
    return {f"deepseek4.{key.replace('__', '.')}": value for key, value in keys.items()}


def logits(path: Path, tokens: Sequence[int], cuts: Sequence[int] = (), chunk: int = 70) -> bytes:
    artifact = Artifact.open(path)
    # Whether a type is exact is another question: in equal chunks a split equals the whole with any.
    with open_chain(artifact, cut_at(artifact.hp.n_layers, cuts), CONTEXT, certified_only=False) as chain:
        return chain.feed(tokens, chunk=chunk)


@pytest.fixture(scope="module")
def plain(small: Path, prompt: Prompt) -> bytes:
    """Logits of the unchanged model."""
    return logits(small, prompt(140))


# --- files that run ---------------------------------------------------------------------------------------------------


def vision(path: Path, target: Path) -> Path:
    """A routing bias for image tokens in every layer."""
    bias = struct.pack("<8f", *(0.5 * index for index in range(8)))
    names = [f"blk.{layer}.exp_probs_b_vl.bias" for layer in range(N_LAYERS)]
    return edit_gguf(path, target, add={TensorForm(name, (8,), GgmlType.F32): bias for name in names})


def grouped(path: Path, target: Path) -> Path:
    """The output projection stored with its groups as a dimension."""
    file, data = read_gguf(path), path.read_bytes()
    names = [f"blk.{layer}.attn_output_a.weight" for layer in range(N_LAYERS)]
    tensors = [file.tensors[name] for name in names]
    added = {
        TensorForm(t.name, (t.ne[0], t.ne[1] // 2, 2), t.type): data[t.offset : t.offset + t.n_bytes] for t in tensors
    }
    return edit_gguf(path, target, drop=names, add=added)


def with_keys(**keys: MetaValue | None) -> Callable[[Path, Path], Path]:
    return lambda path, target: edit_gguf(path, target, keys=v4(**keys))


RATIOS = (0, 0, 4, 128, 4, 128, 4)
HARMLESS: dict[str, Callable[[Path, Path], Path]] = {
    # Older conversions announce an MTP block that they left out.
    "nextn key without its block": with_keys(nextn_predict_layers=u32(1)),
    # The revision of July 31st lists three more ratios than layers.
    "more ratios than layers": with_keys(attention__compress_ratios=ints(*RATIOS, 0, 0, 0)),
    "counts as arrays": with_keys(attention__head_count=ints(*[4] * 7), expert_feed_forward_length=ints(*[32] * 7)),
    "clamps as scalars": with_keys(swiglu_clamp_exp=f32(10.0), swiglu_clamp_shexp=None),
    "no optional keys": with_keys(
        embedding_length_out=None,
        vocab_size=None,
        rope__scaling__yarn_beta_fast=None,
        rope__scaling__yarn_beta_slow=None,
    ),
    "a vision bias": vision,
    "a grouped output projection": grouped,
    "wide alignment": lambda path, target: edit_gguf(path, target, keys={"general.alignment": u32(1024)}),
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_kinds_of_files_that_give_the_same_bits(
    small: Path, plain: bytes, prompt: Prompt, tmp_path: Path, kind: str
) -> None:
    path = HARMLESS[kind](small, tmp_path / "kind.gguf")
    assert logits(path, prompt(140)) == plain
    assert logits(path, prompt(140), CUTS) == plain


def test_an_mtp_block_changes_nothing(model: Model, plain: bytes, prompt: Prompt) -> None:
    path = model("f32", layers=N_LAYERS, mtp=True)
    assert Artifact.open(path).hp.n_mtp_layers == 1
    assert logits(path, prompt(140)) == plain
    assert logits(path, prompt(140), CUTS) == plain
    with pytest.raises(InvalidLayerRange, match="layer 7 is the MTP block"):
        LlamaEngine(path, LayerRange(3, 8), CONTEXT)


@pytest.mark.parametrize(("weights", "experts"), [("mixed", "mxfp4"), ("q8_0", "q8_0"), ("mixed_q2_k", "q2_K")])
def test_quantised_experts_run_split_as_whole(model: Model, prompt: Prompt, weights: str, experts: str) -> None:
    path = model(weights, layers=N_LAYERS)
    assert Artifact.open(path).tensors["blk.4.ffn_up_exps.weight"].type.label == experts
    whole = logits(path, prompt(140))
    assert logits(path, prompt(140), CUTS) == whole
    assert logits(path, prompt(140), (1, 4, 6)) == whole


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["mixed", "q8_0", "mixed_q2_k", "f16"])
def test_quantised_models_of_full_depth_run_split_as_whole(model: Model, prompt: Prompt, weights: str) -> None:
    path = model(weights)
    assert logits(path, prompt(140), (15, 29)) == logits(path, prompt(140))


# --- files that are refused -------------------------------------------------------------------------------------------


class Untouched:
    """Stands where native code would be; fails the test when it is asked for anything."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"native code was reached ({name})")


def refusal(path: Path, layers: LayerRange | None = None) -> str:
    with pytest.raises(ArtifactError) as caught:
        LlamaEngine(path, layers, CONTEXT, native=Untouched(), certified_only=False)  # type: ignore[arg-type]  # a stand-in
    return str(caught.value)


#: Values that make llama.cpp abort or divide by zero, with what the refusal says: key, value, limit.
ABORTS: dict[str, tuple[dict[str, MetaValue | None], str]] = {
    "no blocks": (v4(block_count=u32(0)), "deepseek4.block_count is 0; llama.cpp takes 1 to 512"),
    "600 blocks": (v4(block_count=u32(600)), "deepseek4.block_count is 600; llama.cpp takes 1 to 512"),
    "more MTP than blocks": (v4(nextn_predict_layers=u32(8)), "nextn_predict_layers is 8, beyond deepseek4.block_count (7)"),
    "no experts": (v4(expert_count=u32(0)), "deepseek4.expert_count is 0; llama.cpp takes 1 to 1024"),
    "5000 experts": (v4(expert_count=u32(5000)), "deepseek4.expert_count is 5000; llama.cpp takes 1 to 1024"),
    "no experts used": (v4(expert_used_count=u32(0)), "expert_used_count is 0, but must be 1 to expert_count (8)"),
    "9 experts used": (v4(expert_used_count=u32(9)), "expert_used_count is 9, but must be 1 to expert_count (8)"),
    "513 ratios": (v4(attention__compress_ratios=ints(*[0] * 513)), "has 513 entries, but must have 7 (block_count) to 512"),
    "ratio 7": (v4(attention__compress_ratios=ints(0, 0, 7, 0, 0, 0, 0)), "compress_ratios[2] is 7; only 0, 4 and 128"),
    "no sinkhorn": (
        v4(hyper_connection__sinkhorn_iterations=u32(0)),
        "sinkhorn_iterations is 0, but must be 1 (llama.cpp aborts on 0) to 1000",
    ),
    "3 streams": (v4(hyper_connection__count=u32(3), embedding_length_out=None), "hyper_connection.count is 3; the graph is"),
    "4 K heads": (v4(attention__head_count_kv=u32(4)), "attention.head_count_kv is 4, but V4 has 1"),
    "no output groups": (v4(attention__output_group_count=u32(0)), "output_group_count is 0, but must be at least 1"),
    "3 output groups": (v4(attention__output_group_count=u32(3)), "output_group_count is 3, which does not divide the 4 heads"),
    "rope too wide": (v4(rope__dimension_count=u32(34)), "dimension_count is 34, but must be even and at most"),
    "odd rope": (v4(rope__dimension_count=u32(15)), "dimension_count is 15, but must be even"),
    "indexer of 96": (v4(attention__indexer__key_length=u32(96)), "key_length is 96, but must be a multiple of 64"),
    "indexer of 0": (v4(attention__indexer__key_length=u32(0)), "key_length is 0, but must be at least 1"),
    "no window": (v4(attention__sliding_window=u32(0)), "sliding_window is 0, but must be at least 1"),
    "top 0": (v4(attention__indexer__top_k=u32(0)), "top_k is 0, but must be at least 1"),
    "expert groups": (v4(expert_group_count=u32(2)), "expert_group_count is 2, but V4 routes without groups"),
}  # fmt: skip

#: Files that llama.cpp would load and compute something else with, or refuse with less to go by.
WRONG: dict[str, tuple[dict[str, MetaValue | None], str]] = {
    "no YaRN type": (v4(rope__scaling__type=None), "without it llama.cpp would rotate the compressed layers' keys wrongly"),
    "no YaRN factor": (v4(rope__scaling__factor=None), "rope.scaling.factor is missing: without it llama.cpp would rotate"),
    "no YaRN context": (v4(rope__scaling__original_context_length=None), "original_context_length is missing: without it"),
    "short clamps": (v4(swiglu_clamp_exp=floats(1, 2, 3)), "swiglu_clamp_exp has 3 entries, but must have one per block (7)"),
    "long clamps": (v4(swiglu_clamp_shexp=floats(*[10] * 8)), "swiglu_clamp_shexp has 8 entries, but must have one per block"),
    "short ratios": (v4(attention__compress_ratios=ints(0, 0, 4)), "has 3 entries, but must have 7 (block_count) to 512"),
    "short head counts": (v4(attention__head_count=ints(4, 4)), "head_count has 2 entries, but must have one per block (7)"),
    "V4.1": (v4(attention__kv_source_layer_ids=ints(*[0] * 7)), "DeepSeek V4.1 shares K rows between layers"),
    "another model": ({"general.architecture": text("deepseek2")}, "'deepseek2', but this version runs 'deepseek4'"),
    # The block that nextn_predict_layers takes away must then be there as a layer.
    "8 blocks of 7": (
        v4(block_count=u32(8), nextn_predict_layers=u32(1), attention__compress_ratios=ints(*RATIOS, 0),
           swiglu_clamp_exp=f32(10), swiglu_clamp_shexp=f32(10)),
        "the tensor 'blk.7.attn_norm.weight' is missing, but layer range 0:8 needs it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*ABORTS, *WRONG])
def test_refused_before_native_code(small: Path, tmp_path: Path, kind: str) -> None:
    keys, message = (ABORTS | WRONG)[kind]
    said = refusal(edit_gguf(small, tmp_path / "bad.gguf", keys=keys))
    assert "bad.gguf: " in said
    assert message in said


def test_a_hash_table_that_routes_to_nowhere_is_refused_before_native_code(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    raw = bytearray(small.read_bytes())
    table = read_gguf(small).tensors["blk.1.ffn_gate_tid2eid.weight"]
    struct.pack_into("<i", raw, table.offset + 4 * 77, 8)
    path.write_bytes(raw)
    assert "sends token 38 to expert 8, but the model has experts 0 to 7" in refusal(path)
    assert "token 38" in refusal(path, LayerRange(1, 2))
    LlamaEngine(path, LayerRange(2, 4), CONTEXT).stop()  # not its table


def test_factors_beside_weights_are_refused_before_native_code(small: Path, tmp_path: Path) -> None:
    """llama.cpp reads them and its V4 graph leaves them out: the logits would be those of other weights."""
    name = "blk.4.ffn_up_exps.scale"
    added = {TensorForm(name, (8,), GgmlType.F32): struct.pack("<8f", *[0.5] * 8)}
    said = refusal(edit_gguf(small, tmp_path / "bad.gguf", add=added))
    assert f"{name!r} is a factor that llama.cpp's V4 graph does not apply" in said


@pytest.mark.parametrize("name", ["blk.3.attn_norm.weight", "token_embd.weight", "output_hc_fn.weight"])
def test_a_missing_tensor_is_refused_before_native_code(small: Path, tmp_path: Path, name: str) -> None:
    said = refusal(edit_gguf(small, tmp_path / "bad.gguf", drop=[name]))
    assert f"the tensor {name!r} is missing, but layer range 0:7 needs it" in said


def test_a_tensor_of_another_model_is_refused_before_native_code(small: Path, tmp_path: Path) -> None:
    added = {TensorForm("blk.0.engram.weight", (8,), GgmlType.F32): bytes(32)}
    path = edit_gguf(small, tmp_path / "bad.gguf", add=added)
    assert "'blk.0.engram.weight' is not part of a DeepSeek V4 Flash model" in refusal(path)
    with pytest.raises(UnsupportedModel):
        Artifact.open(path).check(LayerRange(0, 7))
