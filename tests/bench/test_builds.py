"""``dgr-bench builds``: two environments, each with a build of its own, and what their kernels are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dgr.cli.versions import versions
from dgr_bench.cli import main
from dgr_bench.results import read_result


@pytest.mark.slow
def test_two_builds_are_compared_and_named(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same build twice: as fast, and it says what it is."""
    arguments = ["builds", "--other", sys.executable, "--model", str(small), "--quick", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    result = read_result(tmp_path / "out")
    assert set(result.metrics["speed"]) == {
        f"{phase}, {numerics} numerics, this build / the other"
        for phase in ("prefill", "decode")
        for numerics in ("exact", "native")
    }
    kernels = versions()["kernels"]
    for side in ("ours", "theirs"):
        found = json.loads(result.subject[side])
        assert found["fingerprint"] == kernels["fingerprint"]
        assert found["instruction_sets"] == list(kernels["instruction_sets"])
    assert "| theirs |" in (tmp_path / "out" / "report.md").read_text()


def test_an_environment_without_dgr_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for python in (str(tmp_path / "python"), "/bin/true"):
        assert main(["builds", "--other", python, "--quick", "--out", str(tmp_path / "out")]) == 2
        assert f"--other {python} runs no dgr that tells its versions" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
