"""A copied session: the bits of a cold run, a slot of its own, and whatever strikes while it is made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio
from cancel_at import cancelled_at
from conversations import held, reference, seen, take
from msgspec.structs import replace
from narrow import only
from pipeline.harness import CONTEXT, THREE, TWO, WHOLE, Stages, kinds, open_stages, rest

from dgr.client.events import SessionForked, StateLost
from dgr.client.session import ClientSession
from dgr.cluster.local import ShardPolicy
from dgr.core.route import LayerRange
from dgr.core.values import SamplingParams, StageIdentity
from dgr.errors import EngineError, Overloaded, SessionBusy, SessionError
from dgr.protocol.states import ClientState
from dgr.stage.session import SessionActor
from dgr.testing.engines.fake import FakeEngine
from dgr.testing.raw_client import open_raw_client
from dgr.wire import frames
from dgr.wire.frames import Miss, Refusal

PROMPT = list(b"In a hole in the ground there lived")
SEEDED = SamplingParams(temperature=0.9, seed=4, repeat_penalty=1.3)


def copies(stages: Stages, split: str) -> list[int]:
    return [stages.engines[name].forks for name in split.split(",")]


async def check_goes_on(session: ClientSession, more: list[int]) -> None:
    whole = [*session.transcript, *more]
    assert await take(session.generate(more, max_tokens=3, sampling=SEEDED, stop=())) == reference(whole, 3, SEEDED)


@pytest.fixture(autouse=True)
def no_defects(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


# --- the client's side ---


@pytest.mark.parametrize("split", [WHOLE, TWO, THREE])
async def test_both_go_on_as_if_alone(autojump_clock: trio.abc.Clock, split: str) -> None:
    async with open_stages(split) as stages, stages.pipeline(split) as pipeline, pipeline.session() as session:
        said = await take(session.generate(PROMPT, max_tokens=3, stop=()))
        events, before = pipeline.events(), stages.tokens_run(split)
        async with session.fork() as other:
            # The last token was drawn and is not committed: the copy has it in its transcript, as its source has.
            assert other.transcript == session.transcript == [*PROMPT, *said]
            assert other.committed == session.committed == len(PROMPT) + 2
            assert copies(stages, split) == [1] * len(split.split(","))
            stages.assert_consistent()
            summaries = [one.state for one in (await session.state_summaries()).values()]
            assert [one.state for one in (await other.state_summaries()).values()] == summaries
            await check_goes_on(other, [1, 2])
            await check_goes_on(session, [9])
            await check_goes_on(other, [])
            async with other.fork() as third:
                await check_goes_on(third, [5])
            await check_goes_on(other, [6])
        await check_goes_on(session, [7, 8])
        # Nothing was prefilled twice: 2 + 1, 1 + 1, 0 + 1 and so on, and two decode steps each time.
        assert [now - then for now, then in zip(stages.tokens_run(split), before, strict=True)] == [
            (3 + 2) + (2 + 2) + (1 + 2) + (2 + 2) + (2 + 2) + (3 + 2)
        ] * len(split.split(","))
        happened = seen(events)
        assert [type(event) for event in happened if isinstance(event, SessionForked | StateLost)] == [
            SessionForked
        ] * 2
        assert next(event for event in happened if isinstance(event, SessionForked)).tokens == len(PROMPT) + 2


async def test_a_copy_outlives_its_source(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline:
        source = pipeline.session()
        session = await source.__aenter__()
        await session.prefill(PROMPT)
        async with session.fork() as other:
            await source.__aexit__(None, None, None)
            async with pipeline.session() as stranger:  # takes the slot
                await take(stranger.generate([3] * 20, max_tokens=2))
            await check_goes_on(other, [1])
        assert stages.engines["0:2"].forks == 1


async def test_what_holds_nothing_is_copied_without_a_word(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        async with session.fork() as other:
            assert other.transcript == []
            await check_goes_on(other, PROMPT)
        session.generate(PROMPT)
        async with session.fork() as other:
            assert (other.transcript, other.committed) == (PROMPT, 0)
            await check_goes_on(other, [])
        assert copies(stages, TWO) == [0, 0]


async def test_a_session_at_work_is_busy(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        generation = session.generate(PROMPT, max_tokens=2)
        async with held(stages.shard("0:2")), trio.open_nursery() as nursery:
            nursery.start_soon(take, generation)
            await rest()
            with pytest.raises(SessionBusy):
                async with session.fork():
                    pass
            nursery.cancel_scope.cancel()
        async with session.fork() as other:  # drains first
            assert other.transcript == PROMPT
            await check_goes_on(other, [4])
        await check_goes_on(session, [4])
    with pytest.raises(SessionError, match="closed"):
        session.fork()
    assert pipeline.statistics().sessions == 0


@pytest.mark.parametrize("at", ["0:2", "2:6"])
async def test_a_source_whose_caller_gave_up_is_copied_where_it_stands(autojump_clock: trio.abc.Clock, at: str) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO, window=5) as pipeline, pipeline.session() as session:
        async with held(stages.shard(at)), trio.open_nursery() as nursery:
            nursery.start_soon(take, session.generate(PROMPT, max_tokens=2))
            await rest()
            nursery.cancel_scope.cancel()
        async with session.fork() as other:
            assert 0 < other.committed == session.committed <= len(PROMPT)
            await check_goes_on(other, [4])
        await check_goes_on(session, [4])
        assert copies(stages, TWO) == [1, 1]


async def test_no_slot_no_copy(autojump_clock: trio.abc.Clock) -> None:
    """A source is never the one that makes room for its copy."""
    for n_seq_max, min_idle in ((1, 0.0), (2, 60.0)):
        context, policy = replace(CONTEXT, n_seq_max=n_seq_max), ShardPolicy(min_idle=min_idle)
        async with (
            open_stages(TWO, context=context, policy=policy) as stages,
            stages.pipeline(TWO) as pipeline,
            pipeline.session() as session,
            pipeline.session() as third,
        ):
            await session.prefill(PROMPT)
            if n_seq_max == 2:
                await third.prefill(PROMPT)
            with pytest.raises(Overloaded, match=r"all \d sequence slots are leased"):
                async with session.fork():
                    pass
            stages.assert_consistent()
            assert session.committed == len(PROMPT)
            await check_goes_on(session, [1])
            assert copies(stages, TWO) == [0, 0]
            assert pipeline.statistics().sessions == 2


async def test_another_idle_session_makes_room(autojump_clock: trio.abc.Clock) -> None:
    context = replace(CONTEXT, n_seq_max=2)
    async with (
        open_stages(TWO, context=context) as stages,
        stages.pipeline(TWO) as pipeline,
        pipeline.session() as session,
        pipeline.session() as third,
    ):
        await session.prefill(PROMPT)
        await trio.sleep(1)
        await third.prefill(PROMPT)  # used later than the source
        async with session.fork() as other:
            assert stages.shard("0:2").statistics().evictions == 1
            await check_goes_on(other, [1])
        await check_goes_on(third, [1])
        await check_goes_on(session, [1])


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("reason", [Miss.EVICTED, Miss.EXPIRED])
async def test_where_a_stage_lost_the_source_both_begin_anew(
    autojump_clock: trio.abc.Clock, which: int, reason: Miss
) -> None:
    async with open_stages(THREE) as stages, stages.pipeline(THREE) as pipeline, pipeline.session() as session:
        await session.prefill(PROMPT)
        events = pipeline.events()
        name = THREE.split(",")[which]
        next(iter(stages.shard(name).actors())).end(reason)
        async with session.fork() as other:
            assert (other.transcript, other.committed, session.committed) == (PROMPT, 0, 0)
            assert session.state is ClientState.LOST
            lost = [event for event in seen(events) if isinstance(event, StateLost)]
            assert [event.session for event in lost] == [session.id, other.id]
            assert reason.name.lower() in lost[0].reason
            await check_goes_on(other, [1])
            await check_goes_on(session, [2])
            stages.assert_consistent()


async def test_a_route_change_takes_both(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO, THREE) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        await session.prefill(PROMPT)
        async with session.fork() as other:
            await pipeline.change_route(stages.route(THREE))
            assert (session.committed, other.committed) == (0, 0)
            await check_goes_on(other, [1])
            await check_goes_on(session, [2])
            async with held(stages.shard("1:4")), trio.open_nursery() as nursery:
                third = session.fork()
                nursery.start_soon(third.__aenter__)
                await rest()
                nursery.start_soon(pipeline.change_route, stages.route(TWO))
                await rest()
            await check_goes_on(other, [1])
            await check_goes_on(session, [2])
            await third.__aexit__(None, None, None)


class BreaksOff(FakeEngine):
    """Leaves half a copy."""

    def fork(self, source: int, target: int) -> None:
        self._slots[target].tape = self._copy(self._slots[source]).tape
        raise EngineError("the copy broke off")


class CopiesNothing(FakeEngine):
    def describe(self) -> StageIdentity:
        return replace(super().describe(), capabilities={"decode": "executable"})

    def fork(self, source: int, target: int) -> None:
        raise AssertionError("asked for what it does not offer")


async def test_a_copy_that_broke_off_is_cleared_and_its_session_prefills(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages:
        stages.cluster.stop("2:6")
        await stages.start("2:6", BreaksOff(LayerRange(2, 6), CONTEXT))
        async with stages.pipeline(TWO) as pipeline, pipeline.session() as session:
            await session.prefill(PROMPT)
            events = pipeline.events()
            async with session.fork() as other:
                assert (other.transcript, other.committed) == (PROMPT, 0)
                assert session.committed == len(PROMPT)
                await check_goes_on(other, [1])
                assert kinds(seen(events)) == ["StateLost", "RePrefilled"]
                await rest()
                stages.assert_consistent()
            await check_goes_on(session, [2])


async def test_stages_that_copy_nothing_prefill(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages:
        stages.cluster.stop("0:2")
        await stages.start("0:2", CopiesNothing(LayerRange(0, 2), CONTEXT))
        async with stages.pipeline(TWO) as pipeline, pipeline.session() as session:
            await session.prefill(PROMPT)
            async with session.fork() as other:
                assert (other.transcript, other.committed) == (PROMPT, 0)
                await check_goes_on(other, [1])
            await check_goes_on(session, [2])


# --- the stage's side ---


async def test_a_copy_by_hand(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, open_raw_client(stages.cluster.connect, stages.route(WHOLE)) as hand:
        per_session = sum(stages.engines[WHOLE].memory().state.values()) // 3
        await hand.begin()
        await hand.say(hand.work(1, 2, [1, 2]))
        assert await hand.say(hand.fork(2, 1, 1, [1, 2])) == [frames.Opened(hand.key(2), 1, per_session)]
        stages.assert_consistent()
        for session, more in ((1, 5), (2, 6)):
            (token,) = reference([1, 2, more], 1)
            assert await hand.say(hand.work(session, 3, [more], [1, 2])) == [
                frames.Token(hand.key(session), 3, 3, token)
            ]
        # A work frame below the fork's number belongs to an earlier life.
        assert await hand.say(hand.fork(3, 9, 2, [1, 2, 6])) == [frames.Opened(hand.key(3), 9, per_session)]
        assert await hand.say(hand.work(3, 8, [7], [1, 2, 6])) == []
        for session in (1, 2, 3):
            assert await hand.say(hand.close(session, 20)) == [frames.Closed(hand.key(session), 20, per_session)]


async def test_what_cannot_be_copied_is_answered_and_changes_nothing(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, open_raw_client(stages.cluster.connect, stages.route(WHOLE)) as hand:
        await hand.begin()
        await hand.say(hand.work(1, 2, [1, 2]))
        await hand.say(hand.open(3, 1))
        key, engine = hand.key(2), stages.engines[WHOLE]
        before = [engine.state_summary(slot) for slot in range(3)]
        cases: list[tuple[frames.Fork, frames.Frame | Refusal]] = [
            (hand.fork(2, 9, 1, [1]), frames.CacheMiss(key, 9, Miss.POSITION, 2)),
            (hand.fork(2, 9, 1, [1, 2, 3]), frames.CacheMiss(key, 9, Miss.POSITION, 2)),
            (hand.fork(2, 9, 1, [2, 1]), frames.CacheMiss(key, 9, Miss.DIGEST, 2)),
            (hand.fork(2, 9, 7, [1, 2]), frames.CacheMiss(key, 9, Miss.UNKNOWN, 0)),
            (hand.fork(2, 9, 2, [1, 2]), frames.CacheMiss(key, 9, Miss.UNKNOWN, 0)),
            (hand.fork(2, 9, 3, []), Refusal.PROTOCOL),
            (hand.fork(3, 9, 1, [1, 2]), Refusal.PROTOCOL),
            (hand.fork(1, 9, 1, [1, 2]), Refusal.PROTOCOL),
            (hand.fork(2, 9, 1, [1, 2], epoch=0), frames.StaleEpoch(hand.key(2, 0), 9, 1)),
            (hand.fork(2, 9, 1, [1, 2], epoch=2), frames.StaleEpoch(hand.key(2, 2), 9, 1)),
        ]
        for frame, expected in cases:
            (answer,) = await hand.say(frame)
            if isinstance(expected, Refusal):
                assert isinstance(answer, frames.Refused)
                assert answer.code is expected
            else:
                assert answer == expected
            assert [engine.state_summary(slot) for slot in range(3)] == before
            assert stages.shard(WHOLE).statistics().sessions == 2
        assert engine.forks == 0


async def test_a_stranger_copies_nothing(autojump_clock: trio.abc.Clock) -> None:
    """Sessions of another pipeline cannot be named: their route session is not the stranger's."""
    async with open_stages(WHOLE) as stages:
        route = stages.route(WHOLE)
        async with (
            open_raw_client(stages.cluster.connect, route) as hand,
            open_raw_client(stages.cluster.connect, route) as stranger,
        ):
            await hand.begin()
            await hand.say(hand.work(1, 2, [1, 2]))
            await stranger.begin(session=5)
            theirs = frames.Fork(hand.key(9), 1, 1, hand.fork(9, 1, 1, [1, 2]).expect)
            assert await stranger.say(theirs) == [frames.CacheMiss(hand.key(9), 1, Miss.UNKNOWN, 0)]
            (answer,) = await stranger.say(stranger.fork(9, 1, 1, [1, 2]))
            assert answer == frames.CacheMiss(stranger.key(9), 1, Miss.UNKNOWN, 0)
            assert stages.engines[WHOLE].forks == 0


