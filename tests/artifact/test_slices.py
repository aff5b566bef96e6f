"""Slices: what is in them, whose they are, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from dgr.artifact.artifact import Artifact
from dgr.artifact.manifest import encode_manifest
from dgr.artifact.slice_metadata import LAYER_BEGIN, LAYER_END, MANIFEST_KEY, PARENT_KEY
from dgr.artifact.slicing import write_slice
from dgr.core.route import LayerRange
from dgr.errors import ArtifactError, InputError, InvalidLayerRange
from dgr.gguf.reader import MetaValue, ValueType, read_gguf
from dgr.gguf.writer import u32
from dgr.selftest.fixture import edit_gguf, write_fixture

RANGES = [LayerRange(0, 2), LayerRange(2, 3), LayerRange(3, 4), LayerRange(0, 4)]


def payload(path: Path, name: str) -> bytes:
    tensor = read_gguf(path).tensors[name]
    return path.read_bytes()[tensor.offset : tensor.offset + tensor.n_bytes]


@pytest.mark.parametrize("layers", RANGES, ids=str)
def test_a_slice_holds_its_range_and_nothing_else(min_model: Path, tmp_path: Path, layers: LayerRange) -> None:
    parent = Artifact.open(min_model)
    summary = write_slice(parent, layers, tmp_path / "slice.gguf")
    part = Artifact.open(summary.path)
    own = {tensor.name for tensor in parent.tensors_of(layers)}
    assert set(part.located) - {"blk.4.nextn.eh_proj.weight"} == own
    assert all(payload(Path(summary.path), name) == payload(min_model, name) for name in own)
    assert (part.is_slice, part.is_whole, part.layers) == (True, False, layers)
    assert part.hp == parent.hp
    assert summary.n_tensors == len(own)
    assert summary.weight_bytes == parent.weight_bytes(layers)
    assert summary.file_bytes == Path(summary.path).stat().st_size
    part.check(layers)
    assert part.verify_weights(layers) == part.identity == parent.identity == summary.identity
    assert summary.range_digest == parent.manifest().digest_of(own)
    # The whole model is known, so that its sizes can be asked for.
    assert part.tensors == parent.tensors
    assert part.weight_bytes(parent.hp.whole) == parent.weight_bytes(parent.hp.whole)


def test_all_metadata_stays(min_model: Path, tmp_path: Path) -> None:
    write_slice(Artifact.open(min_model), LayerRange(1, 3), tmp_path / "slice.gguf")
    mine, theirs = (dict(read_gguf(path).metadata) for path in (tmp_path / "slice.gguf", min_model))
    assert mine.pop(LAYER_BEGIN) == u32(1)
    assert mine.pop(LAYER_END) == u32(3)
    assert mine.pop(PARENT_KEY).value == Artifact.open(min_model).identity
    assert isinstance(mine.pop(MANIFEST_KEY).value, str)
    assert mine == theirs
    assert list(mine) == list(theirs)


def test_the_alignment_of_the_parent_is_kept(min_model: Path, tmp_path: Path) -> None:
    wide = edit_gguf(min_model, tmp_path / "wide.gguf", keys={"general.alignment": u32(512)})
    write_slice(Artifact.open(wide), LayerRange(1, 3), tmp_path / "slice.gguf")
    file = read_gguf(tmp_path / "slice.gguf")
    assert file.alignment == 512
    assert all(tensor.offset % 512 == 0 for tensor in file.tensors.values())
    assert Artifact.open(file.path).identity == Artifact.open(min_model).identity


def test_a_model_in_parts_gives_the_same_slice(min_model: Path, min_parts: Path, tmp_path: Path) -> None:
    for source, name in ((min_model, "a"), (min_parts, "b")):
        write_slice(Artifact.open(source), LayerRange(1, 3), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_only_the_parts_that_hold_the_range_are_needed(min_parts: Path, tmp_path: Path) -> None:
    for path in min_parts.parent.iterdir():
        shutil.copy(path, tmp_path)
    whole = write_slice(Artifact.open(min_parts), LayerRange(1, 2), tmp_path / "whole.gguf")
    (tmp_path / "min-00004-of-00004.gguf").unlink()
    summary = write_slice(Artifact.open(tmp_path / min_parts.name), LayerRange(1, 2), tmp_path / "slice.gguf")
    assert Path(summary.path).read_bytes() == Path(whole.path).read_bytes()
    with pytest.raises(ArtifactError, match=r"fetch min-00004-of-00004.gguf"):
        write_slice(Artifact.open(tmp_path / min_parts.name), LayerRange(3, 4), tmp_path / "no.gguf")


def test_a_slice_of_a_slice(min_model: Path, tmp_path: Path) -> None:
    write_slice(Artifact.open(min_model), LayerRange(1, 4), tmp_path / "big.gguf")
    write_slice(Artifact.open(tmp_path / "big.gguf"), LayerRange(2, 3), tmp_path / "small.gguf")
    write_slice(Artifact.open(min_model), LayerRange(2, 3), tmp_path / "direct.gguf")
    assert (tmp_path / "small.gguf").read_bytes() == (tmp_path / "direct.gguf").read_bytes()


@pytest.mark.parametrize("layers", [LayerRange(0, 1), LayerRange(0, 4), LayerRange(1, 4), LayerRange(3, 4)], ids=str)
def test_ranges_outside_a_slice_are_refused(min_model: Path, tmp_path: Path, layers: LayerRange) -> None:
    write_slice(Artifact.open(min_model), LayerRange(1, 3), tmp_path / "slice.gguf")
    part = Artifact.open(tmp_path / "slice.gguf")
    with pytest.raises(ArtifactError, match=f"this slice holds layers 1:3 of the model, not all of {layers}"):
        part.check(layers)
    part.check(LayerRange(2, 3))


def test_a_changed_byte_in_a_slice_is_found(min_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "slice.gguf"
    write_slice(Artifact.open(min_model), LayerRange(1, 3), path)
    tensor = read_gguf(path).tensors["blk.2.indexer.proj.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.offset + 7] ^= 1
    path.write_bytes(data)
    part = Artifact.open(path)
    part.verify_weights(LayerRange(1, 2))
    with pytest.raises(
        ArtifactError, match=r"slice.gguf: the weights of 'blk.2.indexer.proj.weight' are not those of model"
    ):
        part.verify_weights(part.layers)


def test_weights_are_held_against_the_manifest_while_copied(min_parts: Path, tmp_path: Path) -> None:
    for path in min_parts.parent.iterdir():
        shutil.copy(path, tmp_path)
    third = tmp_path / "min-00003-of-00004.gguf"
    name, tensor = next(iter(read_gguf(third).tensors.items()))
    data = bytearray(third.read_bytes())
    data[tensor.offset] ^= 1
    third.write_bytes(data)
    artifact = Artifact.open(tmp_path / min_parts.name)
    layer = int(name.split(".")[1])
    with pytest.raises(ArtifactError, match=f"min-00003.*the weights of {name!r} are not those of the manifest"):
        write_slice(artifact, LayerRange(layer, layer + 1), tmp_path / "slice.gguf")
    assert not [path for path in tmp_path.iterdir() if "slice" in path.name]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({LAYER_END: u32(9)}, r"are 1 and 9, which is not a range of the model's 4 main layers"),
        ({LAYER_BEGIN: u32(3)}, r"are 3 and 3, which is not a range"),
        ({LAYER_BEGIN: MetaValue(ValueType.STRING, "1")}, r"layer_begin is '1', but must be a UINT32"),
        ({LAYER_BEGIN: MetaValue(ValueType.INT32, 1)}, r"layer_begin is 1, but must be a UINT32"),
        ({MANIFEST_KEY: u32(3)}, r"deepseek4.dgr.manifest is not a text"),
        ({MANIFEST_KEY: MetaValue(ValueType.STRING, "{")}, r"the manifest of its model is damaged"),
        (
            {"deepseek4.expert_weights_scale": MetaValue(ValueType.FLOAT32, 2.0)},
            "its metadata is not that of slice.gguf",
        ),
    ],
)
def test_a_slice_that_says_it_wrongly(
    min_model: Path, tmp_path: Path, keys: dict[str, MetaValue | None], message: str
) -> None:
    path = tmp_path / "slice.gguf"
    write_slice(Artifact.open(min_model), LayerRange(1, 3), path)
    edit_gguf(path, path, keys=keys)
    with pytest.raises(ArtifactError, match=message):
        Artifact.open(path)


def test_a_slice_without_a_manifest_has_no_identity(min_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "slice.gguf"
    write_slice(Artifact.open(min_model), LayerRange(1, 3), path)
    edit_gguf(path, path, keys={MANIFEST_KEY: None})
    part = Artifact.open(path)
    part.check(LayerRange(1, 3))
    with pytest.raises(ArtifactError, match=r"holds layers 1:3 only and does not say of which model; use `dgr slice`"):
        part.verify_weights(LayerRange(1, 3))


def test_where_a_slice_may_go(min_model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(min_model, tmp_path / "model.gguf"))
    artifact = Artifact.open(copy)
    with pytest.raises(InputError, match=r"model.gguf cannot be written: it is what is read"):
        write_slice(artifact, LayerRange(0, 1), tmp_path / "." / "model.gguf")
    with pytest.raises(InputError, match=r"cannot be written: there is no folder .*absent"):
        write_slice(artifact, LayerRange(0, 1), tmp_path / "absent" / "slice.gguf")
    with pytest.raises(InvalidLayerRange, match="4 is the MTP block"):
        write_slice(artifact, LayerRange(3, 5), tmp_path / "slice.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_model_that_cannot_run_is_not_sliced(min_model: Path, tmp_path: Path) -> None:
    raw = bytearray(min_model.read_bytes())
    table = read_gguf(min_model).tensors["blk.1.ffn_gate_tid2eid.weight"]
    struct.pack_into("<i", raw, table.offset, 99)
    (tmp_path / "bad.gguf").write_bytes(raw)
    with pytest.raises(ArtifactError, match="sends token 0 to expert 99"):
        write_slice(Artifact.open(tmp_path / "bad.gguf"), LayerRange(0, 2), tmp_path / "slice.gguf")


def test_progress_counts_the_copy(min_model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    summary = write_slice(
        Artifact.open(min_model), LayerRange(1, 3), tmp_path / "s.gguf", lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (summary.weight_bytes, summary.weight_bytes)


@pytest.mark.parametrize("mtp", [False, True])
def test_the_stand_in_keeps_the_schedule(tmp_path: Path, mtp: bool) -> None:
    """Without nextn.eh_proj the MTP block would count as one more main layer, for us and for llama.cpp."""
    write_fixture(tmp_path / "m.gguf", preset="min", layers=5, mtp=mtp)
    for begin in range(5):
        write_slice(Artifact.open(tmp_path / "m.gguf"), LayerRange(begin, begin + 1), tmp_path / "s.gguf")
        part = Artifact.open(tmp_path / "s.gguf")
        assert (part.hp.n_layers, part.hp.n_mtp_layers) == (5, int(mtp))
        stand_in = part.located.get("blk.5.nextn.eh_proj.weight")
        assert (stand_in is not None) == mtp
        if stand_in is not None:
            assert stand_in[1].ne == (64, 32)
            assert stand_in[1].n_bytes < 64 * 32


FORGED: dict[str, tuple[list[int], int, str]] = {
    "beyond 64 bits": ([2**62, 2**8], 0, "is not a tensor of a GGUF file"),
    "beyond any disk": ([2**40, 2**20], 0, "take"),
    "a dimension of more": ([2**64, 1], 0, "is not a tensor of a GGUF file"),
    "no dimension": ([], 0, "is not a tensor of a GGUF file"),
    "five dimensions": ([32, 320, 1, 1, 1], 0, "is not a tensor of a GGUF file"),
    "an empty one": ([32, 0], 0, "is not a tensor of a GGUF file"),
    "a negative one": ([32, -320], 0, "is not a tensor of a GGUF file"),
    "no whole block": ([33, 320], 8, "is not a tensor of a GGUF file"),
    "no type": ([32, 320], 4, "is not a tensor of a GGUF file"),
    "another model's shape": ([64, 320], 0, "has the shape"),
    "a type of none of the graph": ([32, 320], 26, "has the type i32"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_manifest_is_refused_before_it_sizes_anything(min_model: Path, tmp_path: Path, case: str) -> None:
    """The entry of a tensor that is elsewhere: nothing in the slice itself speaks against it."""
    write_slice(Artifact.open(min_model), LayerRange(1, 3), tmp_path / "slice.gguf")
    manifest = Artifact.open(tmp_path / "slice.gguf").stored_manifest
    assert manifest is not None
    said = json.loads(encode_manifest(manifest))
    ne, kind, message = FORGED[case]
    next(entry for entry in said["tensors"] if entry[0] == "output.weight")[1:3] = [kind, ne]
    path = edit_gguf(
        tmp_path / "slice.gguf",
        tmp_path / "forged.gguf",
        keys={MANIFEST_KEY: MetaValue(ValueType.STRING, json.dumps(said))},
    )
    with pytest.raises(ArtifactError) as caught:
        Artifact.open(path).check_forms(LayerRange(3, 4))
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "endless"])
def test_what_lies_in_the_manifest_s_place_is_looked_at_before_it_is_opened(
    min_model: Path, tmp_path: Path, kind: str
) -> None:
    shutil.copy(min_model, tmp_path / "model.gguf")
    beside = tmp_path / "model.manifest.json"
    if kind == "a pipe":
        os.mkfifo(beside)  # opening it would wait for a writer
    elif kind == "a folder":
        beside.mkdir()
    else:
        with beside.open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(ArtifactError, match=r"model\.manifest\.json: lies where the model's manifest would"):
        Artifact.open(tmp_path / "model.gguf")
