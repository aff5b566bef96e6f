"""An asyncio task that is cancelled at any step of trio's loses nothing and leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from interrupts import GUARD, PROMPT, Fake, Interrupter, answer, trio_threads, undisturbed

from dgr.errors import SessionBusy
from dgr.runtime.events import Cancelled
from dgr.runtime.generation import GeneratedToken
from dgr.serving import bridge, embed

pytestmark = pytest.mark.filterwarnings("error")

N = 2
#: Steps that a turn, an opening and a leaving take at the very least: an interrupter that never acts proves nothing.
LEAST_STEPS = 10

Interrupted = Callable[[Callable[[], Awaitable[None]], Callable[[Callable[[], object]], None]], Awaitable[None]]


async def by_cancel(work: Callable[[], Awaitable[None]], arm: Callable[[Callable[[], object]], None]) -> None:
    """``task.cancel()``."""

    async def run() -> None:
        arm(task.cancel)
        await work()

    task = asyncio.ensure_future(run())
    await asyncio.wait([task], timeout=GUARD)
    assert task.done()
    if not task.cancelled():
        task.result()


async def by_timeout(work: Callable[[], Awaitable[None]], arm: Callable[[Callable[[], object]], None]) -> None:
    """``asyncio.timeout``."""
    try:
        async with asyncio.timeout(None) as timeout:
            arm(lambda: None if timeout.expired() else timeout.reschedule(0))
            await work()
    except TimeoutError:
        pass


async def by_wait_for(work: Callable[[], Awaitable[None]], arm: Callable[[Callable[[], object]], None]) -> None:
    """A task around ``wait_for``, which has a task of its own inside."""

    async def armed() -> None:
        arm(task.cancel)
        await work()

    async def run() -> None:
        await asyncio.wait_for(armed(), GUARD)

    task = asyncio.ensure_future(run())
    await asyncio.wait([task], timeout=GUARD)
    if not task.cancelled():
        task.result()


async def turn_interrupted(
    pipeline: embed.EmbeddedPipeline, interrupter: Interrupter, step: int, interrupted: Interrupted, times: int
) -> bool:
    """Take a turn that is interrupted at a step, and read on to its end. Whether it lasted for that long."""
    answers: list[embed.EmbeddedGeneration] = []
    seen: list[GeneratedToken] = []
    async with pipeline.session() as session:

        async def turn() -> None:
            answers.append(await session.generate(PROMPT, max_tokens=N, stop=()))
            async for token in answers[0]:
                seen.append(token)

        await interrupted(turn, lambda act: interrupter.arm(step, act, times))
        acted = interrupter.disarm()
        if not answers:  # taken all the same
            assert session.transcript == PROMPT
            answers.append(await session.generate(max_tokens=N, stop=()))
        seen += [token async for token in answers[0]]
        assert [token.position for token in seen] == list(range(len(PROMPT), len(PROMPT) + N))
        assert [token.id for token in seen] == undisturbed_answer
        assert session.transcript == PROMPT + undisturbed_answer
        assert answers[0].finish_reason == "length"
    return acted


async def turns_interrupted_at_every_step(interrupted: Interrupted, times: int) -> int:
    """Take the same turn over and over, interrupted one step later each time; the steps there were."""
    fake, step = Fake(), 1
    async with embed.embed_pipeline(fake.open) as pipeline:
        while await turn_interrupted(pipeline, fake.interrupter, step, interrupted, times):
            step += 1
        assert (await pipeline.statistics()).sessions == 0
    return step


undisturbed_answer = undisturbed(N)


@pytest.mark.parametrize(("way", "times"), [(by_cancel, 1), (by_cancel, 3), (by_timeout, 1), (by_wait_for, 1)])
def test_a_turn_interrupted_at_any_step_goes_on_without_a_gap(way: Interrupted, times: int) -> None:
    assert asyncio.run(turns_interrupted_at_every_step(way, times)) > LEAST_STEPS * N
    assert not trio_threads()


def test_a_bridge_that_throws_away_what_nobody_waits_for_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed.EmbeddedGeneration, "_keep", lambda *_: None)
    with pytest.raises(AssertionError):
        asyncio.run(turns_interrupted_at_every_step(by_cancel, 1))


def test_a_bridge_that_does_not_outlast_a_second_cancellation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def outlast(self: bridge._Moment, on_cancel: Callable[[], None]) -> asyncio.CancelledError | None:
        for _ in range(2):
            if self.passed:
                break
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError as error:
                cancelled = error
                on_cancel()
            else:
                return None
        return cancelled

    monkeypatch.setattr(bridge._Moment, "outlast", outlast)
    with pytest.raises((AssertionError, SessionBusy)):
        asyncio.run(turns_interrupted_at_every_step(by_cancel, 3))


@pytest.mark.parametrize("times", [1, 3])
def test_an_opening_interrupted_at_any_step_leaves_nothing(times: int) -> None:
    async def open_at(step: int) -> bool:
        fake = Fake()

        async def run() -> None:
            fake.interrupter.arm(step, task.cancel, times)
            async with embed.embed_pipeline(fake.open):
                pass

        task = asyncio.ensure_future(run())
        await asyncio.wait([task], timeout=GUARD)
        acted = fake.interrupter.disarm()
        assert task.cancelled() or not acted or task.result() is None
        assert not trio_threads()
        if fake.offline is not None:
            assert all(engine._stopped for engine in fake.offline.engines.values())
            assert not fake.offline.cluster.shards
        return acted

    async def main() -> int:
        step = 1
        while await open_at(step):
            step += 1
        return step

    assert asyncio.run(main()) > LEAST_STEPS


async def block_interrupted(
    pipeline: embed.EmbeddedPipeline, interrupter: Interrupter, step: int, what: str, times: int
) -> bool:
    """Enter and leave a block of the pipeline, interrupted at a step. Whether it lasted for that long."""

    async def run() -> None:
        if what != "used session":
            interrupter.arm(step, task.cancel, times)
        async with pipeline.events() if what == "events" else pipeline.session() as held:
            if isinstance(held, embed.EmbeddedSession) and what == "used session":
                await answer(held, PROMPT, 1)
                interrupter.arm(step, task.cancel, times)  # while it is being left

    task = asyncio.ensure_future(run())
    await asyncio.wait([task], timeout=GUARD)
    assert task.done()
    return interrupter.disarm()


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("what", ["session", "used session", "events"])
def test_a_block_interrupted_at_any_step_leaves_nothing_open(what: str, times: int) -> None:
    async def main() -> int:
        fake, step = Fake(), 1
        async with embed.embed_pipeline(fake.open) as pipeline:
            assert fake.offline is not None
            while await block_interrupted(pipeline, fake.interrupter, step, what, times):
                step += 1
                assert (await pipeline.statistics()).sessions == 0
                fake.offline.pipeline.emit(Cancelled(0, 0))  # finds out whose subscription is over
                assert not fake.offline.pipeline._hub._subscribers
                async with pipeline.session() as session:
                    assert await answer(session, PROMPT, 1) == undisturbed_answer[:1]
        return step

    assert asyncio.run(main()) > 3
