"""The engine's thread: results, errors, order, cancellation, and its end."""

from __future__ import annotations

import signal
import threading
from queue import SimpleQueue
from typing import Any, cast

import pytest
import trio

from dgr.stage.engine_thread import Worker


async def test_calls_run_in_one_thread_in_order() -> None:
    worker, seen = Worker("a worker"), []

    async def call(number: int) -> None:
        seen.append(await worker.run(lambda: (number, threading.current_thread().name)))

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(call, number)
    worker.stop()
    assert sorted(seen) == [(number, "a worker") for number in range(3)]


async def test_an_error_reaches_the_caller_and_the_thread_goes_on() -> None:
    worker = Worker("a worker")
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 // 0)
    assert await worker.run(lambda: 7) == 7
    worker.stop()


async def test_a_cancellation_waits_for_the_call_that_began() -> None:
    worker, began, go, ended = Worker("a worker"), trio.Event(), threading.Event(), []
    token = trio.lowlevel.current_trio_token()

    def call() -> None:
        token.run_sync_soon(began.set)
        assert go.wait(10)
        ended.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run, call)
        await began.wait()
        nursery.cancel_scope.cancel()
        go.set()
    assert ended
    with trio.CancelScope() as scope:
        scope.cancel()
        await worker.run(lambda: ended.append(False))
    assert ended == [True]
    worker.stop()


async def test_the_thread_ends_for_good() -> None:
    worker = Worker("a worker")
    thread = await worker.run(threading.current_thread)
    worker.stop()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="a worker was stopped"):
        await worker.run(lambda: 1)
    worker.stop()


class _Interrupting:
    """A queue that is interrupted by Ctrl-C in the very moment in which something was put."""

    def __init__(self, queue: SimpleQueue[Any]) -> None:
        self.get = queue.get
        self._queue = queue

    def put(self, job: object) -> None:
        self._queue.put(job)
        if job is not None:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_between_handing_over_and_waiting_is_an_interrupt() -> None:
    done: list[bool] = []

    async def main() -> None:
        worker = Worker("a worker")
        worker._jobs = cast("SimpleQueue[Any]", _Interrupting(worker._jobs))
        try:
            await worker.run(lambda: done.append(True))
            await trio.lowlevel.checkpoint()
        finally:
            worker.stop()

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    assert done == [True]
    assert not any(thread.name == "a worker" for thread in threading.enumerate())
