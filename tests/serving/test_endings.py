"""However an embedded pipeline ends, its block returns, nothing stays behind, and what is still held says that it is closed."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from serving.interrupts import GUARD, PROMPT, Fake, answer, trio_threads, undisturbed

import dgr
from dgr.client.events import PrefillProgress
from dgr.errors import ClosedError, ContextLimitExceeded, InputError, SessionError
from dgr.serving import bridge, embed
from dgr.wire.nurseries import open_nursery

pytestmark = pytest.mark.filterwarnings("error")


async def stream(pipeline: embed.EmbeddedPipeline) -> AsyncIterator[int]:
    """The usual streaming answer: a generator that holds a session."""
    async with pipeline.session() as session:
        async for token in await session.generate(PROMPT, max_tokens=8, stop=()):
            yield token.id


# --- leaving ---


async def held_by_a_task(pipeline: embed.EmbeddedPipeline) -> Callable[[], Awaitable[object]]:
    inside, leave = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with pipeline.session() as session:
            await answer(session, PROMPT, 1)
            inside.set()
            await leave.wait()

    task = asyncio.ensure_future(hold())
    await inside.wait()

    async def end() -> None:
        leave.set()
        await task

    return end


async def entered_by_hand(pipeline: embed.EmbeddedPipeline) -> Callable[[], Awaitable[object]]:
    block = pipeline.session()
    await answer(await block.__aenter__(), PROMPT, 1)
    return lambda: block.__aexit__(None, None, None)


async def in_a_generator_nobody_reads(pipeline: embed.EmbeddedPipeline) -> Callable[[], Awaitable[object]]:
    answers = stream(pipeline)
    await anext(answers)
    return answers.aclose  # type: ignore[attr-defined, no-any-return]  # a generator has it, an iterator need not


async def in_a_generator_that_reads_on(pipeline: embed.EmbeddedPipeline) -> Callable[[], Awaitable[object]]:
    answers = stream(pipeline)
    await anext(answers)

    async def end() -> None:
        with pytest.raises(ClosedError):
            await anext(answers)

    return end


async def events_held_by_hand(pipeline: embed.EmbeddedPipeline) -> Callable[[], Awaitable[object]]:
    block = pipeline.events()
    await block.__aenter__()
    return lambda: block.__aexit__(None, None, None)


@pytest.mark.parametrize(
    "hold",
    [held_by_a_task, entered_by_hand, in_a_generator_nobody_reads, in_a_generator_that_reads_on, events_held_by_hand],
)
def test_a_pipeline_is_left_while_something_of_it_is_open_and_that_may_end_later(
    hold: Callable[[embed.EmbeddedPipeline], Awaitable[Callable[[], Awaitable[object]]]],
) -> None:
    async def main() -> None:
        async with asyncio.timeout(GUARD), embed.embed_pipeline(Fake().open) as pipeline:
            end = await hold(pipeline)
        assert not trio_threads()
        await end()

    asyncio.run(main())


def test_a_wait_in_another_task_hears_that_the_pipeline_was_closed() -> None:
    async def main() -> None:
        fake = Fake()
        async with embed.embed_pipeline(fake.open) as pipeline, pipeline.session() as session:
            answers = await session.generate(PROMPT, max_tokens=4, stop=())
            begun = asyncio.Event()
            fake.interrupter.arm(10, begun.set)
            waiting = asyncio.ensure_future(anext(answers))
            await begun.wait()
        with pytest.raises((ClosedError, SessionError)):
            await waiting

    asyncio.run(main())


def test_after_the_end_everything_says_that_it_is_closed() -> None:
    async def main() -> None:
        async with embed.embed_pipeline(Fake().open) as pipeline:
            block = pipeline.session()
            session = await block.__aenter__()
            answers = await session.generate(PROMPT, max_tokens=4, stop=())
            await anext(answers)
            async with pipeline.session() as other:
                pass
            with pytest.raises(SessionError, match="closed"):
                await other.generate(PROMPT)
        route = dgr.Route((dgr.StageRef("stage-0", dgr.LayerRange(0, 6)),))
        for use in (
            lambda: session.generate(PROMPT),
            lambda: session.prefill(PROMPT),
            lambda: anext(answers),
            lambda: other.generate(PROMPT),
            lambda: pipeline.statistics(),
            lambda: pipeline.change_route(route),
            lambda: pipeline.session().__aenter__(),
            lambda: pipeline.events().__aenter__(),
        ):
            with pytest.raises(ClosedError, match="closed"):
                await use()
        assert len(session.transcript) == len(PROMPT) + 1

    asyncio.run(main())


def test_another_loop_is_refused_at_once_and_the_owner_goes_on() -> None:
    async def main() -> list[int]:
        async with embed.embed_pipeline(Fake().open) as pipeline, pipeline.session() as session:
            answers = await session.generate(PROMPT, max_tokens=4, stop=())
            async with pipeline.events() as events:
                for use in (
                    lambda: session.generate(PROMPT),
                    lambda: session.prefill(PROMPT),
                    lambda: anext(answers),
                    lambda: pipeline.statistics(),
                    lambda: pipeline.session().__aenter__(),
                    lambda: anext(events),
                ):

                    async def elsewhere(use: Callable[[], Awaitable[object]] = use) -> None:
                        with pytest.raises(InputError, match="belongs to the asyncio loop that opened it"):
                            await use()

                    thread = threading.Thread(target=asyncio.run, args=(elsewhere(),))
                    thread.start()
                    await asyncio.get_running_loop().run_in_executor(None, thread.join, GUARD)
                    assert not thread.is_alive()
            return [token.id async for token in answers]

    assert asyncio.run(main()) == undisturbed(4)


# --- crossing ---


def test_an_error_carries_the_frames_of_both_sides() -> None:
    async def main() -> None:
        async with embed.embed_pipeline(Fake().open) as pipeline, pipeline.session() as session:
            with pytest.raises(ContextLimitExceeded) as caught:
                await session.prefill([1] * 1000)
            names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
            assert "_rewrite" in names
            assert "main" in names

    asyncio.run(main())


@pytest.mark.parametrize("kind", [ValueError, SystemExit, ExceptionGroup])
@pytest.mark.parametrize("where", ["opening", "leaving"])
def test_what_the_trio_side_raises_leaves_the_block_as_itself(where: str, kind: type[BaseException]) -> None:
    error = kind("several", [ValueError("one")]) if kind is ExceptionGroup else kind("one")

    @asynccontextmanager
    async def broken() -> AsyncIterator[dgr.Pipeline]:
        if where == "opening":
            raise error
        async with Fake().open() as pipeline:
            yield pipeline
        raise error

    async def main() -> None:
        with pytest.raises(kind) as caught:
            async with embed.embed_pipeline(broken):
                assert where == "leaving"
        assert caught.value is error

    asyncio.run(main())
    assert not trio_threads()


def test_a_pipeline_that_ends_by_itself_says_why() -> None:
    async def main() -> None:
        failed, fail = asyncio.Event(), trio.Event()
        error = RuntimeError("its own")

        async def run() -> None:
            await fail.wait()
            raise error

        @asynccontextmanager
        async def failing() -> AsyncIterator[dgr.Pipeline]:
            try:
                async with open_nursery() as nursery, Fake().open() as pipeline:
                    nursery.start_soon(run)
                    yield pipeline
            finally:
                loop.call_soon_threadsafe(failed.set)

        async def use() -> None:
            async with embed.embed_pipeline(failing) as pipeline, pipeline.session() as session:
                pipeline._bridge.post(fail.set)
                await failed.wait()
                with pytest.raises(ClosedError):
                    await anext(await session.generate(PROMPT))
                with pytest.raises(ClosedError) as refused:
                    await pipeline.statistics()
                assert refused.value.__cause__ is error

        loop = asyncio.get_running_loop()
        with pytest.raises(RuntimeError, match="its own") as caught:
            await use()
        assert caught.value is error

    asyncio.run(main())
    assert not trio_threads()


def test_a_context_variable_of_the_caller_is_seen_on_the_trio_side() -> None:
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")
    seen = []

    @asynccontextmanager
    async def look() -> AsyncIterator[dgr.Pipeline]:
        seen.append(who.get())
        async with Fake().open() as pipeline:
            yield pipeline

    async def main() -> None:
        who.set("the caller")
        async with embed.embed_pipeline(look):
            pass

    asyncio.run(main())
    assert seen == ["the caller"]


def test_events_come_over_and_can_be_read_after_the_end() -> None:
    async def main() -> None:
        async with embed.embed_pipeline(Fake().open) as pipeline:
            block = pipeline.events()
            events = await block.__aenter__()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await anext(events)
            async with pipeline.session() as session:
                await answer(session, PROMPT, 2)
                await session.prefill([1, 2])
        told = [type(event).__name__ async for event in events if not isinstance(event, PrefillProgress)]
        assert told[:2] == ["Prefilled", "Prefilled"]
        with pytest.raises(StopAsyncIteration):
            await anext(events)
        await block.__aexit__(None, None, None)

    asyncio.run(main())


# --- several, and one after another ---


def test_pipelines_of_one_loop_do_not_know_each_other() -> None:
    async def main() -> list[list[int]]:
        async with embed.embed_pipeline(Fake().open) as one, one.session() as first:
            async with embed.embed_pipeline(Fake().open) as two, two.session() as second:
                both = await asyncio.gather(answer(first, PROMPT, 4), answer(second, PROMPT, 4))
            return [*both, await answer(first, [], 2)]

    expected = undisturbed(6)
    assert asyncio.run(main()) == [expected[:4], expected[:4], expected[4:]]
    assert not trio_threads()


def test_a_loop_after_another_opens_its_own_pipeline() -> None:
    async def main() -> list[int]:
        async with embed.embed_pipeline(Fake().open) as pipeline, pipeline.session() as session:
            return await answer(session, PROMPT, 3)

    assert asyncio.run(main()) == asyncio.run(main()) == undisturbed(3)


def joined(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(GUARD)
    return not any(thread.is_alive() for thread in threads)


def runs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("dgr-trio")]


def test_a_program_that_ends_by_an_error_with_a_block_entered_by_hand_leaves_no_thread() -> None:
    left: list[threading.Thread] = []

    async def main() -> None:
        block = embed.embed_pipeline(Fake().open)
        session = await (await block.__aenter__()).session().__aenter__()
        answers = await session.generate(PROMPT)
        await anext(answers)
        left.extend(runs())
        raise RuntimeError("the program's own")

    with pytest.raises(RuntimeError, match="the program's own"):
        asyncio.run(main())
    gc.collect()
    assert len(left) == 1
    assert joined(left)


def test_ctrl_c_leaves_the_block() -> None:
    async def main() -> None:
        async with embed.embed_pipeline(Fake().open) as pipeline, pipeline.session() as session:
            async for _ in await session.generate(PROMPT, stop=()):
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert not trio_threads()


def test_a_session_that_is_dropped_without_leaving_it_is_closed() -> None:
    async def main() -> None:
        async with embed.embed_pipeline(Fake().open) as pipeline:
            for drop in (entered_by_hand, in_a_generator_nobody_reads):
                end = await drop(pipeline)
                assert (await pipeline.statistics()).sessions == 1
                del end
                gc.collect()
                while (await pipeline.statistics()).sessions:  # a generator is closed by asyncio, in a task of its own
                    pass

    asyncio.run(asyncio.wait_for(main(), GUARD))


def test_a_loop_closed_with_its_pipeline_open_takes_the_trio_run_along_once_it_is_forgotten() -> None:
    async def main() -> None:
        block = embed.embed_pipeline(Fake().open)
        pipeline = await block.__aenter__()
        held.extend([block, pipeline, await pipeline.session().__aenter__()])

    held: list[object] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    left = runs()
    assert len(left) == 1
    held.clear()
    gc.collect()
    assert joined(left)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_loop_closed_under_a_task_ends_the_trio_run(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with embed.embed_pipeline(Fake().open) as pipeline, pipeline.session() as session:
            async for token in await session.generate(PROMPT, stop=()):
                if token.position == len(PROMPT) + tokens:
                    loop.stop()  # ends it once the next token is asked for

    monkeypatch.setattr(bridge, "_LOOK", 0.01)
    loop = asyncio.new_event_loop()
    task = loop.create_task(main())
    loop.run_forever()
    left = runs()
    loop.close()
    assert len(left) == 1
    assert joined(left)
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is what this test is about
    del task
    gc.collect()


def test_a_trio_run_that_breaks_down_lets_go_of_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[type[BaseException] | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_type))

    async def main() -> None:
        fake = Fake()
        async with embed.embed_pipeline(fake.open) as pipeline, pipeline.session() as session:
            answers = await session.generate(PROMPT, max_tokens=4, stop=())

            def broken() -> None:
                raise ZeroDivisionError

            pipeline._bridge.post(broken)
            with pytest.raises((ClosedError, SessionError)):
                await anext(answers)

    asyncio.run(asyncio.wait_for(main(), GUARD))
    assert told == [trio.TrioInternalError]
    assert not trio_threads()


PROGRAM = """
import asyncio, atexit, os, sys, warnings
from serving.interrupts import Fake, answer, PROMPT
from dgr.errors import ClosedError
from dgr.serving import embed

