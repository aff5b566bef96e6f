"""Artifacts: inventory, checks of a range, identity."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from dgr.artifact.artifact import Artifact
from dgr.core.route import LayerRange
from dgr.errors import ArtifactError, InvalidLayerRange, UnsupportedModel
from dgr.gguf.reader import TensorInfo, ValueType
from dgr.gguf.types import GgmlType
from dgr.v4.hyper_parameters import V4_FLASH
from dgr.v4.tensors import TensorKind, block_tensors, head_tensors, range_tensors, tail_tensors


def with_tensors(artifact: Artifact, change: Callable[[dict[str, TensorInfo]], None]) -> Artifact:
    tensors = dict(artifact.file.tensors)
    change(tensors)
    file = evolve(artifact.file, tensors=tensors)
    return evolve(artifact, parts=evolve(artifact.parts, files=(file,), n_tensors=len(tensors)))


def test_published_model_has_the_published_tensors() -> None:
    specs = [spec for spec in range_tensors(V4_FLASH, V4_FLASH.whole) if spec.required]
    assert len(specs) == 1328
    assert [sum(s.required for s in block_tensors(V4_FLASH, layer)) for layer in (0, 2, 3)] == [24, 34, 28]
    weights = sum(spec.n_elements for spec in specs if spec.kind is not TensorKind.HASH_TABLE)
    assert round(weights / 1e9, 2) == 284.33
    by_name = {spec.name: spec.ne for spec in specs}
    assert by_name["output_hc_fn.weight"] == (16384, 4)
    assert by_name["blk.7.attn_compressor_ape.weight"] == (512, 128)
    assert by_name["blk.8.attn_compressor_kv.weight"] == (4096, 1024)
    assert by_name["blk.8.indexer.attn_q_b.weight"] == (1024, 8192)
    assert by_name["blk.8.indexer_compressor_ape.weight"] == (256, 4)
    assert by_name["blk.2.ffn_gate_tid2eid.weight"] == (6, 129280)
    assert "blk.2.exp_probs_b.bias" not in by_name
    assert by_name["blk.3.exp_probs_b.bias"] == (256,)
    assert "blk.3.ffn_gate_tid2eid.weight" not in by_name
    assert by_name["blk.9.ffn_down_exps.weight"] == (2048, 4096, 256)
    assert by_name["blk.9.attn_output_a.weight"] == (4096, 8192)


def test_globals_belong_to_head_and_tail_alone() -> None:
    def names(layers: LayerRange) -> set[str]:
        return {spec.name for spec in range_tensors(V4_FLASH, layers) if not spec.name.startswith("blk.")}

    head = {spec.name for spec in head_tensors(V4_FLASH)}
    tail = {spec.name for spec in tail_tensors(V4_FLASH)}
    assert head == {"token_embd.weight"}
    assert len(tail) == 5
    assert names(LayerRange(0, 20)) == head
    assert names(LayerRange(20, 42)) == set()
    assert names(LayerRange(42, 43)) == tail
    assert names(V4_FLASH.whole) == head | tail


def test_inventory_adds_up(min_model: Path) -> None:
    artifact = Artifact.open(min_model)
    blocks = [artifact.block_bytes(block) for block in range(5)]
    stored = sum(tensor.n_bytes for tensor in artifact.file.tensors.values())
    assert sum(blocks) + artifact.head_bytes + artifact.tail_bytes == stored
    assert artifact.head_bytes == 32 * 320 * 4
    assert artifact.weight_bytes(LayerRange(0, 2)) == artifact.head_bytes + blocks[0] + blocks[1]
    assert artifact.weight_bytes(LayerRange(1, 3)) == blocks[1] + blocks[2]
    assert artifact.weight_bytes(LayerRange(3, 4)) == blocks[3] + artifact.tail_bytes
    # The MTP block weighs, but no range loads it.
    assert artifact.weight_bytes(artifact.hp.whole) == stored - blocks[4]
    artifact.check(artifact.hp.whole)


def test_types_by_range(min_mixed: Path) -> None:
    artifact = Artifact.open(min_mixed)
    types = {str(layers): artifact.matrix_types(layers) for layers in (LayerRange(1, 2), LayerRange(0, 2))}
    assert types["1:2"] == (GgmlType.F32, GgmlType.Q8_0, GgmlType.MXFP4)
    assert types["0:2"] == (GgmlType.F32, GgmlType.Q8_0, GgmlType.BF16, GgmlType.MXFP4)


def test_a_missing_tensor_is_named_and_only_its_range_refused(min_model: Path) -> None:
    artifact = with_tensors(Artifact.open(min_model), lambda tensors: tensors.__delitem__("blk.2.indexer.proj.weight"))
    with pytest.raises(
        ArtifactError, match=r"'blk\.2\.indexer\.proj\.weight' is missing, but layer range 0:4 needs it"
    ):
        artifact.check(artifact.hp.whole)
    artifact.check(LayerRange(0, 2))
    artifact.check(LayerRange(3, 4))


def test_globals_are_demanded_of_head_and_tail(min_model: Path) -> None:
    def drop(tensors: dict[str, TensorInfo]) -> None:
        del tensors["token_embd.weight"], tensors["output_hc_base.weight"]

    artifact = with_tensors(Artifact.open(min_model), drop)
    artifact.check(LayerRange(1, 3))
    with pytest.raises(ArtifactError, match="token_embd"):
        artifact.check(LayerRange(0, 1))
    with pytest.raises(ArtifactError, match="output_hc_base"):
        artifact.check(LayerRange(3, 4))


def replaced(name: str, **fields: Any) -> Callable[[dict[str, TensorInfo]], None]:
    def change(tensors: dict[str, TensorInfo]) -> None:
        tensors[name] = evolve(tensors[name], **fields)

    return change


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("blk.1.attn_kv.weight", {"ne": (16, 32)}, r"shape \[16, 32\], but the hyper-parameters give \[32, 16\]"),
        ("blk.1.attn_norm.weight", {"type": GgmlType.F16}, "type f16, but must have f32"),
        ("blk.1.attn_sinks.weight", {"type": GgmlType.BF16}, "type bf16, but must have f32"),
        ("blk.1.ffn_gate_tid2eid.weight", {"type": GgmlType.F32}, "type f32, but must have i32"),
        ("blk.1.attn_kv.weight", {"type": GgmlType.I32}, "type i32, but must have a float or quantised type"),
        ("blk.1.ffn_up_exps.weight", {"type": GgmlType.Q8_K}, "type q8_K, but must have"),
    ],
)
def test_misshapen_and_mistyped_tensors(min_model: Path, name: str, fields: Mapping[str, object], message: str) -> None:
    artifact = with_tensors(Artifact.open(min_model), replaced(name, **fields))
    with pytest.raises(ArtifactError, match=message):
        artifact.check(artifact.hp.whole)


@pytest.mark.parametrize("ne", [(32, 16, 2), (32, 32, 1)])
def test_grouped_output_projection_may_be_stored_either_way(min_model: Path, ne: tuple[int, ...]) -> None:
    artifact = with_tensors(Artifact.open(min_model), replaced("blk.0.attn_output_a.weight", ne=ne))
    artifact.check(artifact.hp.whole)


def test_a_tensor_of_another_model_is_refused(min_model: Path) -> None:
    def add(tensors: dict[str, TensorInfo]) -> None:
        tensors["engram.table.weight"] = evolve(tensors["token_embd.weight"], name="engram.table.weight")

    artifact = with_tensors(Artifact.open(min_model), add)
    with pytest.raises(UnsupportedModel, match=r"'engram\.table\.weight' is not part of"):
        artifact.check(artifact.hp.whole)


def test_optional_vision_bias_is_part_of_the_model(min_model: Path) -> None:
    def add(tensors: dict[str, TensorInfo]) -> None:
        tensors["blk.0.exp_probs_b_vl.bias"] = evolve(
            tensors["blk.3.exp_probs_b.bias"], name="blk.0.exp_probs_b_vl.bias"
        )

    with_tensors(Artifact.open(min_model), add).check(LayerRange(0, 4))


@pytest.mark.parametrize(("layer", "place", "expert"), [(0, 0, -1), (1, 639, 4), (2, 321, 1 << 30)])
def test_expert_ids_in_the_hash_table_are_checked(
    min_model: Path, tmp_path: Path, layer: int, place: int, expert: int
) -> None:
    path = tmp_path / "bad.gguf"
    raw = bytearray(min_model.read_bytes())
    table = Artifact.open(min_model).file.tensors[f"blk.{layer}.ffn_gate_tid2eid.weight"]
    struct.pack_into("<i", raw, table.offset + 4 * place, expert)
    path.write_bytes(raw)
    artifact = Artifact.open(path)
    with pytest.raises(
        ArtifactError, match=rf"blk\.{layer}\..* sends token {place // 2} to expert {expert}, .* 0 to 3"
    ):
        artifact.check(artifact.hp.whole)
    artifact.check(LayerRange(3, 4))


def test_a_file_that_shrinks_after_opening(min_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(min_model.read_bytes())
    artifact = Artifact.open(path)
    with path.open("r+b") as file:
        file.truncate(artifact.file.tensors["blk.0.ffn_gate_tid2eid.weight"].offset + 5)
    with pytest.raises(ArtifactError, match="became shorter"):
        artifact.check(LayerRange(0, 1))
    path.unlink()
    with pytest.raises(ArtifactError, match="cannot be read"):
        artifact.check(LayerRange(0, 1))


def test_ranges_beyond_the_model(min_model: Path) -> None:
    artifact = Artifact.open(min_model)
    for ask in (artifact.check, artifact.weight_bytes, artifact.matrix_types):
        with pytest.raises(InvalidLayerRange, match="3:5"):
            ask(LayerRange(3, 5))


def test_other_models_are_named_with_their_file(build_gguf: Callable[..., bytes], tmp_path: Path) -> None:
    path = tmp_path / "llama.gguf"
    name = struct.pack("<Q", 5) + b"llama"
    path.write_bytes(build_gguf([("general.architecture", ValueType.STRING, name)]))
    with pytest.raises(UnsupportedModel, match=rf"{path}: general.architecture is 'llama'"):
        Artifact.open(path)


@pytest.mark.parametrize("name", ["blk.3.ffn_up_exps.scale", "blk.0.ffn_down_shexp.input_scale"])
def test_factors_that_the_graph_would_ignore_are_refused(min_model: Path, name: str) -> None:
    def add(tensors: dict[str, TensorInfo]) -> None:
        tensors[name] = evolve(tensors["blk.3.exp_probs_b.bias"], name=name)

    artifact = with_tensors(Artifact.open(min_model), add)
    with pytest.raises(UnsupportedModel, match=rf"'{name}' is a factor that llama.cpp's V4 graph does not apply"):
        artifact.check(LayerRange(1, 2))


def test_mtp_is_no_layer_of_a_range(min_model: Path) -> None:
    with pytest.raises(InvalidLayerRange, match="layer 4 is the MTP block, which is reserved and never run"):
        Artifact.open(min_model).check(LayerRange(3, 5))
