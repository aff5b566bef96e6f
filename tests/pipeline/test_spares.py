"""Several stages per range: another takes over when one is lost, cannot be had, or is drained; the text is the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import trio
import trio.testing
from conversations import reference, seen, take
from pipeline.harness import TIMEOUTS, TWO, Stages, kinds, open_stages, rest

from dgr.client.candidates import Candidates
from dgr.client.events import RePrefilled, RouteChanged
from dgr.client.pipeline import Pipeline, open_pipeline_on
from dgr.client.work import SessionWork
from dgr.core.route import LayerRange, StageRef
from dgr.errors import DgrError, InputError, InvalidRoute, NoCandidate, StageDraining
from dgr.stage.session import SessionActor
from dgr.wire import frames

PROMPT = list(b"In a hole in the ground there lived a hobbit.")
SPARE_HEAD, SPARE_TAIL = "0:2#b", "2:6#b"


def refs(*names: str) -> tuple[StageRef, ...]:
    return tuple(StageRef(name, LayerRange.parse(name.partition("#")[0])) for name in names)


def spared(stages: Stages, *spares: str, **options: Any) -> Any:
    options.setdefault("timeouts", TIMEOUTS)
    return open_pipeline_on(stages.cluster.connect, stages.route(TWO), spares=refs(*spares), **options)


def addresses(pipeline: Pipeline) -> list[str]:
    return [ref.address for ref in pipeline.route.stages]


async def drain(stages: Stages, name: str, draining: bool | None = True, idle: int = 0) -> frames.Occupancy:
    """What `dgr drain` does, over a control link of its own."""
    async with stages.cluster.connect(name) as (link, _):
        link.send_nowait(frames.Drain(draining, idle))
        async for received in link:
            assert isinstance(received.frame, frames.Occupancy)
            return received.frame
    raise AssertionError("the link ended")


@pytest.mark.parametrize("lost", ["0:2", "2:6"])
async def test_a_spare_takes_over_in_mid_answer(lost: str, autojump_clock: trio.testing.MockClock) -> None:
    async with (
        open_stages(TWO, f"{SPARE_HEAD},{SPARE_TAIL}") as stages,
        spared(stages, SPARE_HEAD, SPARE_TAIL) as pipeline,
        pipeline.session() as session,
    ):
        events = pipeline.events()
        answer = session.generate(PROMPT, max_tokens=16)
        text = await take(answer, 5)
        stages.cluster.stop(lost)
        text += await take(answer)
        assert text == reference(PROMPT, 16)
        assert addresses(pipeline) == [name if name != lost else f"{name}#b" for name in ("0:2", "2:6")]
        assert kinds(seen(events)).count("RePrefilled") == 1


@pytest.mark.parametrize("gone", ["0:2", "2:6", "both"])
async def test_what_is_down_at_the_start_is_passed_over_and_tried_again_later(
    gone: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_stages(TWO, f"{SPARE_HEAD},{SPARE_TAIL}") as stages:
        lost = ["0:2", "2:6"] if gone == "both" else [gone]
        for name in lost:
            stages.cluster.stop(name)
        await rest()
        async with spared(stages, SPARE_HEAD, SPARE_TAIL) as pipeline, pipeline.session() as session:
            assert addresses(pipeline) == [f"{name}#b" if name in lost else name for name in ("0:2", "2:6")]
            assert await take(session.generate(PROMPT, max_tokens=8)) == reference(PROMPT, 8)
            for name in lost:
                await stages.start(name)
                stages.cluster.stop(f"{name}#b")
            await trio.sleep(2)
            assert await take(session.generate([1], max_tokens=4))
            assert addresses(pipeline) == ["0:2", "2:6"]


async def test_nobody_left_is_a_typed_error_that_names_them_all(autojump_clock: trio.testing.MockClock) -> None:
    async with open_stages(TWO, f"{SPARE_HEAD},2:6") as stages:
        for name in ("0:2", SPARE_HEAD):
            stages.cluster.stop(name)
        await rest()
        with pytest.raises(NoCandidate, match=r"no stage of layers 0:2 can be had \(0:2: .*; 0:2#b: ") as found:
            async with spared(stages, SPARE_HEAD):
                pytest.fail("it opened")
        assert "start one of them" in str(found.value)


async def test_all_lost_at_once_are_waited_for_and_any_of_them_will_do(autojump_clock: trio.testing.MockClock) -> None:
    async with (
        open_stages(TWO, f"0:2,{SPARE_TAIL}") as stages,
        spared(stages, SPARE_TAIL) as pipeline,
        pipeline.session() as session,
    ):
        answer = session.generate(PROMPT, max_tokens=12)
        text = await take(answer, 3)
        for name in ("2:6", SPARE_TAIL):
            stages.cluster.stop(name)
        async with trio.open_nursery() as nursery:

            async def come_back() -> None:
                await trio.sleep(20)
                assert "2:6: " in str(pipeline.last_recovery_error)
                assert "2:6#b: " in str(pipeline.last_recovery_error)
                await stages.start(SPARE_TAIL)

            nursery.start_soon(come_back)
            text += await take(answer)
        assert text == reference(PROMPT, 12)
        assert addresses(pipeline) == ["0:2", SPARE_TAIL]


async def test_a_change_of_route_brings_its_own_spares(autojump_clock: trio.testing.MockClock) -> None:
    async with (
        open_stages(TWO, f"{SPARE_HEAD},{SPARE_TAIL}") as stages,
        spared(stages) as pipeline,
        pipeline.session() as session,
    ):
        answer = session.generate(PROMPT, max_tokens=10)
        text = await take(answer, 2)
        stages.cluster.stop("0:2")
        await rest()
        await pipeline.change_route(stages.route(TWO), refs(SPARE_HEAD))
        assert addresses(pipeline) == [SPARE_HEAD, "2:6"]
        assert text + await take(answer) == reference(PROMPT, 10)
        with pytest.raises(InvalidRoute, match="named twice"):
            await pipeline.change_route(stages.route(TWO), refs("2:6"))
        with pytest.raises(InputError, match="a spare stage"):
            await pipeline.change_route(stages.route(TWO), ["2:6"])


# --- draining ---


async def answers(pipeline: Pipeline, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]

    async def ask(index: int) -> None:
        async with pipeline.session() as session:
            async for token in session.generate(prompts[index], max_tokens=tokens):
                found[index].append(token.id)
                await trio.sleep(0.2)  # so that there is time for things to happen

    async with trio.open_nursery() as nursery:
        for index in range(len(prompts)):
            nursery.start_soon(ask, index)
    return found


@pytest.mark.parametrize("name", ["0:2", "2:6"])
async def test_a_drained_stage_is_left_for_a_spare_in_mid_answer(
    name: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with (
        open_stages(TWO, f"{SPARE_HEAD},{SPARE_TAIL}") as stages,
        spared(stages, SPARE_HEAD, SPARE_TAIL) as pipeline,
        pipeline.session() as session,
    ):
        events = pipeline.events()
        answer = session.generate(PROMPT, max_tokens=16)
        text = await take(answer, 5)
        assert (await drain(stages, name)).draining
        text += await take(answer)
        assert text == reference(PROMPT, 16)
        assert f"{name}#b" in addresses(pipeline)
        said = seen(events)
        assert [event.reason for event in said if isinstance(event, RePrefilled)] == ["route change"]
        assert pipeline.statistics().downs == 0  # it was left in good order
        asked = await drain(stages, name, None)
        assert (asked.draining, asked.routes, asked.sessions) == (True, 0, 0)


async def test_without_a_spare_answers_end_where_they_are_and_nobody_new_comes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with (
        open_stages(TWO) as stages,
        spared(stages) as pipeline,
        pipeline.session() as session,
        pipeline.session() as other,
    ):
        answer = session.generate(PROMPT, max_tokens=16)
        text = await take(answer, 5)
        during = await drain(stages, "2:6", idle=3)
        assert (during.sessions, during.routes) == (1, 1)
        with pytest.raises(StageDraining, match=r"^stage 2:6 \(layers 2:6\) is being drained, and it has no spare; "):
            await take(other.generate(PROMPT, max_tokens=4))
        text += await take(answer)
        assert text == reference(PROMPT, 16)
        assert (await drain(stages, "2:6", None)).sessions == 1
        await trio.sleep(4)
        assert (await drain(stages, "2:6", None)).sessions == 0
        with pytest.raises(StageDraining):
            async with spared(stages):
                pytest.fail("a new route session was taken")
        assert not (await drain(stages, "2:6", False)).draining
        assert await take(other.generate([], max_tokens=4)) == reference(PROMPT, 4)
        assert await take(session.generate([1], max_tokens=4))  # it is prefilled again


@pytest.mark.parametrize("moves", ["only when nothing drained is left", "whenever the route is another"])
async def test_what_has_no_spare_ends_its_answers_though_another_range_is_on_its_spare(
    moves: str, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is the mutant: it goes back to what is up again, and the drained stage refuses the re-prefill."""
    is_mutant = moves == "whenever the route is another"
    if is_mutant:
        wishes = iter([True, True])  # it is asked before the change, and when its turn has come
        monkeypatch.setattr(Candidates, "leaves_drained", lambda candidates, now: next(wishes, False))
    async with (
        open_stages(TWO, f"0:2,{SPARE_TAIL}") as stages,
        spared(stages, SPARE_TAIL) as pipeline,
        pipeline.session() as session,
    ):
        answer = session.generate(PROMPT, max_tokens=16)
        text = await take(answer, 3)
        stages.cluster.stop("2:6")
        text += await take(answer, 3)
        await stages.start("2:6")
        epoch = pipeline.epoch
        await trio.sleep(2)  # it would be worth a try again
        await drain(stages, "0:2", idle=60)
        await rest()
        if is_mutant:
            with pytest.raises(StageDraining):
                await take(answer)
            return
        assert pipeline.refuses_sessions is not None
        assert "stage 0:2 (layers 0:2) is being drained, and it has no spare" in pipeline.refuses_sessions
        text += await take(answer)
        assert text == reference(PROMPT, 16)
        assert (addresses(pipeline), pipeline.epoch) == (["0:2", SPARE_TAIL], epoch)
        await drain(stages, "2:6", idle=60)  # what it is not on is none of its business
        await drain(stages, "0:2", False)
        assert pipeline.refuses_sessions is None