async def enter():
    block = embed.embed_pipeline(Fake().open)
    pipeline = await block.__aenter__()
    session = await pipeline.session().__aenter__()
    return block, pipeline, session, await session.generate(PROMPT)
"""
LOOP_CLOSED = """
loop = asyncio.new_event_loop()
held = loop.run_until_complete(enter())
loop.close()
"""
LOOP_FORGOTTEN = """
loop = asyncio.new_event_loop()
held = loop.run_until_complete(enter())
"""
EXIT = """
async def main():
    held = await enter()
    sys.exit(3)

asyncio.run(main())
"""
FORK = """
async def main():
    async with embed.embed_pipeline(Fake().open) as pipeline, pipeline.session() as session:
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads: that is what this looks at
        if (child := os.fork()) == 0:
            try:
                session.generate(PROMPT).send(None)
            except ClosedError:
                atexit._run_exitfuncs()
                os._exit(5)  # unwinding asyncio.run would close the parent's selector
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        assert len(await answer(session, PROMPT, 3)) == 3

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "code"),
    [
        pytest.param(LOOP_CLOSED, 0, id="loop closed"),
        pytest.param(LOOP_FORGOTTEN, 0, id="loop forgotten"),
        pytest.param(EXIT, 3, id="exit"),
        pytest.param(
            FORK, 0, id="fork", marks=pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="no fork here")
        ),
    ],
)
def test_the_interpreter_ends_with_everything_open(program: str, code: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM + program], cwd=Path(__file__).parents[1], capture_output=True, timeout=GUARD
    )
    assert (ran.returncode, ran.stderr.decode(), ran.stdout) == (code, "", b"")
