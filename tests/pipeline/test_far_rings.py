"""Rings whose hops take 1 to 150 ms, by a clock that knows what a batch costs: nothing comes to compute and delay."""

from __future__ import annotations

import itertools

import pytest
import trio
from far_stages import SPEEDS, Distances, put_far_away
from trio.testing import MockClock

from dgr.core.values import ContextParams
from dgr.testing import offline
from dgr.wire.framing import Limits

SPLIT = ",".join(SPEEDS)
STAGES = [f"stage-{index}" for index in range(len(SPEEDS))]
#: From the client to the head, between stages, and from the tail to the client.
HOPS = len(SPEEDS) + 1
DELAYS = [0.001, 0.010, 0.050, 0.150]
TOKENS = 10


def compute(sessions: int = 1) -> float:
    """Seconds that a token of each of some sessions takes on all stages, in one batch."""
    return sum(fixed + each * sessions for fixed, each in SPEEDS.values())


async def _pace(
    monkeypatch: pytest.MonkeyPatch, delay: float, sessions: int, *, astray: float = 0.0
) -> tuple[float, float]:
    """Seconds between two tokens of a session, on average, and tokens a second of all sessions together."""
    control = dict.fromkeys(STAGES, (delay, delay))
    control["stage-2"] = delay, delay + astray
    put_far_away(monkeypatch, Distances(control, dict.fromkeys(STAGES, delay)))
    context = ContextParams(n_ctx=256, n_batch=16, n_ubatch=16, n_seq_max=sessions)
    times: list[list[float]] = []
    async with offline.open_fake_pipeline(SPLIT, context=context) as opened, trio.open_nursery() as nursery:

        async def go(index: int) -> None:
            async with opened.pipeline.session() as session:
                answer = session.generate([1 + index], max_tokens=TOKENS, stop=())
                times.append([trio.current_time() async for _ in answer])

        for index in range(sessions):
            nursery.start_soon(go, index)
    gaps = [(one[-1] - one[TOKENS // 2]) / (TOKENS - 1 - TOKENS // 2) for one in times]
    seconds = max(one[-1] for one in times) - min(one[0] for one in times)
    return sum(gaps) / len(gaps), sum(map(len, times)) / seconds


@pytest.mark.parametrize("delay", DELAYS)
async def test_a_token_takes_compute_and_the_ring(
    delay: float, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    token, _ = await _pace(monkeypatch, delay, 1)
    assert token == pytest.approx(compute() + HOPS * delay, rel=0.05)


@pytest.mark.parametrize(
    "delay", [pytest.param(0.001, marks=pytest.mark.slow), 0.010, pytest.param(0.050, marks=pytest.mark.slow), 0.150]
)
async def test_more_sessions_fill_the_ring(
    delay: float, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    rates = []
    for sessions in (1, 3, 8):
        token, rate = await _pace(monkeypatch, delay, sessions)
        # A token may have to wait for a batch that is under way, on each stage.
        assert token <= 1.05 * (2 * compute(sessions) + HOPS * delay)
        rates.append(rate)
    assert all(more > 1.1 * fewer for fewer, more in itertools.pairwise(rates)), rates
    if delay == max(DELAYS):  # the stages are idle for most of the time: sessions cost each other little
        assert rates[-1] > 0.85 * 8 * rates[0]


async def test_a_hop_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    token, _ = await _pace(monkeypatch, 0.050, 1, astray=0.050)
    assert token != pytest.approx(compute() + HOPS * 0.050, rel=0.05)


async def test_links_that_wait_for_each_payload_would_not_fill_it(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """With room for one token alone each waits for the credit of the one before it, from the far end."""
    monkeypatch.setattr(Limits, "under_way", property(lambda self: self.wire.row_bytes(self.boundary_width)))
    one = (await _pace(monkeypatch, 0.150, 1))[1]
    assert (await _pace(monkeypatch, 0.150, 8))[1] < 0.85 * 8 * one
