"""The fixture writer: the same bytes everywhere, non-trivial values in every tensor, and what it refuses."""

from __future__ import annotations

import errno
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dgr.cli import fixture as fixture_command
from dgr.errors import InputError
from dgr.model.artifact import Artifact
from dgr.model.ggml import GgmlType
from dgr.model.tensors import TensorKind, TensorSpec, block_tensors, head_tensors, tail_tensors
from dgr.selftest.fixture import write_fixture
from dgr.selftest.fixture.presets import PRESETS, WEIGHTS
from dgr.selftest.fixture.stream import Stream, bfloat16
from dgr.selftest.fixture.values import Values

# Digests of the tensor data and of the whole file: the data depends on this repository alone.
PINNED = {
    ("min", "f32", 0): "952b9aa30dc456e1d8e0995bd3380a2cc4c4f4a5307e5ef497c6aed8e16b1232",
    ("min", "f32", 1): "0ff3ad58e96a8509e8bcbf6d38bb02e6bb0357321ceec87e4afa2b2415fa6ac9",
    ("min", "f16", 0): "6f99c065380f8a86c257b6d4d3f47636e2ddf5e483cfa1399ef8090d1a9595f9",
    ("min", "mixed", 0): "b8e3bae3e868ac9abb9999a3709b0d0bbaaee61c55d8a630cebebe0491f93e8a",
    ("min", "q8_0", 0): "c943cdd98f5841ad866a4fdd7ecf5a4ffad680ebe519ddd38169185821a83d92",
    ("wide", "q4_k", 0): "6a415574ccb06063895b1faf79b1a9fa6fb2a7049f80721e322b03abdb3fd997",
}


def data_digest(path: Path) -> str:
    file = Artifact.open(path).file
    return hashlib.sha256(path.read_bytes()[file.data_offset :]).hexdigest()


@pytest.mark.parametrize(("preset", "weights", "seed"), PINNED)
def test_a_seed_gives_the_same_bytes_forever(tmp_path: Path, preset: str, weights: str, seed: int) -> None:
    path = tmp_path / "model.gguf"
    write_fixture(path, preset=preset, weights=weights, seed=seed, layers=4)
    assert data_digest(path) == PINNED[preset, weights, seed]


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
    "q8_0": {"DENSE": "Q8_0", "EXPERT": "Q8_0", "COMPRESSOR": "Q8_0", "EMBEDDING": "Q8_0", "OUTPUT": "Q8_0"},
    "q4_k": {"DENSE": "Q4_K", "EXPERT": "Q4_K", "COMPRESSOR": "Q4_K", "EMBEDDING": "Q4_K", "OUTPUT": "Q4_K"},
}


@pytest.mark.parametrize("weights", TYPES)
def test_types_and_sizes_of_quantised_weights(tmp_path: Path, weights: str) -> None:
    path = tmp_path / "model.gguf"
    write_fixture(path, weights=weights, preset="wide" if weights.endswith("_k") else "min", layers=4)
    artifact = Artifact.open(path)
    artifact.check(artifact.hp.whole)
    for tensor in gguf.GGUFReader(path).tensors:
        kind = artifact._known[tensor.name].kind
        stored = GgmlType(int(tensor.tensor_type))
        default = "I32" if kind is TensorKind.HASH_TABLE else "F32"
        assert stored.name == TYPES[weights].get(kind.name, default), tensor.name
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
        ({"preset": "huge"}, "unknown preset 'huge'; choose one of min, tiny, wide, big, real"),
        ({"weights": "q2"}, "unknown weights 'q2'"),
        ({"layers": 0}, "0 layers asked for"),
        ({"layers": 44}, "44 layers asked for, but the schedule has 1 to 43"),
        ({"seed": -1}, "seed -1"),
        ({"preset": "real"}, "write it sparse"),
    ],
)
def test_refuses(tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        write_fixture(tmp_path / "x.gguf", **asked)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent/x.gguf cannot be written: No such file"):
        write_fixture(tmp_path / "absent" / "x.gguf", layers=1, preset="min")


def test_a_model_that_cannot_be_written_leaves_the_one_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, manifest = tmp_path / "m.gguf", tmp_path / "m.manifest.json"
    write_fixture(path, layers=1, preset="min")
    manifest.write_text("its manifest", encoding="utf-8")
    before = path.read_bytes()

    def full(_self: Values, _spec: TensorSpec, _kind: GgmlType) -> tuple[memoryview]:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Values, "bytes_of", full)
        with pytest.raises(InputError, match=r"m.gguf cannot be written: No space left on device"):
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


def test_sparse_files_have_sizes_but_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "real.gguf"
    summary = write_fixture(path, preset="real", weights="mixed", sparse=True)
    assert summary.n_tensors == 1328
    assert round(summary.n_parameters / 1e9, 2) == 284.33
    assert path.stat().st_blocks * 512 < 8 << 20 < summary.file_bytes
    artifact = Artifact.open(path)
    assert round(artifact.weight_bytes(artifact.hp.whole) / (1 << 30), 1) == 145.7


def test_presets_keep_what_makes_the_graph_real() -> None:
    assert set(WEIGHTS) == set(TYPES)
    for name, hp in PRESETS.items():
        assert hp.n_layers == 43, name
        assert hp.hash_layers == 3, name
        assert hp.window == 128, name
        # Fewer heads give exact ties; equal widths would switch the Hadamard rotation on for every cache.
        assert hp.indexer_heads >= 16, name
        assert hp.indexer_dim != hp.head_dim, name
        assert name in ("big", "real") or hp.indexer_top_k * 4 == 128, name


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
        "mtp": True,
        "n_tensors": 6 + 24 + 24 + 34 + 28,
        "n_parameters": written["n_parameters"],
        "file_bytes": out.stat().st_size,
    }
    args = parser.parse_args(["fixture", str(out), "--layers", "1", "--preset", "min"])
    assert args.run(args) == 0
    assert "preset min, weights f32, seed 0, 1 layers" in capsys.readouterr().out
