"""Models in parts: what is read, and which file is named when one is at fault."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dgr.artifact.artifact import Artifact
from dgr.artifact.parts import part_name, read_parts
from dgr.artifact.slice_metadata import manifest_path
from dgr.core.route import LayerRange
from dgr.errors import ArtifactError
from dgr.gguf.reader import MetaValue, ValueType
from dgr.gguf.writer import u16, u32
from dgr.selftest.fixture import edit_gguf, write_fixture

Parts = Callable[[int], Path]


@pytest.fixture
def parts(min_parts: Path, tmp_path: Path) -> Parts:
    """A copy of the model in four parts to do wrong to: gives a part's path by its number, from 1."""
    for path in min_parts.parent.iterdir():
        shutil.copy(path, tmp_path)
    return lambda number: tmp_path / part_name("min", number - 1, 4)


def i32(value: int) -> MetaValue:
    return MetaValue(ValueType.INT32, value)


def test_a_model_in_parts_is_the_model(min_parts: Path, min_model: Path) -> None:
    whole, split = Artifact.open(min_model), Artifact.open(min_parts)
    assert not split.parts.first.tensors
    assert all(file.tensors for file in split.parts.present[1:])
    assert split.hp == whole.hp
    assert split.layers == whole.layers == LayerRange(0, 4)
    assert split.tensors == whole.tensors
    assert split.weight_bytes(LayerRange(1, 3)) == whole.weight_bytes(LayerRange(1, 3))
    assert split.file_bytes == sum(path.stat().st_size for path in split.parts.paths)
    split.check(split.hp.whole)
    assert split.identity == whole.identity


def test_runs_of_tensors_follow_the_order_of_the_file(min_parts: Path, min_model: Path) -> None:
    split = read_parts(min_parts)
    assert [name for file in split.present for name in file.tensors] == list(read_parts(min_model).first.tensors)
    sizes = [sum(tensor.n_bytes for tensor in file.tensors.values()) for file in split.present[1:]]
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize("n_parts", [2, 3, 7, 145])
def test_any_number_of_parts(tmp_path: Path, min_model: Path, n_parts: int) -> None:
    summary = write_fixture(tmp_path / "x.gguf", preset="min", layers=4, mtp=True, parts=n_parts)
    found = read_parts(summary.path)
    assert len(found.present) == n_parts
    assert not found.missing
    assert summary.file_bytes == sum(path.stat().st_size for path in found.paths)
    assert Artifact.open(summary.path).identity == Artifact.open(min_model).identity
    assert len(list(tmp_path.iterdir())) == n_parts + 1  # and the manifest


def test_a_part_that_is_not_the_first(parts: Parts) -> None:
    with pytest.raises(
        ArtifactError, match=r"this is part 3 of 4 of a model; open the first part, .*min-00001-of-00004"
    ):
        Artifact.open(parts(3))
    parts(1).unlink()
    with pytest.raises(ArtifactError, match=r"min-00001-of-00004.gguf \(which is not there: fetch it\)"):
        Artifact.open(parts(2))
    with pytest.raises(ArtifactError, match=r"min-00001-of-00004.gguf: cannot be read: No such file"):
        Artifact.open(parts(1))


def test_a_first_part_by_another_name(parts: Parts, tmp_path: Path) -> None:
    for name in ("model.gguf", "min-00001-of-00003.gguf", "x-00002-of-00004.gguf"):
        target = parts(1).rename(tmp_path / name)
        with pytest.raises(ArtifactError, match=r"so its name must end in -00001-of-00004.gguf"):
            Artifact.open(target)
        target.rename(parts(1))
    parts(2).rename(tmp_path / "second.gguf")
    with pytest.raises(
        ArtifactError, match=r"this is part 2 of 4 of a model; open the first part, the file with split.no 0"
    ):
        Artifact.open(tmp_path / "second.gguf")


@pytest.mark.parametrize("order", [(1, 2, 3, 4), (1, 2), (2, 3), (4, 1), (1, 1)])
@pytest.mark.parametrize("name", ["joined.gguf", "min-00001-of-00004.gguf", "min-00002-of-00004.gguf"])
def test_parts_joined_as_bytes_are_called_that(parts: Parts, tmp_path: Path, order: tuple[int, ...], name: str) -> None:
    """The advice to rename such a file would not help."""
    content = b"".join(parts(number).read_bytes() for number in order)
    path = parts(1).with_name(name)
    path.write_bytes(content)
    opened = parts(1) if name.startswith("min-") else path
    with pytest.raises(ArtifactError, match=rf"{name}: another GGUF begins .* cut it again with gguf-split, or fetch"):
        Artifact.open(opened)


def test_a_missing_part_is_named_where_it_is_needed(parts: Parts) -> None:
    whole = Artifact.open(parts(1))
    held = {
        layer: [file for file in whole.parts.present if any(name.startswith(f"blk.{layer}.") for name in file.tensors)]
        for layer in range(4)
    }
    for number in (2, 3, 4):
        hidden = parts(number).rename(parts(number).with_suffix(".hidden"))
        artifact = Artifact.open(parts(1))
        assert [path.name for path in artifact.parts.missing] == [parts(number).name]
        assert not artifact.is_whole
        assert artifact.tensors == whole.tensors  # the manifest tells
        assert artifact.identity == whole.identity
        for layer in (1, 2):
            if parts(number) in [file.path for file in held[layer]]:
                with pytest.raises(
                    ArtifactError, match=rf"in none of the parts that are here.*fetch {parts(number).name}"
                ):
                    artifact.check(LayerRange(layer, layer + 1))
            else:
                artifact.check(LayerRange(layer, layer + 1))
                assert artifact.verify_weights(LayerRange(layer, layer + 1)) == whole.identity
        hidden.rename(parts(number))


