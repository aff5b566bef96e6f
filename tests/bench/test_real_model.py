"""The real-model lane, with a small model in its place: everything but the size of the weights is the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import trio

from dgr import Artifact
from dgr.selftest.fixture.cached import cached_fixture
from dgr.testing.network.processes import open_up, write_route
from dgr_bench.certify import real_model
from dgr_bench.certify.mutants import PROFILE
from dgr_bench.cli import main
from dgr_bench.results import read_result

LAYERS, SPLIT = 7, ("0:2", "2:5", "5:7")
SMALL = msgspec.structs.replace(
    PROFILE, name="small-real", lengths=(5, 129), chunkings=(), threads=(), whole=False, cancels=1, rerun=(5,)
)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "storage" / "model.gguf"
    path.parent.mkdir()
    shutil.copy(cached_fixture("mixed", layers=LAYERS), path)
    monkeypatch.setenv(real_model.VARIABLE, str(path))
    return path


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "small-real.json"
    path.write_bytes(msgspec.json.encode(SMALL))
    return str(path)


def test_it_is_opt_in(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(real_model.VARIABLE, raising=False)
    assert main(["real", "--split", "0:43"]) == 2
    assert "DGR_MODEL is not set" in capsys.readouterr().err


def test_it_wants_to_know_the_stages(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["real"]) == 2
    assert "give --route TOML" in capsys.readouterr().err


def test_files_under_home_are_refused_through_links_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real_model, "_FORBIDDEN", model.parent)
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    for name in (model, link):
        monkeypatch.setenv(real_model.VARIABLE, str(name))
        assert main(["real", "--split", "0:7", "--check"]) == 2
        assert "keep model files on mounted storage" in capsys.readouterr().err
    assert main(["real", "--split", "0:7", "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_a_file_under_home_is_not_even_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["real"], ["real", "--split", "0:43", "--check"]):
        monkeypatch.setenv(real_model.VARIABLE, "/home/nobody/no-such-model.gguf")
        assert main(arguments) == 2
        assert "keep model files on mounted storage" in capsys.readouterr().err


def test_home_is_what_it_says() -> None:
    assert Path("/home") == real_model._FORBIDDEN


@pytest.mark.parametrize("fact", ["hosts", "=x", ""])
def test_a_fact_has_a_name_and_a_text(model: Path, fact: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["real", "--split", "0:7", "--check", "--fact", fact]) == 2
    assert "NAME=TEXT" in capsys.readouterr().err


def test_the_check_tells_everything_up_to_loading(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["real", "--split", ",".join(SPLIT), "--check", "--fact", "hosts=one"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["artifact"] == Artifact.open(model).identity
    assert set(facts["split_digests"]) == set(facts["split_bytes"]) == set(SPLIT)
    assert len(set(facts["split_digests"].values())) == 3
    assert facts["pins"]["llama_cpp_commit"]
    assert facts["files"] == [
        {
            "file": "model.gguf",
            "bytes": model.stat().st_size,
            "mount": facts["files"][0]["mount"],
            "file_system": facts["files"][0]["file_system"],
        }
    ]
    assert model.is_relative_to(facts["files"][0]["mount"])
    assert facts["given"] == {"hosts": "one"}


@pytest.mark.slow
async def test_a_run_over_a_route_is_one_json_with_everything(
    model: Path, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    route = write_route(tmp_path / "route.toml", model, SPLIT, n_ctx=256, n_batch=64, n_ubatch=64)
    command = ["real", "--profile", profile, "--route", str(route.path), "--out", str(out)]
    with trio.fail_after(120):
        async with open_up(route):
            assert await trio.to_thread.run_sync(main, command) == 0, capsys.readouterr()
    result = read_result(out)
    assert result.passed
    assert [one["address"] for one in result.subject["network"]] == [ref.address for ref in route.route.stages]
    assert all(one["bytes_per_s"] > 0 and one["devices"] for one in result.subject["network"])
    assert result.subject["in_process"] is False
    assert [unit["variant"] for unit in result.units.values() if "variant" in unit] == ["split"] * 2 + [
        "re-prefilled"
    ] * 2 + ["forked"] * 2
    assert len(result.metrics["not_certified"]) == 3
    assert "## What was run" in (out / "report.md").read_text()
    assert "split equals whole" not in {check.name for check in result.checks}
    assert "states stand where the closed forms say" in {check.name for check in result.checks}


@pytest.mark.slow
async def test_stages_of_another_context_are_refused(
    model: Path, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    route = write_route(tmp_path / "route.toml", model, ("0:7",), n_ctx=512, n_batch=64, n_ubatch=32)
    command = ["certify", "--profile", profile, "--route", str(route.path), "--out", str(tmp_path / "out")]
    with trio.fail_after(120):
        async with open_up(route):
            assert await trio.to_thread.run_sync(main, command) == 2
    assert "n_ctx = 512, the profile is for 256; start them with --ctx" in capsys.readouterr().err


async def test_a_route_that_is_not_well_is_told_before_anything_is_measured(
    model: Path, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    route = write_route(tmp_path / "route.toml", model, ("0:7",))
    command = ["real", "--profile", profile, "--route", str(route.path), "--out", str(tmp_path / "out")]
    assert await trio.to_thread.run_sync(main, command) == 2
    assert "start the stage there" in capsys.readouterr().err
