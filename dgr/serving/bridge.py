"""A trio run in a thread of its own, for the tasks of one asyncio loop.

What the loop wants of trio goes through an inbox that trio empties; what trio has to tell goes through
``loop.call_soon_threadsafe``. A call is trio's from its start to its end, and the loop's before and after. Every method stands
in the section of the side it runs on; what any thread may call says so.

Three rules make cancellation exact. A call that was begun always runs, if only up to its first checkpoint, as it would under
trio. Whoever waits for one waits until its trio side has ended, however often they are cancelled meanwhile. And what that
side brought back although its waiter was cancelled is not thrown away: it goes to ``keep``.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

import trio
from attrs import Factory, define

from dgr.errors import ClosedError, InputError

__all__ = ["Bridge", "Hold"]

T = TypeVar("T")
U = TypeVar("U")

#: Seconds that the end of the interpreter waits for trio runs that were left open: enough for a step that is told to abort.
#: A thread that takes longer (one that reads weights) ends with the process.
_LAST_WAIT = 5.0
#: Seconds between two looks at whether the loop was closed with the pipeline open: a loop tells nobody.
_LOOK = 1.0


class _Moment:
    """Something that comes to pass once, for the one task of the loop that waits for it."""

    def __init__(self) -> None:
        self.passed = False
        self._waiter: asyncio.Future[None] | None = None

    def come(self) -> None:
        self.passed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def outlast(self, on_cancel: Callable[[], None]) -> asyncio.CancelledError | None:
        """Wait until it came, through any number of cancellations; each is passed on, the first is returned."""
        cancelled: asyncio.CancelledError | None = None
        try:
            while not self.passed:
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                except asyncio.CancelledError as error:
                    cancelled = cancelled or error
                    on_cancel()
                except BaseException:  # the coroutine is being closed: nobody can wait
                    on_cancel()
                    raise
            return cancelled
        finally:
            self._waiter = cancelled = None  # no cycle of future, task, frame and error


@define(eq=False)
class _Call(Generic[T]):
    """One call from asyncio into trio, and what came of it."""

    function: Callable[[], Awaitable[T]]
    context: contextvars.Context
    #: Takes a result whose waiter has gone.
    keep: Callable[[T], None] | None = None
    scope: trio.CancelScope = Factory(trio.CancelScope)
    results: list[T] = Factory(list)
    error: BaseException | None = None
    #: The run ended under it.
    cut: bool = False
    #: It has something to show (what it holds open), or has ended.
    settled: _Moment = Factory(_Moment)
    ended: _Moment = Factory(_Moment)
    forsaken: bool = False
    #: All other calls rest on what this one holds open.
    vital: bool = False

    def end(self) -> None:
        self.settled.come()
        self.ended.come()
        if self.forsaken:
            self.give_back()

    def forsake(self) -> None:
        """Its waiter has gone without waiting for the end."""
        self.forsaken = True
        if self.ended.passed:
            self.give_back()

    def give_back(self) -> None:
        if self.keep is not None and self.results:
            self.keep(self.results.pop())

    def claim(self, cancelled: asyncio.CancelledError | None) -> T:
        """The result; or raise the waiter's cancellation, caused by an error if there was one, or that error."""
        error, self.error = self.error, None  # no cycle of error, traceback, frame and call
        try:
            if cancelled is not None:
                self.give_back()
                if error is not None:
                    raise cancelled from error
                raise cancelled
            if self.results:
                return self.results.pop()
            if self.cut or error is None:
                raise ClosedError("the pipeline was closed under this call; open another one") from error
            raise error
        finally:
            del error, cancelled


