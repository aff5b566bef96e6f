"""Stages and clients that may open nothing more: what is open goes on, and what was refused is tried again."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from cluster.remote_stages import PROMPT, TWO, Authority, answer_of, open_hosts, reference
from conversations import take

from dgr.client.pipeline import Pipeline
from dgr.client.session import ClientSession
from dgr.errors import DgrError
from dgr.testing.limits import no_descriptors
from dgr.testing.waits import until


@asynccontextmanager
async def _talking(tmp_path: Path, tls: bool) -> AsyncIterator[tuple[Pipeline, ClientSession]]:
    """Two stages behind sockets and a session that has said three tokens; afterwards nobody holds anything."""
    policy = Authority(tmp_path / "ca").policy("127.0.0.1") if tls else None
    async with open_hosts(policy) as hosts:
        stages = await hosts.start_all(TWO)
        async with hosts.pipeline(stages) as pipeline, pipeline.session() as session:
            assert await take(session.generate(PROMPT, max_tokens=3)) == reference()[:3]
            yield pipeline, session
        await hosts.assert_empty()


async def _goes_on(tmp_path: Path, tls: bool) -> None:
    async with _talking(tmp_path, tls) as (pipeline, session):
        with no_descriptors():
            assert await take(session.generate(max_tokens=3)) == reference()[3:6]
            loads = await pipeline.load()
            assert all(load is not None and load.resident == 0 for load in loads.values())
            assert len(await session.state_summaries()) == 2
            async with session.fork() as other:
                assert await take(other.generate(max_tokens=3)) == reference()[6:9]
            await pipeline.change_route(pipeline.route)
            assert await answer_of(pipeline) == reference()
        loads = await pipeline.load()
        assert all(load is not None and load.resident > 0 for load in loads.values())


@pytest.mark.parametrize("tls", [False, True])
async def test_what_is_open_goes_on(caplog: pytest.LogCaptureFixture, tmp_path: Path, tls: bool) -> None:
    await _goes_on(tmp_path, tls)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_stage_that_must_open_something_to_answer_is_caught(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The mutant; with it the question ended the link, and every session of that route was prefilled again."""
    monkeypatch.setattr("dgr.stage.statistics.resident_memory", lambda: psutil.Process().memory_info().rss)
    with pytest.raises((AssertionError, ExceptionGroup)):
        await _goes_on(tmp_path, tls=False)
    assert "ends by a defect" in caplog.text


@pytest.mark.parametrize("tls", [False, True])
async def test_links_that_end_meanwhile_are_made_again(tmp_path: Path, tls: bool) -> None:
    async with _talking(tmp_path, tls) as (pipeline, session):
        with no_descriptors():
            for stage in pipeline._client._links.stages.values():
                await stage.link.aclose()
            await until(lambda: pipeline.state.value == "down")
            with pytest.raises(DgrError):
                await pipeline.change_route(pipeline.route)
            await until(lambda: pipeline.state.value == "down")
        assert await take(session.generate(max_tokens=3)) == reference()[3:6]
        await pipeline.wait_live()
