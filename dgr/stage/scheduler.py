"""The one owner of an engine: merges ready work of several sessions into native batches, one at a time."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import TypeVar

import trio
from attrs import define, field, frozen

from dgr.core.scalars import TOP_MAX
from dgr.core.values import LogitsWanted, SamplingParams, StateSummary, TopLogprob
from dgr.engine.base import Output, ShardEngine, Work, WorksInPieces
from dgr.errors import EngineError, InputError, NonFinite
from dgr.stage.engine_thread import EngineThread
from dgr.stage.ready import ReadyWork, is_decode
from dgr.stage.statistics import BatchCounts, SchedulerStatistics
from dgr.stage.tracing import StepTimes

__all__ = ["Scheduler", "StepResult"]

T = TypeVar("T")

_log = logging.getLogger("dgr.shard")

_FLOAT = 4


@frozen
class StepResult:
    """The result of one session's work: a residual, rows of logits, or a drawn token."""

    output: Output
    token: int | None = None
    top: tuple[TopLogprob, ...] = ()


@define(eq=False)
class _Request:
    work: Work
    sampling: SamplingParams | None
    history: Sequence[int]
    ring: int
    #: When it was ready, in trio's time.
    came: float
    #: Where its times are noted, if anybody wants them.
    times: StepTimes | None = None
    done: trio.Event = field(factory=trio.Event)
    outcome: StepResult | EngineError | InputError | None = None
    #: The session gave up waiting before the step began.
    abandoned: bool = False


def _execute(engine: ShardEngine, n_vocab: int, requests: list[_Request]) -> None:
    """Run requests as one batch, in the engine's thread. A guard's refusal is pinned on its own request."""
    try:
        outputs = engine.run([request.work for request in requests])
    except (InputError, NonFinite) as error:
        if len(requests) == 1:
            requests[0].outcome = error
        else:
            for request in requests:
                _execute(engine, n_vocab, [request])
        return
    except EngineError as error:
        for request in requests:
            request.outcome = error
        return
    for request, output in zip(requests, outputs, strict=True):
        request.outcome = _finish(engine, n_vocab, request, output)


def _finish(
    engine: ShardEngine, n_vocab: int, request: _Request, output: Output
) -> StepResult | EngineError | InputError:
    if not output.finite:
        work = request.work
        return NonFinite(
            f"NaN or Inf among the values of positions {work.position}..{work.position + len(work.tokens) - 1};"
            " the session is lost on every stage"
        )
    if output.too_great:
        wire = engine.describe().context.wire
        return NonFinite(
            f"a residual of positions {request.work.position}..{request.work.position + len(request.work.tokens) - 1} holds a"
            f" value that wire {wire} does not carry; the session is lost on every stage: use wire bf16 or f32"
        )
    if output.logits is None:
        return StepResult(output)
    size, expected = memoryview(output.logits).nbytes, _rows(request.work) * n_vocab * _FLOAT
    if size != expected:
        return EngineError(f"the engine returned {size} bytes of logits; what was wanted of it is {expected} bytes")
    if request.sampling is None:
        return StepResult(output)
    try:
        token, top = engine.sample(output.logits, request.history, request.sampling)
    except EngineError as error:
        return error
    except InputError as error:
        # Too late for "nothing was changed": the tokens are committed.
        return EngineError(f"no token could be drawn after its logits were made: {error}")
    if (problem := _misdrawn(token, top, n_vocab)) is not None:
        return EngineError(f"the engine {problem}")
    return StepResult(output, token, top)


def _rows(work: Work) -> int:
    """Rows of logits that the work wants."""
    match work.logits:
        case LogitsWanted.NONE:
            return 0
        case LogitsWanted.LAST:
            return 1
        case _:
            return len(work.tokens)


def _misdrawn(token: int, top: Sequence[TopLogprob], n_vocab: int) -> str | None:
    """What is wrong with what an engine drew; it goes to the client as it is."""
    if len(top) > TOP_MAX:
        return f"returned {len(top)} candidates beside a token; a reply holds {TOP_MAX}"
    for which in (token, *(candidate.token for candidate in top)):
        if type(which) is not int or not 0 <= which < n_vocab:
            return f"drew token {which!r}, which is not a whole number below n_vocab {n_vocab}"
    return None