class Bridge(AbstractAsyncContextManager["Bridge"]):
    """Calls from the tasks of one asyncio loop into a trio run, which ends with the block, whatever is open in it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._inbox: deque[Callable[[], object]] = deque()
        self._token: trio.lowlevel.TrioToken | None = None
        # The loop's side.
        self._pending: set[_Call[Any]] = set()
        self._closed = False
        self._why: BaseException | None = None
        self._over = _Moment()
        # Trio's side.
        self._calls: trio.Nursery
        self._scope = trio.CancelScope()
        self._leaving = False

    # --- the loop's side ---

    async def __aenter__(self) -> Bridge:
        _live.add(self)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads
            _live.discard(self)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Calls under way are cancelled; who waits for one gets a :class:`ClosedError`."""
        self.abandon()
        if not self.is_here():
            return
        cancelled = await self._over.outlast(lambda: None)
        self._thread.join()
        if cancelled is not None:
            raise cancelled

    async def call(
        self, function: Callable[..., Awaitable[T]], *args: Any, keep: Callable[[T], None] | None = None
    ) -> T:
        """Await ``function(*args)`` on the trio side, in a copy of the caller's context.

        ``keep`` is handed a result that came although this wait was cancelled. An error that came so is the cause of
        the :class:`asyncio.CancelledError`. Raises :class:`ClosedError` after the end, :class:`InputError` in another loop.
        """
        call = self.begin(_Call(partial(function, *args), contextvars.copy_context(), keep))
        return call.claim(await self.outlast(call))

    def check(self) -> None:
        """Refuse a call that could not be answered: after the end, or from another loop."""
        if self._closed:
            raise ClosedError("the pipeline is closed; open another one") from self._why
        self.check_here()

    def check_here(self) -> None:
        """Refuse a caller whom trio's answer could not reach."""
        if not self.is_here():
            raise InputError(
                "this pipeline belongs to the asyncio loop that opened it, and was used from another;"
                " open one there, or hand the work over with asyncio.run_coroutine_threadsafe"
            )

    def close(self) -> None:
        """Begin no call from now on; those under way go on."""
        self._closed = True

    def abandon(self) -> None:
        """Tell the run to end, from any thread; nobody waits for it."""
        self._closed = True
        self.post(self._leave)

    def begin(self, call: _Call[T]) -> _Call[T]:
        """Have a call run; it is somebody's to wait for."""
        self.check()
        self._pending.add(call)
        self.post(partial(self._start, call))
        return call

    async def outlast(self, call: _Call[Any]) -> asyncio.CancelledError | None:
        """Wait for the end of a call through any number of cancellations; the first is returned."""
        try:
            return await call.ended.outlast(partial(self.post, call.scope.cancel))
        except BaseException:
            call.forsake()
            raise

    def post(self, function: Callable[[], object]) -> None:
        """Have trio run a function, in the order of posting: at once, or as soon as the run has begun. From any thread."""
        self._inbox.append(function)
        if (token := self._token) is not None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._empty_inbox)

    def is_here(self) -> bool:
        """Whether this runs in the loop that trio's answers come to."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _finish(self, call: _Call[Any]) -> None:
        self._pending.discard(call)
        if call.vital:
            self._closed, self._why = True, call.error
        call.end()

    def _end(self) -> None:
        self._closed = True
        for call in list(self._pending):  # trio itself broke down, or the call came too late
            call.cut = True
            self._finish(call)
        self._over.come()

    # --- trio's side ---

    def _run(self) -> None:
        try:
            trio.run(self._main)
        finally:
            _live.discard(self)
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._end)

    async def _main(self) -> None:
        with self._scope:
            async with trio.open_nursery() as self._calls:
                # In this order: what was posted before the token is seen here, what is posted after wakes trio.
                self._token = trio.lowlevel.current_trio_token()
                self._empty_inbox()
                while not self._loop.is_closed():  # noqa: ASYNC110 (nothing sets an event then)
                    await trio.sleep(_LOOK)
                self._leave()

    def tell(self, function: Callable[..., object], *args: object) -> None:
        """Have the loop run a function; from trio tasks alone."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop was closed with the pipeline open: nobody is left to serve
            self._leave()

    def _empty_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _start(self, call: _Call[Any]) -> None:
        if self._leaving:
            call.cut = True
            self.tell(self._finish, call)
        else:
            call.context.run(self._calls.start_soon, self._serve, call)

    async def _serve(self, call: _Call[Any]) -> None:
        try:
            with call.scope:
                call.results.append(await call.function())
        except BaseException as error:
            call.error = _apart_from_cancelled(error)
            if call.error is None:  # not its own scope was cancelled: the run ends
                call.cut = True
                raise
        finally:
            self.tell(self._finish, call)

    def _leave(self) -> None:
        self._leaving = True
        self._scope.cancel()


