"""Copies of states kept on the way: found again, given room and taken away by rule, and the same tokens whatever happens."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

import pytest
import trio
from cancel_at import cancelled_at
from msgspec.structs import replace
from trio.testing import MockClock, wait_all_tasks_blocked

from dgr.cluster.local import ShardPolicy
from dgr.core.values import ContextParams, LogitsWanted, SamplingParams, StageIdentity
from dgr.engine.base import Work
from dgr.errors import InputError
from dgr.serving.engine import Answer, Job, ServingEngine, ServingLimits, open_serving
from dgr.serving.sessions import WORTH_A_COPY, KeptSession, Miss, SessionPool
from dgr.testing.engines.fake import FakeEngine, FakeModel
from dgr.testing.offline import Offline, open_fake_pipeline
from dgr.testing.waits import until

#: Marks of a thinking chat: the prompt ends with OPEN; in the next one the turn is there with SHUT and without its reasoning.
OPEN, SHUT = 1, 2
GREEDY = SamplingParams()
#: Small, for prompts that are long enough to be copied.
MODEL, SPLIT = FakeModel(n_layers=3, width=1), "0:1,1:2,2:3"
CONTEXT = ContextParams(n_ctx=2048, n_batch=64, n_ubatch=64, n_seq_max=4)


def text(name: str, length: int = 200) -> tuple[int, ...]:
    """Bytes that begin alike for no two names."""
    dice = random.Random(name)
    return tuple(dice.randrange(3, 256) for _ in range(length))


@asynccontextmanager
async def serving(
    sessions: int | None = 2, prefixes: int | None = 2, *, n_seq_max: int = 4, policy: ShardPolicy | None = None
) -> AsyncIterator[tuple[ServingEngine, Offline]]:
    limits = ServingLimits(sessions=sessions, prefixes=prefixes, deadline=500)
    context = replace(CONTEXT, n_seq_max=n_seq_max)
    async with open_fake_pipeline(SPLIT, model=MODEL, context=context, policy=policy) as offline:
        async with open_serving(offline.pipeline, limits) as engine:
            yield engine, offline
        await wait_all_tasks_blocked()
        for name, shard in offline.cluster.shards.items():
            assert shard.statistics().leased_bytes == 0, name


async def drawn(engine: ServingEngine, job: Job) -> tuple[list[int], Answer]:
    async with engine.admit(job) as answer:
        return [token.id async for token in answer], answer


@cache
def expected(prompt: tuple[int, ...], count: int, sampling: SamplingParams = GREEDY) -> list[int]:
    """What the whole model by itself draws."""
    room = len(prompt) + count
    alone = FakeEngine(None, ContextParams(n_ctx=room, n_batch=room, n_ubatch=room, n_seq_max=1), model=MODEL)
    history, new = list(prompt), list(prompt)
    while len(history) < room:
        (output,) = alone.run([Work(0, len(history) - len(new), new, logits=LogitsWanted.LAST)])
        assert output.logits is not None
        new = [alone.sample(output.logits, history, sampling)[0]]
        history += new
    return history[len(prompt) :]


def expected_of(job: Job) -> list[int]:
    return expected(job.prompt, job.max_tokens, job.sampling)


async def asks(engine: ServingEngine, prompt: tuple[int, ...], *, cached: int, length: int = 6) -> list[int]:
    """Ask, and see that the answer is right and that just so many tokens of the prompt were not evaluated for it."""
    job = Job(prompt, length)
    before = engine.counters.prompt_tokens, engine.counters.cached_tokens
    tokens, answer = await drawn(engine, job)
    assert tokens == expected_of(job)
    assert answer.usage.cached == cached
    after = engine.counters.prompt_tokens, engine.counters.cached_tokens
    assert after == (before[0] + len(prompt), before[1] + cached)
    return tokens


def next_turn(prompt: tuple[int, ...], answer: list[int], question: tuple[int, ...]) -> tuple[int, ...]:
    """As the format has it for a thinking chat without tools: the first half of the answer was reasoning, and is dropped."""
    return (*prompt[:-1], SHUT, *answer[len(answer) // 2 :], *question, OPEN)


async def test_a_thinking_chat_hits_at_every_turn(autojump_clock: MockClock) -> None:
    async with serving() as (engine, offline):
        prompt = (*text("system"), OPEN)
        answer = await asks(engine, prompt, cached=0)
        for turn in range(4):
            held = len(prompt) - 1
            prompt = next_turn(prompt, answer, text(f"question {turn}", 150))
            before = offline.engines["stage-0"].tokens_run
            answer = await asks(engine, prompt, cached=held)
            assert offline.engines["stage-0"].tokens_run - before == len(prompt) - held + 5
        assert engine.sessions.hits == 4
        assert dict(engine.sessions.misses) == {Miss.NEW: 1}
        assert engine.sessions.kept <= 4


async def test_the_same_prompt_asked_again_hits_up_to_its_last_token(autojump_clock: MockClock) -> None:
    async with serving() as (engine, _):
        prompt = text("prompt")
        await asks(engine, prompt, cached=0)
        await asks(engine, prompt, cached=len(prompt) - 1)
        assert (engine.sessions.stored, engine.sessions.copied) == (1, 1)


async def test_a_chat_that_is_only_added_to_goes_on_from_its_end(autojump_clock: MockClock) -> None:
    async with serving() as (engine, _):
        prompt = text("prompt")
        answer = await asks(engine, prompt, cached=0)
        for turn in range(3):
            held = len(prompt) + len(answer) - 1
            prompt = (*prompt, *answer, *text(f"more {turn}", 20))
            answer = await asks(engine, prompt, cached=held)
        assert engine.sessions.stored == 1, "turns of few tokens are not worth a copy"


async def test_short_prompts_are_not_copied(autojump_clock: MockClock) -> None:
    async with serving() as (engine, offline):
        await asks(engine, text("short", WORTH_A_COPY), cached=0)
        assert (engine.sessions.stored, offline.engines["stage-0"].forks) == (0, 0)
        await asks(engine, text("longer", WORTH_A_COPY + 1), cached=0)
        assert (engine.sessions.stored, offline.engines["stage-0"].forks) == (1, 1)


async def test_a_long_system_text_is_shared_from_the_third_request_on(autojump_clock: MockClock) -> None:
    """The second shows where the two part; from then on a copy stands there for everybody."""
    async with serving(prefixes=3, n_seq_max=5) as (engine, _):
        system = text("system", 300)
        await asks(engine, (*system, *text("one", 30)), cached=0)
        await asks(engine, (*system, *text("two", 30)), cached=0)
        for name in ("three", "four", "five"):
            await asks(engine, (*system, *text(name, 30)), cached=300)
        assert dict(engine.sessions.misses) == {Miss.NEW: 1, Miss.DIVERGED: 1}
        assert engine.sessions.copied == 3


async def test_side_by_side_with_the_same_system_text(autojump_clock: MockClock) -> None:
    async with serving(sessions=2, prefixes=2) as (engine, offline):
        system, answers = text("system", 300), {}

        async def ask(name: str) -> None:
            answers[name], _ = await drawn(engine, Job((*system, *text(name, 40)), 10))

        for names in (("a", "b"), ("c", "d"), ("a", "e")):
            async with trio.open_nursery() as nursery:
                for name in names:
                    nursery.start_soon(ask, name)
        for name, tokens in answers.items():
            assert tokens == expected((*system, *text(name, 40)), 10)
        evaluated = offline.engines["stage-0"].tokens_run
        assert evaluated < 3 * 340 + 3 * 60 + 6 * 9, "of six prompts, three at most were evaluated whole"
        assert engine.line.running == 0


async def test_two_at_once_may_have_a_copy_of_one_prefix(autojump_clock: MockClock) -> None:
    async with serving(sessions=2, prefixes=2) as (engine, offline):
        system = text("system", 300)
        for name in ("a", "b", "c"):  # of which the last shows that it serves several
            await asks(engine, (*system, *text(name, 30)), cached=300 if name == "c" else 0)
        before = offline.engines["stage-0"].tokens_run
        async with trio.open_nursery() as nursery:
            for name in ("d", "e"):
                nursery.start_soon(drawn, engine, Job((*system, *text(name, 30)), 4))
        assert offline.engines["stage-0"].tokens_run - before == 2 * (30 + 3)


# --- room ---


async def test_sessions_and_prefixes_have_their_places(autojump_clock: MockClock) -> None:
    async with serving(sessions=2, prefixes=2) as (engine, _):
        sessions = engine.sessions
        for name in ("one", "two", "three", "four"):
            await asks(engine, text(name), cached=0)
            assert sessions.kept <= 4
        assert (sessions.kept, sessions.kept_prefixes) == (4, 2)
        # The least recently used of their kind are gone: of prefixes the first two, of sessions too.
        await asks(engine, text("four"), cached=199)
        await asks(engine, text("three"), cached=199)
        await asks(engine, text("one"), cached=0)


async def test_what_was_used_last_stays(autojump_clock: MockClock) -> None:
    async with serving(sessions=1, prefixes=2, n_seq_max=3) as (engine, _):
        system = text("system", 200)
        await asks(engine, (*system, *text("a", 10)), cached=0)
        await asks(engine, (*system, *text("b", 10)), cached=0)
        for name in ("other", "another"):  # each wants a place for its own end
            await asks(engine, (*system, *text(f"again {name}", 10)), cached=200)
            await asks(engine, text(name), cached=0)
        await asks(engine, (*system, *text("c", 10)), cached=200)


async def test_conversations_do_not_push_each_other_out(autojump_clock: MockClock) -> None:
    """Four thinking chats take turns in four places for prefixes: each turn frees the place that it fills."""
    async with serving(sessions=4, prefixes=4, n_seq_max=8) as (engine, _):
        chats = {name: (*text(name), OPEN) for name in "abcd"}
        held = dict.fromkeys(chats, 0)
        for turn in range(4):
            for name, prompt in list(chats.items()):
                answer = await asks(engine, prompt, cached=held[name])
                held[name] = len(prompt) - 1
                chats[name] = next_turn(prompt, answer, text(f"{name} {turn}", 150))
        assert engine.sessions.hits == 12


async def test_without_places_of_their_own_prefixes_have_what_nobody_takes(autojump_clock: MockClock) -> None:
    async with serving(sessions=2, prefixes=0, n_seq_max=2) as (engine, _):
        await asks(engine, text("one"), cached=0)
        assert (engine.sessions.kept, engine.sessions.kept_prefixes) == (2, 1)
        await asks(engine, text("two"), cached=0)
        assert (engine.sessions.kept, engine.sessions.kept_prefixes) == (2, 0)
        answer = await asks(engine, text("three"), cached=0)
        await asks(engine, (*text("three"), *answer, 9), cached=205)


async def test_slots_that_sessions_leave_are_for_prefixes(autojump_clock: MockClock) -> None:
    async with serving(sessions=1, prefixes=None, n_seq_max=4) as (engine, _):
        assert (engine.line.slots, engine.sessions._size, engine.sessions.places_of_prefixes) == (1, 4, 3)
    async with serving(sessions=None, prefixes=3, n_seq_max=4) as (engine, _):
        assert (engine.line.slots, engine.sessions._size, engine.sessions.places_of_prefixes) == (1, 4, 3)
    for sessions, prefixes in ((2, 3), (None, 4), (5, None), (0, 1), (1, -1)):
        with pytest.raises(InputError):
            async with serving(sessions=sessions, prefixes=prefixes, n_seq_max=4):
                pytest.fail("it was opened")


# --- when it cannot be ---


async def test_full_stages_copy_nothing_and_answers_go_on(autojump_clock: MockClock) -> None:
    """Another pipeline has the other slots."""
    async with serving(sessions=1, prefixes=2, n_seq_max=3, policy=ShardPolicy(min_idle=1000)) as (engine, offline):
        await asks(engine, text("one"), cached=0)
        async with offline.pipeline.session() as stranger:
            await stranger.prefill([1, 2])
            tokens = await asks(engine, text("one"), cached=199)
            assert (engine.sessions.copied, engine.sessions.refused) == (0, 2)
            await asks(engine, (*text("one"), *tokens, 5), cached=205)
        await asks(engine, text("two"), cached=0)


@pytest.mark.parametrize("stage", ["stage-0", "stage-1", "stage-2"])
async def test_a_prefix_that_a_stage_has_lost_is_a_miss_of_its_own(autojump_clock: MockClock, stage: str) -> None:
    async with serving() as (engine, offline):
        await asks(engine, text("one"), cached=0)
        (prefix,) = [kept.session.id for kept in engine.sessions._kept if kept.is_prefix]
        for actor in offline.cluster.shards[stage].actors():
            if actor.key.session == prefix:
                actor.end(None)
        await asks(engine, text("one"), cached=0)
        assert dict(engine.sessions.misses) == {Miss.NEW: 1, Miss.LOST: 1}
        await asks(engine, text("one"), cached=199)


async def test_after_a_stage_came_back_all_is_found_anew(autojump_clock: MockClock) -> None:
    async with serving() as (engine, offline):
        await asks(engine, text("one"), cached=0)
        await offline.restart("stage-1")
        await wait_all_tasks_blocked()
        await trio.sleep(1)
        await until(lambda: engine.is_ready)
        await asks(engine, text("one"), cached=0)
        await asks(engine, text("one"), cached=199)


class CopiesNothing(FakeEngine):
    def describe(self) -> StageIdentity:
        return replace(super().describe(), capabilities={"decode": "executable"})


async def test_stages_that_copy_nothing_are_served_as_before(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgr.testing.offline.FakeEngine", CopiesNothing)
    async with serving() as (engine, offline):
        await asks(engine, text("one"), cached=0)
        await asks(engine, text("one"), cached=0)
        assert offline.engines["stage-0"].forks == engine.sessions.stored == 0


# --- clients that leave ---


@pytest.mark.parametrize("seeded", [True, False])
async def test_a_prompt_that_was_left_in_prefill_is_gone_on_with(autojump_clock: MockClock, seeded: bool) -> None:
    job = Job(text("long", 500), 5, SamplingParams(temperature=1, seed=3), seeded=seeded)
    async with serving() as (engine, offline):
        for _ in range(40):
            async with engine.admit(job) as answer:
                with cancelled_at(120) as killer:
                    tokens = [token.id async for token in answer]
                if not killer.scope.cancelled_caught:
                    break
        assert tokens == expected_of(job)
        assert offline.engines["stage-0"].tokens_run <= 500 + 4 + 8, "hardly anything was evaluated twice"


def test_left_at_any_step_the_next_try_is_right_and_nothing_stays_behind() -> None:
    reached = True

    async def live(step: int) -> None:
        nonlocal reached
        async with serving(sessions=1, prefixes=2, n_seq_max=3) as (engine, offline):
            one, other = Job((*text("one", 150), 7), 3), Job((*text("one", 150), 8, 9), 3)
            with cancelled_at(step) as killer:
                await drawn(engine, one)
                await drawn(engine, other)  # has a copy of what the first one left
            reached = killer.reached
            assert engine.line.running == 0
            assert not any(kept.in_use for kept in engine.sessions._kept)
            for job in (other, one):
                assert (await drawn(engine, job))[0] == expected_of(job)
            assert offline.pipeline.statistics().sessions == engine.sessions.kept <= 3

    step = 1
    while reached:
        trio.run(live, step)
        step += 9
    assert step > 100


@pytest.mark.parametrize("seed", range(4))
async def test_clients_that_come_and_leave_at_will_get_what_a_pipeline_alone_draws(
    autojump_clock: MockClock, seed: int
) -> None:
    """Thinking chats and plain ones with system texts in common, fewer places than states, stages that die."""
    dice = random.Random(seed)
    sessions, prefixes = dice.choice([(1, 0), (2, 1), (2, 2), (3, 4)])
    expectations: list[tuple[Job, list[int]]] = []
    async with serving(sessions, prefixes, n_seq_max=sessions + prefixes) as (engine, offline):

        async def talk(name: int) -> None:
            prompt = (*text(f"system {name % 2}", 160), *text(f"user {name % 5}", dice.choice([10, 140])), OPEN)
            for turn in range(3):
                job = Job(prompt, dice.randint(1, 8), SamplingParams(temperature=dice.choice([0, 1])))
                tokens: list[int] | None = None
                while tokens is None:
                    await trio.sleep(dice.random())
                    with trio.move_on_after(dice.choice([0.01, 0.1, 50])):
                        async with engine.admit(job) as answer:
                            found = []
                            async for token in answer:
                                found.append(token.id)
                                await trio.sleep(dice.choice([0, 0.02]))
                            tokens = found
                expectations.append((job, tokens))
                question = text(f"question {name % 3} {turn}", dice.choice([20, 150]))
                prompt = next_turn(prompt, tokens, question) if name % 2 else (*prompt, *tokens, *question, OPEN)

        async with trio.open_nursery() as nursery:
            for name in range(6):
                nursery.start_soon(talk, name)
            for _ in range(dice.randrange(3)):
                await trio.sleep(1)
                await offline.restart(f"stage-{dice.randrange(3)}")
                await until(lambda: engine.is_ready)
        assert (engine.line.running, engine.line.waiting) == (0, 0)
        assert engine.sessions.kept <= sessions + prefixes
        assert not any(kept.in_use for kept in engine.sessions._kept)
    for job, tokens in expectations:
        assert tokens == expected_of(job)


# --- the mutants ---


async def test_a_pool_that_takes_a_state_for_more_than_it_holds_would_be_seen(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: whatever begins alike is taken, and the session says that it is lost."""
    monkeypatch.setattr("dgr.serving.sessions._fits", lambda kept, prompt: kept.held[:50] == prompt[:50])
    async with serving() as (engine, _):
        await drawn(engine, Job((*text("one", 150), 7), 3))
        with pytest.raises(AssertionError):
            await asks(engine, (*text("one", 100), *text("else", 60)), cached=100)


async def test_a_pool_that_gives_prefixes_away_would_be_seen(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: the first to come gets the prefix itself, and the next one finds nothing."""

    async def give_away(pool: SessionPool, prefix: KeptSession) -> KeptSession:
        return pool._use_up(prefix)

    monkeypatch.setattr(SessionPool, "_branch", give_away)
    store = SessionPool.store

    async def store_once(pool: SessionPool, kept: KeptSession, *, shared: bool) -> None:
        if not pool.stored:
            await store(pool, kept, shared=shared)

    monkeypatch.setattr(SessionPool, "store", store_once)
    async with serving() as (engine, _):
        await asks(engine, text("system"), cached=0)
        await asks(engine, text("system"), cached=199)
        with pytest.raises(AssertionError):
            await asks(engine, text("system"), cached=199)
