"""A stage, spoken to by hand over its control link: what it answers, and what it never does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest
import trio
from conversations import held, reference, take
from msgspec.structs import replace
from narrow import all_of, as_a, only
from pipeline.harness import CONTEXT, TWO, WHOLE, Stages, open_stages, rest

from dgr.cluster.local import ShardPolicy
from dgr.core.prefix import PrefixDigest
from dgr.core.values import Expectation, Key, LogitsWanted, SamplingParams
from dgr.engine.base import Output, Work
from dgr.errors import InputError
from dgr.protocol.limits import limits_of
from dgr.testing.engines.fake import FakeEngine, Fault, FaultKind
from dgr.testing.raw_client import GREEDY, RawClient, open_raw_client
from dgr.wire import frames, memory_transports
from dgr.wire.frames import Miss, Refusal
from dgr.wire.links import open_link

ROUTE, STRANGER = b"r" * 16, b"s" * 16


def by_hand(stages: Stages, lease: bytes = ROUTE) -> AbstractAsyncContextManager[RawClient]:
    return open_raw_client(stages.cluster.connect, stages.route(WHOLE), lease)


async def test_the_plain_course(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand:
        per_session = sum(stages.engines[WHOLE].memory().state.values()) // 3
        assert await hand.say(hand.fence(1)) == [frames.Fenced(ROUTE, 1, 0, 0)]
        assert await hand.say(hand.open(7, 1)) == [frames.Opened(hand.key(7), 1, per_session)]
        (first,) = reference([1, 2], 1)
        assert await hand.say(hand.work(7, 2, [1, 2])) == [frames.Token(hand.key(7), 2, 2, first)]
        advanced = await hand.say(hand.work(7, 3, [5], [1, 2], logits=LogitsWanted.NONE, sampling=None))
        assert advanced == [frames.Advanced(hand.key(7), 3, 3)]
        assert await hand.say(hand.close(7, 4)) == [frames.Closed(hand.key(7), 4, per_session)]
        assert await hand.say(hand.close(7, 5)) == [frames.Closed(hand.key(7), 5, 0)]


async def test_a_stale_epoch_is_answered_before_any_state_is_looked_at(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand:
        await hand.begin(3)
        await hand.say(hand.work(1, 2, [1, 2], epoch=3))
        engine = stages.engines[WHOLE]
        before = (engine.state_summary(0), engine.runs)
        for epoch in (0, 2, 4, 2**62):
            key = hand.key(1, epoch)
            # Everything else about the frame is right, or everything is wrong: the answer is the same.
            for frame in (
                hand.work(1, 3, [3], [1, 2], epoch=epoch),
                hand.work(1, 3, [999_999], [], epoch=epoch, position=77),
                hand.open(1, 3, epoch=epoch),
                frames.QueryState(key, 3),
            ):
                assert await hand.say(frame) == [frames.StaleEpoch(key, 3, 3)]
            assert await hand.say(hand.close(1, 3, epoch=epoch)) == [frames.Closed(key, 3, 0)]
            assert await hand.say(frames.Cancel(key, 99)) == []
        assert (engine.state_summary(0), engine.runs) == before
        (token,) = reference([1, 2, 3], 1)
        assert await hand.say(hand.work(1, 3, [3], [1, 2], epoch=3)) == [frames.Token(hand.key(1, 3), 3, 3, token)]


async def test_a_fence_must_raise_the_epoch(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand:
        await hand.begin(5)
        for epoch in (0, 4, 5):
            assert await hand.say(hand.fence(epoch)) == [frames.StaleEpoch(hand.key(0, epoch), 0, 5)]
        assert stages.shard(WHOLE).statistics().sessions == 1
        fenced = only(frames.Fenced, await hand.say(hand.fence(6)))
        assert (fenced.epoch, fenced.sessions_dropped) == (6, 1)


async def test_fences_back_to_back_leave_the_last(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand:
        await hand.begin()
        async with held(stages.shard(WHOLE)):
            assert await hand.say(hand.fence(2), hand.fence(3), hand.fence(4)) == []
        fenced = only(frames.Fenced, await hand.say())
        assert fenced.epoch == 4
        assert stages.shard(WHOLE).statistics().sessions == 0


@pytest.mark.parametrize(
    ("before", "position", "reason"),
    [
        ([], None, Miss.POSITION),
        ([1], None, Miss.POSITION),
        ([1, 2, 3], None, Miss.POSITION),
        ([2, 1], None, Miss.DIGEST),
        ([1], 2, Miss.DIGEST),
    ],
)
async def test_a_wrong_expectation_misses_and_changes_nothing(
    autojump_clock: trio.abc.Clock, before: list[int], position: int | None, reason: Miss
) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand:
        await hand.begin()
        await hand.say(hand.work(1, 2, [1, 2]))
        engine = stages.engines[WHOLE]
        held_before = (engine.state_summary(0), engine.runs)
        answer = await hand.say(hand.work(1, 3, [9], before, position=position))
        assert answer == [frames.CacheMiss(hand.key(1), 3, reason, 2)]
        assert (engine.state_summary(0), engine.runs) == held_before
        (token,) = reference([1, 2, 3], 1)
        assert await hand.say(hand.work(1, 4, [3], [1, 2])) == [frames.Token(hand.key(1), 4, 3, token)]


async def test_what_was_never_here_is_unknown(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand:
        miss = frames.CacheMiss(hand.key(1, 0), 1, Miss.UNKNOWN, 0)
        assert await hand.say(hand.work(1, 1, [1], epoch=0)) == [miss]
        assert await hand.say(frames.QueryState(hand.key(1, 0), 1)) == [miss]
        assert stages.shard(WHOLE).statistics().unroutable_frames == 2
        await hand.say(hand.fence(1))
        assert await hand.say(hand.work(1, 1, [1])) == [frames.CacheMiss(hand.key(1), 1, Miss.UNKNOWN, 0)]
        assert await hand.say(frames.QueryState(hand.key(1), 1)) == [frames.CacheMiss(hand.key(1), 1, Miss.UNKNOWN, 0)]


async def test_the_fate_of_an_ended_session_is_told(autojump_clock: trio.abc.Clock) -> None:
    context = replace(CONTEXT, n_seq_max=1)
    policy = ShardPolicy(idle_timeout=50.0, min_idle=0)
    async with open_stages(WHOLE, context=context, policy=policy) as stages, by_hand(stages) as hand:
        await hand.begin()
        await hand.say(hand.open(2, 1))
        assert await hand.say(hand.work(1, 2, [1])) == [frames.CacheMiss(hand.key(1), 2, Miss.EVICTED, 0)]
        await trio.sleep(51)
        assert await hand.say(hand.work(2, 2, [1])) == [frames.CacheMiss(hand.key(2), 2, Miss.EXPIRED, 0)]
        await hand.say(hand.open(3, 1))
        stages.engines[WHOLE].faults.append(Fault(FaultKind.ERROR))
        first, behind = await hand.say(hand.work(3, 2, [1]), hand.work(3, 3, [1], [1]))
        refused, missed = as_a(frames.Refused, first), as_a(frames.CacheMiss, behind)
        assert (refused.seq, refused.code) == (2, Refusal.ENGINE)
        assert (missed.seq, missed.reason) == (3, Miss.POISONED)
        # Closed is closed: its fate is nobody's business any more.
        await hand.say(hand.close(3, 4))
        assert await hand.say(hand.work(3, 5, [1])) == [frames.CacheMiss(hand.key(3), 5, Miss.UNKNOWN, 0)]
        assert await hand.say(hand.work(1, 5, [1])) == [frames.CacheMiss(hand.key(1), 5, Miss.EVICTED, 0)]
        # A new epoch knows of no fate of an older one.
        await hand.say(hand.fence(2))
        assert await hand.say(hand.work(1, 6, [1], epoch=2)) == [frames.CacheMiss(hand.key(1, 2), 6, Miss.UNKNOWN, 0)]


async def test_frames_of_an_earlier_life_are_dropped(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand:
        await hand.begin()
        await hand.say(hand.work(1, 2, [1, 2]))
        await hand.say(hand.close(1, 3))
        await hand.say(hand.open(1, 6))
        # They fit what the new life holds (nothing), but they are not meant for it.
        assert await hand.say(hand.work(1, 2, [1, 2]), hand.work(1, 4, [1, 2])) == []
        assert stages.engines[WHOLE].position(0) == 0
        (token,) = reference([1, 2], 1)
        assert await hand.say(hand.work(1, 7, [1, 2])) == [frames.Token(hand.key(1), 7, 2, token)]


async def test_open_twice_is_refused_and_close_first_helps(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand:
        await hand.begin()
        refused = only(frames.Refused, await hand.say(hand.open(1, 2)))
        assert (refused.code, refused.seq) == (Refusal.PROTOCOL, 2)
        assert stages.shard(WHOLE).statistics().sessions == 1


@pytest.mark.parametrize("schedule", range(4))
async def test_requests_take_effect_in_the_order_in_which_they_came(
    autojump_clock: trio.abc.Clock, schedule: int
) -> None:
    """Open, Close, Open, Close, ... back to back: tasks start in any order, effects may not."""
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand:
        await hand.say(hand.fence(1))
        for round_ in range(30):
            session = round_ + 1
            await hand.say(hand.open(session, 1), hand.close(session, 2))
            assert stages.shard(WHOLE).statistics().sessions == 0, round_
        for epoch in range(2, 20):
            answers = await hand.say(hand.open(1, epoch, epoch=epoch - 1), hand.fence(epoch))
            assert as_a(frames.Fenced, answers[-1]).epoch == epoch
            assert stages.shard(WHOLE).statistics().sessions == 0, epoch
        answers = await hand.say(hand.open(1, 50, epoch=19), hand.work(1, 51, [1, 2], epoch=19))
        assert {type(answer) for answer in answers} in (
            {frames.Opened, frames.Token},
            {frames.Opened, frames.CacheMiss},
        )


@pytest.mark.parametrize("schedule", range(8))
async def test_an_open_that_waits_is_taken_back_by_close_and_by_fence(
    autojump_clock: trio.abc.Clock, schedule: int
) -> None:
    context = replace(CONTEXT, n_seq_max=1)
    async with open_stages(WHOLE, context=context) as stages, by_hand(stages) as hand:
        await hand.begin()
        async with held(stages.shard(WHOLE)):  # the evicted session's slot is not cleared: opens wait
            assert await hand.say(hand.open(2, 1)) == []
            assert await hand.say(hand.close(2, 2)) == [frames.Closed(hand.key(2), 2, 0)]
            assert await hand.say(hand.open(2, 3), hand.close(2, 4), hand.open(2, 5)) == [
                frames.Closed(hand.key(2), 4, 0)
            ]
        (opened,) = [answer for answer in await hand.say() if isinstance(answer, frames.Opened)]
        assert opened.seq == 5
        async with held(stages.shard(WHOLE)):
            assert await hand.say(hand.open(3, 1)) == []
            assert await hand.say(hand.fence(2), hand.open(3, 2, epoch=2)) == [
                frames.CacheMiss(hand.key(3, 2), 2, Miss.FENCING, 0)
            ]
        answers = await hand.say()
        assert frames.StaleEpoch(hand.key(3), 1, 2) in answers
        assert stages.shard(WHOLE).statistics().sessions == 0


async def test_nothing_is_admitted_while_fencing(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand:
        await hand.begin()
        async with held(stages.shard(WHOLE)):
            key = hand.key(1, 2)
            miss = frames.CacheMiss(key, 2, Miss.FENCING, 0)
            assert await hand.say(hand.fence(2)) == []
            assert await hand.say(hand.open(1, 2, epoch=2)) == [miss]
            assert await hand.say(hand.work(1, 2, [1], epoch=2)) == [miss]
            assert await hand.say(frames.QueryState(key, 2)) == [miss]
            assert stages.shard(WHOLE).statistics().leased_bytes > 0
        fenced = only(frames.Fenced, await hand.say())
        assert (fenced.epoch, fenced.sessions_dropped) == (2, 1)
        assert stages.shard(WHOLE).statistics().leased_bytes == 0


async def test_a_step_of_an_old_epoch_gives_no_answer(autojump_clock: trio.abc.Clock) -> None:
    """The step was queued before the fence and runs, or not, after it: nobody is told."""
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand:
        await hand.begin()
        async with held(stages.shard(WHOLE)):
            await hand.say(hand.work(1, 2, [1, 2]))
            await hand.say(hand.fence(2))
        assert [type(answer) for answer in await hand.say()] == [frames.Fenced]
        assert stages.engines[WHOLE].position(0) == 0


async def test_a_probe_behind_a_fence_reads_nobody_elses_slot(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand, by_hand(stages, STRANGER) as other:
        await hand.begin()
        await other.begin()
        await hand.say(hand.work(1, 2, [1, 2]))
        async with held(stages.shard(WHOLE)):
            assert await hand.say(frames.QueryState(hand.key(1), 3)) == []
            await hand.say(hand.close(1, 4))
            assert await other.say(other.open(2, 2)) != []
        answers = await hand.say()
        assert {type(answer) for answer in answers} == {frames.Closed, frames.CacheMiss}


async def test_a_probe_tells_position_and_digest_of_one_moment(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand:
        await hand.begin()
        before: list[int] = []
        for seq in range(2, 40, 2):
            tokens = [seq, seq + 1]
            answers = await hand.say(hand.work(1, seq, tokens, before), frames.QueryState(hand.key(1), seq + 1))
            before += tokens
            (frontier,) = [answer for answer in answers if isinstance(answer, frames.StateReport)]
            assert frontier.digest == PrefixDigest(before[: frontier.state.position]).digest()


async def test_cancel_skips_queued_work_up_to_a_number(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand:
        await hand.begin()
        async with held(stages.shard(WHOLE)):
            await hand.say(hand.work(1, 2, [1]), hand.work(1, 3, [2], [1]), hand.work(1, 4, [3], [1, 2]))
            await hand.say(frames.Cancel(hand.key(1), 3))
        answers = await hand.say()
        assert [(type(answer), getattr(answer, "seq", None)) for answer in answers] == [
            (frames.Token, 2),
            (frames.WorkSkipped, 3),
            (frames.CacheMiss, 4),
        ]
        assert as_a(frames.WorkSkipped, answers[1]).position == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": [300]}, "token id 300 is outside the vocabulary of 257"),
        ({"logits": 0}, "sampling needs logits = 1"),
        ({"logits": 2}, "sampling needs logits = 1"),
        ({"sampling": SamplingParams(0.0, 0, 0.0, 0.0, 1.0, 0.0, 0.0, -1, 0, 0, 0)}, "top_p is 0"),
        ({"sampling": SamplingParams(0.0, 0, 1.0, 2.0, 1.0, 0.0, 0.0, -1, 0, 0, 0)}, "min_p is 2"),
        ({"sampling": SamplingParams(0.0, 0, 1.0, 0.0, 0.0, 0.0, 0.0, -1, 0, 0, 0)}, "repeat_penalty is 0"),
    ],
)
async def test_input_that_breaks_a_limit_is_refused_and_changes_nothing(
    autojump_clock: trio.abc.Clock, changes: dict[str, object], words: str
) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand:
        await hand.begin()
        arguments: dict[str, Any] = {"tokens": [1, 2], **changes}
        refused = only(frames.Refused, await hand.say(hand.work(1, 2, **arguments)))
        assert refused.code is Refusal.INPUT
        assert words in refused.message
        assert stages.engines[WHOLE].position(0) == 0
        (token,) = reference([1, 2], 1)
        assert await hand.say(hand.work(1, 3, [1, 2])) == [frames.Token(hand.key(1), 3, 2, token)]


class _NoThirteen(FakeEngine):
    def run(self, batch: Sequence[Work]) -> list[Output]:
        if any(13 in work.tokens for work in batch):
            raise InputError("thirteen is not run here")
        return super().run(batch)


async def test_a_step_that_the_engine_refuses_changes_nothing(autojump_clock: trio.abc.Clock) -> None:
    """Not even the history that draws depend on."""
    drawn = SamplingParams(1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.5, -1, 3, 0, 0)
    async with open_stages(WHOLE) as stages:
        stages.cluster.stop(WHOLE)
        await rest()
        await stages.start(WHOLE, _NoThirteen(None, CONTEXT))
        async with by_hand(stages) as hand:
            await hand.begin()
            refused = only(frames.Refused, await hand.say(hand.work(1, 2, [13, 14])))
            assert (refused.code, refused.message) == (Refusal.INPUT, "thirteen is not run here")
            token = only(frames.Token, await hand.say(hand.work(1, 3, [1, 2, 3], sampling=drawn)))
            params = SamplingParams(temperature=1.0, presence_penalty=0.5, seed=3)
            assert [token.token] == reference([1, 2, 3], 1, params)


async def test_the_context_ends_at_n_ctx(autojump_clock: trio.abc.Clock) -> None:
    context = replace(CONTEXT, n_ctx=16, n_batch=16)
    async with open_stages(WHOLE, context=context) as stages, by_hand(stages) as hand:
        await hand.begin()
        tokens = list(range(16))
        await hand.say(hand.work(1, 2, tokens[:10]))
        refused = only(frames.Refused, await hand.say(hand.work(1, 3, [*tokens[10:], 99], tokens[:10])))
        assert (refused.code, refused.message) == (Refusal.INPUT, "17 tokens do not fit n_ctx 16")
        token = only(frames.Token, await hand.say(hand.work(1, 4, tokens[10:], tokens[:10])))
        assert token.position == 16
        refused = only(frames.Refused, await hand.say(hand.work(1, 5, [1], tokens)))
        assert refused.code is Refusal.INPUT


async def test_an_inbox_has_an_end(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand:
        await hand.begin()
        async with held(stages.shard(WHOLE)):
            work = [hand.work(1, 2 + n, [n], list(range(n))) for n in range(70)]
            refused = all_of(frames.Refused, await hand.say(*work))
            # One is being run, 64 wait.
            assert {(answer.code, answer.seq) for answer in refused} == {(Refusal.OVERLOADED, n) for n in range(67, 72)}
        assert [answer.seq for answer in all_of(frames.Token, await hand.say())] == list(range(2, 67))


# --- whose route it is ---


async def test_a_route_belongs_to_the_link_that_brought_it(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as owner, by_hand(stages) as thief:
        await owner.begin()
        await owner.say(owner.work(1, 2, [1, 2]))
        assert await thief.say(thief.work(1, 3, [3], [1, 2])) == [frames.CacheMiss(thief.key(1), 3, Miss.UNKNOWN, 0)]
        assert await thief.say(thief.close(1, 3)) == [frames.Closed(thief.key(1), 3, 0)]
        assert await thief.say(frames.Cancel(thief.key(1), 99)) == []
        assert await thief.say(frames.QueryState(thief.key(1), 4)) == [
            frames.CacheMiss(thief.key(1), 4, Miss.UNKNOWN, 0)
        ]
        assert await thief.say(thief.fence(2)) == []  # it waits for the owner to leave ...
        await trio.sleep(31)
        refused = only(frames.Refused, await thief.say())  # ... and not forever
        assert (refused.code, refused.message) == (Refusal.PROTOCOL, "the route session belongs to another link")
        token = only(frames.Token, await owner.say(owner.work(1, 3, [3], [1, 2])))
        assert token.position == 3


async def test_a_route_comes_back_on_another_link(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages:
        async with by_hand(stages) as second:
            async with by_hand(stages) as first:
                await first.begin()
                assert await second.say(second.fence(2)) == []
            fenced = only(frames.Fenced, await second.say())
            assert (fenced.epoch, fenced.sessions_dropped) == (2, 0)
            assert stages.shard(WHOLE).statistics().sessions == 0
            opened = only(frames.Opened, await second.say(second.open(1, 5, epoch=2)))
            assert opened.seq == 5
        await rest()
        assert stages.shard(WHOLE).statistics().routes == 0


async def test_a_link_that_ends_while_its_route_waits_leaves_nothing(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as first:
        await first.begin()
        async with by_hand(stages) as second:
            assert await second.say(second.fence(2)) == []
        await rest()
        assert stages.shard(WHOLE).statistics().sessions == 1


@pytest.mark.parametrize("stop_at", ["fence", "open", "fence again"])
async def test_a_link_that_ends_behind_its_last_word(autojump_clock: trio.abc.Clock, stop_at: str) -> None:
    """The stage reads the request and the end of the link in one breath."""
    async with open_stages(WHOLE) as stages:
        for _ in range(10):
            async with by_hand(stages) as hand:
                if stop_at != "fence":
                    await hand.say(hand.fence(1))
                words: dict[str, frames.Frame] = {
                    "fence": hand.fence(1), "open": hand.open(1, 1), "fence again": hand.fence(2),
                }  # fmt: skip
                hand.send(words[stop_at])
                for _ in range(3):
                    await trio.lowlevel.checkpoint()
            await rest()
            assert stages.shard(WHOLE).statistics().routes == 0
            assert stages.shard(WHOLE).statistics().sessions == 0


@pytest.mark.parametrize(
    "frame",
    [
        frames.Fenced(ROUTE, 1, 0, 0),
        frames.Advanced(Key(ROUTE, 1, 1), 1, 1),
        frames.Ready(ROUTE, 1),
        frames.AwaitReady(ROUTE, 1),
    ],
    ids=lambda frame: type(frame).__name__,
)
async def test_a_frame_that_does_not_belong_closes_the_link_and_only_that(
    autojump_clock: trio.abc.Clock, frame: frames.Frame
) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as good:
        await good.begin()
        async with by_hand(stages, STRANGER) as bad:
            await bad.begin()
            assert await bad.say(frame) == []
            assert bad.closed
        assert stages.shard(WHOLE).statistics().sessions == 1
        token = only(frames.Token, await good.say(good.work(1, 2, [1, 2])))
        assert token.position == 2


async def test_boundaries_are_taken_from_the_stage_before_and_from_no_one_else(
    autojump_clock: trio.abc.Clock,
) -> None:
    """A wrong one is that route's own trouble: the link stays, because other routes share it."""
    near, far = memory_transports()
    async with open_stages(TWO) as stages, trio.open_nursery() as nursery:
        tail = stages.shard("2:6")
        limits = limits_of(tail.description)
        async with (
            stages.pipeline(TWO) as pipeline,
            pipeline.session() as session,
            open_link(far, limits) as arriving,
            open_link(near, limits, credit=limits.under_way) as stranger,
        ):
            nursery.start_soon(tail.serve_boundary, arriving, "a stranger")
            reader = RawClient(stages.route(WHOLE), {WHOLE: stranger}, ROUTE)
            nursery.start_soon(reader.read, WHOLE)  # takes the credits
            await session.prefill([1, 2])
            payload = bytes(4 * 3)
            for epoch in (0, 1, 2):
                key = Key(pipeline.route_id, epoch, session.id)
                expect = Expectation(2, PrefixDigest([1, 2]).digest())
                boundary = frames.Boundary(key, 99, expect, (3,), LogitsWanted.LAST, GREEDY, len(payload))
                await stranger.send(boundary, payload)
            await stranger.send(evolve_key(boundary, STRANGER), payload)
            await rest()
            assert stages.engines["2:6"].position(0) == 2
            assert tail.statistics().unroutable_frames == 1
            stranger.send_nowait(frames.Ping(0))  # the link lives
            assert await take(session.generate([3], max_tokens=2)) == reference([1, 2, 3], 2)
            assert session.committed == 4
            assert stranger._outbox.credit == limits.under_way, "every payload's credit came back"
        nursery.cancel_scope.cancel()


def evolve_key(frame: frames.Boundary, route: bytes) -> frames.Boundary:
    return msgspec.structs.replace(frame, key=Key(route, 1, 1))


async def test_a_flood_of_requests_closes_the_link(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, by_hand(stages) as hand:
        await hand.begin()
        async with held(stages.shard(WHOLE)):
            await hand.say(*(frames.QueryState(hand.key(1), seq) for seq in range(2, 1030)))
            assert hand.closed
        await rest()
        assert stages.shard(WHOLE).statistics().routes == 0
