"""dgr from a plain synchronous program: many threads, timeouts, and nothing that stays behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager

import pytest
import trio
from serving.interrupts import GUARD, PROMPT, Fake, undisturbed

import dgr
from dgr.errors import ClosedError, ContextLimitExceeded, InputError, InvalidRoute, QueueFull, RequestTimedOut
from dgr.serving import blocking, embed
from dgr.serving.engine import Job, Phase, ServingLimits
from dgr.testing.offline import Offline, open_fake_pipeline

pytestmark = pytest.mark.filterwarnings("error")

JOB = Job(tuple(PROMPT), 8)
ONE = ServingLimits(sessions=1, max_waiting=1)


class Gate:
    """A made-up pipeline whose head waits before every run while the gate is shut."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.offline: Offline | None = None

    def shut(self) -> None:
        self.reached.clear()
        self.open.clear()

    @asynccontextmanager
    async def pipeline(self) -> AsyncIterator[dgr.Pipeline]:
        def watch(_: object) -> None:
            if not self.open.is_set():
                self.reached.set()
                assert self.open.wait(GUARD)

        async with open_fake_pipeline("0:3,3:6") as self.offline:
            head = self.offline.engines["stage-0"]
            head.inline, head.watch = False, watch
            yield self.offline.pipeline


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("dgr-trio", "dgr-asyncio"))]


def ids(answer: blocking.BlockingAnswer) -> list[int]:
    return [token.id for token in answer]


def test_an_answer_is_that_of_the_pipeline_alone(gate: Gate) -> None:
    with blocking.open_serving(Fake().open) as serving:
        assert serving.encode("abc") == (97, 98, 99)
        with serving.admit(JOB) as answer:
            assert ids(answer) == undisturbed(8)
        assert (answer.finish_reason, answer.usage.completion, answer.phase) == ("length", 8, Phase.ENDED)


def test_many_threads_get_their_own_answers(gate: Gate) -> None:
    jobs = [Job(tuple(PROMPT[index:]), 8) for index in range(12)]

    def ask(job: Job) -> list[int]:
        with serving.admit(job) as answer:
            return ids(answer)

    with blocking.open_serving(Fake().open) as serving, ThreadPoolExecutor(len(jobs)) as threads:
        found = list(threads.map(ask, jobs))
        assert (serving.engine.line.running, serving.engine.line.waiting) == (0, 0)
    assert found == [undisturbed(8, list(job.prompt)) for job in jobs]


def test_a_full_line_a_deadline_and_wrong_input_are_told_by_type(gate: Gate) -> None:
    with blocking.open_serving(gate.pipeline, ONE) as serving:
        gate.shut()
        with serving.admit(JOB), serving.admit(JOB, deadline=0.05) as late:
            with pytest.raises(QueueFull, match="no more than 1 may"), serving.admit(JOB):
                pytest.fail("a third was admitted")
            with pytest.raises(RequestTimedOut, match=r"within 0\.05 s"):
                late.next()
        with pytest.raises(ContextLimitExceeded), serving.admit(Job((1,), 10**6)):
            pytest.fail("it was admitted")
        gate.open.set()


def test_a_wait_that_timed_out_loses_no_token(gate: Gate) -> None:
    with blocking.open_serving(gate.pipeline) as serving, serving.admit(JOB) as answer:
        found = [answer.next(), answer.next()]
        gate.shut()
        with pytest.raises(TimeoutError):
            answer.next(timeout=0.01)
        gate.open.set()
        found += list(answer)
        assert [token.id for token in found if token] == undisturbed(8)
        assert answer.next() is None


def test_leaving_an_answer_gives_its_place_to_who_waits(gate: Gate) -> None:
    with blocking.open_serving(gate.pipeline, ONE) as serving:
        with serving.admit(Job(tuple(PROMPT), 500)) as first:
            first.next()
        with serving.admit(JOB) as second:
            assert ids(second) == undisturbed(8)
        assert serving.engine.counters.cancelled == 1
        with pytest.raises(ClosedError, match="block of this answer was left"):
            first.next()


def waits_for_a_token(serving: blocking.BlockingServing, ready: Callable[[], object]) -> None:
    with serving.admit(JOB) as answer:
        ready()
        ids(answer)


def waits_for_its_turn(serving: blocking.BlockingServing, ready: Callable[[], object]) -> None:
    with serving.admit(Job(tuple(PROMPT), 1000)) as first:
        first.next()
        waits_for_a_token(serving, ready)


@pytest.mark.parametrize("wait", [waits_for_a_token, waits_for_its_turn])
def test_whoever_waits_as_the_block_is_left_is_told(
    gate: Gate, wait: Callable[[blocking.BlockingServing, Callable[[], object]], None]
) -> None:
    ready = threading.Event()
    failures: list[dgr.DgrError] = []

    def ask() -> None:
        try:
            wait(serving, ready.set)
        except dgr.DgrError as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    with blocking.open_serving(gate.pipeline, ONE) as serving:
        if wait is waits_for_a_token:
            gate.shut()
        thread.start()
        assert ready.wait(GUARD)
        if wait is waits_for_a_token:
            assert gate.reached.wait(GUARD)
            threading.Timer(0.05, gate.open.set).start()  # a native step is never cut short
    thread.join(GUARD)
    assert not thread.is_alive()
    assert len(failures) == 1
    with pytest.raises(ClosedError):
        serving.encode("x")


