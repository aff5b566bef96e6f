"""`dgr up` with real processes: what freezes is started again, and all are restarted under load without a wrong token."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve
from fixture_types import Prompt

import dgr
from dgr.client.pipeline import Pipeline, Timeouts
from dgr.cluster.connect import LinkPolicy
from dgr.cluster.route_file import RouteFile, format_route_file
from dgr.core.route import StageRef
from dgr.testing.network.processes import Program, free_ports, open_up, write_route
from dgr.testing.waits import until

CONTEXT: dict[str, Any] = {"n_ctx": 512, "n_batch": 32, "n_ubatch": 32}
#: Sessions that decode all the while, and the tokens of each of their answers.
SESSIONS, ANSWER = 3, 24
BEAT = 0.25


async def expected_of(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What the whole model, undisturbed and in this process, answers."""
    context = dgr.ContextParams(n_ctx=512, n_batch=32, n_ubatch=32, n_seq_max=SESSIONS)
    async with dgr.open_pipeline(model, context=context) as pipeline:
        found = []
        for prompt in prompts:
            async with pipeline.session() as session:
                found.append([token.id async for token in session.generate(prompt, max_tokens=ANSWER, stop=())])
        return found


class Load:
    """Sessions that answer their prompts again and again, and what they said."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.answers: list[list[list[int]]] = [[] for _ in prompts]
        self.stop = False

    async def run(self, pipeline: Pipeline, index: int) -> None:
        while not self.stop:
            async with pipeline.session() as session:
                answer: list[int] = []
                async for token in session.generate(self.prompts[index], max_tokens=ANSWER, stop=()):
                    answer.append(token.id)
                    await trio.sleep(0.02)  # a reader; and a disturbance that meets answers in their middle
                self.answers[index].append(answer)

    @property
    def complete(self) -> int:
        return min(map(len, self.answers))

    async def one_more(self) -> None:
        """Until every session has answered once more, from the beginning."""
        wanted = self.complete + 2
        await until(lambda: self.complete >= wanted, 60.0)


@asynccontextmanager
async def loaded(file: RouteFile, prompts: list[list[int]]) -> AsyncIterator[tuple[Pipeline, Load]]:
    load = Load(prompts)
    timeouts = Timeouts(reply=30.0, control=30.0)
    policy = LinkPolicy(heartbeat=BEAT)
    async with (
        dgr.open_route(evolve(file, model=None), policy=policy, timeouts=timeouts) as pipeline,
        trio.open_nursery() as nursery,
    ):
        for index in range(len(prompts)):
            nursery.start_soon(load.run, pipeline, index)
        yield pipeline, load
        load.stop = True


async def roll(up: Program, stages: tuple[StageRef, ...], times: int = 1) -> None:
    """Restart all stages, and check that each was begun when the one before served again."""
    before = len(up.lines)
    up.process.send_signal(signal.SIGHUP)
    await until(lambda: len(up.events(stages[-1].address, "live")) >= times, 90.0, "the last stage, live again,")
    told = [(line["stage"], line["event"]) for line in up.lines[before:]]
    steps = ("restarting", "ended", "ready", "live")
    assert told == [(ref.address, event) for ref in stages for event in steps]


@pytest.mark.slow
async def test_what_freezes_is_started_again_and_all_are_restarted_under_load(
    small: Path, prompt: Prompt, tmp_path: Path
) -> None:
    prompts = [prompt(16 + index, seed=index) for index in range(SESSIONS)]
    expected = await expected_of(small, prompts)
    file = write_route(tmp_path / "route.toml", small, ("0:3", "3:7"), **CONTEXT)
    head, tail = file.route.stages
    async with open_up(file, "--frozen-after", "1", "--heartbeat", str(BEAT)) as up:
        async with loaded(file, prompts) as (pipeline, load):
            await load.one_more()
            os.kill(await up.ready(tail.address), signal.SIGSTOP)
            await up.ready(tail.address, 2)
            assert "has not answered for" in up.events(tail.address, "frozen")[0]["why"]
            assert [line["code"] for line in up.events(tail.address, "ended")] == [-signal.SIGKILL]
            await load.one_more()
            await roll(up, (head, tail))
            await load.one_more()
            assert pipeline.statistics().downs >= 3
        for answers, right in zip(load.answers, expected, strict=True):
            assert all(answer == right for answer in answers)
        assert up.events(head.address, "frozen") == []


@pytest.mark.slow
async def test_stages_with_spares_are_left_in_good_order_before_they_are_restarted(
    small: Path, prompt: Prompt, tmp_path: Path
) -> None:
    """Every stage twice: no answer meets a loss, and everyone is moved by being drained."""
    prompts = [prompt(16 + index, seed=index) for index in range(SESSIONS)]
    expected = await expected_of(small, prompts)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(6)]
    split = ("0:2", "2:5", "5:7")
    file = write_route(tmp_path / "route.toml", small, split, addresses[:3], **CONTEXT)
    spares = tuple(StageRef(at, ref.layers) for at, ref in zip(addresses[3:], file.route.stages, strict=True))
    file = evolve(file, spares=spares)
    file.path.write_text(format_route_file(file))
    async with open_up(file, "--heartbeat", str(BEAT)) as up, loaded(file, prompts) as (pipeline, load):
        await load.one_more()
        for times in (1, 2):
            await roll(up, file.stages, times)
            await load.one_more()
        assert pipeline.statistics().downs == 0
        assert pipeline.epoch > 6
    for answers, right in zip(load.answers, expected, strict=True):
        assert all(answer == right for answer in answers)
