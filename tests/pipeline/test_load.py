"""How much stages have to do, as their pipeline is told over its links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from far_stages import SPEEDS, Distances, put_far_away
from timed_engines import time_engines
from trio.testing import MockClock

from dgr.client.pipeline import Pipeline
from dgr.core.load import Side
from dgr.core.log_fields import short_route
from dgr.core.values import ContextParams
from dgr.errors import ClosedError, InputError
from dgr.serving import blocking, embed
from dgr.testing.offline import open_fake_pipeline

SPLIT = "0:2,2:4,4:6"
CONTEXT = ContextParams(n_ctx=256, n_batch=64, n_ubatch=64, n_seq_max=4)


async def test_a_load_says_what_was_done(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    put_far_away(monkeypatch, Distances(control={"stage-1": (0.25, 0.25)}))
    async with open_fake_pipeline(SPLIT, context=CONTEXT) as offline, offline.pipeline.session() as session:
        before = await offline.pipeline.load()
        async for _ in session.generate([1] * 10, max_tokens=5, stop=()):
            pass
        loads = await offline.pipeline.load()
        assert list(loads) == ["stage-0", "stage-1", "stage-2"]
        for (stage, load), layers in zip(loads.items(), SPLIT.split(","), strict=True):
            assert load is not None
            fixed, each = SPEEDS[layers]
            assert load.prefill.seconds.total == pytest.approx(fixed + 10 * each)
            assert load.decode.seconds.total == pytest.approx(4 * (fixed + each))
            assert load.computed == pytest.approx(5 * fixed + 14 * each)
            assert (load.decode.tokens.count, load.decode.tokens.total) == (4, 4)
            assert (load.ready, load.routes, load.sessions, load.slots, load.slots_leased) == (True, 1, 1, 4, 1)
            assert load.epochs == {short_route(offline.pipeline.route_id): 1}
            memory = offline.engines[stage].memory()
            assert (load.weights, load.compute, load.state) == (memory.weights, memory.compute, memory.state)
            assert load.state_leased == {name: size // 4 for name, size in memory.state.items()}
            assert load.resident > 1 << 20
            earlier = before[stage]
            assert earlier is not None
            assert 0 < load.seconds - earlier.seconds <= trio.current_time()
        head = loads["stage-0"]
        assert head is not None
        (link,) = [one for one in head.links if one.side is Side.NEXT]
        assert (link.peer, link.frames_sent) == ("stage-1", 6)  # five boundaries, and the wait for the epoch


async def test_a_stage_answers_while_it_computes(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    time_engines(monkeypatch).cost = (10.0, 0.0)
    async with open_fake_pipeline("0:6", context=CONTEXT) as offline, trio.open_nursery() as nursery:

        async def ask() -> None:
            async with offline.pipeline.session() as session:
                await session.prefill([1, 2])

        nursery.start_soon(ask)
        await trio.sleep(4)
        (load,) = (await offline.pipeline.load()).values()
        assert load is not None
        assert load.running_seconds == pytest.approx(4)
        assert load.prefill.tokens.count == 0


async def test_who_does_not_answer_has_no_load(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    put_far_away(monkeypatch, Distances(control={"stage-1": (3.0, 3.0)}))
    async with open_fake_pipeline(SPLIT, context=CONTEXT) as offline:
        began = trio.current_time()
        loads = await offline.pipeline.load(2)
        assert trio.current_time() == began + 2
        assert [load is None for load in loads.values()] == [False, True, False]
        assert all(
            (await offline.pipeline.load(7)).values()
        )  # the late answer to the first is not taken for this one's
        offline.cluster.stop("stage-2")
        await trio.testing.wait_all_tasks_blocked()
        assert (await offline.pipeline.load(7))["stage-2"] is None
        for absurd in (-1, float("nan"), "2"):
            with pytest.raises(InputError, match="seconds"):
                await offline.pipeline.load(absurd)  # type: ignore[arg-type]
    with pytest.raises(ClosedError):
        await offline.pipeline.load()


def test_the_same_from_threads_and_from_asyncio() -> None:
    @asynccontextmanager
    async def pipeline() -> AsyncIterator[Pipeline]:
        async with open_fake_pipeline(SPLIT, context=CONTEXT) as offline:
            yield offline.pipeline

    async def embedded() -> list[str]:
        async with embed.embed_pipeline(pipeline) as embedded:
            loads = await embedded.load()
            async with embedded.serving() as serving:
                assert list(await serving.load(1.0)) == list(loads)
            return [address for address, load in loads.items() if load is not None]

    assert asyncio.run(embedded()) == ["stage-0", "stage-1", "stage-2"]
    with blocking.open_serving(pipeline) as serving:
        assert all(serving.load().values())
