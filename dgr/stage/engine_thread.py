"""A thread that runs blocking calls for tasks, one after another.

``trio.to_thread`` shares a pool of threads and does more around each call; between steps of tens of milliseconds, when the
other core has gone idle, a thread of one's own saves about 0.2 ms a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import trio
from attrs import define

__all__ = ["EngineThread"]

T = TypeVar("T")


@define
class _Call(Generic[T]):
    """A call, the task that waits for it, and what came of it."""

    function: Callable[[], T]
    task: trio.lowlevel.Task
    token: trio.lowlevel.TrioToken
    results: list[T]
    #: Called with the result, in the event loop, before the task goes on.
    then: Callable[[T], None] | None = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.results.append(self.function())
        except BaseException as error:
            self.error = error
        self.token.run_sync_soon(self._end)

    def _end(self) -> None:
        """What waits for the result need not wait for the task too: that would be one turn of the event loop more."""
        if self.then is not None and self.error is None:
            try:
                self.then(self.results[0])
            except Exception as error:
                self.error = error
        trio.lowlevel.reschedule(self.task)


class EngineThread:
    """One thread; it starts with the first call and ends with :meth:`stop`, for good."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = False

    # An interrupt between handing over the call and waiting for it would leave a call that wakes a task which has gone on.
    @trio.lowlevel.enable_ki_protection
    async def run(self, function: Callable[[], T], then: Callable[[T], None] | None = None) -> T:
        """Run a call in the thread and wait for it; a cancellation is noticed before it and does not cut it short.

        ``then`` is called with the result as soon as the event loop has it, a turn before this returns; what it raises, this
        raises too.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._stopped:
            raise RuntimeError(f"thread {self._name} was stopped: nobody would stop another one")
        if self._thread is None:
            thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            thread.start()  # may be refused; the next call tries again
            self._thread = thread
        results: list[T] = []
        call = _Call(function, trio.lowlevel.current_task(), trio.lowlevel.current_trio_token(), results, then)
        self._calls.put(call)
        await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        if call.error is not None:
            error, call.error = call.error, None  # no cycle of error, traceback, frame and call
            raise error
        return results[0]

    def stop(self) -> None:
        """End the thread and wait for its end; idempotent. No call may be in progress."""
        self._stopped = True
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _loop(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call  # nothing of a call is kept alive until the next one
