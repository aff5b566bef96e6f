"""Routes that change under a conversation, and pipelines that share stages: the text never changes, only its cost."""

from __future__ import annotations

import pytest
import trio
from conversations import held, reference, seen, take
from msgspec.structs import replace
from pipeline.harness import CONTEXT, THREE, TWO, WHOLE, Stages, open_stages, rest

from dgr.client.events import Event, RePrefilled, RouteChanged
from dgr.client.pipeline import Pipeline
from dgr.client.session import ClientSession
from dgr.core.route import LayerRange, Route, StageRef
from dgr.core.values import SamplingParams
from dgr.errors import InvalidLayerRange, InvalidRoute, LinkBroken
from dgr.protocol.states import ClientState, RouteState

PROMPT = list(b"Call me Ishmael. Some years ago, never mind how")
SAMPLING = SamplingParams(temperature=0.7, seed=4, presence_penalty=0.3)
OTHER = "0:4,4:6#b"


def reprefills(events: trio.MemoryReceiveChannel[Event]) -> list[tuple[str, int]]:
    return [(event.reason, event.tokens) for event in seen(events) if isinstance(event, RePrefilled)]


async def test_a_change_while_idle(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO, THREE) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        events = pipeline.events()
        first = await take(session.generate(PROMPT, max_tokens=4))
        per_session = sum(sum(stages.engines[name].memory().state.values()) // 3 for name in TWO.split(","))
        await pipeline.change_route(stages.route(THREE))
        assert session.state is ClientState.LOST
        await rest()
        # The old stages dropped everything before anything ran on the new ones.
        for name in TWO.split(","):
            assert stages.shard(name).statistics().leased_bytes == 0
        assert stages.tokens_run(THREE) == [0, 0, 0]
        assert await take(session.generate(max_tokens=4)) == reference([*PROMPT, *first], 4)
        happened = seen(events)
        changed = [event for event in happened if isinstance(event, RouteChanged)]
        assert [(event.epoch, event.route, event.sessions_dropped) for event in changed] == [
            (2, stages.route(THREE), 0)  # no stage of the new route held anything
        ]
        assert [(e.reason, e.tokens) for e in happened if isinstance(e, RePrefilled)] == [
            ("route change", len(PROMPT) + 4)
        ]
        await pipeline.change_route(stages.route(THREE))
        (changed_again,) = [event for event in seen(events) if isinstance(event, RouteChanged)]
        assert changed_again.sessions_dropped == 3
        assert changed_again.bytes_released == per_session


@pytest.mark.parametrize("to", [TWO, THREE, WHOLE, OTHER])
@pytest.mark.parametrize("where", ["0:2", "2:6"])
async def test_a_change_in_the_middle_of_prefill(autojump_clock: trio.abc.Clock, to: str, where: str) -> None:
    async with open_stages(TWO, to) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        events = pipeline.events()
        answers = []

        async def ask() -> None:
            answers.append(await take(session.generate(PROMPT, max_tokens=5, sampling=SAMPLING)))

        async with trio.open_nursery() as nursery, held(stages.shard(where)):
            nursery.start_soon(ask)
            await rest()
            nursery.start_soon(pipeline.change_route, stages.route(to))
            await rest()
        assert answers == [reference(PROMPT, 5, SAMPLING)]
        assert reprefills(events) == [("route change", len(PROMPT))]
        stages.assert_consistent()


@pytest.mark.parametrize("to", [TWO, THREE, WHOLE])
async def test_a_change_in_the_middle_of_decode(autojump_clock: trio.abc.Clock, to: str) -> None:
    async with open_stages(TWO, to) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        events = pipeline.events()
        generation = session.generate(PROMPT, max_tokens=9, sampling=SAMPLING)
        answer = await take(generation, 3)
        await pipeline.change_route(stages.route(to))
        answer += await take(generation, 3)

        async def ask() -> None:
            answer.extend(await take(generation))

        async with trio.open_nursery() as nursery, held(stages.shard(to.split(",")[-1])):
            nursery.start_soon(ask)
            await rest()
            nursery.start_soon(pipeline.change_route, stages.route(TWO))
            await rest()
        assert answer == reference(PROMPT, 9, SAMPLING)
        assert reprefills(events) == [("route change", len(PROMPT) + 3), ("route change", len(PROMPT) + 6)]


@pytest.mark.parametrize("steps", range(0, 90, 3))
async def test_a_change_at_any_moment(autojump_clock: trio.abc.Clock, steps: int) -> None:
    """Wherever the change falls (while slots are opened, dropped, filled, drained): no wait in vain, the same text."""
    async with open_stages(TWO, THREE) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        began = trio.current_time()
        answers = []

        async def ask() -> None:
            answers.append(await take(session.generate(PROMPT, max_tokens=4)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            for split in (THREE, TWO):
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                await pipeline.change_route(stages.route(split))
        assert answers == [reference(PROMPT, 4)]
        assert trio.current_time() == began
        assert pipeline.epoch == 3
        stages.assert_consistent()


async def test_there_and_back_and_there_again(autojump_clock: trio.abc.Clock) -> None:
    """A pipeline comes back to stages that have not finished dropping it."""
    async with open_stages(TWO, WHOLE) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        await session.prefill(PROMPT)
        began = trio.current_time()
        states: list[RouteState] = []
        async with trio.open_nursery() as nursery, held(stages.shard("0:2")), held(stages.shard("2:6")):
            await pipeline.change_route(stages.route(WHOLE))
            nursery.start_soon(pipeline.change_route, stages.route(TWO))
            await rest()
            states.append(pipeline.state)
        states.append(pipeline.state)
        assert states == [RouteState.FENCING, RouteState.LIVE]
        for split in (WHOLE, TWO, WHOLE, TWO, WHOLE, TWO):
            await pipeline.change_route(stages.route(split))
        assert await take(session.generate([1], max_tokens=2)) == reference([*PROMPT, 1], 2)
        assert trio.current_time() == began
        assert pipeline.epoch == 9
        stages.assert_consistent()


async def test_changes_asked_for_at_once_are_made_one_after_another(autojump_clock: trio.abc.Clock) -> None:
    async with (
        open_stages(TWO, THREE, WHOLE) as stages,
        stages.pipeline(TWO, retries=4) as pipeline,
        pipeline.session() as session,
        trio.open_nursery() as nursery,
    ):
        for split in (THREE, WHOLE, TWO, WHOLE):
            nursery.start_soon(pipeline.change_route, stages.route(split))
        assert await take(session.generate(PROMPT, max_tokens=3)) == reference(PROMPT, 3)
        await rest()
        assert pipeline.epoch == 5
        used = {ref.address for ref in pipeline.route.stages}
        for name, shard in stages.cluster.shards.items():
            assert shard.statistics().routes == (name in used)


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ("0:2,3:6", InvalidRoute),
        ("0:2", InvalidRoute),
        ("0:4,2:6", InvalidRoute),
        ("0:2,2:6,6:9", InvalidLayerRange),
    ],
)
async def test_routes_that_do_not_cover_the_model_leave_the_old_one(
    autojump_clock: trio.abc.Clock, names: str, error: type[Exception]
) -> None:
    async with (
        open_stages(TWO, "0:4,4:6") as stages,
        stages.pipeline(TWO) as pipeline,
        pipeline.session() as session,
    ):
        await session.prefill(PROMPT)
        refs = tuple(StageRef(name, LayerRange.parse(name)) for name in names.split(","))
        with pytest.raises((error, LinkBroken)):
            await pipeline.change_route(Route(refs))
        assert pipeline.epoch == 1
        assert pipeline.state is RouteState.LIVE
        assert session.committed == len(PROMPT)
        assert await take(session.generate([1], max_tokens=1)) == reference([*PROMPT, 1], 1)
        await rest()
        for name, shard in stages.cluster.shards.items():
            assert shard.statistics().routes == (1 if name in TWO else 0)


async def test_a_route_to_a_stage_that_is_not_there_leaves_the_old_one(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        await session.prefill(PROMPT)
        with pytest.raises(LinkBroken, match="no stage '0:1' runs here"):
            await pipeline.change_route(stages.route(THREE))
        assert pipeline.state is RouteState.LIVE
        assert session.committed == len(PROMPT)


# --- two pipelines on the same stages ---


async def where_it_stands(session: ClientSession) -> list[object]:
    return [(report.digest, report.state) for report in (await session.state_summaries()).values()]


async def test_a_fence_of_one_pipeline_does_not_touch_another(autojump_clock: trio.abc.Clock) -> None:
    context = replace(CONTEXT, n_seq_max=4)
    async with (
        open_stages(THREE, context=context) as stages,
        stages.pipeline(THREE) as mine,
        stages.pipeline(THREE) as theirs,
        mine.session() as session,
        theirs.session() as other,
    ):
        events = theirs.events()
        said = await take(other.generate(PROMPT, max_tokens=3))
        before = await where_it_stands(other)
        for _ in range(3):
            await take(session.generate([*PROMPT[::-1]][: 3 + len(session.transcript) % 5], max_tokens=2))
            await mine.change_route(stages.route(THREE))
            assert await where_it_stands(other) == before
        assert await take(other.generate(max_tokens=3)) == reference([*PROMPT, *said], 3)
        assert reprefills(events) == []
        assert (mine.epoch, theirs.epoch) == (4, 1)


async def test_pipelines_come_and_go_beside_one_that_stays(autojump_clock: trio.abc.Clock) -> None:
    context = replace(CONTEXT, n_seq_max=4)
    async with (
        open_stages(TWO, THREE, context=context) as stages,
        stages.pipeline(TWO) as stays,
        stays.session() as keeper,
    ):
        generation = keeper.generate(PROMPT, max_tokens=24)
        answer = []
        for round_ in range(8):
            async with stages.pipeline(TWO) as pipeline, pipeline.session() as session:
                assert await take(session.generate([round_, 1], max_tokens=2)) == reference([round_, 1], 2)
                answer += await take(generation, 3)
                await pipeline.change_route(stages.route(THREE if round_ % 2 else TWO))
                assert await take(session.generate(max_tokens=1))
            await rest()
            for name in TWO.split(","):
                statistics = stages.shard(name).statistics()
                assert (statistics.routes, statistics.sessions) == (1, 1)
        assert answer == reference(PROMPT, 24)


async def test_a_pipeline_that_starts_again_finds_empty_stages(autojump_clock: trio.abc.Clock) -> None:
    context = replace(CONTEXT, n_seq_max=1)
    async with open_stages(TWO, context=context) as stages:
        for _ in range(5):
            async with stages.pipeline(TWO) as pipeline, pipeline.session() as session:
                await session.prefill([9, 9, 9])
                # Left without a word: the session is still open when the links end.
                assert await take(session.generate(PROMPT, max_tokens=2)) == reference([9, 9, 9, *PROMPT], 2)


@pytest.mark.parametrize("steps", range(0, 60, 4))
async def test_a_pipeline_that_dies_at_any_moment_leaves_nothing(autojump_clock: trio.abc.Clock, steps: int) -> None:
    async with open_stages(TWO, THREE) as stages, stages.pipeline(TWO) as stays, stays.session() as keeper:
        await keeper.prefill(PROMPT)

        async def live(split: str) -> None:
            async with stages.pipeline(split) as pipeline, pipeline.session() as session:
                await take(session.generate(PROMPT, max_tokens=50))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(live, TWO)
            nursery.start_soon(live, THREE)
            for _ in range(steps):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await rest()
        for name, shard in stages.cluster.shards.items():
            wanted = 1 if name in TWO.split(",") else 0
            assert (shard.statistics().routes, shard.statistics().sessions) == (wanted, wanted), (name, steps)
        stages.assert_consistent()
        assert await take(keeper.generate([1], max_tokens=2)) == reference([*PROMPT, 1], 2)


async def _talk(pipeline: Pipeline, stages: Stages, first: int, changes: tuple[str, ...]) -> list[int]:
    async with pipeline.session() as session:
        answer = await take(session.generate([first, *PROMPT], max_tokens=3))
        for split in changes:
            await pipeline.change_route(stages.route(split))
            answer += await take(session.generate(max_tokens=3))
        return answer


async def test_pipelines_change_routes_against_each_other(autojump_clock: trio.abc.Clock) -> None:
    """Three pipelines over the same stages, each changing its route in the other's way."""
    context = replace(CONTEXT, n_seq_max=6)
    answers: dict[int, list[int]] = {}
    async with open_stages(TWO, THREE, WHOLE, context=context) as stages:

        async def run(first: int, *splits: str) -> None:
            async with stages.pipeline(splits[0]) as pipeline:
                answers[first] = await _talk(pipeline, stages, first, splits[1:])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, 1, TWO, THREE, TWO, WHOLE)
            nursery.start_soon(run, 2, THREE, TWO, THREE, TWO)
            nursery.start_soon(run, 3, WHOLE, TWO, TWO, THREE)
    assert answers == {first: reference([first, *PROMPT], 12) for first in (1, 2, 3)}


async def test_a_session_lost_on_one_stage_is_opened_anew_on_all(autojump_clock: trio.abc.Clock) -> None:
    """A stage that was restarted between two turns knows nothing; the others are told to drop what they hold."""
    async with open_stages(THREE) as stages, stages.pipeline(THREE) as pipeline:
        sessions: list[ClientSession] = []
        async with pipeline.session() as one, pipeline.session() as two:
            sessions += [one, two]
            for session in sessions:
                await session.prefill(PROMPT)
            stages.cluster.stop("1:4")
            await stages.start("1:4")
            for session in sessions:
                assert await take(session.generate([1], max_tokens=2)) == reference([*PROMPT, 1], 2)
            for name in THREE.split(","):
                assert stages.shard(name).statistics().sessions == 2
