"""The engine's thread: results, errors, order, cancellation, and its end."""

from __future__ import annotations

import signal
import threading
from queue import SimpleQueue
from typing import Any, cast

import pytest
import trio
import trio.testing

from dgr.stage.engine_thread import EngineThread


async def test_calls_run_in_one_thread_in_order() -> None:
    engine_thread, seen = EngineThread("an engine thread"), []

    async def call(number: int) -> None:
        seen.append(await engine_thread.run(lambda: (number, threading.current_thread().name)))

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(call, number)
    engine_thread.stop()
    assert sorted(seen) == [(number, "an engine thread") for number in range(3)]


async def test_an_error_reaches_the_caller_and_the_thread_goes_on() -> None:
    engine_thread = EngineThread("an engine thread")
    with pytest.raises(ZeroDivisionError):
        await engine_thread.run(lambda: 1 // 0)
    assert await engine_thread.run(lambda: 7) == 7
    engine_thread.stop()


async def test_what_is_to_be_told_first_is_told_before_the_caller() -> None:
    engine_thread, told = EngineThread("an engine thread"), trio.Event()
    seen: list[object] = []

    async def listen() -> None:
        await told.wait()
        seen.append("whoever was told")

    def tell(result: int) -> None:
        seen.append(result)
        told.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        await trio.testing.wait_all_tasks_blocked()
        assert await engine_thread.run(lambda: 7, tell) == 7
        seen.append("the caller")
    assert seen[0] == 7
    assert set(seen[1:]) == {"the caller", "whoever was told"}

    def divide(result: int) -> None:
        seen.append(1 // result)

    with pytest.raises(ZeroDivisionError):
        await engine_thread.run(lambda: 0, divide)
    with pytest.raises(ZeroDivisionError):
        await engine_thread.run(lambda: 1 // 0, tell)
    assert len(seen) == 3
    assert await engine_thread.run(lambda: 8) == 8, "neither ends the thread or the loop"
    engine_thread.stop()


async def test_a_cancellation_waits_for_the_call_that_began() -> None:
    engine_thread, began, go, ended = EngineThread("an engine thread"), trio.Event(), threading.Event(), []
    token = trio.lowlevel.current_trio_token()

    def call() -> None:
        token.run_sync_soon(began.set)
        assert go.wait(10)
        ended.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine_thread.run, call)
        await began.wait()
        nursery.cancel_scope.cancel()
        go.set()
    assert ended
    with trio.CancelScope() as scope:
        scope.cancel()
        await engine_thread.run(lambda: ended.append(False))
    assert ended == [True]
    engine_thread.stop()


async def test_the_thread_ends_for_good() -> None:
    engine_thread = EngineThread("an engine thread")
    thread = await engine_thread.run(threading.current_thread)
    engine_thread.stop()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="an engine thread was stopped"):
        await engine_thread.run(lambda: 1)
    engine_thread.stop()


async def test_a_thread_that_is_refused_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was handed over to a thread that never began would be waited for without end."""
    engine_thread = EngineThread("an engine thread")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: _refuse())
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await engine_thread.run(lambda: 1)
    with trio.fail_after(20):
        assert await engine_thread.run(lambda: 7) == 7
    engine_thread.stop()


async def test_a_thread_that_never_began_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_thread = EngineThread("an engine thread")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: _refuse())
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await engine_thread.run(lambda: 1)
    engine_thread.stop()


def _refuse() -> None:
    raise RuntimeError("can't start new thread")


class _Interrupting:
    """A queue that is interrupted by Ctrl-C in the very moment in which something was put."""

    def __init__(self, queue: SimpleQueue[Any]) -> None:
        self.get = queue.get
        self._queue = queue

    def put(self, call: object) -> None:
        self._queue.put(call)
        if call is not None:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_between_handing_over_and_waiting_is_an_interrupt() -> None:
    done: list[bool] = []

    async def main() -> None:
        engine_thread = EngineThread("an engine thread")
        engine_thread._calls = cast("SimpleQueue[Any]", _Interrupting(engine_thread._calls))
        try:
            await engine_thread.run(lambda: done.append(True))
            await trio.lowlevel.checkpoint()
        finally:
            engine_thread.stop()

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    assert done == [True]
    assert not any(thread.name == "an engine thread" for thread in threading.enumerate())
