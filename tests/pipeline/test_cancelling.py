"""Cancelled at any step of its life, a pipeline ends quietly, and nothing of it is left: no error, slot, thread or task."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterator

import pytest
import trio
from cancel_at import CancelAt, cancelled_at
from conversations import reference, take
from pipeline.harness import CONTEXT, THREE, TWO, Stages, open_stages

from dgr.cluster.local import ShardPolicy, open_cluster
from dgr.core.route import LayerRange
from dgr.errors import LinkBroken
from dgr.stage.shard import Shard
from dgr.testing.engines.fake import FakeEngine
from dgr.testing.waits import until

PROMPT = list(b"The quick brown fox")


class Threaded(FakeEngine):
    """A fake that is called in a thread, as native engines are."""

    inline = False


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dgr-engine"]


def at_every_step(life: Callable[[Callable[[], None]], Coroutine[None, None, None]], stride: int = 1) -> int:
    """Live once for every step that may be the one; gives how many there were.

    ``life(begin)`` calls ``begin`` where cancelling may begin. It must end without an error.
    """

    async def live(step: int) -> bool:
        with trio.CancelScope() as scope:
            killer = CancelAt(step, scope)

            def begin() -> None:
                trio.lowlevel.add_instrument(killer)

            try:
                await life(begin)
            finally:
                trio.lowlevel.remove_instrument(killer)
        return killer.reached

    before = engine_threads()
    step = 1
    while trio.run(live, step):
        assert engine_threads() == before, f"cancelled at step {step}"
        step += stride
    return step


def a_whole_life(engine: type[FakeEngine], split: str) -> Callable[..., Coroutine[None, None, None]]:
    """Stages, a pipeline, two turns, a route change, all under one scope: everything is cancelled at once."""

    async def live(begin: Callable[[], None]) -> None:
        begin()
        shards: list[Shard] = []
        try:
            async with open_cluster() as cluster:
                stages = Stages(cluster, CONTEXT, ShardPolicy(min_idle=0))
                for name in (*split.split(","), "0:6"):
                    await stages.start(name, engine(LayerRange.parse(name), CONTEXT))
                    shards.append(stages.shard(name))
                async with stages.pipeline(split) as pipeline, pipeline.session() as session:
                    await take(session.generate(PROMPT, max_tokens=2))
                    await session.state_summaries()
                    await pipeline.change_route(stages.route("0:6"))
                    await take(session.generate([1], max_tokens=1))
        finally:
            assert [shard.ledger.leases for shard in shards] == [()] * len(shards)

    return live


@pytest.fixture(autouse=True)
def no_defects(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What ends by a defect ends alone, and would not be seen here."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("engine", [FakeEngine, Threaded])
def test_everything_under_one_timeout_ends_quietly(engine: type[FakeEngine]) -> None:
    stride = 11 if engine is Threaded else 7
    assert at_every_step(a_whole_life(engine, TWO), stride) > 230


@pytest.mark.slow
@pytest.mark.parametrize("split", [TWO, THREE])
@pytest.mark.parametrize("engine", [FakeEngine, Threaded])
def test_everything_under_one_timeout_ends_quietly_at_every_single_step(engine: type[FakeEngine], split: str) -> None:
    assert at_every_step(a_whole_life(engine, split)) > 230


@pytest.mark.parametrize("engine", [FakeEngine, Threaded])
def test_stages_that_stay_hold_nothing_of_a_pipeline_that_was_cancelled(engine: type[FakeEngine]) -> None:
    async def live(begin: Callable[[], None]) -> None:
        async with open_cluster() as cluster:
            stages = Stages(cluster, CONTEXT, ShardPolicy(min_idle=0))
            with trio.CancelScope(shield=True):
                for name in TWO.split(","):
                    await stages.start(name, engine(LayerRange.parse(name), CONTEXT))
            try:
                begin()
                async with stages.pipeline(TWO) as pipeline, pipeline.session() as session:
                    await take(session.generate(PROMPT, max_tokens=2))
            finally:
                with trio.CancelScope(shield=True):
                    await settled(stages)

    async def settled(stages: Stages) -> None:
        shards = stages.cluster.shards.values()
        await until(
            lambda: not any(shard.statistics().routes for shard in shards), what="the end of every route session"
        )
        for name, shard in stages.cluster.shards.items():
            seen = shard.statistics()
            assert (seen.sessions, seen.leased_bytes) == (0, 0), f"{name}: {seen}"
            assert all(stages.engines[name].position(slot) == 0 for slot in range(CONTEXT.n_seq_max))

    assert at_every_step(live, 3) > 100


def test_a_cancelled_turn_leaves_a_session_that_goes_on() -> None:
    step, reached = 1, True

    async def live(begin: Callable[[], None]) -> None:
        async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
            with cancelled_at(step) as killer:
                await take(session.generate(PROMPT, max_tokens=3))
            answer = await take(session.generate(transcript=PROMPT, max_tokens=3))
            assert answer == reference(PROMPT, 3)
            nonlocal reached
            reached = killer.reached

    while reached:
        trio.run(live, lambda: None)
        step += 3
    assert step > 20


@pytest.mark.parametrize(
    "raised",
    [
        ExceptionGroup("the caller's own", [ValueError("one")]),
        ExceptionGroup("the caller's own", [ValueError("one"), LinkBroken("two")]),
        BaseExceptionGroup("the caller's own", [ExceptionGroup("inner", [ValueError("one")]), KeyboardInterrupt()]),
        ValueError("alone"),
        LinkBroken("the caller's own"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("beside_a_timeout", [False, True])
def test_what_a_block_raises_leaves_as_it_is(raised: BaseException, beside_a_timeout: bool) -> None:
    async def main() -> None:
        with trio.CancelScope() as scope:
            async with open_cluster() as cluster:
                stages = Stages(cluster, CONTEXT, ShardPolicy(min_idle=0))
                for name in TWO.split(","):
                    await stages.start(name)
                async with stages.pipeline(TWO) as pipeline, pipeline.session() as session:
                    await take(session.generate(PROMPT, max_tokens=1))
                    if beside_a_timeout:
                        scope.cancel()
                    raise raised

    with pytest.raises(type(raised)) as caught:
        trio.run(main)
    assert repr(caught.value) == repr(raised)
    if not beside_a_timeout:  # a cancelled scope of trio's builds groups anew
        assert caught.value is raised
