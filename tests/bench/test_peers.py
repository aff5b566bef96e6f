"""dgr beside llama.cpp's RPC backend: what is counted and judged, and a run in small where the backend is built."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dgr.engine.native import build_info
from dgr.errors import EngineError, InputError
from dgr_bench.cli import main
from dgr_bench.peers.command import Peers, row_name
from dgr_bench.peers.measurements import PeersPlan
from dgr_bench.peers.rpc import open_servers
from dgr_bench.upstream.programs import bench_beside

PLAN = PeersPlan(
    name="a plan", prefill=512, decode=10, rounds=2, delays=(0.0, 10.0), contexts=(0, 512), split=("0:3", "3:7"), n_vocab=512,
    numerics="exact",
    goals={row_name("decode", 0): "at least 1.25", row_name("decode", 10): "at least 2.5"},
)  # fmt: skip
PEERS = Peers(PLAN, Path("m.gguf"), "0" * 16, Path("rpc-server"), Path("llama-server"))


def units(near: float = 2.0, far: float = 12.0, tokens: int = 16) -> dict[str, dict[str, Any]]:
    """Ours takes 1 s for ten tokens and 1.4 s over delays of 10 ms; theirs ``near`` and ``far``."""
    found: dict[str, dict[str, Any]] = {}
    for number in range(2):
        for delay, ours, theirs in ((0, 1.0, near), (10, 1.4, far)):
            found[f"{row_name('decode', delay)}, round {number}"] = {"tokens": 10, "ours_s": ours, "theirs_s": theirs}
    traffic = {"ours_bytes": 20_480, "ours_turns": 20, "theirs_bytes": 204_800, "theirs_turns": 800}
    found["traffic/0"] = {"tokens": 10, **traffic}
    alone = {"decode_tokens": 10, "decode_s": 0.5, "prefill_tokens": 512, "prefill_s": 2.0}
    found["alone/0"] = {**alone, "server_decode_s": 1.0, "server_prefill_s": 4.0}
    theirs_end = {"exit_code": -6, "ended_s": 0.2, "said": "Remote RPC server crashed"}
    found["kill"] = {"ours": {"next_token_s": 1.5, "tokens": tokens, "asked": 16}, "theirs": theirs_end}
    return found


def test_figures() -> None:
    found = PEERS.metrics(units())
    assert found["speed"]["decode, delay 0 ms"]["ratio"].median == 2.0
    assert found["speed"]["decode, delay 10 ms"]["ours_tokens_per_s"].median == pytest.approx(10 / 1.4)
    # 40 ms more a token of ours at 10 ms, and a second of theirs.
    assert found["delays_per_token"] == {"ours": pytest.approx(4.0), "theirs": pytest.approx(100.0)}
    assert found["traffic"] == {
        "0": {"ours_bytes": 2048, "ours_turns": 2, "theirs_bytes": 20_480, "theirs_turns": 80},
    }
    assert found["alone"]["llama-bench"]["prefill"].median == 256
    assert found["alone"]["llama-server"]["decode"].median == 10
    assert list(found["speed"]) == ["decode, delay 0 ms", "decode, delay 10 ms"]


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, []),
        ({"near": 1.2}, ["speed of decode, delay 0 ms"]),
        ({"far": 3.4}, ["speed of decode, delay 10 ms"]),
        ({"tokens": 7}, ["an answer survives the loss of a process"]),
    ],
)
def test_verdicts(changes: dict[str, Any], failed: list[str]) -> None:
    assert [check.name for check in PEERS.checks(units(**changes)) if not check.passed] == failed


def test_an_answer_whose_kill_was_not_measured_has_not_survived() -> None:
    measured = {name: unit for name, unit in units().items() if name != "kill"}
    assert [check.name for check in PEERS.checks(measured) if not check.passed] == [
        "an answer survives the loss of a process"
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--delays", "-1"], "--delays -1: give milliseconds"),
        (["--processes", "1"], "--processes 1: give 2 to"),
        (["--rpc-server", "/nowhere"], "--rpc-server /nowhere is not a program"),
        (["--rpc-server", sys.executable], "there is no llama-bench beside"),
    ],
)
def test_what_is_refused(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["peers", "--quick", "--model", str(small), "--out", str(tmp_path / "out"), *arguments]) == 2
    assert words in capsys.readouterr().err


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_server_of_another_pin_and_one_that_is_none(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before anything is measured; what cannot listen ends in a line, and another binary does not go on from it."""
    server = script(tmp_path / "rpc-server", "exit 3")
    command = ["peers", "--quick", "--model", str(small), "--out", str(tmp_path / "out"), "--rpc-server", str(server)]
    command += ["--llama-server", str(server)]
    script(tmp_path / "llama-bench", "echo version: 1, commit abcdef012")
    assert main(command) == 2
    assert "was built from llama.cpp abcdef012, dgr from" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    script(tmp_path / "llama-bench", f"echo version: 1, commit {build_info()['llama_cpp_commit']}")
    assert main(command) == 1
    assert "rpc-server ended with exit status 3 instead of listening" in capsys.readouterr().err
    script(server, "exit 4")
    assert main(command) == 2
    assert "holds a result of another subject" in capsys.readouterr().err


async def test_a_server_that_ends_instead_of_listening(tmp_path: Path) -> None:
    path = tmp_path / "ggml-rpc-server"
    path.write_text(f"#!{sys.executable}\nraise SystemExit(3)\n")
    path.chmod(0o755)
    with pytest.raises(EngineError, match="ended with exit status 3 instead of listening"):
        async with open_servers(path, 1, 1):
            pass
    with pytest.raises(InputError, match="no llama-bench beside"):
        bench_beside(path)


@pytest.mark.llama_bench
def test_the_command(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["peers", "--quick", "--model", str(small), "--delays", "0", "2", "--json", "--out", str(tmp_path)]
    assert main(arguments) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert set(figures["speed"]) == {row_name(phase, delay) for phase in ("decode", "prefill") for delay in (0, 2)}
    assert figures["traffic"]["0"]["theirs_bytes"] > 0
    assert figures["kill"]["ours"]["tokens"] == figures["kill"]["ours"]["asked"]
    assert all(row["decode"]["median"] > 0 for row in figures["alone"].values())
    report = (tmp_path / "report.md").read_text()
    assert "| a process is killed | next token after" in report
    assert "| llama-server |" in report