def test_errors_of_opening_are_raised_as_they_are(gate: Gate) -> None:
    def broken() -> AbstractContextManager[object]:
        raise InvalidRoute("no such route")

    with pytest.raises(InvalidRoute, match="no such route"), blocking.open_serving(broken):  # type: ignore[arg-type]
        pytest.fail("it was opened")
    with (
        pytest.raises(InputError, match="sessions is 9"),
        blocking.open_serving(Fake().open, ServingLimits(sessions=9)),
    ):
        pytest.fail("it was opened")


def test_a_block_that_was_never_left_ends_with_its_last_reference(gate: Gate) -> None:
    serving = blocking.open_serving(Fake().open).__enter__()
    assert len(serving.encode("x")) == 1
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("dgr-")]
    assert len(threads) == 2
    del serving
    gc.collect()
    for thread in threads:
        thread.join(GUARD)


def test_a_call_from_an_event_loop_is_refused(gate: Gate) -> None:
    with blocking.open_serving(Fake().open) as serving:

        async def call() -> None:
            serving.encode("x")

        with pytest.raises(InputError, match="would stop this thread's event loop"):
            asyncio.run(call())
        with pytest.raises(InputError, match="would stop this thread's event loop"):
            trio.run(call)


def test_a_forked_child_is_told_that_it_has_no_pipeline(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    with blocking.open_serving(Fake().open) as serving, serving.admit(JOB) as answer:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            with pytest.raises(ClosedError, match="another process's"):
                serving.encode("x")
        assert ids(answer) == undisturbed(8)


def test_an_interrupt_gives_the_work_up_and_the_block_ends(gate: Gate) -> None:
    """As Control-C does while the main thread waits for a token."""

    def interrupt() -> None:
        assert gate.reached.wait(GUARD)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        gate.open.set()

    gate.shut()
    thread = threading.Thread(target=interrupt)
    with blocking.open_serving(gate.pipeline) as serving:
        thread.start()
        with pytest.raises(KeyboardInterrupt), serving.admit(JOB) as answer:
            ids(answer)
        thread.join()
        assert serving.engine.line.running == 0
        with serving.admit(JOB) as answer:
            assert ids(answer) == undisturbed(8)


# --- the same from asyncio ---


def test_asyncio_has_the_line_and_the_deadlines(gate: Gate) -> None:
    async def main() -> None:
        async with embed.embed_pipeline(gate.pipeline) as pipeline, pipeline.serving(ONE) as serving:
            assert await serving.encode("ab") == (97, 98)
            gate.shut()
            async with serving.admit(JOB) as first, serving.admit(JOB, deadline=0.05) as late:
                with pytest.raises(QueueFull):
                    async with serving.admit(JOB):
                        pytest.fail("a third was admitted")
                with pytest.raises(RequestTimedOut):
                    await anext(late)
                gate.open.set()
                assert [token.id async for token in first] == undisturbed(8)
            assert (serving.engine.line.running, serving.engine.line.waiting) == (0, 0)
            await serving.drain(1)
            with pytest.raises(dgr.errors.NotServing):
                async with serving.admit(JOB):
                    pytest.fail("a server at its end admitted somebody")

    asyncio.run(main())


@pytest.mark.parametrize("left", ["answer", "serving", "pipeline"])
def test_blocks_may_be_left_in_any_order_under_a_reader(gate: Gate, left: str) -> None:
    """Tasks of a server end when they like: nobody keeps a slot, and who reads is told."""

    async def main() -> None:
        async with embed.embed_pipeline(gate.pipeline) as pipeline:
            block = pipeline.serving(ONE)
            serving = await block.__aenter__()
            admission = serving.admit(Job(tuple(PROMPT), 500))
            answer = await admission.__aenter__()
            await anext(answer)
            reading = asyncio.Event()
            reader = asyncio.create_task(_read(answer, reading))
            await reading.wait()
            if left != "pipeline":
                await (admission if left == "answer" else block).__aexit__(None, None, None)
                assert isinstance(await reader, ClosedError | dgr.errors.NotServing)
                assert serving.engine.line.running == 0
                await admission.__aexit__(None, None, None)
                await block.__aexit__(None, None, None)
        assert isinstance(await reader, dgr.DgrError)

    asyncio.run(main())


async def _read(answer: embed.EmbeddedAnswer, reading: asyncio.Event) -> dgr.DgrError | None:
    try:
        async for _ in answer:
            reading.set()
    except dgr.DgrError as error:
        return error
    return None


def test_an_admitted_answer_that_is_interrupted_at_any_step_keeps_its_place_or_has_none() -> None:
    """Admission, a wait for a token, leaving: whichever step of trio's the cancellation meets, no token and no slot is lost."""
    expected = undisturbed(3)

    async def main() -> int:
        side = Fake()
        async with embed.embed_pipeline(side.open) as pipeline, pipeline.serving(ONE) as serving:
            for step in itertools.count(1):
                seen: list[int] = []

                async def read(answer: embed.EmbeddedAnswer, seen: list[int] = seen) -> None:
                    async for token in answer:
                        seen.append(token.id)  # noqa: PERF401 (one by one: this is cancelled)

                async def work() -> None:
                    async with serving.admit(Job(tuple(PROMPT), 3)) as answer:
                        try:
                            await read(answer)
                        except asyncio.CancelledError:
                            await read(answer)
                            raise

                task = asyncio.ensure_future(work())
                side.interrupter.arm(step, task.cancel)
                await asyncio.wait([task], timeout=GUARD)
                acted = side.interrupter.disarm()
                assert task.done()
                assert task.cancelled() or task.exception() is None
                assert seen in ([], expected)
                assert (serving.engine.line.running, serving.engine.line.waiting) == (0, 0)
                if not acted:
                    assert seen == expected
                    return step
        raise AssertionError

    assert asyncio.run(main()) > 10
