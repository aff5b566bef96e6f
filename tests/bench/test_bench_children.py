"""Programs that a benchmark starts are the installed ones, whatever lies in the folder where it was started."""

from __future__ import annotations

from pathlib import Path

import pytest

from dgr import Artifact, ContextParams
from dgr.core.route import parse_split
from dgr.testing.network.processes import ProgramEnded, open_program
from dgr_bench.certify.resident import resident_with
from dgr_bench.links.echo import open_echo


@pytest.fixture(autouse=True)
def decoys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of the same names in the working directory."""
    for name in ("dgr", "dgr_bench", "bench"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the decoy was run')")
    monkeypatch.chdir(tmp_path)


async def test_stages_in_a_process_of_their_own(small: Path) -> None:
    context = ContextParams(n_ctx=64, n_batch=32, n_ubatch=32)
    resident = await resident_with(Artifact.open(small), parse_split("0:7", 7), context)
    assert 0 < resident.before < resident.loaded


async def test_an_echo() -> None:
    async with open_echo("tcp") as echo, echo.connect() as stream:
        await stream.send_all(b"b" + b"round")
        assert await stream.receive_some(5) == b"round"


async def test_a_stage() -> None:
    async with open_program("stage", "nowhere.gguf", "--layers", "0:7", "--listen", "127.0.0.1:0") as program:
        with pytest.raises(ProgramEnded, match=r"nowhere\.gguf"):
            await program.first_line()