async def test_a_spare_that_is_drained_too_keeps_the_route_where_it_is(autojump_clock: trio.testing.MockClock) -> None:
    async with (
        open_stages(TWO, f"0:2,{SPARE_TAIL}") as stages,
        spared(stages, SPARE_TAIL) as pipeline,
        pipeline.session() as session,
    ):
        await drain(stages, SPARE_TAIL, idle=60)
        answer = session.generate(PROMPT, max_tokens=16)
        text = await take(answer, 5)
        await drain(stages, "2:6", idle=60)
        await trio.sleep(1)
        assert "no spare can be had (2:6#b: stage 2:6#b is being drained too)" in str(pipeline.refuses_sessions)
        text += await take(answer, 5)
        assert (addresses(pipeline), pipeline.epoch) == (["0:2", "2:6"], 1)
        await drain(stages, SPARE_TAIL, False)
        await trio.sleep(30)  # it is asked again
        assert addresses(pipeline) == ["0:2", SPARE_TAIL]
        assert pipeline.refuses_sessions is None
        text += await take(answer)
        assert text == reference(PROMPT, 16)


async def test_a_stage_that_is_drained_says_in_its_load_that_it_is_not_ready(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_stages(TWO) as stages, spared(stages) as pipeline:
        for draining in (True, False):
            await drain(stages, "2:6", draining)
            loads = await pipeline.load()
            assert [load is not None and load.ready for load in loads.values()] == [True, not draining]


async def test_a_spare_that_cannot_be_had_keeps_the_route_where_it_is(autojump_clock: trio.testing.MockClock) -> None:
    async with (
        open_stages(TWO, f"0:2,{SPARE_TAIL}") as stages,
        spared(stages, SPARE_TAIL) as pipeline,
        pipeline.session() as session,
    ):
        stages.cluster.stop(SPARE_TAIL)
        answer = session.generate(PROMPT, max_tokens=16)
        text = await take(answer, 5)
        await drain(stages, "2:6", idle=5)
        text += await take(answer)
        assert text == reference(PROMPT, 16)
        assert (addresses(pipeline), pipeline.epoch) == (["0:2", "2:6"], 1)


async def test_a_stage_may_be_drained_again_after_it_was_started_again(autojump_clock: trio.testing.MockClock) -> None:
    async with (
        open_stages(TWO, f"0:2,{SPARE_TAIL}") as stages,
        spared(stages, SPARE_TAIL) as pipeline,
        pipeline.session() as session,
    ):
        stages.cluster.stop(SPARE_TAIL)
        answer = session.generate(PROMPT, max_tokens=16)
        text = await take(answer, 3)
        await drain(stages, "2:6", idle=60)
        stages.cluster.stop("2:6")
        await stages.start("2:6")
        text += await take(answer, 3)
        assert addresses(pipeline) == ["0:2", "2:6"]
        await stages.start(SPARE_TAIL)
        await drain(stages, "2:6", idle=60)
        text += await take(answer)
        assert text == reference(PROMPT, 16)
        assert addresses(pipeline) == ["0:2", SPARE_TAIL]


async def test_many_sessions_move_with_their_texts_and_the_mutant_that_skips_the_re_prefill_is_seen(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drained one after another, back and forth. The mutant's stages believe, and its sessions do not begin again."""
    prompts = [PROMPT[:12], PROMPT[3:20], PROMPT[5:30]]
    expected = [reference(prompt, 24) for prompt in prompts]

    async def run() -> tuple[list[list[int]], int]:
        async with (
            open_stages(TWO, f"{SPARE_HEAD},{SPARE_TAIL}") as stages,
            spared(stages, SPARE_HEAD, SPARE_TAIL) as pipeline,
            trio.open_nursery() as nursery,
        ):
            events = pipeline.events()

            async def maintain() -> None:
                for name in ("0:2", "2:6", SPARE_HEAD, SPARE_TAIL):
                    await drain(stages, name)
                    await trio.sleep(0.5)
                    assert (await drain(stages, name, None)).sessions == 0
                    stages.cluster.stop(name)
                    await stages.start(name)
                    await trio.sleep(0.5)

            nursery.start_soon(maintain)
            found = await answers(pipeline, prompts, 24)
            nursery.cancel_scope.cancel()
            return found, sum(isinstance(event, RouteChanged) for event in seen(events))

    found, changes = await run()
    assert found == expected
    assert changes >= 2
    monkeypatch.setattr(SessionWork, "forget", _keep_what_was_sent)
    monkeypatch.setattr(SessionActor, "_differs", lambda self, expect: None)
    try:
        with trio.fail_after(1000):
            wrong = (await run())[0] != expected
    except (DgrError, ExceptionGroup, trio.TooSlowError):
        wrong = True  # a later check stops it
    assert wrong


def _keep_what_was_sent(work: SessionWork, error: DgrError) -> None:
    """The mutant's session goes on from where it stood, on stages that hold nothing of it."""
    chunks, work._chunks = work._chunks, deque()
    for chunk in chunks:
        work._route.fail_work(work._session, chunk.seq, error)