def _apart_from_cancelled(error: BaseException) -> BaseException | None:
    if isinstance(error, BaseExceptionGroup):
        cancelled, others = error.split(trio.Cancelled)
        return others if cancelled else error
    return None if isinstance(error, trio.Cancelled) else error


class Hold(AbstractAsyncContextManager[U], Generic[T, U]):
    """A trio context manager held open for the length of an asyncio block, all in one trio task.

    The block is entered with ``show(self, value)``; what is shown shall keep this object alive, since the trio side is left
    when it is dropped. Leaving after the run has ended is harmless, and does not wait where its loop does not run (a
    coroutine that is closed after its loop). ``vital``: when this ends, nothing new is begun on the bridge.
    """

    def __init__(
        self,
        bridge: Bridge,
        make: Callable[[], AbstractAsyncContextManager[T]],
        show: Callable[[Hold[T, U], T], U],
        *,
        vital: bool = False,
    ) -> None:
        self._bridge, self._make, self._show, self._vital = bridge, make, show, vital
        self._call: _Call[None] | None = None
        self._leave = trio.Event()
        self._entered: list[T] = []

    async def __aenter__(self) -> U:
        if self._call is not None:
            raise InputError("this block was entered already; ask its pipeline for another one")
        bridge, settled = self._bridge, _Moment()
        stay = partial(_stay, bridge, self._make, self._leave, self._entered, settled)
        call = _Call(stay, contextvars.copy_context(), settled=settled, vital=self._vital)
        self._call = bridge.begin(call)
        weakref.finalize(self, bridge.post, self._leave.set).atexit = False  # then the bridge itself ends
        cancelled = await settled.outlast(partial(bridge.post, call.scope.cancel))
        if cancelled is not None or not self._entered:
            await self._end(call, cancelled)
        return self._show(self, self._entered[0])

    async def __aexit__(self, *_: object) -> None:
        if self._call is not None:
            await self._end(self._call, None)

    async def _end(self, call: _Call[None], cancelled: asyncio.CancelledError | None) -> None:
        self._bridge.post(self._leave.set)
        if not self._bridge.is_here():
            return
        cancelled = await self._bridge.outlast(call) or cancelled
        if cancelled is not None or not self._entered or (call.error is not None and not call.cut):
            call.claim(cancelled)


async def _stay(
    bridge: Bridge,
    make: Callable[[], AbstractAsyncContextManager[T]],
    leave: trio.Event,
    entered: list[T],
    settled: _Moment,
) -> None:
    """The trio side of a :class:`Hold`, which it must not keep alive."""

    def show(value: T) -> None:
        entered.append(value)
        settled.come()

    async with make() as value:
        bridge.tell(show, value)
        await leave.wait()


#: Every run whose thread has not ended.
_live: set[Bridge] = set()


def _end_all() -> None:
    """The interpreter ends: so do the runs that a closed loop or a forgotten block left behind."""
    left = list(_live)
    for bridge in left:
        bridge.abandon()
    until = time.monotonic() + _LAST_WAIT
    for bridge in left:
        bridge._thread.join(max(0.0, until - time.monotonic()))


def _forget_all() -> None:
    """A forked child has neither the threads nor the loop; what it inherited must not wake its parent's."""
    for bridge in list(_live):
        bridge._token = None
        with suppress(RuntimeError):  # its loop is closed, or runs in another thread
            bridge._end()
    _live.clear()


atexit.register(_end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