def test_several_missing_parts_are_all_named(parts: Parts) -> None:
    parts(2).unlink()
    parts(4).unlink()
    with pytest.raises(
        ArtifactError, match=r"fetch min-00002-of-00004.gguf, min-00004-of-00004.gguf \(or the one of them"
    ):
        Artifact.open(parts(1)).check(LayerRange(0, 4))


def test_without_a_manifest_a_part_more_is_needed_for_the_identity(parts: Parts) -> None:
    known = Artifact.open(parts(1))
    manifest_path(known.parts).unlink()
    assert Artifact.open(parts(1)).identity == known.identity  # all parts are here: from the weights
    parts(2).unlink()
    artifact = Artifact.open(parts(1))
    asks: list[Callable[[], object]] = [lambda: artifact.identity, lambda: artifact.verify_weights(LayerRange(2, 3))]
    for ask in asks:
        with pytest.raises(
            ArtifactError, match=r"min-00002-of-00004.gguf is not here.*put the manifest\s*here as min.manif"
        ):
            ask()
    assert artifact.known_manifest() is None


def test_parts_in_each_others_place(parts: Parts, tmp_path: Path) -> None:
    parts(2).rename(tmp_path / "x")
    parts(3).rename(parts(2))
    (tmp_path / "x").rename(parts(3))
    with pytest.raises(
        ArtifactError, match=r"min-00002-of-00004.gguf: this is part 3 \(split.no is 2\) under the name of part 2"
    ):
        Artifact.open(parts(1))


def test_a_part_that_is_there_twice(parts: Parts) -> None:
    shutil.copy(parts(2), parts(4))
    with pytest.raises(ArtifactError, match=r"min-00004-of-00004.gguf: this is part 2 a second time .*; fetch part 4"):
        Artifact.open(parts(1))


def test_the_first_part_a_second_time(parts: Parts) -> None:
    shutil.copy(parts(1), parts(3))
    with pytest.raises(ArtifactError, match=r"min-00003-of-00004.gguf: this is part 1 a second time"):
        Artifact.open(parts(1))


def test_a_copy_under_the_right_number_has_tensors_twice(parts: Parts) -> None:
    edit_gguf(parts(2), parts(4), keys={"split.no": u16(3)})
    with pytest.raises(
        ArtifactError, match=r"min-00004-of-00004.gguf: holds the tensor 'token_embd.weight', which min-00002"
    ):
        Artifact.open(parts(1))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"split.count": u16(5)},
            r"min-00003-of-00004.gguf: a part of another model: its split.count is 5, but 4 in min-00001",
        ),
        ({"split.tensors.count": i32(99)}, r"min-00003.*: its split.tensors.count is 99, but 144 in"),
        (
            {"general.name": MetaValue(ValueType.STRING, "V3")},
            r"min-00003.*: its general.name is V3, but dgr fixture min",
        ),
        ({"split.count": None}, r"min-00003.*: the key split.count is missing, so it is not part of min-00001"),
        ({"split.no": None}, r"min-00003.*: the key split.no is missing"),
        # llama.cpp reads split.no without looking at its type, and aborts.
        ({"split.no": u32(2)}, r"min-00003.*: split.no is 2 \(UINT32\), but llama.cpp takes UINT16 only"),
    ],
)
def test_a_foreign_part_is_named(parts: Parts, keys: dict[str, MetaValue | None], message: str) -> None:
    edit_gguf(parts(3), parts(3), keys=keys)
    with pytest.raises(ArtifactError, match=message):
        Artifact.open(parts(1))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"split.tensors.count": None}, "split.tensors.count is missing"),
        ({"split.no": None}, "split.no is missing"),
        ({"split.count": u32(4)}, r"split.count is 4 \(UINT32\)"),
        ({"split.tensors.count": i32(-1)}, "split.tensors.count is -1"),
    ],
)
def test_a_first_part_that_says_it_wrongly(parts: Parts, keys: dict[str, MetaValue | None], message: str) -> None:
    edit_gguf(parts(1), parts(1), keys=keys)
    with pytest.raises(ArtifactError, match=message):
        Artifact.open(parts(1))


def test_tensors_too_many_or_too_few(parts: Parts) -> None:
    edit_gguf(parts(4), parts(4), drop=["blk.3.attn_norm.weight"])
    with pytest.raises(
        ArtifactError, match=r"split.tensors.count is 144, but the parts hold 143 tensors \(min-00001-of-00004.g"
    ):
        Artifact.open(parts(1))
    parts(4).unlink()
    for number in (1, 2, 3):
        edit_gguf(parts(number), parts(number), keys={"split.tensors.count": i32(9)})
    with pytest.raises(ArtifactError, match=r"split.tensors.count is 9, but the parts hold"):
        Artifact.open(parts(1))


def test_a_part_of_the_same_model_with_other_weights_is_found_by_its_digest(parts: Parts, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_fixture(other / "min.gguf", preset="min", layers=4, mtp=True, seed=5, parts=4)
    shutil.copy(other / parts(4).name, parts(4))
    artifact = Artifact.open(parts(1))
    artifact.verify_weights(LayerRange(0, 1))
    with pytest.raises(
        ArtifactError, match=r"min-00004-of-00004.gguf: the weights of 'blk.3.[a-z_.]+' are not those of model"
    ):
        artifact.verify_weights(LayerRange(3, 4))


def test_a_truncated_part_is_named(parts: Parts) -> None:
    data = parts(3).read_bytes()
    parts(3).write_bytes(data[: len(data) // 2])
    with pytest.raises(ArtifactError, match=r"min-00003-of-00004.gguf: tensor .* but the file has"):
        Artifact.open(parts(1))
