"""``dgr inspect``: the numbers programs read, and the tables people read."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from dgr.cli import inspect as command
from dgr.cli.tables import layer_runs
from dgr.core.units import human_bytes
from dgr.errors import ArtifactError, InvalidLayerRange
from dgr.selftest.fixture import write_fixture

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *argv: str) -> str:
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    args = parser.parse_args(["inspect", *argv])
    assert args.run(args) == 0
    return capsys.readouterr().out


def run_json(capsys: Capture, *argv: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(capsys, *argv, "--json"))
    return found


@pytest.mark.parametrize(("n_ctx", "total"), [(32768, 271466496), (131072, 947798016), (1048576, 7260225536)])
def test_the_published_model_needs_no_file(capsys: Capture, n_ctx: int, total: int) -> None:
    found = run_json(capsys, "v4-flash", "--layers", "0:43", "--ctx", str(n_ctx))
    assert found["total_bytes"] == total == sum(part["bytes"] for part in found["components"])
    names = ["raw_swa", "csa", "hca", "indexer", "csa_ring", "hca_ring", "indexer_ring"]
    assert [part["name"] for part in found["components"]] == names
    assert found["components"][2]["layers"] == list(range(3, 43, 2))
    assert "weight_bytes" not in found


def test_map_follows_every_option(capsys: Capture) -> None:
    options = ("--ctx", "1000", "--ubatch", "2048", "--sessions", "2", "--type-k", "q8_0")
    found = run_json(capsys, "v4-flash", "--layers", "2:3", *options)
    assert (found["layers"], found["n_ctx"], found["n_ubatch"], found["n_seq_max"]) == ("2:3", 1024, 2048, 2)
    assert {part["name"]: part["bytes"] for part in found["components"]} == {
        "raw_swa": 544 * 1024 * 2,
        "csa": 544 * 256 * 2,
        "indexer": 136 * 256 * 2,
        "csa_ring": 65536 * 2,
        "indexer_ring": 16384 * 2,
    }
    first = found["components"][3]["tensors"][0]
    assert first == {"name": "dsv4_csa_state_kv_l2", "layer": 2, "shape": [1024, 8, 2], "bytes": 65536}


def test_a_context_beyond_training_is_warned_of(capsys: Capture, caplog: pytest.LogCaptureFixture) -> None:
    for tokens, said in ((1 << 20, []), ((1 << 20) + 1, ["1048577 tokens (n_ctx), the model was trained on 1048576"])):
        caplog.clear()
        run(capsys, "v4-flash", "--layers", "0:1", "--ctx", str(tokens))
        assert [words in record.message for record, words in zip(caplog.records, said, strict=True)] == [True] * len(
            said
        )


def test_layers_of_a_part_that_is_missing_are_not_here(capsys: Capture, tmp_path: Path) -> None:
    write_fixture(tmp_path / "m.gguf", preset="min", layers=4, parts=3)
    first, second = (tmp_path / f"m-0000{n}-of-00003.gguf" for n in (1, 2))
    whole = run(capsys, str(first))
    second.unlink()
    assert "not here" not in whole
    assert "not here" not in run(capsys, str(first)), "the manifest tells"
    (tmp_path / "m.manifest.json").unlink()
    text = run(capsys, str(first))
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert rows["head"].endswith("not here")
    assert rows["0-1"].count("not here") == 2
    assert rows["total"].endswith("and more, not here")
    assert " 0 B" not in text
    assert f"tensors are not here: {second.name}" in text
    assert run_json(capsys, str(first), "--layers", "0:1")["missing_tensors"] > 0
    assert "weights of layers 0:1: not here" in run(capsys, str(first), "--layers", "0:1")


def test_map_of_a_file_tells_its_weights(capsys: Capture, min_model: Path) -> None:
    head, rest = (run_json(capsys, str(min_model), "--layers", part) for part in ("0:2", "2:4"))
    whole = run_json(capsys, str(min_model), "--ctx", "4096")
    assert whole["layers"] == "0:4"
    assert whole["weight_bytes"] == head["weight_bytes"] + rest["weight_bytes"]
    assert whole["total_bytes"] == head["total_bytes"] + rest["total_bytes"]


def test_model_as_json(capsys: Capture, min_model: Path) -> None:
    found = run_json(capsys, str(min_model))
    assert [layer["kind"] for layer in found["layers"]] == ["SWA", "SWA", "CSA", "HCA"]
    assert [layer["compress_ratio"] for layer in found["layers"]] == [0, 0, 4, 128]
    assert [layer["hash_routed"] for layer in found["layers"]] == [True, True, True, False]
    layers = sum(layer["weight_bytes"] for layer in found["layers"])
    assert found["weight_bytes"] == layers + found["head_bytes"] + found["tail_bytes"]
    assert found["mtp_bytes"] > 0
    assert found["file_bytes"] == min_model.stat().st_size
    assert found["hyper_parameters"]["n_embd"] == 32
    assert len(found["identity"]) == 64


def test_tables(capsys: Capture, min_mixed: Path) -> None:
    text = run(capsys, str(min_mixed))
    assert "main layers        4\n" in text
    lines = [line for line in text.splitlines() if line.startswith(("0-1 ", "2 ", "3 "))]
    assert [line.split()[:3] for line in lines] == [["0-1", "2", "SWA"], ["2", "1", "CSA"], ["3", "1", "HCA"]]
    assert "token id" in lines[1]
    assert "router" in lines[2]
    flash = run(capsys, "v4-flash")
    assert "3,5..41     20  HCA" in flash
    assert "4,6..42     20  CSA" in flash
    table = run(capsys, "v4-flash", "--layers", "0:43", "--ctx", "32768")
    assert table.splitlines()[-1].split() == ["total", "271466496", "258.89", "MiB"]
    assert all(line == line.rstrip() for line in (text + flash + table).splitlines())


def test_mtp_is_shown_as_never_run(capsys: Capture, min_model: Path) -> None:
    text = run(capsys, str(min_model))
    assert "4 + 1 MTP block (reserved, never run)" in text
    assert "not loaded" in text


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([], ""),
        ([7], "7"),
        ([0, 1], "0-1"),
        ([0, 1, 2, 5], "0-2,5"),
        ([2, 4], "2,4"),
        ([2, 4, 6], "2,4..6"),
        ([0, 2, 3, 4], "0,2-4"),
        (list(range(3, 42, 2)), "3,5..41"),
    ],
)
def test_layer_runs(layers: list[int], text: str) -> None:
    assert layer_runs(layers) == text


def test_human_bytes() -> None:
    sizes = (0, 1023, 1024, 271466496, 7260225536, 1 << 45)
    assert [human_bytes(size) for size in sizes] == [
        *("0 B", "1023 B", "1.00 KiB", "258.89 MiB", "6.76 GiB", "32768.00 GiB"),
    ]


def test_bad_asks(capsys: Capture, tmp_path: Path) -> None:
    with pytest.raises(InvalidLayerRange, match="40:44"):
        run(capsys, "v4-flash", "--layers", "40:44")
    with pytest.raises(ArtifactError, match="absent"):
        run(capsys, str(tmp_path / "absent.gguf"))
