"""A pipeline that follows its route file: it goes where the file says, once, and stays where it is while the file is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from pipeline.harness import CONTEXT, Stages

from dgr.cluster import follow
from dgr.cluster.local import ShardPolicy, open_cluster
from dgr.cluster.route_file import RouteFile, read_route_file
from dgr.testing.waits import until

PROMPT = list(b"In a hole in the ground")


def _write(path: Path, text: str) -> None:
    """In one step, as whoever places stages does."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").replace(path)


def _route(split: str) -> str:
    """A route file whose addresses are the names of the stages."""
    names = split.split(",")
    return "".join(f'[[stage]]\naddress = "{name}"\nlayers = "{name.partition("#")[0]}"\n' for name in names)


async def test_a_pipeline_goes_where_its_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(follow, "_EVERY", 0.002)
    looks = []

    def read(path: Path) -> RouteFile:
        looks.append(path)
        return read_route_file(path)

    monkeypatch.setattr(follow, "read_route_file", read)
    path = tmp_path / "route.toml"
    _write(path, _route("0:2,2:6"))

    async def look() -> None:
        """Until the file was looked at several times, the last ones with what it says now."""
        upto = len(looks) + 4
        await until(lambda: len(looks) >= upto)

    async with open_cluster() as cluster:
        stages = Stages(cluster, CONTEXT, ShardPolicy())
        for name in ("0:2", "2:6", "2:6#other", "0:1"):
            await stages.start(name)
        async with stages.pipeline("0:2,2:6") as pipeline, trio.open_nursery() as nursery:
            nursery.start_soon(follow.follow_route, pipeline, read_route_file(path))
            async with pipeline.session() as session:
                before = [token.id async for token in session.generate(PROMPT, max_tokens=5, stop=())]
            # No file, none that is one, a stage that is not there, layers left out.
            for wrong in ("[[stage]]", _route("0:2,2:6#none"), _route("0:1,2:6")):
                _write(path, wrong)
                await look()
            path.unlink()
            await look()
            assert pipeline.route == stages.route("0:2,2:6")
            assert pipeline.epoch == 1
            told = [record.message for record in caplog.records if "cannot be taken" in record.message]
            assert len(told) == 4  # each once, however often it was looked at

            _write(path, _route("0:2,2:6#other"))
            await until(lambda: pipeline.route == stages.route("0:2,2:6#other"))
            await look()
            assert pipeline.epoch == 2  # and not again at the next look
            async with pipeline.session() as session:
                assert [token.id async for token in session.generate(PROMPT, max_tokens=5, stop=())] == before
            assert stages.engines["2:6#other"].tokens_run > 0
            nursery.cancel_scope.cancel()