class Scheduler:
    """Runs an engine. ``run`` is its loop; every other method may be called by any task."""

    def __init__(self, engine: ShardEngine) -> None:
        self._engine = engine
        about = engine.describe()
        self._n_vocab = about.n_vocab
        self._ready: ReadyWork[_Request] = ReadyWork(about.context.n_batch, about.context.n_ubatch)
        #: Set when a request comes.
        self._came = trio.Event()
        #: Whoever holds it has the engine alone; steps, cleared slots and summaries wait.
        self.engine_lock = trio.Lock()
        self._thread = EngineThread("dgr-engine")
        #: Copies that are being made of a slot, and who waits for their end.
        self._copied: Counter[int] = Counter()
        self._copy_ended = trio.lowlevel.ParkingLot()
        self._decode, self._prefill = BatchCounts(), BatchCounts()
        #: When the batch under way began; None when none is.
        self._began: float | None = None
        self._longest = 0.0

    def statistics(self) -> SchedulerStatistics:
        decode, prefill = self._decode.snapshot(), self._prefill.snapshot()
        return SchedulerStatistics(
            batches=decode.tokens.count + prefill.tokens.count,
            items=decode.waits.count + prefill.waits.count,
            tokens=int(decode.tokens.total + prefill.tokens.total),
            decode=decode,
            prefill=prefill,
            running_seconds=0.0 if self._began is None else trio.current_time() - self._began,
            longest_seconds=self._longest,
        )

    async def run(self) -> None:
        """Take what is ready, run it, answer; forever. The engine's thread ends with it."""
        try:
            while True:
                batch = await self._next_batch()
                self._began = trio.current_time()
                await self._run(batch, self._began)
        finally:
            self._thread.stop()

    def _count(self, batch: list[_Request], began: float, now: float) -> None:
        counts = self._decode if is_decode(batch[0]) else self._prefill
        tokens = sum(len(request.work.tokens) for request in batch)
        counts.seconds.add(now - began)
        self._longest = max(self._longest, now - began)
        counts.tokens.add(tokens)
        for request in batch:
            counts.waits.add(began - request.came)
            if (times := request.times) is not None:
                times.began, times.ended = began, now
                times.batch_items, times.batch_tokens = len(batch), tokens

    async def _run(self, batch: list[_Request], began: float) -> None:
        try:
            await self._call(
                lambda: _execute(self._engine, self._n_vocab, batch), lambda _: self._end_batch(batch, began)
            )
        except Exception as error:
            # What one session brought must not end the engine of all: a defect is a failure of this batch alone.
            _log.exception("a batch of %d sessions meets a defect; please report this", len(batch))
            if self._began is None:
                return  # it was answered: the defect is in counting it
            for request in batch:
                request.outcome = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            self._end_batch(batch, began)

    def _end_batch(self, batch: list[_Request], began: float) -> None:
        now, self._began = trio.current_time(), None
        try:
            self._ready.ran(batch, began, now)
            self._count(batch, began, now)
        finally:
            for request in batch:
                request.done.set()

    async def _next_batch(self) -> list[_Request]:
        while isinstance(found := self._ready.next(trio.current_time()), float):
            self._came = trio.Event()
            if found == math.inf:
                await self._came.wait()
            else:
                with trio.CancelScope(deadline=found):
                    await self._came.wait()
        return found

    async def step(
        self,
        work: Work,
        sampling: SamplingParams | None,
        history: Sequence[int],
        *,
        ring: int = 1,
        times: StepTimes | None = None,
    ) -> StepResult:
        """Run one session's work, merged with whatever else is ready. ``ring``: see :class:`~dgr.stage.ready.ReadyRequest`.
        ``times`` is told when that was.

        Raises InputError when a guard refused (nothing changed), EngineError when the session is lost. Cancelled while
        waiting: a step that has begun still ends, its result is dropped.
        """
        now = trio.current_time()
        request = _Request(work, sampling, history, ring, now, times)
        self._ready.add(request, now)
        self._came.set()
        try:
            await request.done.wait()
        except trio.Cancelled:
            request.abandoned = True
            raise
        if isinstance(request.outcome, Exception):
            raise request.outcome
        assert request.outcome is not None
        return request.outcome

    async def clear(self, slot: int) -> None:
        """Erase a slot once no step is running and no copy is made of it; a large one in pieces, between which others run."""
        self._ready.forget(slot)
        while self._copied[slot]:
            await self._copy_ended.park()
        await self._in_pieces(self._clear(slot))

    def _clear(self, slot: int) -> Generator[None, None, None]:
        if isinstance(self._engine, WorksInPieces):
            yield from self._engine.close_pieces(slot)
        else:
            self._engine.close(slot)

    async def fork(self, source: int, target: int, position: int) -> bool:
        """Copy a slot that holds ``position`` tokens into an empty one; False when it holds others by then.

        Whoever asks before the source is cleared is served before it. A large one is copied in pieces, between which others
        run, the source too. Raises what :meth:`ShardEngine.fork` raises.
        """
        self._copied[source] += 1
        try:
            return await self._in_pieces(self._fork(source, target, position))
        finally:
            self._copied[source] -= 1
            self._copy_ended.unpark_all()

    def _fork(self, source: int, target: int, position: int) -> Generator[None, None, bool]:
        if self._engine.position(source) != position:
            return False
        if isinstance(self._engine, WorksInPieces):
            yield from self._engine.fork_pieces(source, target)
        else:
            self._engine.fork(source, target)
        return True

    async def state_summary(self, slot: int) -> StateSummary:
        """Read a slot's state summary between two steps; a large one in pieces, between which others run."""
        return await self._in_pieces(self._summarise(slot))

    def _summarise(self, slot: int) -> Generator[None, None, StateSummary]:
        if isinstance(self._engine, WorksInPieces):
            for summary in self._engine.state_pieces(slot):
                if summary is not None:
                    return summary
                yield
        return self._engine.state_summary(slot)

    async def _in_pieces(self, pieces: Generator[None, None, T]) -> T:
        """Run a generator with the engine, which other calls may have whenever it yields."""

        def advance() -> list[T]:
            try:
                next(pieces)
            except StopIteration as ended:
                return [ended.value]
            return []

        with closing(pieces):
            while not (result := await self._call(advance)):
                await trio.lowlevel.checkpoint()
        return result[0]

    async def _call(self, function: Callable[[], T], then: Callable[[T], None] | None = None) -> T:
        """``then`` is told the result before anyone else; see :meth:`EngineThread.run`."""
        try:
            self.engine_lock.acquire_nowait()  # whoever finds the engine free does not give up its turn of the event loop
        except trio.WouldBlock:
            await self.engine_lock.acquire()
        try:
            if self._engine.inline:
                result = function()
                if then is not None:
                    then(result)
                return result
            return await self._thread.run(function, then)
        finally:
            self.engine_lock.release()
