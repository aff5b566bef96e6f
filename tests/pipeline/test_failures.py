"""What breaks, and whom it may touch: one request, one session, one batch, one stage. Never more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
from conversations import held, reference, seen, take
from msgspec.structs import replace
from pipeline.harness import CONTEXT, THREE, TIMEOUTS, TWO, WHOLE, kinds, open_stages, rest

from dgr.client.events import RePrefilled, RouteDown, StateLost
from dgr.client.pipeline import Pipeline
from dgr.client.session import ClientSession
from dgr.cluster.local import ShardPolicy
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams, SamplingParams, TopLogprob
from dgr.engine.base import Output, Work
from dgr.errors import (
    BudgetExceeded,
    ClosedError,
    DeadlineExceeded,
    EngineError,
    InputError,
    LinkBroken,
    NonFinite,
    PrefillFailed,
    SessionLost,
)
from dgr.protocol.states import RouteState
from dgr.testing.engines.fake import FakeEngine, Fault, FaultKind

PROMPT = list(b"It was the best of times, it was the worst of")


# --- values that are not finite ---


@pytest.mark.parametrize("where", THREE.split(","))
@pytest.mark.parametrize("at", [0, 17, 44, 45, 47])
async def test_nan_ends_one_request_and_no_other(autojump_clock: trio.abc.Clock, where: str, at: int) -> None:
    async with (
        open_stages(THREE) as stages,
        stages.pipeline(THREE) as pipeline,
        pipeline.session() as other,
        pipeline.session() as session,
    ):
        said = await take(other.generate(PROMPT, max_tokens=2))
        stages.engines[where].faults.append(Fault(FaultKind.NON_FINITE, position=at, slot=1))
        with pytest.raises(NonFinite, match="NaN or Inf among the values of positions"):
            await take(session.generate(PROMPT, max_tokens=10))
        assert other.committed == len(PROMPT) + 1
        assert await take(other.generate(max_tokens=3)) == reference([*PROMPT, *said], 3)
        # The session itself is usable again, from token 0.
        before = list(session.transcript)
        assert await take(session.generate([1], max_tokens=3)) == reference([*before, 1], 3)
        assert pipeline.state is RouteState.LIVE


async def test_nan_in_a_merged_batch_spares_its_companions(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, trio.open_nursery() as nursery:
        outcomes: dict[int, object] = {}

        async def ask(prompt: list[int]) -> None:
            async with pipeline.session() as session:
                try:
                    outcomes[prompt[0]] = await take(session.generate(prompt, max_tokens=4))
                except NonFinite as error:
                    outcomes[prompt[0]] = error

        stages.engines["0:2"].faults.append(Fault(FaultKind.NON_FINITE, position=2, slot=1))
        async with held(stages.shard("0:2")):
            for first in (1, 2, 3):
                nursery.start_soon(ask, [first, 9, 9])
            await rest()
        await rest()
        bad = [first for first, outcome in outcomes.items() if isinstance(outcome, NonFinite)]
        assert len(bad) == 1
        for first in {1, 2, 3} - set(bad):
            assert outcomes[first] == reference([first, 9, 9], 4)


# --- native failures ---


@pytest.mark.parametrize("where", THREE.split(","))
@pytest.mark.parametrize("at", [0, 20, 44, 46])
async def test_a_native_failure_is_prefilled_over_with_the_same_text(
    autojump_clock: trio.abc.Clock, where: str, at: int
) -> None:
    sampling = SamplingParams(temperature=0.8, seed=11)
    async with open_stages(THREE) as stages, stages.pipeline(THREE) as pipeline, pipeline.session() as session:
        events = pipeline.events()
        stages.engines[where].faults.append(Fault(FaultKind.ERROR, position=at))
        assert await take(session.generate(PROMPT, max_tokens=6, sampling=sampling)) == reference(PROMPT, 6, sampling)
        again = [event for event in seen(events) if isinstance(event, RePrefilled)]
        assert len(again) == 1
        assert "fails on purpose" in again[0].reason
        assert again[0].tokens == max(len(PROMPT), at + 1)
        assert [stages.shard(name).statistics().sessions for name in THREE.split(",")] == [1, 1, 1]


async def test_a_native_failure_loses_every_session_of_its_batch_and_no_other(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as idle:
        events = pipeline.events()
        await idle.prefill([1])
        engine, batches = stages.engines["0:2"], []
        engine.watch = lambda batch: batches.append([work.slot for work in batch])
        answers = {}

        async def ask(first: int) -> None:
            async with pipeline.session() as session:
                answers[first] = await take(session.generate([first], max_tokens=2))

        async with trio.open_nursery() as nursery, held(stages.shard("0:2")):
            for first in (5, 6):
                nursery.start_soon(ask, first)
            await rest()
            engine.faults.append(Fault(FaultKind.ERROR, slot=1))
        assert answers == {5: reference([5], 2), 6: reference([6], 2)}
        lost = {event.session for event in seen(events) if isinstance(event, StateLost)}
        failed = next(batch for batch in batches if 1 in batch)
        assert len(lost) == len(failed)
        assert idle.id not in lost
        assert idle.committed == 1


async def test_tries_are_bounded_and_the_failure_is_typed(autojump_clock: trio.abc.Clock) -> None:
    for retries in (0, 2, 3):
        async with (
            open_stages(THREE) as stages,
            stages.pipeline(THREE, retries=retries) as pipeline,
            pipeline.session() as session,
        ):
            runs: list[int] = []

            def fail(_batch: object, runs: list[int] = runs) -> None:
                runs.append(1)
                raise EngineError("the device is gone")

            stages.engines["1:4"].watch = fail
            with pytest.raises(PrefillFailed, match=rf"was lost {retries + 1} times while 45 tokens .* device is gone"):
                await take(session.generate(PROMPT))
            assert len(runs) == retries + 1
            stages.engines["1:4"].watch = None
            for name in THREE.split(","):
                stages.engines[name].close(0)  # the fake marks no slot lost when a watcher raises
            assert await take(session.generate(max_tokens=2)) == reference(PROMPT, 2)


async def test_the_lowest_failed_chunk_decides(autojump_clock: trio.abc.Clock) -> None:
    """Chunks behind a failed one are answered with misses; the caller hears of the failure itself, and at once."""
    for where in THREE.split(","):
        async with (
            open_stages(THREE) as stages,
            stages.pipeline(THREE, window=6, chunk=5) as pipeline,
            pipeline.session() as session,
        ):
            stages.engines[where].faults += [Fault(FaultKind.NON_FINITE, position=p) for p in (12, 22, 31)]
            # A tail shows its values only where a token is drawn from them.
            with pytest.raises(NonFinite, match=r"positions 40\.\.44" if where == "4:6" else r"positions 10\.\.14"):
                await take(session.generate(PROMPT))


async def test_misses_reach_the_caller_before_any_deadline(autojump_clock: trio.abc.Clock) -> None:
    began = trio.current_time()
    async with (
        open_stages(THREE) as stages,
        stages.pipeline(THREE, retries=3) as pipeline,
        pipeline.session() as session,
    ):
        for name in THREE.split(","):
            stages.engines[name].faults.append(Fault(FaultKind.ERROR, position=3))
        assert await take(session.generate(PROMPT, max_tokens=2)) == reference(PROMPT, 2)
        assert trio.current_time() == began


# --- guards that only the engine has ---


class _Picky(FakeEngine):
    """Refuses what nobody above it knows to refuse."""

    def run(self, batch: Sequence[Work]) -> list[Output]:
        if any(13 in work.tokens for work in batch):
            raise InputError("thirteen is not run here")
        return super().run(batch)

    def sample(
        self, logits: memoryview | bytes, history: Sequence[int], params: SamplingParams
    ) -> tuple[int, tuple[TopLogprob, ...]]:
        if params.temperature == 13:
            raise InputError("thirteen is too hot")
        return super().sample(logits, history, params)


@pytest.mark.parametrize("where", THREE.split(","))
async def test_a_refusal_behind_the_head_loses_the_session_everywhere(
    autojump_clock: trio.abc.Clock, where: str
) -> None:
    async with open_stages(THREE) as stages:
        stages.cluster.stop(where)
        await rest()
        await stages.start(where, _Picky(LayerRange.parse(where), CONTEXT))
        async with stages.pipeline(THREE) as pipeline, pipeline.session() as session, pipeline.session() as other:
            await other.prefill(PROMPT)
            await session.prefill(PROMPT)
            with pytest.raises(InputError, match="thirteen is not run here"):
                await take(session.generate([13]))
            assert session.committed == 0
            assert await take(session.generate(transcript=[*PROMPT, 14], max_tokens=2)) == reference([*PROMPT, 14], 2)
            assert await take(other.generate([14], max_tokens=2)) == reference([*PROMPT, 14], 2)


async def test_a_good_companion_of_a_refused_item_is_run(autojump_clock: trio.abc.Clock) -> None:
    context = replace(CONTEXT, n_seq_max=4)
    async with open_stages(WHOLE, context=context) as stages:
        stages.cluster.stop(WHOLE)
        await rest()
        engine = await stages.start(WHOLE, _Picky(None, context))
        batches: list[int] = []
        engine.watch = lambda batch: batches.append(len(batch))
        async with stages.pipeline(WHOLE) as pipeline, trio.open_nursery() as nursery:
            outcomes: dict[int, object] = {}

            async def ask(first: int) -> None:
                async with pipeline.session() as session:
                    try:
                        outcomes[first] = await take(session.generate([first], max_tokens=3))
                    except InputError as error:
                        outcomes[first] = str(error)

            async with held(stages.shard(WHOLE)):
                nursery.start_soon(ask, 11)  # goes ahead alone: the others gather behind it
                await rest()
                for first in (12, 13, 14):
                    nursery.start_soon(ask, first)
                await rest()
            await rest()
            assert outcomes == {
                11: reference([11], 3),
                12: reference([12], 3),
                13: "thirteen is not run here",
                14: reference([14], 3),
            }
            assert batches[:3] == [1, 1, 1], "the batch with a refused item was run one by one"


async def test_a_sampler_that_refuses_too_late_loses_the_session_and_says_why(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages:
        stages.cluster.stop(WHOLE)
        await rest()
        engine = await stages.start(WHOLE, _Picky(None, CONTEXT))
        async with stages.pipeline(WHOLE, retries=0) as pipeline, pipeline.session() as session:
            with pytest.raises(PrefillFailed, match="thirteen is too hot"):
                await take(session.generate(PROMPT, sampling=SamplingParams(temperature=13)))
            (actor,) = stages.shard(WHOLE).actors()
            assert engine.position(actor.lease.slot) == actor.position == 0
            assert await take(session.generate(max_tokens=2)) == reference(PROMPT, 2)


# --- stages that die ---


@pytest.mark.parametrize("where", THREE.split(","))
async def test_a_dead_stage_fails_its_own_requests_within_the_deadline(
    autojump_clock: trio.abc.Clock, where: str
) -> None:
    async with (
        open_stages(THREE, "0:6#other") as stages,
        stages.pipeline(THREE) as pipeline,
        stages.pipeline("0:6#other") as bystander,
        pipeline.session() as session,
        bystander.session() as other,
    ):
        events = pipeline.events()
        generation = session.generate(PROMPT, max_tokens=50)
        said = await take(generation, 3)
        kept = await take(other.generate(PROMPT, max_tokens=3))
        stages.cluster.stop(where)
        began = trio.current_time()
        with pytest.raises(DeadlineExceeded, match=rf"the route is down .* \(no stage '{where}' runs here"):
            await anext(generation)
        assert trio.current_time() - began == pytest.approx(TIMEOUTS.route)
        assert session.transcript == [*PROMPT, *said]
        assert [event.why for event in seen(events) if isinstance(event, RouteDown)]
        assert bystander.state is RouteState.LIVE
        assert await take(other.generate(max_tokens=3)) == reference([*PROMPT, *kept], 3)


@pytest.mark.parametrize("where", THREE.split(","))
@pytest.mark.parametrize("at", ["idle", "prefill", "decode"])
async def test_a_stage_that_comes_back_is_used_again(autojump_clock: trio.abc.Clock, where: str, at: str) -> None:
    async with open_stages(THREE) as stages, stages.pipeline(THREE) as pipeline, pipeline.session() as session:

        def die(_batch: object) -> None:
            stages.engines[where].watch = None
            stages.cluster.stop(where)

        answer: list[int] = []

        async def ask() -> None:
            answer.extend(await take(session.generate(max_tokens=8)))

        if at != "idle":
            stages.engines[where].watch = die if at == "prefill" else None
        session.transcript = []
        async with trio.open_nursery() as nursery:
            if at == "decode":
                await session.prefill(PROMPT[:-1])
                stages.engines[where].watch = die
            if at == "idle":
                await session.prefill(PROMPT)
                stages.cluster.stop(where)
            session.transcript = list(PROMPT)
            nursery.start_soon(ask)
            await rest()
            await trio.sleep(1)
            await stages.start(where)
            began = trio.current_time()
        assert answer == reference(PROMPT, 8)
        assert trio.current_time() - began < 5
        assert pipeline.epoch == 2
        stages.assert_consistent()


async def test_a_stage_that_restarts_at_once_is_found_and_used(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        for where in [*TWO.split(","), *TWO.split(",")]:
            before = list(session.transcript)
            await take(session.generate([3], max_tokens=2))
            stages.cluster.stop(where)
            await stages.start(where)
            assert session.transcript == [*before, 3, *reference([*before, 3], 2)]
            assert len(stages.cluster.shards) == 2
        began = trio.current_time()
        before = list(session.transcript)
        assert await take(session.generate([4], max_tokens=2)) == reference([*before, 4], 2)
        assert trio.current_time() - began < 1


async def test_nothing_of_a_dead_stage_stays_in_the_cluster(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(THREE) as stages:
        async with stages.pipeline(THREE) as pipeline, pipeline.session() as session:
            await session.prefill(PROMPT)
            await rest()
            tasks = len(stages.cluster._nursery.child_tasks)
            for _ in range(3):
                for name in THREE.split(","):
                    stages.cluster.stop(name)
                    await stages.start(name)
                    await session.prefill([1])
                    await rest()
                    assert len(stages.cluster._nursery.child_tasks) == tasks
                    assert len(stages.cluster._boundaries) == 2
        await rest()
        for shard in stages.cluster.shards.values():
            assert shard.statistics().routes == 0


@pytest.mark.parametrize("dead", THREE.split(","))
async def test_a_session_closed_on_a_dead_route_is_dropped_where_there_is_life(
    autojump_clock: trio.abc.Clock, dead: str
) -> None:
    async with open_stages(THREE) as stages, stages.pipeline(THREE) as pipeline:
        async with pipeline.session() as session:
            await session.prefill(PROMPT)
            stages.cluster.stop(dead)
            await rest()
        await rest()
        for name, shard in stages.cluster.shards.items():
            assert shard.statistics().sessions == 0, name


async def test_names_of_stages_are_taken_once(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages:
        engine = FakeEngine(None, CONTEXT)
        with pytest.raises(InputError, match="a stage '0:6' runs here already"):
            await stages.cluster.start(WHOLE, engine)
        with pytest.raises(EngineError):
            engine.position(0)
        with pytest.raises(InputError, match="no stage 'x' runs here"):
            stages.cluster.stop("x")


async def test_a_name_is_taken_while_its_stage_starts(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages:
        refused: list[str] = []

        async def start() -> None:
            try:
                await stages.start("0:6#b")
            except InputError as error:
                refused.append(str(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(start)
            nursery.start_soon(start)
        assert len(refused) == 1
        stages.cluster.stop("0:6#b")
        await stages.start("0:6#b")


async def test_a_pipeline_to_nowhere_is_refused(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages("0:2") as stages:
        with pytest.raises(LinkBroken, match="no stage '2:6' runs here; running: 0:2"):
            async with stages.pipeline(TWO):
                pass


async def test_a_stage_over_its_budget_is_refused_with_the_arithmetic(autojump_clock: trio.abc.Clock) -> None:
    engine = FakeEngine(None, CONTEXT)
    total = engine.memory().total
    async with open_stages(WHOLE, policy=ShardPolicy(memory_budget=total)) as stages:
        stages.policy = ShardPolicy(memory_budget=total - 1)
        with pytest.raises(BudgetExceeded, match=rf"stage 0:6#b \(0:6\): weights .* = {total} B .* by 1 B"):
            await stages.start("0:6#b")
        assert list(stages.cluster.shards) == [WHOLE]


# --- a pipeline that is closed under its users ---


@pytest.mark.parametrize("steps", [0, 1, 3, 7, 12, 20, 30, 45, 60])
async def test_closing_the_pipeline_tells_whoever_waits(autojump_clock: trio.abc.Clock, steps: int) -> None:
    async with open_stages(TWO) as stages, trio.open_nursery() as nursery:
        outcome: list[object] = []
        opened = trio.Event()
        sessions: list[ClientSession] = []

        async def ask(pipeline: Pipeline) -> None:
            began = trio.current_time()
            try:
                async with pipeline.session() as session:
                    sessions.append(session)
                    opened.set()
                    outcome.append(await take(session.generate(PROMPT, max_tokens=6)))
            except (ClosedError, SessionLost) as error:
                outcome.append(error)
            assert trio.current_time() == began

        async with stages.pipeline(TWO) as pipeline:
            nursery.start_soon(ask, pipeline)
            await opened.wait()
            for _ in range(steps):
                await trio.lowlevel.checkpoint()
        await rest()
        assert len(outcome) == 1
        with pytest.raises(ClosedError, match="the pipeline is closed"):
            await pipeline.change_route(stages.route(TWO))


# --- deadlines ---


async def test_a_stage_that_hangs_costs_its_callers_the_stated_deadlines(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO, retries=1) as pipeline, pipeline.session() as session:
        await session.prefill([1])
        async with held(stages.shard("2:6")):
            began = trio.current_time()
            with pytest.raises(PrefillFailed, match="no reply to Close of session 1 from stage 2:6 within 10 s"):
                await take(session.generate(PROMPT))
            # One chunk unanswered, then the slot that cannot be cleared.
            assert trio.current_time() - began == pytest.approx(TIMEOUTS.reply + TIMEOUTS.control)
        assert await take(session.generate(max_tokens=2)) == reference([1, *PROMPT], 2)


async def test_a_fence_that_hangs_is_given_up(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO, THREE) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        events = pipeline.events()
        await session.prefill(PROMPT)
        async with held(stages.shard("2:6")):
            began = trio.current_time()
            with pytest.raises(DeadlineExceeded, match="no reply to Fence"):
                await pipeline.change_route(stages.route(TWO))
            assert trio.current_time() - began == pytest.approx(TIMEOUTS.route)
            assert pipeline.state is RouteState.DOWN
        assert await take(session.generate([1], max_tokens=2)) == reference([*PROMPT, 1], 2)
        assert "RouteChanged" in kinds(seen(events))


async def test_a_change_of_route_that_is_cancelled_is_made_good(autojump_clock: trio.abc.Clock) -> None:
    """Some stages are at the new epoch, some may not be: the route is fenced anew, nobody has to ask for it."""
    for steps in range(0, 30, 2):
        async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
            await session.prefill(PROMPT)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pipeline.change_route, stages.route(TWO))
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            began = trio.current_time()
            assert await take(session.generate([1], max_tokens=2)) == reference([*PROMPT, 1], 2)
            assert trio.current_time() - began < 1
            assert pipeline.state is RouteState.LIVE


@pytest.mark.parametrize("steps", range(40))
@pytest.mark.parametrize("to", [TWO, THREE])
async def test_closing_the_pipeline_in_the_middle_of_a_change(
    autojump_clock: trio.abc.Clock, steps: int, to: str
) -> None:
    async with open_stages(TWO, THREE) as stages, trio.open_nursery() as nursery:
        outcome: list[object] = []
        began = trio.current_time()

        async def change(pipeline: Pipeline) -> None:
            try:
                await pipeline.change_route(stages.route(to))
            except ClosedError as error:
                outcome.append(error)
            else:
                outcome.append(None)

        async with stages.pipeline(TWO) as pipeline:
            nursery.start_soon(change, pipeline)
            for _ in range(steps):
                await trio.lowlevel.checkpoint()
        await rest()
        assert len(outcome) == 1
        assert trio.current_time() == began


@pytest.mark.parametrize("n_seq_max", [1, 70])
async def test_many_sessions_at_once(autojump_clock: trio.abc.Clock, n_seq_max: int) -> None:
    """More payloads at once than a link has streams, and more sessions than it has room for."""
    context: ContextParams = replace(CONTEXT, n_seq_max=n_seq_max, n_batch=128, n_ubatch=8)
    async with open_stages(TWO, context=context) as stages, stages.pipeline(TWO) as pipeline:
        answers: dict[int, list[int]] = {}

        async def ask(first: int) -> None:
            async with pipeline.session() as session:
                answers[first] = await take(session.generate([first, 1, 2], max_tokens=3))

        async with trio.open_nursery() as nursery, held(stages.shard("0:2")):
            for first in range(n_seq_max):
                nursery.start_soon(ask, first)
            await rest()
        assert answers == {first: reference([first, 1, 2], 3) for first in range(n_seq_max)}
        assert pipeline.epoch == 1
