"""Seeded peers that mean harm, against a shard, and stages that lie, against a client. ``make test-fuzz`` runs longer."""

from __future__ import annotations

import logging
import random
from functools import partial

import pytest
import trio
from conversations import reference, take, take_tokens
from hostile import Talker, lying, talk
from msgspec.structs import replace
from pipeline.harness import CONTEXT, THREE, TIMEOUTS, TWO, Stages, open_stages, rest

from dgr.client import route_client
from dgr.client.pipeline import open_pipeline_on
from dgr.core.values import SamplingParams
from dgr.errors import DgrError
from dgr.protocol.limits import limits_of
from dgr.wire import memory_transports
from dgr.wire.links import open_link

PROMPT = list(b"The quick brown fox")
ROOMY = replace(CONTEXT, n_seq_max=6)


async def _attack(stages: Stages, rng: random.Random, name: str, route: bytes) -> None:
    """One hostile link to a stage: a pipeline's, or a previous stage's."""
    shard = stages.shard(name)
    limits, near_far = limits_of(shard.description), memory_transports()
    talker = Talker(rng, shard.description, [*stages.cluster.shards], route if rng.random() < 0.3 else None)
    boundary = rng.random() < 0.4
    async with open_link(near_far[1], limits, name="hostile", granted=limits.under_way) as arriving:
        if boundary:
            shard.start_soon(shard.serve_boundary, arriving, rng.choice([*stages.cluster.shards, "", "nowhere:1"]))
        else:
            shard.start_soon(shard.serve_control, arriving)
        await talk(near_far[0], talker.next_bytes, rng, 60)


async def _attack_shards(seed: int, rounds: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(seed)
    right = 0
    async with open_stages(THREE, TWO, context=ROOMY) as stages:
        async with stages.pipeline(TWO, ahead=2) as honest:
            for round_ in range(rounds):
                async with trio.open_nursery() as nursery, honest.session() as session:
                    for _ in range(3):
                        name = rng.choice([*stages.cluster.shards])
                        nursery.start_soon(_attack, stages, rng, name, honest.route_id)
                    try:
                        right += await take(session.generate(PROMPT, max_tokens=4)) == reference(PROMPT, 4)
                    except DgrError:
                        continue
                stages.assert_consistent()
                assert caplog.records == [], f"seed {seed}, round {round_}"
            async with honest.session() as session:
                assert await take(session.generate(PROMPT, max_tokens=4)) == reference(PROMPT, 4)
        await rest()
    assert right > rounds // 2
    assert caplog.records == []


def _note(rows: list[int], position: int, _values: memoryview) -> None:
    rows.append(position)


async def _lie_to_a_client(seed: int, rounds: int) -> dict[str, int]:
    rng, seen = random.Random(seed), {"right": 0, "typed": 0}
    for _ in range(rounds):
        params = SamplingParams(top_logprobs=rng.choice([0, 2]))
        async with open_stages(TWO) as stages:
            began = trio.current_time()
            connect = lying(stages.cluster.connect, rng, rng.choice([0.02, 0.1, 0.4]))
            try:
                async with (
                    open_pipeline_on(
                        connect, stages.route(TWO), timeouts=TIMEOUTS, ahead=rng.choice([0, 2])
                    ) as pipeline,
                    pipeline.session() as session,
                ):
                    for turn in range(2):
                        rows: list[int] = []
                        tokens = await take_tokens(session.generate(PROMPT[turn:], max_tokens=3, sampling=params))
                        places = [token.position for token in tokens]
                        assert places == list(range(places[0], places[0] + len(places)))
                        before = session.transcript[: places[0]]
                        assert [token.id for token in tokens] == reference(before, 3)[: len(tokens)]
                        await session.logits([1, 2], partial(_note, rows))
                        assert set(rows) == {len(session.transcript) - 2}
                        await session.state_summaries()
                        async with session.fork() as other:
                            said = [token.id for token in await take_tokens(other.generate([turn], max_tokens=2))]
                            assert said == reference([*session.transcript, turn], 2)[: len(said)]
                seen["right"] += 1
            except DgrError:
                seen["typed"] += 1
            assert trio.current_time() - began < 40 * (TIMEOUTS.reply + TIMEOUTS.control + TIMEOUTS.route)
    return seen


@pytest.fixture(autouse=True)
def errors_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_hostile_peers_change_nothing_for_others(
    autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    await _attack_shards(seed, 25, caplog)


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_lying_stage_is_found_out_or_told_right(
    autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    seen = await _lie_to_a_client(seed, 30)
    assert min(seen.values()) > 0
    assert caplog.records == []


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(100, 120))
async def test_hostile_peers_and_lying_stages_for_longer(
    autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    await _attack_shards(seed, 200, caplog)
    await _lie_to_a_client(seed, 200)


async def test_a_client_that_believes_its_stages_falls_for_their_lies(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: positions, rows and token ids are taken as they come."""
    monkeypatch.setattr(route_client, "check_work_reply", lambda *_args, **_options: None)
    with pytest.raises((AssertionError, IndexError, ExceptionGroup)):
        await _lie_to_a_client(1, 30)
