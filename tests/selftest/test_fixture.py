"""The fixture writer: the same bytes everywhere, non-trivial values in every tensor, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dgr.artifact.artifact import Artifact
from dgr.cli import fixture as fixture_command
from dgr.cli import main
from dgr.core.route import LayerRange
from dgr.errors import ArtifactError, InputError, InvalidLayerRange
from dgr.gguf.types import GgmlType
from dgr.selftest.fixture import cached_fixture, values, write_fixture
from dgr.selftest.fixture.presets import BLOCK_TYPES, PRESETS, WEIGHTS
from dgr.selftest.fixture.stream import Stream, bfloat16
from dgr.testing.limits import limited_files
from dgr.v4.published import PUBLISHED
from dgr.v4.tensors import TensorKind, block_tensors, head_tensors, range_tensors, tail_tensors

# Digests of the tensor data and of the whole file: the data depends on this repository alone.
PINNED = {
    ("min", "f32", 0): "952b9aa30dc456e1d8e0995bd3380a2cc4c4f4a5307e5ef497c6aed8e16b1232",
    ("min", "f32", 1): "0ff3ad58e96a8509e8bcbf6d38bb02e6bb0357321ceec87e4afa2b2415fa6ac9",
    ("min", "f16", 0): "6f99c065380f8a86c257b6d4d3f47636e2ddf5e483cfa1399ef8090d1a9595f9",
    ("min", "mixed", 0): "b8e3bae3e868ac9abb9999a3709b0d0bbaaee61c55d8a630cebebe0491f93e8a",
    ("min", "q8_0", 0): "c943cdd98f5841ad866a4fdd7ecf5a4ffad680ebe519ddd38169185821a83d92",
    ("wide", "q4_k", 0): "6a415574ccb06063895b1faf79b1a9fa6fb2a7049f80721e322b03abdb3fd997",
}


# Digests of whole files of four layers, header and all: of every type a matrix can have.
WHOLE = {
    ("min", "f32", 7): "e55029a79ae26340737f443cb7989e4bb4682164d34c60523756b14f6f4d1424",
    ("min", "f16", 7): "a3322182320cc321fa60bf924e012c1c221cb798b89b1f41886a610415f53cc9",
    ("min", "mixed", 7): "82c8ef16707405f41694e17f58cf5cbf39568f9f43b63260bfb2c3a54a78ffae",
    ("min", "q8_0", 7): "f18fa4a4b9dba8dadc50d3c18763de17406bffcddb55d850c9324226ac59e0aa",
    ("wide", "f32", 3): "b78162f2ac9d56c91fe62ca254b32450371997f71ecbaf3db40ecf11ae1b17a0",
    ("wide", "f16", 3): "5db1e9171c893fc4cc9e31812b7ad6daa075fbcfbe144970cd3fd0835f38880c",
    ("wide", "mixed", 3): "720fa6c99ca2ed6d81b97eff884e68b3246d62d224c5d6de7d145fc8546ad90b",
    ("wide", "mixed_q2_k", 3): "bc75d7fae6c843b9de3d586a63432520d570438a70c7cb8f70cedc48e8f6c14c",
    ("wide", "mixed_iq2_xxs", 3): "9de2b59f1c390896c3dba23d16e84219106092745c3b2101445700d7ac837530",
    ("wide", "q8_0", 3): "c600e34957d6a46e4771465cb7ae28b16b72c3a66789999af46fdb3dfeab2e88",
    ("wide", "q4_k", 3): "e2d373c12c3378b775e49e85a6247b3686d7c7027ba5e30e2687f189f0670d67",
    ("wide", "bf16", 3): "2217b7d35bc0c162774f1e5df47da0dceb2d16d5d70657fbb3661950b6e6649e",
    ("wide", "iq1_m", 3): "7d64252042e1cf1639424a41c040f56bdbda34f3312f42b6ed941700a1128ad2",
    ("wide", "iq1_s", 3): "137cda7a1aa38a0904d7dafdf0b71ac0dfc30e75e7001e3cc16f34bb659f3fcf",
    ("wide", "iq2_s", 3): "d7a5340db03777eddee6147f5af4d80b46be5da3d329e6a38cabe1cdb3ba1ad0",
    ("wide", "iq2_xs", 3): "c3d8821873b76612a1216c5c56c4fc15a3720d4f1db9b4fe75b0c93a767d28cb",
    ("wide", "iq2_xxs", 3): "c0ea6412945c33df60444d55cb4e43f8a18359a9823786a5ef5f1774b6a90e5c",
    ("wide", "iq3_s", 3): "2b83ed4298a253a633d826a07938ffe101d40dc3e6cb21ace112a45f474c645e",
    ("wide", "iq3_xxs", 3): "c90c6112572a5b4b566dcb382804dd5861c2a73fe7e0d0988b69fb747a5eaa90",
    ("wide", "iq4_nl", 3): "3701f3bd07a98589776dbbf3905f85faf271cc5c6e3cbc2b5096193b17d9f686",
    ("wide", "iq4_xs", 3): "7e00a88017aed108ad783f44ba39709dcd53870c4f5fde3c97dce42c957ddc29",
    ("wide", "mxfp4", 3): "86dd62d77728c291f90559891b44f06a40876915123dd4d90a4f9d437a4d7198",
    ("wide", "nvfp4", 3): "02507bb047f7db05448ceafb2bb040ff793fe810134fcffe9dfb0b1f974899dc",
    ("wide", "q1_0", 3): "a4ca8ae0d6ebfc8a5b697d79972ceade9fbba55822fbd1cf6d544864686dac7e",
    ("wide", "q2_k", 3): "28f6fef5a6966ac1a96d9d2efa285ea067ddb9654d76d7ce9eaf6fe184781029",
    ("wide", "q3_k", 3): "309d87598ae7a2612f3c49da09f2e93780d6b7ac1ea749f0305629db0b29f4f9",
    ("wide", "q4_0", 3): "9b2650dc478d6902ce7af02149d82e96d27819e921e4df61f670c9d78b0c9266",
    ("wide", "q4_1", 3): "ba63d29d864bf8cd09b98750292a54e7f84f87cc332e41e167fc9f4856d0c96b",
    ("wide", "q5_0", 3): "ed7fd688884d9ed44b26f7aee963969e5da11ba6dfbf6e316f488c6f16e9a7f7",
    ("wide", "q5_1", 3): "9863f93ba27d408a434bdb77803d4a2981e7821108eac6c40b81d7b94109570d",
    ("wide", "q5_k", 3): "4d952cced06f6d59b722cea8c8ffc45ab7e5888fedddf947b4454bfcb5fea426",
    ("wide", "q6_k", 3): "95584e6cd5db150de28180eb57e61f715b512dd09f5194a7a8c430477dd05c77",
    ("wide", "tq1_0", 3): "002c8250ab15203722f572a440e22c844def2886136170c4471b25eca55a67a6",
    ("wide", "tq2_0", 3): "245300d9a1230076195d510d54df1fb625b01928c02de60425e790b45c0c528f",
}

# Digests of a model in four parts and of its manifest.
PARTS = [
    "356b0c03d9d40f7d947618f5d7e7f33a06eb650cfc64e60fcb959a9e4334eaf9",
    "92f77a29e708dd65bc723246674b9020ab47f7bf2e2d663df8f25d7865965f8a",
    "5f32da262ff32c8120dc1d1e5ec52b54e9de491043b23b36b3658d2add6a20e6",
    "729bc207a3c632c3706dd76326d44892ab1535787349621e08da53b3c1dbd959",
    "10ccae8b948480d29aaf6eb549ae277f844ccc1ce9059d386a27feca35671471",
]


def data_digest(path: Path) -> str:
    file = Artifact.open(path).file
    return hashlib.sha256(path.read_bytes()[file.data_offset :]).hexdigest()


@pytest.mark.parametrize(("preset", "weights", "seed"), PINNED)
def test_a_seed_gives_the_same_bytes_forever(tmp_path: Path, preset: str, weights: str, seed: int) -> None:
    path = tmp_path / "model.gguf"
    write_fixture(path, preset=preset, weights=weights, seed=seed, layers=4)
    assert data_digest(path) == PINNED[preset, weights, seed]


@pytest.mark.parametrize(("preset", "weights", "seed"), WHOLE)
def test_a_file_of_every_type_is_the_same_forever(tmp_path: Path, preset: str, weights: str, seed: int) -> None:
    path = tmp_path / "model.gguf"
    write_fixture(path, preset=preset, weights=weights, seed=seed, layers=4)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == WHOLE[preset, weights, seed]


def test_every_type_is_pinned() -> None:
    pinned = {weights.upper() for _, weights, _ in WHOLE}
    # The published files are made of these types.
    own = {weights.upper() for weights in WEIGHTS if weights not in PUBLISHED}
    assert pinned >= {kind.name for kind in BLOCK_TYPES} | own


def test_parts_are_the_same_forever(tmp_path: Path) -> None:
    write_fixture(tmp_path / "m.gguf", weights="mixed", layers=3, parts=4)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == [
        *(f"m-{index:05d}-of-00004.gguf" for index in range(1, 5)),
        "m.manifest.json",
    ]
    assert [hashlib.sha256(path.read_bytes()).hexdigest() for path in files] == PARTS


def test_the_default_file_is_the_same_twice(tmp_path: Path) -> None:
    digests = set()
    for name in ("a", "b"):
        write_fixture(tmp_path / name, preset="min", layers=3)
        digests.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    assert digests == {"5599d19f57b94bf6069d38dbdf8a645f4e737ab08ed9f90198c69802171d6777"}


def test_the_stream_is_splitmix64() -> None:
    def reference(key: int, index: int) -> int:
        mask = (1 << 64) - 1
        x = (key + (index + 1) * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    stream = Stream(7, "blk.0.attn_norm.weight")
    key = stream._key
    words = [*stream.words(5), *stream.words(3)]
    assert [int(word) for word in words] == [reference(key, index) for index in range(8)]
    assert Stream(8, "blk.0.attn_norm.weight")._key != key != Stream(7, "blk.1.attn_norm.weight")._key


def test_uniform_values_fill_their_interval() -> None:
    values = Stream(0, "x").uniform(1 << 16, 0.25, 1.0)
    assert values.dtype == np.float32
    assert 0.75 <= values.min() < 0.7501
    assert 1.2499 < values.max() <= 1.25
    assert abs(float(values.mean()) - 1.0) < 0.002


def test_bfloat16_rounds_to_nearest_even() -> None:
    exact = np.array([1.0, -2.5, 1.00390625, 1.01171875, 1.004, 3.3895314e38], np.float32)
    raw = bfloat16(exact).view("<u2").astype(np.uint32) << 16
    assert raw.view(np.float32).tolist() == [1.0, -2.5, 1.0, 1.015625, 1.0078125, pytest.approx(3.39e38, rel=1e-3)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "whole.gguf"
    write_fixture(path, preset="min", layers=5, mtp=True)
    return path


def test_every_tensor_of_the_model_is_there(whole: Path) -> None:
    artifact = Artifact.open(whole)
    hp = artifact.hp
    specs = [*head_tensors(hp), *tail_tensors(hp), *(s for block in range(6) for s in block_tensors(hp, block))]
    required = {spec.name for spec in specs if spec.required}
    assert set(artifact.file.tensors) == required | {"blk.5.nextn.shared_head_norm.weight"}
    artifact.check(hp.whole)


def test_no_value_is_trivial(whole: Path) -> None:
    artifact = Artifact.open(whole)
    seen: dict[bytes, str] = {}
    for tensor in gguf.GGUFReader(whole).tensors:
        kind = artifact._known[tensor.name].kind
        data = np.asarray(tensor.data)
        assert seen.setdefault(data.tobytes(), tensor.name) == tensor.name
        if kind is TensorKind.HASH_TABLE:
            continue
        flat = data.reshape(-1).astype(np.float64)
        assert np.isfinite(flat).all(), tensor.name
        assert (flat != 0).all(), tensor.name
        assert len(np.unique(flat)) > 0.95 * len(flat), tensor.name
        match kind:
            case TensorKind.NORM:
                assert flat.min() >= 0.75, tensor.name
                assert flat.max() <= 1.25, tensor.name
            case TensorKind.HC_SCALE:
                assert flat.min() >= 0.5, tensor.name
                assert flat.max() <= 1.0, tensor.name
            case TensorKind.SINK | TensorKind.APE | TensorKind.HC_BASE | TensorKind.EXPERT_BIAS:
                assert np.abs(flat).max() <= 1, tensor.name
                assert len(flat) < 16 or flat.min() < 0 < flat.max(), tensor.name
            case TensorKind.EMBEDDING:
                assert float(np.sqrt((flat**2).mean())) == pytest.approx(1.0, rel=0.02)
            case TensorKind.OUTPUT:
                assert 0.05 < float(np.abs(flat).mean()) < 1.0
            case _:
                expected = 1 / math.sqrt(int(tensor.shape[0]))
                assert float(np.sqrt((flat**2).mean())) == pytest.approx(expected, rel=0.1), tensor.name


def test_hash_tables_route_to_distinct_experts(whole: Path) -> None:
    tables = [tensor for tensor in gguf.GGUFReader(whole).tensors if tensor.name.endswith("tid2eid.weight")]
    assert [tensor.name.split(".")[1] for tensor in tables] == ["0", "1", "2"]
    for tensor in tables:
        rows = np.asarray(tensor.data)
        assert rows.shape == (320, 2)
        assert rows.dtype == np.int32
        assert rows.min() == 0
        assert rows.max() == 3
        assert (rows[:, 0] != rows[:, 1]).all()
        assert len({tuple(row) for row in rows.tolist()}) == 12  # every ordered pair of 4 experts


TYPES = {
    "f32": {},
    "f16": {"DENSE": "F16", "EXPERT": "F16", "COMPRESSOR": "F16", "EMBEDDING": "F16", "OUTPUT": "F16"},
    "mixed": {"DENSE": "Q8_0", "EXPERT": "MXFP4", "COMPRESSOR": "BF16", "EMBEDDING": "BF16", "OUTPUT": "BF16"},
    "mixed_q2_k": {"DENSE": "Q8_0", "EXPERT": "Q2_K", "COMPRESSOR": "Q8_0", "EMBEDDING": "Q8_0", "OUTPUT": "Q8_0"},
    "mixed_iq2_xxs": {
        "DENSE": "Q8_0",
        "EXPERT": "IQ2_XXS",
        "COMPRESSOR": "Q8_0",
        "EMBEDDING": "Q8_0",
        "OUTPUT": "Q8_0",
    },
    "q8_0": {"DENSE": "Q8_0", "EXPERT": "Q8_0", "COMPRESSOR": "Q8_0", "EMBEDDING": "Q8_0", "OUTPUT": "Q8_0"},
    "q4_k": {"DENSE": "Q4_K", "EXPERT": "Q4_K", "COMPRESSOR": "Q4_K", "EMBEDDING": "Q4_K", "OUTPUT": "Q4_K"},
}


@pytest.mark.parametrize("weights", TYPES)
def test_types_and_sizes_of_quantised_weights(tmp_path: Path, weights: str) -> None:
    path = tmp_path / "model.gguf"
    write_fixture(path, weights=weights, preset="wide" if weights.endswith(("_k", "_xxs")) else "min", layers=4)
    artifact = Artifact.open(path)
    artifact.check(artifact.hp.whole)
    for tensor in gguf.GGUFReader(path).tensors:
        kind = artifact._known[tensor.name].kind
        stored = GgmlType(int(tensor.tensor_type))
        default = "I32" if kind is TensorKind.HASH_TABLE else "F32"
        down = weights == "mixed_iq2_xxs" and tensor.name.endswith("ffn_down_exps.weight")
        assert stored.name == ("Q2_K" if down else TYPES[weights].get(kind.name, default)), tensor.name
        if kind in (TensorKind.DENSE, TensorKind.EXPERT, TensorKind.COMPRESSOR):
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            assert np.isfinite(values).all()
            rms = float(np.sqrt((values**2).mean())) * math.sqrt(int(tensor.shape[0]))
            low, high = (0.5, 2.0) if stored is GgmlType.MXFP4 else (0.85, 1.15)
            assert low < rms < high, (tensor.name, rms)
            assert abs(float(values.mean())) < 0.1 * float(values.std()), tensor.name


def test_q4_k_needs_wide_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"multiples of 256 values, but token_embd.weight has rows of 64"):
        write_fixture(tmp_path / "x.gguf", preset="tiny", weights="q4_k")
    assert write_fixture(tmp_path / "x.gguf", weights="q4_k", layers=1).preset == "wide"
    assert list(tmp_path.iterdir()) == [tmp_path / "x.gguf"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"preset": "huge"}, "unknown preset 'huge'; choose one of min, tiny, wide, heads, big, flash, real"),
        ({"weights": "q2"}, "unknown weights 'q2'"),
        ({"layers": 0}, "0 layers asked for"),
        ({"layers": 44}, "44 layers asked for, but the schedule has 1 to 43"),
        ({"seed": -1}, "seed -1"),
        ({"layers": LayerRange(40, 44)}, "ends beyond the last main layer"),
        ({"layers": LayerRange(2, 4), "sparse": True}, "one file of real data"),
        ({"layers": LayerRange(2, 4), "mtp": True}, "one file of real data"),
        ({"layers": LayerRange(2, 4), "parts": 3}, "one file of real data"),
    ],
)
def test_refuses(tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, InvalidLayerRange), match=message):
        write_fixture(tmp_path / "x.gguf", **asked)
    assert list(tmp_path.iterdir()) == []


def test_refuses_what_the_disk_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000_000_000))
    with pytest.raises(InputError, match=r"takes 145.71 GiB \(156458025308 bytes\), but its disk has 93.13 GiB free"):
        write_fixture(tmp_path / "x.gguf", preset="real")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent/x.gguf cannot be written: there is no folder"):
        write_fixture(tmp_path / "absent" / "x.gguf", layers=1, preset="min")


def test_a_model_that_cannot_be_written_leaves_the_one_that_is_there(tmp_path: Path) -> None:
    path, manifest = tmp_path / "m.gguf", tmp_path / "m.manifest.json"
    write_fixture(path, layers=1, preset="min")
    manifest.write_text("its manifest", encoding="utf-8")
    before = path.read_bytes()
    with limited_files(10_000), pytest.raises(InputError, match=r"m.gguf cannot be written: File too large"):
        write_fixture(path, layers=1, preset="min", seed=1)
    assert path.read_bytes() == before
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, manifest.name}
    write_fixture(path, layers=1, preset="min", seed=1)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_prefixes_share_their_layers(tmp_path: Path) -> None:
    write_fixture(tmp_path / "3.gguf", preset="min", layers=3)
    write_fixture(tmp_path / "5.gguf", preset="min", layers=5)
    shorter, longer = (gguf.GGUFReader(tmp_path / name).tensors for name in ("3.gguf", "5.gguf"))
    data = {tensor.name: np.asarray(tensor.data).tobytes() for tensor in longer}
    assert all(data[tensor.name] == np.asarray(tensor.data).tobytes() for tensor in shorter)


@pytest.mark.parametrize("layers", ["0:2", "2:4", "3:4", "41:43"])
def test_a_range_is_a_slice_of_the_whole_schedule(tmp_path: Path, layers: str) -> None:
    path, of = tmp_path / "m.gguf", LayerRange.parse(layers)
    summary = write_fixture(path, preset="min", weights="mixed", layers=of)
    assert (summary.layers, summary.holds) == (43, layers)
    artifact = Artifact.open(path)
    assert (artifact.is_slice, artifact.layers, artifact.hp.n_layers) == (True, of, 43)
    artifact.check(of)
    assert set(artifact.located) == {spec.name for spec in range_tensors(artifact.hp, of) if spec.required}
    # Every digest of a tensor that is there is that of its data.
    assert artifact.verify_weights(of) == artifact.identity
    whole = Artifact.open(cached_fixture("mixed", preset="min"))
    assert set(artifact.tensors) == set(whole.tensors)
    for name, (_, tensor) in artifact.located.items():
        assert data_of(artifact, name) == data_of(whole, name), name
        assert tensor.type is whole.tensors[name].type
    assert artifact.identity != whole.identity


def data_of(artifact: Artifact, name: str) -> bytes:
    file, tensor = artifact.located[name]
    with file.path.open("rb") as data:
        data.seek(tensor.offset)
        return data.read(tensor.n_bytes)


def test_ranges_of_one_seed_are_different_models(tmp_path: Path) -> None:
    identities = set()
    for layers, seed in (("2:4", 0), ("2:4", 1), ("3:4", 0)):
        write_fixture(tmp_path / "m.gguf", preset="min", layers=LayerRange.parse(layers), seed=seed)
        identities.add(Artifact.open(tmp_path / "m.gguf").identity)
    assert len(identities) == 3


def test_a_damaged_range_is_told_from_its_manifest(tmp_path: Path) -> None:
    path, layers = tmp_path / "m.gguf", LayerRange(3, 4)
    write_fixture(path, preset="min", layers=layers)
    _, tensor = Artifact.open(path).located["blk.3.attn_q_a.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.offset + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"weights of 'blk.3.attn_q_a.weight' are not those of model"):
        Artifact.open(path).verify_weights(layers)


@pytest.mark.parametrize("weights", ["f32", "mixed", "q8_0"])
def test_large_tensors_are_made_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    monkeypatch.setattr(values, "_LARGE", 4 << 10)
    monkeypatch.setattr(values, "_PIECE", 1 << 10)
    seen: list[tuple[int, int]] = []
    digests = set()
    for cpus in (1, 3):
        monkeypatch.setattr(values, "available_cpus", lambda: cpus)  # noqa: B023 (called in this turn)
        write_fixture(
            tmp_path / "m.gguf", preset="min", weights=weights, layers=4, progress=lambda *at: seen.append(at)
        )
        digests.add(hashlib.sha256((tmp_path / "m.gguf").read_bytes()).hexdigest())
    assert len(digests) == 1  # however many are made at a time
    assert seen[-1][0] == seen[-1][1] == sum(t.n_bytes for t in Artifact.open(tmp_path / "m.gguf").tensors.values())
    assert [done for done, _ in seen[: len(seen) // 2]] == sorted(done for done, _ in seen[: len(seen) // 2])
    steps = [after[0] - before[0] for before, after in pairwise(seen) if after[0] > before[0]]
    assert max(steps) <= 4 << 10
    for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        if tensor.name.endswith("_exps.weight"):
            values_of = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            rms = float(np.sqrt((values_of**2).mean())) * math.sqrt(int(tensor.shape[0]))
            assert 0.5 < rms < 2.0, tensor.name
            assert len({row.tobytes() for row in values_of}) == len(values_of), tensor.name  # no piece is another again


@pytest.mark.slow
def test_sparse_files_have_sizes_but_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "real.gguf"
    summary = write_fixture(path, preset="real", weights="mixed", sparse=True)
    assert summary.n_tensors == 1328
    assert round(summary.n_parameters / 1e9, 2) == 284.33
    assert path.stat().st_blocks * 512 < 8 << 20 < summary.file_bytes
    artifact = Artifact.open(path)
    assert round(artifact.weight_bytes(artifact.hp.whole) / (1 << 30), 1) == 145.7


def test_presets_keep_what_makes_the_graph_real() -> None:
    assert set(WEIGHTS) == set(TYPES) | set(PUBLISHED)
    for name, hp in PRESETS.items():
        assert hp.n_layers == 43, name
        assert hp.hash_layers == 3, name
        assert hp.window == 128, name
        # Fewer heads give exact ties; equal widths would switch the Hadamard rotation on for every cache.
        assert hp.indexer_heads >= 16, name
        assert hp.indexer_dim != hp.head_dim, name
        assert name in ("big", "flash", "real") or hp.indexer_top_k * 4 == 128, name


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    fixture_command.register(parser.add_subparsers())
    out = tmp_path / "model.gguf"
    args = parser.parse_args(
        ["fixture", str(out), "--layers", "3", "--preset", "min", "--seed", "9", "--mtp", "--json"]
    )
    assert args.run(args) == 0
    written = json.loads(capsys.readouterr().out)
    assert written == {
        "path": str(out),
        "preset": "min",
        "weights": "f32",
        "seed": 9,
        "layers": 3,
        "holds": "0:3",
        "mtp": True,
        "n_tensors": 6 + 24 + 24 + 34 + 28,
        "n_parameters": written["n_parameters"],
        "file_bytes": out.stat().st_size,
    }
    args = parser.parse_args(["fixture", str(out), "--layers", "1", "--preset", "min"])
    assert args.run(args) == 0
    assert "preset min, weights f32, seed 0, 1 layers" in capsys.readouterr().out
    args = parser.parse_args(["fixture", str(out), "--layers", "2:4", "--preset", "min"])
    assert args.run(args) == 0
    assert "seed 0, 43 layers of which it holds 2:4" in capsys.readouterr().out
    args = parser.parse_args(["fixture", str(out), "--layers", "x", "--preset", "min"])
    with pytest.raises(InputError, match="--layers is 'x'; give a number of layers, or a range"):
        args.run(args)


@pytest.mark.parametrize(("parts", "first"), [(1, "m.gguf"), (2, "m-00001-of-00002.gguf")])
def test_the_path_is_said_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], parts: int, first: str
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["fixture", "m.gguf", "--preset", "min", "--layers", "1", "--parts", str(parts)]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith(f"{first}: ")
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == first
