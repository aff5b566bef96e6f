"""Decode runs: stages that draw some tokens without being asked for each. The text is the same, and every promise is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from conversations import held, reference, seen, take
from far_stages import Distances, FarCluster
from msgspec.structs import replace
from narrow import as_a
from pipeline import harness
from pipeline.harness import CONTEXT, THREE, TIMEOUTS, TWO, WHOLE, Stages, kinds, open_stages, rest

from dgr.client.events import Event, RePrefilled, StateLost
from dgr.client.generation import Generation
from dgr.client.pipeline import Pipeline
from dgr.client.session import ClientSession
from dgr.client.work import SessionWork
from dgr.core.load import Side
from dgr.core.prefix import PrefixDigest
from dgr.core.values import DecodeRun, Expectation, LogitsWanted, SamplingParams
from dgr.errors import DgrError, LinkBroken
from dgr.protocol.runs import next_in_run
from dgr.stage import session as stage_session
from dgr.stage.ring import WayToHead
from dgr.stage.session import SessionActor
from dgr.testing.raw_client import open_raw_client
from dgr.wire import frames
from dgr.wire.nurseries import open_nursery

PROMPT = list(b"In a hole in the ground there lived a hobbit.")
SPLITS = [WHOLE, TWO, THREE]


def losses(events: trio.MemoryReceiveChannel[Event]) -> list[str]:
    return [event.reason for event in seen(events) if isinstance(event, StateLost)]


def said_to_head(stages: Stages, split: str) -> int:
    """Frames that pipelines have sent to the head."""
    return stages.shard(split.split(",")[0]).traffic.statistics()[Side.PIPELINE, ""].frames_received


async def warm(pipeline: Pipeline) -> None:
    """The tail has its way to the head."""
    async with pipeline.session() as session:
        await take(session.generate([1], max_tokens=2, ahead=1))
    await rest()


# --- what is gained ---


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.9, top_k=12, seed=5, repeat_penalty=1.3, presence_penalty=0.4, top_logprobs=3),
    ],
    ids=["greedy", "sampled"],
)
async def test_the_text_is_the_same_and_the_client_asks_once_a_run(
    autojump_clock: trio.abc.Clock, split: str, sampling: SamplingParams
) -> None:
    async with open_stages(split) as stages, stages.pipeline(split, ahead=3) as pipeline:
        await warm(pipeline)
        async with pipeline.session() as session:
            events = pipeline.events()
            await session.prefill(PROMPT)
            before = said_to_head(stages, split)
            assert await take(session.generate([7], max_tokens=12, sampling=sampling)) == reference(
                [*PROMPT, 7], 12, sampling
            )
            assert said_to_head(stages, split) - before == 3, "three runs of a token and three further ones"
            assert stages.tokens_run(split) == [len(PROMPT) + 1 + 11 + 2] * len(split.split(","))
            frontiers = await session.state_summaries()
            assert {one.state.position for one in frontiers.values()} == {len(PROMPT) + 1 + 11}
            assert await take(session.generate([9], max_tokens=5)) == reference(session.transcript[:-5], 5)
            assert losses(events) == []


async def test_without_a_way_from_the_tail_to_the_head_the_pipeline_asks_for_every_token(
    autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_stages(TWO) as stages:
        dial = stages.cluster._dial

        async def walled(source: str, target: str) -> Any:
            if source == "2:6":
                raise LinkBroken("no way through")
            return await dial(source, target)

        stages.shard("2:6")._dial = walled
        async with stages.pipeline(TWO, ahead=5) as pipeline, pipeline.session() as session:
            events = pipeline.events()
            before = said_to_head(stages, TWO)
            assert await take(session.generate(PROMPT, max_tokens=6)) == reference(PROMPT, 6)
            assert said_to_head(stages, TWO) - before == 1 + 6 + 5, "the open, six chunks of the prompt, five tokens"
            assert losses(events) == []
    told = [record.getMessage() for record in caplog.records if "no decode runs" in record.getMessage()]
    assert len(told) == 1, "and not once a token"


async def test_sessions_of_one_route_run_side_by_side(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO, ahead=4) as pipeline:
        said: dict[int, list[int]] = {}

        async def converse(index: int) -> None:
            async with pipeline.session() as session:
                said[index] = await take(session.generate([*PROMPT, index], max_tokens=14))

        async with trio.open_nursery() as nursery:
            for index in range(3):
                nursery.start_soon(converse, index)
        assert said == {index: reference([*PROMPT, index], 14) for index in range(3)}


# --- how far it goes ---


@pytest.mark.parametrize("split", SPLITS)
async def test_stages_run_no_further_than_they_were_granted(autojump_clock: trio.abc.Clock, split: str) -> None:
    async with open_stages(split) as stages, stages.pipeline(split, ahead=4) as pipeline:
        await warm(pipeline)
        async with pipeline.session() as session:
            said = await take(session.generate(PROMPT), 1)
            await rest()
            assert session.committed == len(PROMPT) + 4
            assert said + await take(session.generate(), 4) == reference(PROMPT, 5)
            assert session.committed == len(PROMPT) + 4, "they were drawn already, and are as good as any"


@pytest.mark.parametrize("split", SPLITS)
async def test_an_overrun_costs_a_prefill_and_changes_no_text(autojump_clock: trio.abc.Clock, split: str) -> None:
    async with open_stages(split) as stages, stages.pipeline(split, ahead=4) as pipeline:
        await warm(pipeline)
        async with pipeline.session() as session:
            events = pipeline.events()
            said = await take(session.generate(PROMPT), 2)
            await rest()
            assert await take(session.generate([9], max_tokens=3)) == reference([*PROMPT, *said, 9], 3)
            assert [(e.reason, e.tokens) for e in seen(events) if isinstance(e, RePrefilled)] == [
                ("overrun", len(PROMPT) + 3)
            ]


@pytest.mark.parametrize("where", ["0:2", "2:6"])
async def test_a_cancelled_run_stops_at_the_head(autojump_clock: trio.abc.Clock, where: str) -> None:
    """Of forty tokens that were granted one more is drawn at most, and nobody runs anything again."""
    async with open_stages(TWO) as stages, stages.pipeline(TWO, ahead=40) as pipeline:
        await warm(pipeline)
        async with pipeline.session() as session:
            events = pipeline.events()
            answer = session.generate(PROMPT)
            said: list[int] = []

            async def read() -> None:
                said.extend(await take(answer, 1))
                async with held(stages.shard(where)):
                    reading.set()
                    said.extend(await take(answer, 30))

            reading = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await reading.wait()
                await rest()
                nursery.cancel_scope.cancel()
            await rest()
            ran = stages.tokens_run(TWO)
            assert session.committed <= len(session.transcript) + 1
            assert max(ran) - min(ran) == 0, "every stage stands where the others do"
            read_so_far = len(session.transcript) - len(PROMPT)
            more = await take(session.generate(), 3)
            assert session.transcript[len(PROMPT) :] == reference(PROMPT, read_so_far + 3)
            assert more == reference(PROMPT, read_so_far + 3)[read_so_far:]
            assert kinds(seen(events)) == ["Prefilled", "GenerationCancelled"]


# --- far stages: a run takes time ---

#: Seconds from a stage to the next one, and from the tail to the head.
HOP = 0.05


@pytest.fixture
def distances(monkeypatch: pytest.MonkeyPatch) -> Distances:
    """Every cluster is of stages that are a hop away from each other."""
    found = Distances(boundary=dict.fromkeys(("0:2", "2:6", "0:1", "1:4", "4:6"), HOP))

    @asynccontextmanager
    async def open_far() -> AsyncIterator[FarCluster]:
        async with open_nursery() as nursery:
            yield FarCluster(nursery, found)
            nursery.cancel_scope.cancel()

    monkeypatch.setattr(harness, "open_cluster", open_far)
    return found


async def seconds_of(answer: Generation, count: int) -> float:
    began = trio.current_time()
    assert len(await take(answer, count)) == count
    return trio.current_time() - began


@pytest.mark.parametrize("split", [TWO, THREE])
async def test_a_token_takes_one_way_less(autojump_clock: trio.abc.Clock, distances: Distances, split: str) -> None:
    names = split.split(",")
    distances.control = dict.fromkeys(names, (HOP, HOP))
    async with open_stages(split) as stages, stages.pipeline(split) as pipeline:
        await warm(pipeline)
        async with pipeline.session() as session:
            await take(session.generate(PROMPT), 1)
            asked = await seconds_of(session.generate(), 8)
            assert asked == pytest.approx(8 * (len(names) + 1) * HOP)
            await take(session.generate(ahead=16), 1)
            assert await seconds_of(session.generate(ahead=16), 1) < 3 * len(names) * HOP
            answer = session.generate(ahead=32)
            await take(answer, 4)
            assert await seconds_of(answer, 8) == pytest.approx(8 * len(names) * HOP)


async def test_the_head_may_be_heard_before_the_tail(autojump_clock: trio.abc.Clock, distances: Distances) -> None:
    """The head says that it skips a token of the run before the token comes that it follows."""
    distances.control = {"2:6": (0.0, 0.6)}
    async with open_stages(TWO) as stages, stages.pipeline(TWO, ahead=20) as pipeline:
        await warm(pipeline)
        async with pipeline.session() as session:
            events = pipeline.events()
            with trio.move_on_after(1.3):
                await take(session.generate(PROMPT))
            await trio.sleep(2)
            began = trio.current_time()
            await session.state_summaries()
            assert trio.current_time() - began < TIMEOUTS.reply / 2
            n_read = len(session.transcript) - len(PROMPT)
            await take(session.generate(), 10)
            assert session.transcript[len(PROMPT) :] == reference(PROMPT, n_read + 10)
            assert "StateLost" not in kinds(seen(events))


async def _lose_the_way_back(stages: Stages, _pipeline: Pipeline) -> None:
    (link,) = [link for pair, link in stages.cluster._boundaries.items() if pair[0].name == "2:6"]
    await link.aclose()


async def _lose_a_stage(stages: Stages, _pipeline: Pipeline, *, name: str) -> None:
    stages.cluster.stop(name)
    await stages.start(name)


async def _change_route(stages: Stages, pipeline: Pipeline) -> None:
    await pipeline.change_route(stages.route(THREE))


@pytest.mark.parametrize("later", [0.02, 0.07, 0.12])
@pytest.mark.parametrize(
    "meanwhile",
    [_lose_the_way_back, partial(_lose_a_stage, name="0:2"), partial(_lose_a_stage, name="2:6"), _change_route],
    ids=["way back", "head", "tail", "route"],
)
async def test_what_breaks_in_a_run_changes_no_text(
    autojump_clock: trio.abc.Clock, distances: Distances, meanwhile: Callable[..., Awaitable[None]], later: float
) -> None:
    async with open_stages(TWO, THREE) as stages, stages.pipeline(TWO, ahead=8) as pipeline:
        await warm(pipeline)
        async with pipeline.session() as session, trio.open_nursery() as nursery:
            events = pipeline.events()
            said: list[int] = []
            three, ended = trio.Event(), trio.Event()

            async def read() -> None:
                async for token in session.generate(PROMPT, max_tokens=20):
                    said.append(token.id)
                    if len(said) == 3:
                        three.set()
                ended.set()

            nursery.start_soon(read)
            await three.wait()
            await trio.sleep(later)
            began = trio.current_time()
            await meanwhile(stages, pipeline)
            await ended.wait()
            assert trio.current_time() - began < TIMEOUTS.reply / 2, "nobody waits for what will not come"
        assert said == reference(PROMPT, 20)
        assert len([event for event in seen(events) if isinstance(event, RePrefilled)]) == 1


# --- what is done while a run goes on, or stands at its end ---


async def _fork(_stages: Stages, _pipeline: Pipeline, session: ClientSession) -> None:
    async with session.fork() as other:
        so_far = list(other.transcript)
        assert await take(other.generate([3], max_tokens=3)) == reference([*so_far, 3], 3)


async def _look(_stages: Stages, _pipeline: Pipeline, session: ClientSession) -> None:
    positions = {one.state.position for one in (await session.state_summaries()).values()}
    assert positions == {session.committed}


async def _ask_again(_stages: Stages, _pipeline: Pipeline, session: ClientSession) -> None:
    session.generate()


async def _evict(_stages: Stages, pipeline: Pipeline, _session: ClientSession) -> None:
    async with pipeline.session() as one, pipeline.session() as two, pipeline.session() as three:
        for other in (one, two, three):
            await other.prefill([1])


@pytest.mark.parametrize("later", [0.0, 0.03, 0.08, 3.0])
@pytest.mark.parametrize("deed", [_fork, _look, _ask_again, _evict])
async def test_what_is_done_in_a_run_changes_no_text(
    autojump_clock: trio.abc.Clock, distances: Distances, deed: Callable[..., Awaitable[None]], later: float
) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO, ahead=8) as pipeline:
        await warm(pipeline)
        async with pipeline.session() as session:
            events = pipeline.events()
            await take(session.generate(PROMPT), 2)
            await trio.sleep(later)
            await deed(stages, pipeline, session)
            await take(session.generate(), 12)
            assert session.transcript[len(PROMPT) :] == reference(PROMPT, 14)
            lost = [event.session for event in seen(events) if isinstance(event, StateLost)]
            if deed is not _evict:
                assert session.id not in lost
            elif later > 1:  # in the midst of a run it is not idle, and makes room for nobody
                assert session.id in lost


async def test_a_session_that_is_closed_in_a_run_leaves_nothing(
    autojump_clock: trio.abc.Clock, distances: Distances
) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO, ahead=8) as pipeline:
        await warm(pipeline)
        for later in (0.0, 0.03, 0.08, 3.0):
            async with pipeline.session() as session:
                await take(session.generate(PROMPT), 2)
                await trio.sleep(later)
            await trio.sleep(1)
            for name in TWO.split(","):
                assert stages.shard(name).statistics().sessions == 0
        assert not pipeline._client._links.replies._granted


# --- whoever breaks the rules ---


async def _converse(stages: Stages) -> list[str]:
    """Two turns with runs, one cancelled; which losses there were."""
    async with stages.pipeline(TWO, ahead=3) as pipeline:
        await warm(pipeline)
        async with pipeline.session() as session:
            events = pipeline.events()
            assert await take(session.generate(PROMPT, max_tokens=9)) == reference(PROMPT, 9)
            answer = session.generate([5])
            said = await take(answer, 2)
            await session.state_summaries()
            n_turn = len(session.transcript) - 2
            said += await take(session.generate(), 5)
            assert said == reference(session.transcript[:n_turn], 7)
            return losses(events)


def _grants_more(work: Any, token: int, expect: Expectation, n_ctx: int) -> frames.Tokens | None:
    following = next_in_run(replace(work, run=work.run or DecodeRun(2)), token, expect, n_ctx)
    return following and replace(following, run=work.run or DecodeRun(2))


async def test_what_a_tail_does_rightly_loses_nothing(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages:
        assert await _converse(stages) == []


async def test_a_grant_that_the_tail_exceeds_is_seen_by_the_client(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant goes on after the last token of every run; the head lets it."""
    monkeypatch.setattr(stage_session, "next_in_run", _grants_more)
    monkeypatch.setattr(SessionActor, "_was_granted", lambda *_: True)
    async with open_stages(TWO) as stages:
        with pytest.raises((AssertionError, DgrError, ExceptionGroup)):
            assert await _converse(stages) == []


