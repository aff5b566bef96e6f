"""Wire types over slow links: what is counted and judged, and a run in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from dgr.core.route import LayerRange
from dgr.core.values import Wire
from dgr.selftest.fixture import write_fixture
from dgr.testing.network.processes import write_route
from dgr_bench.cli import main
from dgr_bench.links.wires import Wires, WiresPlan

PLAN = WiresPlan(
    name="a plan", tokens=64, rounds=2, wires=(Wire.BF16, Wire.Q8, Wire.F32_ZSTD), rates=(10.0,), split=("0:3", "3:7"),
    width=256,
)  # fmt: skip
WIRES = Wires(PLAN, Path("m.gguf"), "0" * 16)


def unit(wire: Wire, **changes: Any) -> dict[str, Any]:
    own = 64 * wire.row_bytes(256) * (0.82 if wire.packs else 1)
    sizes = {"f32_bytes": 64 * 1024 + 600, "wire_bytes": own + 600}
    return {"tokens": 64, "f32_s": 2.0, "wire_s": 1.0} | sizes | changes


def units(**changes: Any) -> dict[str, dict[str, Any]]:
    return {f"{wire} at 10 Mbit/s, round {n}": unit(wire, **changes) for wire in PLAN.wires for n in range(2)}


def test_figures() -> None:
    found = WIRES.metrics(units())
    assert list(found) == ["bf16 at 10 Mbit/s", "q8 at 10 Mbit/s", "f32+zstd at 10 Mbit/s"]
    assert found["q8 at 10 Mbit/s"]["ratio"].median == 2.0
    assert found["bf16 at 10 Mbit/s"]["wire_tokens_per_s"].median == 64
    assert found["bf16 at 10 Mbit/s"]["wire_bytes_per_token"].median == 512 + 600 / 64


@pytest.mark.parametrize("changes", [{}, {"wire_bytes": 64 * 1024 + 600}, {"f32_bytes": 100}])
def test_bytes_are_those_of_the_boundary(changes: dict[str, int]) -> None:
    error, sizes = WIRES.checks(units(**changes))
    assert error.passed
    assert sizes.passed is not bool(changes)
    assert sizes.cases == 12


def test_a_round_that_failed_is_told() -> None:
    failed = units() | {"q8 at 10 Mbit/s, round 0": {"error": "LinkBroken: gone"}}
    error, sizes = WIRES.checks(failed)
    assert not error.passed
    assert sizes.passed
    assert evolve(WIRES).metrics(failed)["q8 at 10 Mbit/s"]["ratio"].count == 1


def test_a_rate_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["wires", "--quick", "--rates", "0", "--out", str(tmp_path)]) == 2
    assert "--rates 0: give megabits a second" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command(small: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["wires", "--quick", "--model", str(small), "--rates", "2", "--json", "--out", str(tmp_path)]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)["figures"]
    assert list(found) == ["f32+zstd at 2 Mbit/s", "bf16 at 2 Mbit/s", "f16 at 2 Mbit/s", "q8 at 2 Mbit/s"]
    for name, row in found.items():
        share = row["wire_bytes_per_token"]["median"] / row["f32_bytes_per_token"]["median"]
        assert share < (0.3 if "q8" in name else 0.88 if "zstd" in name else 0.55), name
    assert "| 2 | bf16 | 10" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    "command", ["wires", "peers", "sessions", "servers", "prefill", "drill", "overhead", "frontier", "certify"]
)
def test_a_slice_is_refused_before_anything_is_measured(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "slice.gguf"
    write_fixture(model, preset="min", layers=LayerRange(2, 4))
    assert main([command, "--quick", "--model", str(model), "--out", str(tmp_path / "out")]) == 2
    assert "slice.gguf: this slice holds layers 2:4 of the model, not all of 0:43" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_is_named_from_where_the_caller_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    file = write_route(tmp_path / "elsewhere" / "route.toml", Path("m.gguf"), ("0:2", "2:4"))
    assert file.model == tmp_path / "m.gguf"
