"""A slot that holds much is read and cleared in pieces: nobody else's step waits for all of them."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import trio

from dgr.core.values import ContextParams, StateSummary
from dgr.engine.base import Work, WorksInPieces
from dgr.stage.scheduler import Scheduler
from dgr.testing.engines.fake import FakeEngine

_PIECES = 5


class LargeEngine(FakeEngine):
    """Needs many calls for what others do in one, and notes what it was called for."""

    def __init__(self) -> None:
        super().__init__(context=ContextParams(n_seq_max=2))
        self.calls: list[str] = []

    def run(self, batch):  # type: ignore[no-untyped-def]
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


class HastyEngine(LargeEngine):
    """Takes no turns: the mutant that the test must catch."""

    def state_pieces(self, slot: int) -> Generator[StateSummary | None, None, None]:
        self.calls += ["read"] * _PIECES
        yield self.state_summary(slot)

    def close_pieces(self, slot: int) -> Generator[None, None, None]:
        self.calls += ["clear"] * _PIECES
        self.close(slot)
        yield from ()


async def _calls_beside_a_step(engine: LargeEngine, what: str) -> list[str]:
    scheduler = Scheduler(engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scheduler.run)
        await scheduler.step(Work(0, 0, [1, 2, 3]), None, ())
        engine.calls.clear()
        async with trio.open_nursery() as both:
            both.start_soon(scheduler.clear if what == "clear" else scheduler.state_summary, 0)
            both.start_soon(scheduler.step, Work(1, 0, [4, 5]), None, ())
        nursery.cancel_scope.cancel()
    assert engine.position(0) == (0 if what == "clear" else 3)
    return engine.calls


@pytest.mark.parametrize("what", ["read", "clear"])
async def test_a_step_runs_between_the_pieces(what: str, autojump_clock: trio.abc.Clock) -> None:
    assert isinstance(LargeEngine(), WorksInPieces)
    calls = await _calls_beside_a_step(LargeEngine(), what)
    assert sorted(calls) == sorted(["run", *[what] * _PIECES])
    assert calls.index("run") <= 2


@pytest.mark.parametrize("what", ["read", "clear"])
async def test_a_step_waits_for_an_engine_that_takes_no_turns(what: str, autojump_clock: trio.abc.Clock) -> None:
    calls = await _calls_beside_a_step(HastyEngine(), what)
    assert calls.index("run") in (0, _PIECES)
