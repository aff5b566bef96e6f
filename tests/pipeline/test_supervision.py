"""What serves one peer ends alone: a failure in a route session or on a link touches nobody else on the shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from conversations import reference, seen, take
from pipeline.harness import TWO, Stages, open_stages, rest

from dgr.client.events import RouteDown
from dgr.errors import DgrError, PeerRefused
from dgr.stage.session import SessionActor
from dgr.stage.shard import Shard
from dgr.stage.supervisor import EpochSupervisor
from dgr.wire import frames
from dgr.wire.frames import Fence
from dgr.wire.framing import Limits
from dgr.wire.links import Link, open_link
from dgr.wire.nurseries import open_nursery

PROMPT = list(b"The quick brown fox")
LIMITS = Limits(16, 3, 257)


class Defect(Exception):
    """Nothing of the tree of errors: what a mistake of ours would raise."""


def broken(*_: object, **__: object) -> None:
    raise Defect("on purpose")


async def broken_later(*_: object, **__: object) -> None:
    await trio.lowlevel.checkpoint()
    raise Defect("on purpose")


async def broken_twice(*_: object, **__: object) -> None:
    async with open_nursery() as nursery:
        nursery.start_soon(broken_later)
        nursery.start_soon(broken_later)


#: Every step of a route session that a frame leads to, in its reader or in a task of its own.
STEPS = {
    "begin of a fence": (EpochSupervisor, "_begin_fence", broken),
    "fence": (EpochSupervisor, "_fence", broken_later),
    "fence, twice over": (EpochSupervisor, "_fence", broken_twice),
    "begin of an open": (EpochSupervisor, "_begin_open", broken),
    "begin of a session": (EpochSupervisor, "_begin_session", broken),
    "begin of a close": (EpochSupervisor, "_begin_close", broken),
    "close": (EpochSupervisor, "_close", broken_later),
    "probe": (EpochSupervisor, "_probe", broken_later),
    "work": (EpochSupervisor, "work", broken),
    "delivery": (SessionActor, "deliver", broken),
    "step": (SessionActor, "_step", broken_later),
    "answer": (SessionActor, "_answer", broken_twice),
    "cancel": (EpochSupervisor, "cancel", broken),
}


@pytest.mark.parametrize("step", STEPS)
async def test_a_defect_ends_one_route_session_and_no_other(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    owner, name, wrong = STEPS[step]
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as other, other.session() as neighbour:
        expected = reference(PROMPT, 6)
        assert await take(neighbour.generate(PROMPT, max_tokens=3)) == expected[:3]
        events = other.events()
        with monkeypatch.context() as patch:
            shards = list(stages.cluster.shards.values())

            def theirs(route: bytes) -> bool:
                return route != other.route_id

            right = getattr(owner, name)
            patch.setattr(owner, name, _for_route(right, wrong, theirs))
            # Whatever the caller hears is typed; the defect itself never comes out of the shard.
            try:
                async with stages.pipeline(TWO, retries=1) as pipeline, pipeline.session() as session:
                    await session.state_summaries()
                    with trio.move_on_after(1):
                        await take(session.generate(PROMPT, max_tokens=40))
            except DgrError:
                assert step != "cancel"
            await rest()
        assert [shard.statistics().routes for shard in shards] == [1] * len(shards)
        assert not any(isinstance(event, RouteDown) for event in seen(events))
        assert await take(neighbour.generate(max_tokens=3)) == expected[3:]
    if step != "cancel":
        assert any("ends by a defect" in record.getMessage() for record in caplog.records)


def _for_route(
    right: Callable[..., object], wrong: Callable[..., object], is_wrong: Callable[[bytes], bool]
) -> Callable[..., object]:
    def call(self: EpochSupervisor | SessionActor, *args: object, **options: object) -> object:
        route = self.route if isinstance(self, EpochSupervisor) else self.key.route
        return (wrong if is_wrong(route) else right)(self, *args, **options)

    return call


@pytest.mark.parametrize("call", ["run", "sample"])
async def test_a_defect_of_the_engine_ends_a_batch_and_not_the_stage(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        engine = stages.engines["2:6"]
        right = getattr(engine, call)

        def once(*args: object) -> object:
            monkeypatch.setattr(engine, call, right)
            raise TypeError("on purpose")

        monkeypatch.setattr(engine, call, once)
        assert await take(session.generate(PROMPT, max_tokens=3)) == reference(PROMPT, 3)
    assert any("meets a defect" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("inline", [True, False])
async def test_a_defect_in_counting_a_batch_costs_no_answer_and_counts_none_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, inline: bool
) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        stages.engines["2:6"].inline = inline
        scheduler = stages.shard("2:6").scheduler
        right, counted = scheduler._count, []

        def wrong(*batch: Any) -> None:
            counted.append(batch)
            right(*batch)
            if len(counted) == 2:
                raise TypeError("on purpose")

        monkeypatch.setattr(scheduler, "_count", wrong)
        assert await take(session.generate(PROMPT, max_tokens=3)) == reference(PROMPT, 3)
        assert scheduler.statistics().batches == len(counted) == len({id(batch[0]) for batch in counted})
        assert scheduler.statistics().running_seconds == 0
        assert stages.engines["2:6"].tokens_run == len(PROMPT) + 2
    assert any("meets a defect" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("errors", [1, 2])
@pytest.mark.parametrize("hangs_up", [True, False])
async def test_a_refused_next_stage_ends_nothing_whoever_hangs_up(
    autojump_clock: trio.abc.Clock, errors: int, hangs_up: bool
) -> None:
    """A refusal that meets the end of its route session: the stage serves on."""
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as other, other.session() as neighbour:
        asked = trio.Event()

        async def refusing_dial(own: str, successor: str) -> Link:
            near, _far = trio.testing.memory_stream_pair()
            async with open_link(near, LIMITS), open_nursery() as nursery:
                for _ in range(errors):
                    nursery.start_soon(_refuse_when_cancelled if hangs_up else _refuse)
                asked.set()
                await trio.sleep_forever()

        shard = stages.shard("0:2")
        shard._dial = refusing_dial
        route = b"r" * 16
        async with stages.cluster.connect("0:2") as (link, _):
            link.send_nowait(Fence(route, 1, "0:2", "", "2:6"))
            await asked.wait()
            if not hangs_up:
                async for received in link:
                    assert isinstance(received.frame, frames.Refused)
                    break
        await rest()
        assert shard.statistics().routes == 1
        assert await take(neighbour.generate(PROMPT, max_tokens=3)) == reference(PROMPT, 3)


async def _refuse() -> None:
    await trio.lowlevel.checkpoint()
    raise PeerRefused("not you")


async def _refuse_when_cancelled() -> None:
    try:
        await trio.sleep_forever()
    finally:
        raise PeerRefused("not you")


async def test_a_slot_that_cannot_be_cleared_meets_no_other_session(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_stages(TWO) as stages:
        engine = stages.engines["2:6"]
        async with stages.pipeline(TWO) as pipeline, pipeline.session() as session:
            await take(session.generate(PROMPT, max_tokens=1))
            monkeypatch.setattr(engine, "close", broken)
        await rest()
        monkeypatch.undo()
        shard = stages.shard("2:6")
        assert [lease.slot for lease in shard.ledger.leases] == [0]
        async with stages.pipeline(TWO) as pipeline, pipeline.session() as session:
            assert await take(session.generate(PROMPT, max_tokens=2)) == reference(PROMPT, 2)
            assert [lease.slot for lease in shard.ledger.leases] == [0, 1]
        await rest()
        _forgive(stages, shard)
    assert any("ends by a defect" in record.getMessage() for record in caplog.records)


def _forgive(stages: Stages, shard: Shard) -> None:
    (lease,) = shard.ledger.leases
    stages.engines["2:6"].close(lease.slot)
    shard.ledger.release(lease)
