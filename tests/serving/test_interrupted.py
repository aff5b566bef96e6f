"""An asyncio task that is cancelled at any step of trio's loses nothing and leaves nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from attrs import Factory, define
from serving.interrupts import GUARD, PROMPT, Fake, Interrupter, Native, answer, trio_threads, undisturbed

from dgr.client.events import GenerationCancelled
from dgr.client.generation import GeneratedToken
from dgr.errors import SessionBusy
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


async def read(answers: embed.EmbeddedGeneration, seen: list[GeneratedToken]) -> None:
    async for token in answers:
        seen.append(token)  # noqa: PERF401 (one by one: this is cancelled)


@define
class Turns:
    """The same turn, taken over and over, interrupted one step later each time and read to its end every time."""

    side: Fake
    interrupted: Interrupted
    times: int
    expected: list[int] = Factory(lambda self: undisturbed(N, side=self.side), takes_self=True)

    async def take(self, pipeline: embed.EmbeddedPipeline, step: int) -> bool:
        """Whether the turn lasted for as many steps."""
        answers: list[embed.EmbeddedGeneration] = []
        seen: list[GeneratedToken] = []
        async with pipeline.session() as session:

            async def turn() -> None:
                answers.append(await session.generate(PROMPT, max_tokens=N, stop=()))
                await read(answers[0], seen)

            await self.interrupted(turn, lambda act: self.side.interrupter.arm(step, act, self.times))
            acted = self.side.interrupter.disarm()
            if not answers:  # taken all the same
                assert session.transcript == PROMPT
                answers.append(await session.generate(max_tokens=N, stop=()))
            seen += [token async for token in answers[0]]
            assert [token.position for token in seen] == list(range(len(PROMPT), len(PROMPT) + N))
            assert [token.id for token in seen] == self.expected
            assert session.transcript == PROMPT + self.expected
            assert answers[0].finish_reason == "length"
        return acted

    async def take_all(self) -> int:
        """The steps there were."""
        step = 1
        async with embed.embed_pipeline(self.side.open) as pipeline:
            while await self.take(pipeline, step):
                step += 1
            assert (await pipeline.statistics()).sessions == 0
        return step


WAYS = [(by_cancel, 1), (by_cancel, 3), (by_timeout, 1), (by_wait_for, 1)]


@pytest.mark.parametrize(("way", "times"), WAYS)
def test_a_turn_interrupted_at_any_step_goes_on_without_a_gap(way: Interrupted, times: int) -> None:
    assert asyncio.run(Turns(Fake(), way, times).take_all()) > LEAST_STEPS * N
    assert not trio_threads()


@pytest.mark.slow
@pytest.mark.parametrize(("way", "times"), WAYS)
def test_a_turn_of_the_native_engine_interrupted_at_any_step_goes_on_without_a_gap(
    way: Interrupted, times: int, small: Path
) -> None:
    assert asyncio.run(Turns(Native(small), way, times).take_all()) > LEAST_STEPS * N
    assert not trio_threads()


def test_an_answer_whose_every_wait_is_given_one_step_more_than_the_last_has_no_gap() -> None:
    async def main() -> tuple[list[int], list[int]]:
        side, seen = Fake(), list[GeneratedToken]()
        async with embed.embed_pipeline(side.open) as pipeline, pipeline.session() as session:
            answers = await session.generate(PROMPT, max_tokens=8, stop=())
            for step in itertools.count(1):
                await by_cancel(partial(read, answers, seen), partial(side.interrupter.arm, step))
                if not side.interrupter.disarm():
                    break
            assert session.transcript[len(PROMPT) :] == [token.id for token in seen]
        return [token.id for token in seen], [token.position for token in seen]

    ids, positions = asyncio.run(main())
    assert ids == undisturbed(8)
    assert positions == list(range(len(PROMPT), len(PROMPT) + 8))


def test_an_answer_given_up_for_another_turn_still_has_what_the_transcript_has() -> None:
    async def give_up(side: Fake, pipeline: embed.EmbeddedPipeline, step: int) -> bool:
        seen: list[GeneratedToken] = []
        async with pipeline.session() as session:
            answers = await session.generate(PROMPT, max_tokens=N, stop=())

            await by_cancel(partial(read, answers, seen), partial(side.interrupter.arm, step))
            acted = side.interrupter.disarm()
            said = session.transcript[len(PROMPT) :]
            await answer(session, [7, 8, 9], 1)
            with suppress(SessionBusy):
                await read(answers, seen)
            assert [token.id for token in seen] == said
        return acted

    async def main() -> int:
        side = Fake()
        async with embed.embed_pipeline(side.open) as pipeline:
            step = 1
            while await give_up(side, pipeline, step):
                step += 1
        return step

    assert asyncio.run(main()) > LEAST_STEPS * N


def test_a_second_wait_does_not_overtake_a_first_that_was_cancelled_and_not_waited_for() -> None:
    async def main() -> list[int]:
        async with embed.embed_pipeline(Fake().open) as pipeline, pipeline.session() as session:
            answers = await session.generate(PROMPT, max_tokens=4, stop=())
            seen = [await anext(answers)]
            first = asyncio.ensure_future(anext(answers))
            await asyncio.sleep(0)  # it has begun
            first.cancel()
            with pytest.raises(SessionBusy, match="waited for already"):
                await anext(answers)
            await asyncio.wait([first])
            await read(answers, seen)
        return [token.position for token in seen]

    assert asyncio.run(main()) == list(range(len(PROMPT), len(PROMPT) + 4))


def test_a_bridge_that_throws_away_what_nobody_waits_for_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed.EmbeddedGeneration, "_keep", lambda *_: None)
    with pytest.raises(AssertionError):
        asyncio.run(Turns(Fake(), by_cancel, 1).take_all())


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
        asyncio.run(Turns(Fake(), by_cancel, 3).take_all())


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
    expected = undisturbed(1)

    async def main() -> int:
        fake, step = Fake(), 1
        async with embed.embed_pipeline(fake.open) as pipeline:
            assert fake.offline is not None
            while await block_interrupted(pipeline, fake.interrupter, step, what, times):
                step += 1
                assert (await pipeline.statistics()).sessions == 0
                fake.offline.pipeline._hub.emit(GenerationCancelled(0, 0))  # finds out whose subscription is over
                assert not fake.offline.pipeline._hub._subscribers
                async with pipeline.session() as session:
                    assert await answer(session, PROMPT, 1) == expected
        return step

    assert asyncio.run(main()) > 3
