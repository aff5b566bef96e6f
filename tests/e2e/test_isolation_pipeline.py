"""What the runtime does to one session leaves every byte of the others' state as it was, on every stage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from e2e.running import Open, Running
from fixture_types import Prompt

import dgr
from dgr.client.session import ClientSession
from dgr.core.values import ContextParams

CONTEXT = ContextParams(n_ctx=512, n_batch=128, n_ubatch=128, n_seq_max=3)
SPLIT = "0:2,2:4,4:7"


async def some(session: ClientSession, prompt: Sequence[int], count: int) -> list[int]:
    return [token.id async for token in session.generate(prompt, max_tokens=count, stop=())]


async def cancelled_generation(running: Running, session: ClientSession, prompt: Prompt) -> None:
    with trio.CancelScope() as scope:
        async for token in session.generate(prompt(5), max_tokens=50, stop=()):
            if token.position > 70:
                scope.cancel()
    assert scope.cancelled_caught


async def cancelled_prefill(running: Running, session: ClientSession, prompt: Prompt) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.prefill, prompt(300))
            while not session.in_flight:
                await trio.lowlevel.checkpoint()
            scope.cancel()
    await session.state_summaries()  # settles: what was in flight has drained


async def dropped_iterator(running: Running, session: ClientSession, prompt: Prompt) -> None:
    async for _ in session.generate(prompt(9), max_tokens=50, stop=()):
        break


async def diverging_turn(running: Running, session: ClientSession, prompt: Prompt) -> None:
    [token async for token in session.generate(transcript=prompt(90, seed=8), max_tokens=3, stop=())]


async def closed(running: Running, session: ClientSession, prompt: Prompt) -> None:
    await session.aclose()


async def reopened(running: Running, session: ClientSession, prompt: Prompt) -> None:
    await session.aclose()
    async with running.pipeline.session() as another:
        await some(another, prompt(100, seed=6), 4)


#: What is done to one session of a pipeline.
Act = Callable[[Running, ClientSession, Prompt], Awaitable[None]]
ACTS: list[Act] = [cancelled_generation, cancelled_prefill, dropped_iterator, diverging_turn, closed, reopened]


@pytest.mark.parametrize("act", ACTS, ids=lambda act: str(act.__name__))
async def test_an_act_on_one_session(small: Path, prompt: Prompt, open_stages: Open, act: Act) -> None:
    async with open_stages(small, SPLIT, CONTEXT, chunk=64) as running, AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(running.pipeline.session()) for _ in range(2)]
        for seed, session in enumerate(sessions):
            await some(session, prompt(66, seed=seed), 3)
        before = running.images(sessions[0])
        await act(running, sessions[1], prompt)
        assert running.images(sessions[0]) == before
        running.assert_slots_empty()
        # And it goes on as if nothing had been.
        async with dgr.open_pipeline(small, context=CONTEXT) as whole, whole.session() as alone:
            expected = await some(alone, prompt(66), 3) + await some(alone, (), 5)
        assert await some(sessions[0], (), 5) == expected[3:]


async def test_an_eviction(small: Path, prompt: Prompt, open_stages: Open) -> None:
    policy = dgr.ShardPolicy(min_idle=0)
    async with open_stages(small, SPLIT, CONTEXT, policy=policy) as running, AsyncExitStack() as stack:
        oldest, kept, late = [await stack.enter_async_context(running.pipeline.session()) for _ in range(3)]
        for seed, session in enumerate((oldest, kept, late)):
            await some(session, prompt(66, seed=seed), 2)
        before = running.images(kept), running.images(late)
        newcomer = await stack.enter_async_context(running.pipeline.session())
        await some(newcomer, prompt(80, seed=9), 2)
        assert running.cluster.shards["stage-1"].statistics().evictions == 1
        assert (running.images(kept), running.images(late)) == before


async def test_another_pipelines_fence(small: Path, prompt: Prompt, open_stages: Open) -> None:
    async with open_stages(small, SPLIT, CONTEXT) as running, running.pipeline.session() as session:
        await some(session, prompt(66), 2)
        before = running.images(session)
        async with dgr.open_pipeline_on(running.cluster.connect, running.pipeline.route) as other:
            async with other.session() as theirs:
                await some(theirs, prompt(30, seed=4), 2)
                await other.change_route(other.route)
                assert running.images(session) == before
                await some(theirs, (), 2)
            assert running.images(session) == before
        assert running.images(session) == before
        running.assert_slots_empty()


async def test_a_route_change_frees_everything(small: Path, prompt: Prompt, open_stages: Open) -> None:
    async with open_stages(small, SPLIT, CONTEXT) as running, running.pipeline.session() as session:
        first = await some(session, prompt(66), 2)
        await running.pipeline.change_route(running.pipeline.route)
        running.assert_slots_empty()
        async with running.pipeline.session() as alone:
            again = await some(alone, prompt(66), 4)
        assert again == first + await some(session, (), 2)
