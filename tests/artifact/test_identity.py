"""Identity: what changes it and what does not, how digests are computed, kept and held against weights."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attrs import evolve

from dgr.artifact import digests
from dgr.artifact.artifact import Artifact
from dgr.artifact.digests import digest_tensors, known_digests
from dgr.artifact.manifest import Manifest, decode_manifest, encode_manifest, make_manifest, metadata_digest
from dgr.artifact.slice_metadata import manifest_path
from dgr.core.route import LayerRange
from dgr.errors import ArtifactError
from dgr.gguf.reader import MetaValue, TensorInfo, ValueType, read_gguf
from dgr.gguf.types import GgmlType
from dgr.gguf.writer import TensorForm, u32
from dgr.selftest.fixture import edit_gguf, write_fixture


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DGR_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def old(min_model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the model that nobody touched for an hour."""
    monkeypatch.setattr(digests, "_now", lambda: time.time() + 3600)
    return Path(shutil.copy(min_model, tmp_path / "old.gguf"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of tensors whose data is read for a digest, as it happens."""
    seen: list[str] = []
    real = digests._digest_one

    def spy(fd: int, path: Path, tensor: TensorInfo, meter: digests._Meter) -> str:
        seen.append(tensor.name)
        return real(fd, path, tensor, meter)

    monkeypatch.setattr(digests, "_digest_one", spy)
    return seen


def flip(path: Path, name: str, at: int = 0) -> None:
    """Change one bit of a weight; the clock of the file moves on as it does for any write."""
    tensor = read_gguf(path).tensors[name]
    with path.open("r+b") as file:
        file.seek(tensor.offset + at)
        byte = file.read(1)[0]
        file.seek(tensor.offset + at)
        file.write(bytes([byte ^ 1]))


# --- what identity is -------------------------------------------------------------------------------------------------


def test_seeds_and_shapes_have_their_own(min_model: Path, tmp_path: Path) -> None:
    again, seeded, longer = (tmp_path / name for name in ("again.gguf", "seeded.gguf", "longer.gguf"))
    write_fixture(again, preset="min", layers=4, mtp=True)
    write_fixture(seeded, preset="min", layers=4, mtp=True, seed=5)
    write_fixture(longer, preset="min", layers=5, mtp=True)
    known = Artifact.open(min_model).identity
    assert len(known) == 64
    assert Artifact.open(again).identity == known
    assert len({known, Artifact.open(seeded).identity, Artifact.open(longer).identity}) == 3


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.2.ffn_gate_tid2eid.weight", "blk.4.nextn.hnorm.weight"])
def test_one_bit_of_a_weight_counts(min_model: Path, tmp_path: Path, name: str) -> None:
    path = Path(shutil.copy(min_model, tmp_path / "x.gguf"))
    before = Artifact.open(path).manifest()
    last = read_gguf(path).tensors[name].n_bytes - 1
    flip(path, name, last)
    after = Artifact.open(path).manifest()
    assert after.identity != before.identity
    assert [entry.name for entry in after.tensors if entry not in before.tensors] == [name]
    flip(path, name, last)
    assert Artifact.open(path).identity == before.identity


def test_storage_does_not_count(min_model: Path, tmp_path: Path) -> None:
    known = Artifact.open(min_model).identity
    texts = {"general.name": MetaValue(ValueType.STRING, "other"), "general.alignment": u32(256)}
    moved = edit_gguf(min_model, tmp_path / "moved.gguf", keys=texts)
    assert Artifact.open(moved).identity == known
    name = "blk.0.attn_norm.weight"
    tensor = read_gguf(min_model).tensors[name]
    data = min_model.read_bytes()[tensor.offset : tensor.offset + tensor.n_bytes]
    reordered = edit_gguf(
        min_model, tmp_path / "order.gguf", drop=[name], add={TensorForm(name, tensor.ne, tensor.type): data}
    )
    assert list(read_gguf(reordered).tensors)[-1] == name
    assert Artifact.open(reordered).identity == known


def test_metadata_counts_but_for_names_and_storage(min_model: Path) -> None:
    metadata = dict(read_gguf(min_model).metadata)

    def with_key(**changes: MetaValue) -> str:
        return metadata_digest({**metadata, **changes})

    known = metadata_digest(metadata)
    assert known == metadata_digest(dict(reversed(metadata.items())))
    for ignored in ("general.name", "general.alignment", "split.count", "deepseek4.dgr.layer_begin"):
        assert known == with_key(**{ignored: u32(7)})
    for counted in ("deepseek4.expert_weights_scale", "tokenizer.ggml.bos_token_id", "general.architecture", "new.key"):
        assert known != with_key(**{counted: u32(7)})
    # The same number in another type is another key.
    assert with_key(k=u32(7)) != with_key(k=MetaValue(ValueType.INT32, 7))


def some_manifest(**changes: Any) -> Manifest:
    metadata: Mapping[str, MetaValue] = {
        "general.architecture": MetaValue(ValueType.STRING, "deepseek4"),
        "k": MetaValue(ValueType.FLOAT32, 0.5),
    }
    first = evolve(TensorInfo("t", (4, 2), GgmlType.F16, 0, 16), **changes)
    other = TensorInfo("s", (1,), GgmlType.F32, 32, 4)
    return make_manifest(metadata, [first, other], {first.name: "ab" * 32, "s": "cd" * 32})


def test_identity_is_stable() -> None:
    found = some_manifest()
    assert [entry.name for entry in found.tensors] == ["s", "t"]
    assert found.metadata == "fdcf0e041cfbc9d2f5c45d4aac8f6d0db9a28e055f35a673f107d6c83a356dae"
    assert found.digest == "81be886ce9d756c24bc732533341bf5b223f4b6db7ccce8bc3a0da80eeb403d5"
    assert found.identity == "a416b77caa92c9688204da7b2f25b4538007b92de370a3864973298453e469bc"
    assert found.digest_of(["t"]) == "1fafa039aac4c8dac776e89664a6e955e075a222878840735d3193debdf67464"


def test_every_field_of_an_entry_counts() -> None:
    known = some_manifest()
    assert some_manifest(offset=4096, n_bytes=99) == known
    for change in ({"name": "x"}, {"ne": (2, 4)}, {"type": GgmlType.BF16}):
        assert some_manifest(**change).identity != known.identity


def test_a_range_has_a_digest_of_its_own(min_model: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(min_model, tmp_path / "x.gguf"))
    artifact = Artifact.open(path)

    def ranges(manifest: Manifest) -> list[str]:
        return [manifest.digest_of(spec.name for spec in artifact.specs_of(LayerRange(a, a + 1))) for a in range(4)]

    before = ranges(artifact.manifest())
    assert len(set(before)) == 4
    flip(path, "blk.2.attn_kv.weight")
    after = ranges(Artifact.open(path).manifest())
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, True]


# --- digests: once, in parallel, kept ---------------------------------------------------------------------------------


def test_a_digest_is_that_of_the_data(min_model: Path) -> None:
    file = read_gguf(min_model)
    found = digest_tensors([(file, list(file.tensors.values()))])
    data = min_model.read_bytes()
    for name in ("token_embd.weight", "output_hc_scale.weight", "blk.3.ffn_down_exps.weight"):
        tensor = file.tensors[name]
        own = hashlib.blake2b(
            data[tensor.offset : tensor.offset + tensor.n_bytes], digest_size=32, person=b"dgr-tensor/1"
        )
        assert found[name] == own.hexdigest()


def test_weights_are_read_once(old: Path, reads: list[str]) -> None:
    first = Artifact.open(old)
    assert first.known_manifest() is None
    identity = first.identity
    assert sorted(reads) == sorted(first.located)
    reads.clear()
    assert first.identity == identity
    known = Artifact.open(old).known_manifest()
    assert known is not None
    assert known.identity == identity
    assert reads == []


def test_a_link_needs_no_reading(old: Path, reads: list[str]) -> None:
    identity = Artifact.open(old).identity
    reads.clear()
    link = old.with_name("link.gguf")
    link.symlink_to(old)
    assert Artifact.open(link).identity == identity
    assert reads == []


def test_a_changed_file_is_read_again(old: Path, reads: list[str]) -> None:
    identity = Artifact.open(old).identity
    flip(old, "output.weight")
    assert Artifact.open(old).known_manifest() is None
    assert Artifact.open(old).identity != identity


def test_a_file_changed_in_place_under_its_old_time_is_read_again(old: Path) -> None:
    """As ``rsync --inplace --times`` leaves it, and whoever gives all files one date."""
    os.utime(old, (5, 5))
    before, identity = old.stat(), Artifact.open(old).identity
    flip(old, "output.weight")
    os.utime(old, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (old.stat().st_size, old.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert Artifact.open(old).known_manifest() is None
    assert Artifact.open(old).identity != identity


@pytest.mark.parametrize("ahead", [-2.5, 2.5, 86400.0])
def test_a_file_servers_clock_may_be_ahead_or_behind(old: Path, ahead: float, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = old.stat().st_ctime
    monkeypatch.setattr(digests, "_now", lambda: changed - ahead)
    assert Artifact.open(old).identity
    assert len(known_digests(read_gguf(old))) == 144


@pytest.mark.parametrize("date", [0, 2**31, 2**33])
def test_the_date_that_a_file_was_given_does_not_matter(old: Path, date: int) -> None:
    os.utime(old, (date, date))
    assert Artifact.open(old).identity
    assert len(known_digests(read_gguf(old))) == 144


@pytest.mark.parametrize("after", [-1.5, 0.0, 1.5])
def test_a_file_that_was_just_changed_is_not_recorded(
    old: Path, after: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Within one tick of the file system's clock two contents have one time of change."""
    os.utime(old, (5, 5))
    changed = old.stat().st_ctime
    slept: list[float] = []
    monkeypatch.setattr(digests, "_now", lambda: changed + after)
    monkeypatch.setattr(digests, "_sleep", slept.append)
    assert Artifact.open(old).identity
    assert known_digests(read_gguf(old)) == {}
    assert caplog.records == []
    monkeypatch.setattr(digests, "_COSTLY", 1000)
    assert Artifact.open(old).identity
    assert slept == pytest.approx([] if after < 0 else [2 - after])
    assert re.search(r"old.gguf are not kept \(it was changed just now.*the next start reads .*iB again", caplog.text)


def test_a_range_is_read_and_kept_alone(old: Path, reads: list[str]) -> None:
    artifact = Artifact.open(old)
    manifest_path(artifact.parts).write_bytes(encode_manifest(artifact.read_manifest()))
    copy = Path(shutil.copy(old, old.with_name("copy.gguf")))
    manifest_path(artifact.parts).rename(copy.with_name("copy.manifest.json"))
    reads.clear()
    artifact = Artifact.open(copy)
    layers = LayerRange(2, 3)
    assert artifact.verify_weights(layers) == artifact.identity
    assert sorted(reads) == sorted(tensor.name for tensor in artifact.tensors_of(layers))
    reads.clear()
    artifact.verify_weights(LayerRange(1, 3))
    assert all(name.startswith("blk.1.") for name in reads)
    assert reads


def test_a_stopped_run_goes_on_where_it_stopped(old: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = digests._digest_one

    def fail_late(fd: int, path: Path, tensor: TensorInfo, meter: digests._Meter) -> str:
        if tensor.name.startswith("blk.3."):
            raise KeyboardInterrupt
        return real(fd, path, tensor, meter)

    monkeypatch.setattr(digests, "_digest_one", fail_late)
    artifact = Artifact.open(old)
    with pytest.raises(KeyboardInterrupt):
        artifact.manifest()
    monkeypatch.setattr(digests, "_digest_one", real)
    done = known_digests(artifact.file)
    assert 0 < len(done) < len(artifact.located)
    assert artifact.identity
    assert set(known_digests(artifact.file)) == set(artifact.located)


def test_stages_that_start_together_read_the_weights_once(old: Path, reads: list[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: Artifact.open(old).identity, range(4)))
    assert len(set(found)) == 1
    assert len(reads) == len(set(reads))


def test_whoever_waits_sees_how_far_the_reading_is(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second reader reads nothing, and its own bar moves while the first one reads."""
    monkeypatch.setattr(digests, "_NOTE_EVERY", 0.0)
    reader, ours, theirs = digests._digest_one, [], []
    half_way, seen = threading.Event(), threading.Event()

    def slow(fd: int, path: Path, tensor: TensorInfo, meter: digests._Meter) -> str:
        found = reader(fd, path, tensor, meter)
        ours.append(tensor.name)
        if len(ours) >= 20:
            half_way.set()
            assert seen.wait(30)
        return found

    def watch(done: int, total: int) -> None:
        theirs.append(done / total)
        seen.set()

    monkeypatch.setattr(digests, "_digest_one", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Artifact.open(old).manifest)
        assert half_way.wait(30)
        second = pool.submit(Artifact.open(old).manifest, watch)
        assert first.result() == second.result()
    assert len(ours) == len(set(ours))
    assert 0 < theirs[0] < 1
    assert theirs[-1] == 1


@pytest.mark.parametrize("note", [b"", b"5", b"x y", b"-1 5", b"7 5", b"5 0", b"\xff" * 48, b"1 2 3"])
def test_a_note_that_says_nothing_moves_no_bar(note: bytes) -> None:
    seen: list[tuple[int, int]] = []
    digests._Meter(100, lambda done, total: seen.append((done, total))).watch(note)
    assert seen == []


def test_a_large_file_that_was_just_changed_is_waited_for(
    old: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moment is less than what reading it again at every start takes."""
    waits: list[float] = []
    now = old.stat().st_ctime + 0.5

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        monkeypatch.setattr(digests, "_now", lambda: now + seconds + 0.001)

    monkeypatch.setattr(digests, "_COSTLY", 1000)
    monkeypatch.setattr(digests, "_sleep", sleep)
    monkeypatch.setattr(digests, "_now", lambda: now)
    first = Artifact.open(old).identity
    assert waits == [pytest.approx(digests._SETTLED - 0.5)]
    n_reads = len(reads)
    assert Artifact.open(old).identity == first
    assert len(reads) == n_reads


def test_progress_counts_every_byte_once(old: Path) -> None:
    seen: list[tuple[int, int]] = []
    artifact = Artifact.open(old)
    artifact.manifest(lambda done, total: seen.append((done, total)))
    total = sum(tensor.n_bytes for _, tensor in artifact.located.values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    seen.clear()
    artifact.manifest(lambda done, total: seen.append((done, total)))
    assert seen == []


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"a": 1}', '{"output.weight": "zz"}', '{"output.weight": ""}'])
def test_a_damaged_record_is_made_again(old: Path, cache: Path, damage: str) -> None:
    identity = Artifact.open(old).identity
    (record,) = (cache / "digests").glob("*.json")
    record.write_text(damage)
    assert Artifact.open(old).identity == identity
    assert len(msgspec.json.decode(record.read_bytes())) == 144


def test_a_cache_that_cannot_be_written_costs_time_only(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    identity = Artifact.open(old).identity
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("DGR_CACHE_DIR", str(tmp_path / "file"))
    assert Artifact.open(old).identity == identity
    assert caplog.records == []
    monkeypatch.setattr(digests, "_COSTLY", 1000)
    assert Artifact.open(old).identity == identity
    assert "the digests of" in caplog.text
    assert "cannot be made" in caplog.text


def test_old_records_make_room(old: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_KEPT", 3)
    (cache / "digests").mkdir(parents=True)
    for index in range(5):
        stale = cache / "digests" / f"{index}.json"
        stale.write_text("{}")
        os.utime(stale, (index, index))
    assert Artifact.open(old).identity
    left = sorted(path.name for path in (cache / "digests").glob("*.json"))
    assert len(left) == 3
    assert {"3.json", "4.json"} < set(left)
    assert not list((cache / "digests").glob("*.lock"))
    assert not list((cache / "digests").glob("*.part"))


def test_a_file_that_changes_while_being_read_is_refused(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = digests._digest_all

    def touch(*args: Any) -> None:
        real(*args)
        os.utime(old, (5, 5))

    monkeypatch.setattr(digests, "_digest_all", touch)
    with pytest.raises(ArtifactError, match="the file changed while being read"):
        _ = Artifact.open(old).identity
    assert known_digests(read_gguf(old)) == {}


def test_a_file_that_shrinks_or_goes_away(old: Path) -> None:
    artifact = Artifact.open(old)
    with old.open("r+b") as file:
        file.truncate(artifact.file.file_bytes // 2)
    with pytest.raises(ArtifactError, match="became shorter"):
        artifact.manifest()
    old.unlink()
    with pytest.raises(ArtifactError, match="cannot be read"):
        artifact.manifest()


# --- manifests beside a model -----------------------------------------------------------------------------------------


def test_a_manifest_beside_a_model_is_believed_but_for_the_own_tensors(old: Path, reads: list[str]) -> None:
    artifact = Artifact.open(old)
    manifest = artifact.manifest()
    beside = manifest_path(artifact.parts)
    assert beside.name == "old.manifest.json"
    beside.write_bytes(encode_manifest(manifest))
    flip(old, "blk.0.attn_norm.weight", 2)
    reads.clear()
    artifact = Artifact.open(old)
    assert artifact.identity == manifest.identity
    assert reads == []
    artifact.verify_weights(LayerRange(1, 4))
    with pytest.raises(
        ArtifactError, match=r"old.gguf: the weights of 'blk.0.attn_norm.weight' are not those of model"
    ):
        artifact.verify_weights(LayerRange(0, 1))
    assert artifact.read_manifest().identity != manifest.identity


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b'{"metadata": "x", "tensors": [["a", 0, [1]]]}'])
def test_a_damaged_manifest(old: Path, damage: bytes) -> None:
    old.with_name("old.manifest.json").write_bytes(damage)
    with pytest.raises(ArtifactError, match=r"old.manifest.json: the manifest of its model is damaged"):
        Artifact.open(old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": "00" * 32}, "its metadata is not that of old.gguf"),
        ({"tensors": lambda entries: entries[1:]}, "is not in it as old.gguf has it"),
        ({"tensors": lambda entries: (msgspec.structs.replace(entries[0], ne=(1,)), *entries[1:])}, "is not in it as"),
        ({"tensors": lambda entries: (*entries, msgspec.structs.replace(entries[0], name="z"))}, "lists 145 tensors"),
        ({"tensors": lambda entries: entries[::-1]}, "damaged"),
        ({"tensors": lambda entries: (msgspec.structs.replace(entries[0], digest="xy"), *entries[1:])}, "damaged"),
        ({"tensors": lambda entries: (msgspec.structs.replace(entries[0], type=99), *entries[1:])}, "damaged"),
        ({"version": 2}, "has version 2"),
    ],
)
def test_a_manifest_of_another_model(old: Path, change: dict[str, object], message: str) -> None:
    manifest = Artifact.open(old).manifest()
    fields = {key: value(manifest.tensors) if callable(value) else value for key, value in change.items()}
    wrong = msgspec.structs.replace(manifest, **fields)
    old.with_name("old.manifest.json").write_bytes(encode_manifest(wrong))
    with pytest.raises(ArtifactError, match=message):
        Artifact.open(old)


def test_a_manifest_survives_its_encoding(old: Path) -> None:
    manifest = Artifact.open(old).manifest()
    assert decode_manifest(encode_manifest(manifest), old) == manifest
