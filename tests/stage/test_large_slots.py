"""A slot that holds much is read, copied and cleared in pieces: nobody else's step waits for all of them."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import pytest
import trio
import trio.testing

from dgr.core.values import ContextParams, StateSummary
from dgr.engine.base import Output, Work, WorksInPieces
from dgr.stage.scheduler import Scheduler
from dgr.testing.engines.fake import FakeEngine

_PIECES = 5


class LargeEngine(FakeEngine):
    """Needs many calls for what others do in one, and notes what it was called for."""

    def __init__(self) -> None:
        super().__init__(context=ContextParams(n_seq_max=3))
        self.calls: list[str] = []

    def run(self, batch: Sequence[Work]) -> list[Output]:
        self.calls.append("run")
        return super().run(batch)

    def state_pieces(self, slot: int) -> Generator[StateSummary | None, None, None]:
        for _ in range(_PIECES):
            self.calls.append("read")
            yield None
        yield self.state_summary(slot)

    def close_pieces(self, slot: int) -> Generator[None, None, None]:
        for _ in range(_PIECES):
            self.calls.append("clear")
            yield
        self.close(slot)

    def fork_pieces(self, source: int, target: int) -> Generator[None, None, None]:
        for _ in range(_PIECES):
            self.calls.append("copy")
            yield
        self.fork(source, target)


class HastyEngine(LargeEngine):
    """Takes no turns: the mutant that the test must catch."""

    def state_pieces(self, slot: int) -> Generator[StateSummary | None, None, None]:
        self.calls += ["read"] * _PIECES
        yield self.state_summary(slot)

    def close_pieces(self, slot: int) -> Generator[None, None, None]:
        self.calls += ["clear"] * _PIECES
        self.close(slot)
        yield from ()

    def fork_pieces(self, source: int, target: int) -> Generator[None, None, None]:
        self.calls += ["copy"] * _PIECES
        self.fork(source, target)
        yield from ()


async def _calls_beside_a_step(engine: LargeEngine, what: str) -> list[str]:
    scheduler = Scheduler(engine)
    work = {
        "read": lambda: scheduler.state_summary(0),
        "copy": lambda: scheduler.fork(0, 2, 3),
        "clear": lambda: scheduler.clear(0),
    }[what]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scheduler.run)
        await scheduler.step(Work(0, 0, [1, 2, 3]), None, ())
        engine.calls.clear()
        async with trio.open_nursery() as both:
            both.start_soon(work)
            both.start_soon(scheduler.step, Work(1, 0, [4, 5]), None, ())
        nursery.cancel_scope.cancel()
    assert engine.position(0) == (0 if what == "clear" else 3)
    assert engine.position(2) == (3 if what == "copy" else 0)
    return engine.calls


@pytest.mark.parametrize("what", ["read", "copy", "clear"])
async def test_a_step_runs_between_the_pieces(what: str, autojump_clock: trio.abc.Clock) -> None:
    assert isinstance(LargeEngine(), WorksInPieces)
    calls = await _calls_beside_a_step(LargeEngine(), what)
    assert sorted(calls) == sorted(["run", *[what] * _PIECES])
    assert calls.index("run") <= 2


@pytest.mark.parametrize("what", ["read", "copy", "clear"])
async def test_a_step_waits_for_an_engine_that_takes_no_turns(what: str, autojump_clock: trio.abc.Clock) -> None:
    calls = await _calls_beside_a_step(HastyEngine(), what)
    assert calls.index("run") in (0, _PIECES)


@pytest.mark.parametrize("engine", [LargeEngine, FakeEngine])
async def test_a_slot_is_not_cleared_while_it_is_copied(
    engine: type[FakeEngine], autojump_clock: trio.abc.Clock
) -> None:
    """Whoever asked for a copy has it; who asks when the clearing has begun finds other tokens."""
    slots = engine() if engine is LargeEngine else FakeEngine(context=ContextParams(n_seq_max=3))
    scheduler, copied = Scheduler(slots), []

    async def copy(target: int) -> None:
        copied.append((target, await scheduler.fork(0, target, 3)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(scheduler.run)
        await scheduler.step(Work(0, 0, [1, 2, 3]), None, ())
        async with trio.open_nursery() as both:
            both.start_soon(copy, 1)
            await trio.testing.wait_all_tasks_blocked()
            await scheduler.clear(0)
            assert copied == [(1, True)]
            both.start_soon(copy, 2)
        nursery.cancel_scope.cancel()
    assert copied == [(1, True), (2, False)]
    assert [slots.position(slot) for slot in range(3)] == [0, 3, 0]
