"""dgr inside a plain synchronous program: the same admission and the same answers, for any of its threads.

    with blocking.open_serving(lambda: dgr.open_pipeline("model.gguf", "0:22,22:43")) as serving:
        with serving.admit(Job(serving.encode("Hello"), max_tokens=32)) as answer:
            for token in answer:
                print(token.text, end="")

An asyncio loop runs in a thread of its own, with :mod:`~dgr.serving.embed` in it; a blocking call is one of its tasks. So
what holds there holds here: a call that is given up (its timeout, an interrupt) cancels the work on the other side, and
loses no token. Leaving the block ends everything and both threads; whoever still waits gets
:class:`~dgr.errors.ClosedError`. Nothing here may be called from a thread that runs an event loop: it would stand still.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, TypeVar

import trio

from dgr.client.generation import GeneratedToken
from dgr.client.pipeline import Pipeline
from dgr.core.load import StageLoad
from dgr.errors import ClosedError, InputError
from dgr.serving import embed
from dgr.serving.engine import Job, Phase, ServingEngine, ServingLimits, Usage

__all__ = ["BlockingAnswer", "BlockingServing", "open_serving"]

T = TypeVar("T")


class _Calls:
    """Calls from any thread into one asyncio loop, while that admits them."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = False
        self._leave = asyncio.Event()
        self._lock = threading.Lock()
        self._process = os.getpid()

    def begin(self) -> None:
        """Take calls into the loop that runs here."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
            if self._over:
                self._leave.set()

    async def wait_over(self) -> None:
        """Wait for :meth:`end`; every call that was taken has its task by then."""
        await self._leave.wait()

    def end(self) -> None:
        """Take no call from now on; from any thread, any number of times."""
        with self._lock:
            if not self._over and self._loop is not None and self.is_ours:
                self._loop.call_soon_threadsafe(self._leave.set)
            self._over = True

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that has the loop; a forked child has neither it nor its thread."""
        return os.getpid() == self._process

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float | None = None) -> T:
        """Do ``work`` in the loop. Raises :class:`TimeoutError` when it was cancelled after ``timeout`` seconds."""

        async def bounded() -> T:
            async with asyncio.timeout(timeout):
                return await work()

        with self._lock:
            if self._loop is None or self._over or not self.is_ours:
                raise ClosedError("the pipeline is closed, or another process's; open another one")
            if _runs_a_loop():
                raise InputError("a blocking call would stop this thread's event loop; use dgr.serving.embed, or trio")
            future = asyncio.run_coroutine_threadsafe(bounded(), self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ClosedError("the pipeline was closed under this call; open another one") from None
        except BaseException:
            future.cancel()  # of use if this thread was interrupted
            raise


def _runs_a_loop() -> bool:
    if trio.lowlevel.in_trio_run():
        return True
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class BlockingAnswer(AbstractContextManager["BlockingAnswer"]):
    """The answer to one job: a block, and an iterator of its tokens. Made by :meth:`BlockingServing.admit`."""

    def __init__(self, serving: BlockingServing, block: AbstractAsyncContextManager[embed.EmbeddedAnswer]) -> None:
        self._owner = serving
        self._calls = serving._calls
        self._block = block
        self._answer: embed.EmbeddedAnswer | None = None

    def __enter__(self) -> BlockingAnswer:
        self._answer = self._calls.run(lambda: _entered(self._block))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._calls.run(lambda: _left(self._block))
        except ClosedError:
            return  # everything has ended already

    def __iter__(self) -> BlockingAnswer:
        return self

    def __next__(self) -> GeneratedToken:
        token = self.next()
        if token is None:
            raise StopIteration
        return token

    def next(self, timeout: float | None = None) -> GeneratedToken | None:
        """The next token, or None at the end; errors as of :class:`~dgr.serving.engine.Answer`.

        Raises :class:`TimeoutError` after ``timeout`` seconds without one; asking again goes on.
        """
        return self._calls.run(lambda: _next(self._inside), timeout)

    @property
    def phase(self) -> Phase:
        return self._inside.phase

    @property
    def usage(self) -> Usage:
        return self._inside.usage

    @property
    def finish_reason(self) -> str | None:
        """At the end: ``stop`` or ``length``."""
        return self._inside.finish_reason

    @property
    def _inside(self) -> embed.EmbeddedAnswer:
        if self._answer is None:
            raise InputError("this answer was not begun; enter its block first")
        return self._answer


async def _entered(block: AbstractAsyncContextManager[T]) -> T:
    return await block.__aenter__()


async def _left(block: AbstractAsyncContextManager[object]) -> None:
    await block.__aexit__(None, None, None)


async def _next(answer: embed.EmbeddedAnswer) -> GeneratedToken | None:
    return await anext(answer, None)


class BlockingServing:
    """Admission to one pipeline; see :class:`~dgr.serving.engine.ServingEngine`. Made by :func:`open_serving`."""

    def __init__(self, block: object, calls: _Calls, serving: embed.EmbeddedServing) -> None:
        self._owner = block
        self._calls = calls
        self._serving = serving

    @property
    def engine(self) -> ServingEngine:
        """The engine itself, to read its counters, line and state; its methods belong to the trio side."""
        return self._serving.engine

    def admit(self, job: Job, deadline: float | None = None) -> BlockingAnswer:
        """A block with a place in the line for ``job``; entering it raises what :meth:`ServingEngine.admit` does."""
        return BlockingAnswer(self, self._serving.admit(job, deadline))

    def load(self, seconds: float = 5.0) -> Mapping[str, StageLoad | None]:
        """How much each stage has to do: address -> its load, None for one that does not tell; see :meth:`Pipeline.load`."""
        return self._calls.run(lambda: self._serving.load(seconds))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt, as :meth:`~dgr.serving.embed.EmbeddedServing.encode` has them."""
        return self._calls.run(lambda: self._serving.encode(text))

    def drain(self, seconds: float) -> None:
        """Admit nobody from now on; wait for the answers under way, and end those that take longer than ``seconds``."""
        self._calls.run(lambda: self._serving.drain(seconds))


class _Block(AbstractContextManager[BlockingServing]):
    """The block of a serving, and the thread of its loop."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Pipeline]], limits: ServingLimits | None) -> None:
        self._calls = calls = _Calls()
        self._opened: Future[embed.EmbeddedServing] = Future()
        self._ended: Future[None] = Future()
        main = _run, make, limits, calls, self._opened, self._ended
        self._thread = threading.Thread(target=main[0], args=main[1:], name="dgr-asyncio", daemon=True)

    def __enter__(self) -> BlockingServing:
        self._thread.start()
        weakref.finalize(self, self._calls.end).atexit = False  # the trio side ends with the interpreter
        try:
            return BlockingServing(self, self._calls, self._opened.result())
        except BaseException:
            self._opened.cancel()
            self._calls.end()  # of use if this thread was interrupted: what is being opened is closed again
            raise

    def __exit__(self, *_: object) -> None:
        self._calls.end()
        if self._calls.is_ours:
            self._thread.join()
            self._ended.result()


def _run(
    make: Callable[[], AbstractAsyncContextManager[Pipeline]],
    limits: ServingLimits | None,
    calls: _Calls,
    opened: Future[embed.EmbeddedServing],
    ended: Future[None],
) -> None:
    """The loop's thread; it keeps nothing of the block alive."""

    async def main() -> None:
        async with embed.embed_pipeline(make) as pipeline, pipeline.serving(limits) as serving:
            if opened.set_running_or_notify_cancel():
                calls.begin()
                opened.set_result(serving)
                await calls.wait_over()

    try:
        asyncio.run(main())
    except BaseException as error:
        if not opened.done():
            opened.set_exception(error)
        elif not opened.cancelled():
            ended.set_exception(error)
    else:
        ended.set_result(None)


def open_serving(
    make: Callable[[], AbstractAsyncContextManager[Pipeline]], limits: ServingLimits | None = None
) -> AbstractContextManager[BlockingServing]:
    """Serve the pipeline that ``make`` opens to the threads of this program.

    ``make`` runs on the trio side: ``lambda: dgr.open_pipeline("model.gguf", "0:22,22:43")``, or of a route. Errors of opening
    and closing it are raised as they are. A block that was never left ends with its last reference.
    """
    return _Block(make, limits)
