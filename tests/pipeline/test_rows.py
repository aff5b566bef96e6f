"""Every row of the tables of a stage and of a route happens in the product, and nothing outside them does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from enum import Enum
from typing import Any

import pytest
import trio
import trio.testing
from conversations import held, take
from pipeline.harness import TWO, WHOLE, Stages, open_stages, rest

from dgr.client.pipeline import Pipeline
from dgr.core.state_machine import InvalidTransition, StateMachine, Table
from dgr.errors import ClosedError
from dgr.protocol.states import EPOCH, ROUTE, SESSION
from dgr.testing.engines.fake import Fault, FaultKind
from dgr.testing.raw_client import RawClient, open_raw_client
from dgr.wire import frames

Rows = set[tuple[Enum, Enum]]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """The pairs of state and event that came up, whether their table has them or not."""
    seen: Rows = set()
    fire = StateMachine.fire

    def recording(machine: StateMachine[Any, Any], event: Any) -> Any:
        seen.add((machine.state, event))
        return fire(machine, event)

    monkeypatch.setattr(StateMachine, "fire", recording)
    return seen


def assert_exactly(rows: Rows, table: Table[Any, Any]) -> None:
    fired = {(state, event) for state, event in rows if isinstance(state, table.states)}
    missing = set(table.transitions) - fired
    assert not missing, f"rows that nothing fires: {sorted(f'{s.value} on {e.value}' for s, e in missing)}"
    assert fired == set(table.transitions)


def by_hand(stages: Stages, split: str) -> Any:
    return open_raw_client(stages.cluster.connect, stages.route(split))


# --- a session on a stage --------------------------------------------------------------------------------------------


async def _ends_while_idle(stages: Stages, hand: RawClient) -> None:
    await hand.say(hand.work(1, 2, [1, 2]))
    await hand.say(hand.close(1, 3))


async def _ends_while_it_runs(stages: Stages, hand: RawClient) -> None:
    async with held(stages.shard("0:2")):
        await hand.say(hand.work(1, 2, [1, 2]))
        await hand.say(hand.close(1, 3))


async def _ends_after_a_guard_refused(stages: Stages, hand: RawClient) -> None:
    engine = stages.engines["0:2"]
    run = engine.run

    def refusing(batch: Any) -> Any:
        engine.run = run  # type: ignore[method-assign]
        return run([*batch, *batch])  # one slot twice: the engine's own guard

    engine.run = refusing  # type: ignore[method-assign]
    (reply,) = await hand.say(hand.work(1, 2, [1, 2]))
    assert isinstance(reply, frames.Refused)
    assert reply.code is frames.Refusal.INPUT


async def _ends_after_the_engine_failed(stages: Stages, hand: RawClient) -> None:
    stages.engines["0:2"].faults.append(Fault(FaultKind.ERROR))
    (reply,) = await hand.say(hand.work(1, 2, [1, 2]))
    assert isinstance(reply, frames.Refused)


async def _ends_after_its_successor_was_lost(stages: Stages, hand: RawClient) -> None:
    stages.cluster.stop("2:6")
    await rest()
    replies = await hand.say(hand.work(1, 2, [1, 2]))
    assert isinstance(replies[-1], frames.Refused)


LIVES = (
    _ends_while_idle,
    _ends_while_it_runs,
    _ends_after_a_guard_refused,
    _ends_after_the_engine_failed,
    _ends_after_its_successor_was_lost,
)


async def test_every_row_of_a_stages_session_happens_and_no_other(rows: Rows, autojump_clock: trio.abc.Clock) -> None:
    for life in LIVES:
        async with open_stages(TWO) as stages, by_hand(stages, TWO) as hand:
            await hand.ask_all(lambda index, _, hand=hand: hand.fence(1, index))
            await hand.ask_all(lambda _index, _ref, hand=hand: hand.open(1, 1))
            await life(stages, hand)
    assert_exactly(rows, SESSION)


# --- a route session on a stage --------------------------------------------------------------------------------------


async def test_every_row_of_a_stages_epoch_happens_and_no_other(rows: Rows, autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE, TWO) as stages:
        async with by_hand(stages, WHOLE) as hand:  # live, fenced anew, and left
            await hand.say(hand.fence(1))
            await hand.say(hand.fence(2))
        async with by_hand(stages, TWO) as hand:  # its successor never comes: fenced anew while it waits, and left
            await hand.say(hand.fence(1))
            await hand.say(hand.fence(2))
        await rest()
        async with by_hand(stages, TWO) as hand:  # its successor cannot be reached, and the pipeline leaves
            lost = frames.Fence(hand.lease, 1, "0:2", "", "nowhere")
            (reply,) = await hand.say(lost)
            assert isinstance(reply, frames.Refused)
        await rest()
    assert_exactly(rows, EPOCH)


# --- a route as its client sees it -----------------------------------------------------------------------------------


async def answer(pipeline: Pipeline) -> None:
    async with pipeline.session() as session:
        await take(session.generate([1], max_tokens=1))


async def _closed_while_live(stages: Stages, pipeline: Pipeline) -> None:
    await answer(pipeline)


async def _changed_while_live(stages: Stages, pipeline: Pipeline) -> None:
    await pipeline.change_route(stages.route(WHOLE))


async def _broken_and_back(stages: Stages, pipeline: Pipeline) -> None:
    stages.cluster.stop("2:6")
    await rest()
    await stages.start("2:6")
    await answer(pipeline)


async def _broken_twice_and_closed(stages: Stages, pipeline: Pipeline) -> None:
    stages.cluster.stop("2:6")
    stages.cluster.stop("0:2")
    await rest()


async def _given_up_while_fencing(stages: Stages, pipeline: Pipeline) -> None:
    """The tail does not clear its slots, so that the change waits until its caller has gone."""
    async with pipeline.session() as session:
        await take(session.generate([1], max_tokens=1))
        async with held(stages.shard("2:6")):
            with trio.move_on_after(1):
                await pipeline.change_route(stages.route(TWO))
        await rest()


async def _changes_until_it_is_closed(stages: Stages, pipeline: Pipeline) -> None:
    with pytest.raises(ClosedError):
        await pipeline.change_route(stages.route(TWO))


DEEDS: tuple[Callable[[Stages, Pipeline], Awaitable[None]], ...] = (
    _closed_while_live,
    _changed_while_live,
    _broken_and_back,
    _broken_twice_and_closed,
    _given_up_while_fencing,
)


async def test_every_row_of_a_route_happens_and_no_other(rows: Rows, autojump_clock: trio.abc.Clock) -> None:
    for deed in DEEDS:
        async with open_stages(TWO, WHOLE) as stages, stages.pipeline(TWO) as pipeline:
            await deed(stages, pipeline)
    async with (
        open_stages(TWO) as stages,
        trio.open_nursery() as nursery,
        AsyncExitStack() as stack,
        stages.pipeline(TWO) as pipeline,
        pipeline.session() as session,
    ):
        await take(session.generate([1], max_tokens=1))
        await stack.enter_async_context(held(stages.shard("2:6")))
        nursery.start_soon(_changes_until_it_is_closed, stages, pipeline)
        await rest()
    assert_exactly(rows, ROUTE)


def test_a_row_outside_a_table_is_noticed(rows: Rows) -> None:
    """The recording sees what a table refuses, so that the tests above could fail."""
    machine = StateMachine(SESSION)
    with pytest.raises(InvalidTransition):
        machine.fire(next(event for event in SESSION.events if not machine.can(event)))
    with pytest.raises(AssertionError):
        assert_exactly(rows, SESSION)
