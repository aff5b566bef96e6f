"""Stages of the simulation: engines that take time of the mock clock, can be slow or frozen, and may be another model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import trio

from dgr.core.route import LayerRange
from dgr.core.values import ContextParams
from dgr.engine.base import Output, Work
from dgr.errors import EngineError
from dgr.testing.engines.fake import FakeEngine, FakeModel

__all__ = ["CONTEXT", "MODEL", "OTHER", "LyingEngine", "SimEngine", "SimThread", "layers_of"]

T = TypeVar("T")

MODEL, OTHER = FakeModel(), FakeModel(seed=1)
CONTEXT = ContextParams(n_ctx=96, n_batch=16, n_ubatch=8, n_seq_max=3)
#: Seconds of a batch: fixed, and for each token.
FIXED, EACH = 0.004, 0.001


def layers_of(name: str) -> LayerRange:
    """The layers of the stage ``A:B`` or ``A:B#x``."""
    return LayerRange.parse(name.partition("#")[0])


class SimEngine(FakeEngine):
    """Its batches take time, more while it is slow, and end only once it is not frozen."""

    inline = False

    def __init__(self, name: str, model: FakeModel = MODEL) -> None:
        super().__init__(layers_of(name), CONTEXT, model=model)
        #: How many times longer everything takes.
        self.slowness = 1.0
        #: Copies that fail for want of memory.
        self.refused_copies = 0
        self._thawed = trio.Event()
        self._thawed.set()
        self._over = trio.Event()

    def freeze(self) -> None:
        if self._thawed.is_set():
            self._thawed = trio.Event()

    def thaw(self) -> None:
        self._thawed.set()

    def run(self, batch: Sequence[Work]) -> list[Output]:
        SimThread.due = self, (FIXED + EACH * sum(len(work.tokens) for work in batch)) * self.slowness
        return super().run(batch)

    def close(self, slot: int) -> None:
        SimThread.due = self, 0.0005 * self.slowness
        super().close(slot)

    def fork(self, source: int, target: int) -> None:
        SimThread.due = self, 0.001 * self.slowness
        if self.refused_copies:
            self.refused_copies -= 1
            raise EngineError("no memory for a copy: close a session")
        super().fork(source, target)

    def abort(self) -> None:
        super().abort()
        self._over.set()
        self.thaw()

    async def spend(self, seconds: float) -> None:
        """Until a call into it has ended."""
        with trio.move_on_after(seconds):
            await self._over.wait()
        await self._thawed.wait()


class LyingEngine(SimEngine):
    """Says that it is of the model, and has other weights: what it answers with is wrong."""

    def __init__(self, name: str) -> None:
        super().__init__(name, OTHER)
        self._description = msgspec.structs.replace(self._description, artifact=MODEL.identity)


class SimThread:
    """In the place of an engine's thread: calls are made at once, and their time is spent afterwards."""

    #: Whose call it was, and how long it takes.
    due: tuple[SimEngine, float] | None = None

    def __init__(self, name: str) -> None:
        self._name = name

    async def run(self, function: Callable[[], T], then: Callable[[T], None] | None = None) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        SimThread.due = None
        results: list[T] = []
        failure = None
        try:
            results.append(function())
        except Exception as error:
            failure = error
        due, SimThread.due = SimThread.due, None
        with trio.CancelScope(shield=True):  # a call that has begun is not cut short
            if due is None:
                await trio.lowlevel.checkpoint()
            else:
                await due[0].spend(due[1])
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None
        if then is not None:
            then(results[0])
        return results[0]

    def stop(self) -> None:
        """There is no thread."""
