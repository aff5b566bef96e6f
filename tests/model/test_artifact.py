"""Artifacts: inventory, checks of a range, identity."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from attrs import evolve

from dgr.errors import ArtifactError, InvalidLayerRange, UnsupportedModel
from dgr.model.artifact import Artifact, identity
from dgr.model.ggml import GgmlType
from dgr.model.gguf import GgufFile, MetaValue, TensorInfo, ValueType
from dgr.model.route import LayerRange
from dgr.model.tensors import TensorKind, block_tensors, head_tensors, range_tensors, tail_tensors
from dgr.model.v4 import V4_FLASH
from dgr.testing.fixture import write_fixture


def with_tensors(artifact: Artifact, change: Callable[[dict[str, TensorInfo]], None]) -> Artifact:
    tensors = dict(artifact.file.tensors)
    change(tensors)
    return evolve(artifact, file=evolve(artifact.file, tensors=tensors))


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


def replaced(name: str, **fields: object) -> Callable[[dict[str, TensorInfo]], None]:
    def change(tensors: dict[str, TensorInfo]) -> None:
        tensors[name] = evolve(tensors[name], **fields)  # type: ignore[arg-type]

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
    with pytest.raises(UnsupportedModel, match=r"'engram\.table\.weight' is no part of"):
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


def test_parts_of_a_split_model_are_refused(build_gguf: Callable[..., bytes], tmp_path: Path) -> None:
    path = tmp_path / "m-00002-of-00003.gguf"
    pairs = [
        ("split.no", ValueType.UINT16, struct.pack("<H", 1)),
        ("split.count", ValueType.UINT16, struct.pack("<H", 3)),
    ]
    path.write_bytes(build_gguf(pairs))
    with pytest.raises(ArtifactError, match="part 2 of a model in 3 files"):
        Artifact.open(path)


def same(file: GgufFile, **changes: MetaValue | None) -> str:
    metadata = {**file.metadata, **{key: value for key, value in changes.items() if value is not None}}
    return identity(metadata, file.tensors.values())


def test_identity_ignores_names_and_order_and_nothing_else(min_model: Path, tmp_path: Path) -> None:
    artifact = Artifact.open(min_model)
    file, known = artifact.file, artifact.identity
    assert len(known) == 64
    assert known == identity(dict(reversed(list(file.metadata.items()))), list(file.tensors.values())[::-1])
    moved = [evolve(tensor, offset=tensor.offset + 4096) for tensor in file.tensors.values()]
    assert known == identity(file.metadata, moved)
    for ignored in ("general.name", "general.alignment", "split.count", "deepseek4.dgr.layer_begin"):
        assert known == same(file, **{ignored: MetaValue(ValueType.UINT32, 7)})
    for counted in ("deepseek4.expert_weights_scale", "tokenizer.ggml.bos_token_id", "general.architecture", "new.key"):
        assert known != same(file, **{counted: MetaValue(ValueType.UINT32, 7)})
    # The same number in another type is another key.
    one, other = (MetaValue(kind, 7) for kind in (ValueType.UINT32, ValueType.INT32))
    assert same(file, k=one) != same(file, k=other)
    first, *rest = file.tensors.values()
    assert known != identity(file.metadata, rest)
    for change in ({"name": "x"}, {"ne": first.ne[::-1]}, {"type": GgmlType.I32}):
        assert known != identity(file.metadata, [evolve(first, **change), *rest])


def test_identity_is_stable() -> None:
    metadata = {
        "general.architecture": MetaValue(ValueType.STRING, "deepseek4"),
        "k": MetaValue(ValueType.FLOAT32, 0.5),
    }
    tensors = [TensorInfo("t", (4, 2), GgmlType.F16, 0, 16)]
    assert identity(metadata, tensors) == "55735c1c40ba3b6d74f2d3d49d3215fbcfe7be356f92ba482aea00c8e6706be6"


def test_seeds_share_an_identity_and_shapes_do_not(min_model: Path, tmp_path: Path) -> None:
    again, more = tmp_path / "again.gguf", tmp_path / "more.gguf"
    write_fixture(again, preset="min", layers=4, mtp=True, seed=5)
    write_fixture(more, preset="min", layers=5, mtp=True)
    # Until weights are digested, the table is all there is.
    assert Artifact.open(again).identity == Artifact.open(min_model).identity
    assert Artifact.open(more).identity != Artifact.open(min_model).identity