async def test_a_source_at_work_is_refused(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, open_raw_client(stages.cluster.connect, stages.route(WHOLE)) as hand:
        await hand.begin()
        await hand.say(hand.work(1, 2, [1, 2]))
        async with held(stages.shard(WHOLE)):
            await hand.say(hand.work(1, 3, [3], [1, 2]))
            refused = only(frames.Refused, await hand.say(hand.fork(2, 1, 1, [1, 2])))
            assert (refused.code, refused.key.session) == (Refusal.PROTOCOL, 2)
            assert "at work" in refused.message
        await hand.say()
        only(frames.Opened, await hand.say(hand.fork(2, 2, 1, [1, 2, 3])))


@pytest.mark.parametrize("strike", ["close", "close-copy", "fence", "work", "evict"])
async def test_what_strikes_while_a_copy_waits_for_the_engine(autojump_clock: trio.abc.Clock, strike: str) -> None:
    """The copy is what was asked for or nothing; above all it is never what came into the slot later."""
    async with open_stages(WHOLE) as stages, open_raw_client(stages.cluster.connect, stages.route(WHOLE)) as hand:
        await hand.begin()
        await hand.say(hand.work(1, 2, [1, 2]))
        shard = stages.shard(WHOLE)
        async with held(shard):
            assert await hand.say(hand.fork(2, 1, 1, [1, 2])) == []
            source = next(actor for actor in shard.actors() if actor.key.session == 1)
            match strike:
                case "close":
                    await hand.say(hand.close(1, 3), hand.open(1, 4), hand.work(1, 5, [7, 7]))
                case "close-copy":
                    await hand.say(hand.close(2, 3))
                case "fence":
                    await hand.say(hand.fence(2))
                case "work":
                    await hand.say(hand.work(1, 3, [3], [1, 2]))
                case "evict":
                    source.end(Miss.EVICTED)
        came = await hand.say()
        if strike == "fence":
            assert [type(frame) for frame in came] == [frames.Fenced]
        elif strike == "close-copy":
            assert [type(frame) for frame in came if frame.key.session == 2] == [frames.Closed]  # type: ignore[union-attr]
        else:
            assert frames.Opened(hand.key(2), 1, source.lease.total) in came
            (token,) = reference([1, 2, 9], 1)
            assert frames.Token(hand.key(2), 3, 3, token) in await hand.say(hand.work(2, 3, [9], [1, 2]))
        stages.assert_consistent()


async def test_a_copy_of_what_was_cleared_before_is_none(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: a stage that looks at its source too early, and copies whatever is in the slot by then."""
    monkeypatch.setattr(SessionActor, "copy_problem", lambda *_: None)
    async with open_stages(WHOLE) as stages, open_raw_client(stages.cluster.connect, stages.route(WHOLE)) as hand:
        await hand.begin()
        await hand.say(hand.work(1, 2, [1, 2]))
        (answer,) = await hand.say(hand.fork(2, 1, 1, [1, 2, 3]))
        # The engine's own position is the last guard.
        assert answer == frames.CacheMiss(hand.key(2), 1, Miss.POSITION, 2)
        only(frames.Opened, await hand.say(hand.fork(2, 2, 1, [2, 1])))  # and nothing guards the digest any more


# --- cancelled at any step ---


class Threaded(FakeEngine):
    inline = False


@pytest.mark.parametrize("engine", [FakeEngine, Threaded])
def test_cancelled_at_any_step_a_fork_leaves_both_in_order(engine: type[FakeEngine]) -> None:
    reached = True

    async def live(step: int) -> None:
        nonlocal reached
        async with open_stages(policy=ShardPolicy(min_idle=0)) as stages:
            for name in TWO.split(","):
                await stages.start(name, engine(LayerRange.parse(name), CONTEXT))
            async with stages.pipeline(TWO) as pipeline, pipeline.session() as session:
                await session.prefill(PROMPT)
                with cancelled_at(step) as killer:
                    async with session.fork() as other:
                        await take(other.generate([1], max_tokens=1))
                reached = killer.reached
                assert pipeline.statistics().sessions == 1
                assert session.committed == len(PROMPT)
                before = stages.tokens_run(TWO)
                await check_goes_on(session, [5])
                assert stages.tokens_run(TWO) == [count + 3 for count in before], "the source prefills nothing again"
                await until_consistent(stages)

    async def until_consistent(stages: Stages) -> None:
        while any(shard.statistics().sessions != 1 for shard in stages.cluster.shards.values()):
            await trio.lowlevel.checkpoint()
        stages.assert_consistent()

    step = 1
    while reached:
        trio.run(live, step)
        step += 1 if engine is FakeEngine else 3
    assert step > 30