async def test_a_grant_that_the_tail_exceeds_is_refused_by_the_head(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, and the client believes everything."""
    tail_rule = _grants_more

    def by_stage(actor: SessionActor, frame: Any, token: int) -> bool:
        stands = Expectation(actor.position, actor.digest)
        following = tail_rule(frame, token, stands, CONTEXT.n_ctx)
        return following is not None and actor._pass_on(following)

    monkeypatch.setattr(SessionActor, "_go_on", by_stage)
    refused: list[str] = []
    refuse = SessionActor._refuse

    async def noted(actor: SessionActor, frame: Any, code: Any, message: str) -> None:
        refused.append(message)
        await refuse(actor, frame, code, message)

    monkeypatch.setattr(SessionActor, "_refuse", noted)
    async with open_stages(TWO) as stages:
        with pytest.raises((AssertionError, DgrError, ExceptionGroup)):
            assert await _converse(stages) == []
    assert any("further than it was granted" in message for message in refused)


async def test_a_token_that_is_sent_twice_is_not_run_twice(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = WayToHead.send

    def twice(way: WayToHead, frame: frames.Tokens) -> bool:
        return send(way, frame) and send(way, frame)

    monkeypatch.setattr(WayToHead, "send", twice)
    async with open_stages(TWO) as stages:
        with pytest.raises((AssertionError, DgrError)):
            assert await _converse(stages) == []


async def test_a_row_that_is_kept_though_its_token_was_cancelled_is_seen(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: a client that counts what the head has skipped."""
    stand_at = SessionWork.stand_at

    def one_more(work: SessionWork, tokens: Any) -> None:
        stand_at(work, [*tokens, 7])

    monkeypatch.setattr(SessionWork, "stand_at", one_more)
    async with open_stages(TWO) as stages:
        with pytest.raises((AssertionError, DgrError)):
            assert await _converse(stages) == []


# --- frame by frame ---

RUN = DecodeRun(2, (1,))


async def test_the_answers_to_a_run(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, open_raw_client(stages.cluster.connect, stages.route(TWO)) as hand:
        await hand.begin()
        (alone,) = await hand.say(replace(hand.work(1, 2, PROMPT[:4]), run=RUN))
        first = as_a(frames.Token, alone)
        assert not first.goes_on, "the link to the head is made meanwhile"
        told = [*PROMPT[:4], first.token]
        came = await hand.say(replace(hand.work(1, 3, [first.token], PROMPT[:4]), run=RUN))
        tokens = [as_a(frames.Token, one) for one in came]
        assert [one.seq for one in tokens] == [3, 4, 5]
        assert [one.goes_on for one in tokens] == [True, True, False]
        assert [one.position for one in tokens] == [5, 6, 7]
        assert [first.token, *(one.token for one in tokens)] == reference(PROMPT[:4], 4)
        (late,) = await hand.say(hand.work(1, 4, [tokens[0].token], told))
        assert isinstance(late, frames.CacheMiss)


async def test_only_the_tail_goes_on_with_a_run(autojump_clock: trio.abc.Clock) -> None:
    """Another stage's word, and the tail's own about what was not granted, leave everything as it was."""
    async with open_stages(TWO, "0:6") as stages, open_raw_client(stages.cluster.connect, stages.route(TWO)) as hand:
        await hand.begin()
        (first,) = await hand.say(hand.work(1, 2, PROMPT[:4]))
        token = as_a(frames.Token, first).token
        stands = Expectation(4, PrefixDigest(PROMPT[:4]).digest())
        more = frames.Tokens(hand.key(1), 3, stands, (token,), LogitsWanted.LAST, SamplingParams())
        for name, problem in (("0:6", "not its tail"), ("2:6", "further than it was granted")):
            link = await stages.cluster._dial(name, "0:2")
            link.send_nowait(more)
            await rest()
            (answer,) = await hand.say()
            refused = as_a(frames.Refused, answer)
            assert refused.code is frames.Refusal.PROTOCOL
            assert problem in refused.message
        (next_one,) = await hand.say(hand.work(1, 4, [token], PROMPT[:4]))
        assert [token, as_a(frames.Token, next_one).token] == reference(PROMPT[:4], 2)
