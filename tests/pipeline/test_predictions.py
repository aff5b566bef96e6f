"""What is predicted of a route, against what a pipeline does by a clock that knows what a batch costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import trio
from timed_engines import TimedEngine, TimedThread, time_engines
from trio.testing import MockClock

from dgr.artifact.pace import HopSpeed, RoutePace
from dgr.artifact.speeds import FORMAT, HostSpeed, Timing
from dgr.core.route import LayerRange, parse_split
from dgr.core.values import ContextParams, Numerics
from dgr.engine.base import Output, Work
from dgr.testing import offline
from dgr.testing.engines.fake import FakeEngine

#: Seconds of a call, of a layer for each token of a decode step, and of a chunk.
CALL, STEP, CHUNK = 0.020, 0.004, 0.001
#: What the tail takes beside.
TAIL = 0.010
N_LAYERS = 6


class LayerwiseEngine(TimedEngine):
    """Its runs take what its layers take."""

    def run(self, batch: Sequence[Work]) -> list[Output]:
        outputs = FakeEngine.run(self, batch)
        layers = self.describe().layers
        tokens = sum(len(work.tokens) for work in batch)
        each = STEP if tokens == len(batch) else CHUNK
        TimedThread.owed = CALL + each * tokens * len(layers) + TAIL * (layers.end == N_LAYERS)
        return outputs


def pace(split: str, tail: float = TAIL) -> RoutePace:
    """As `dgr benchmark` would have measured such hosts."""

    def timing(sequences: int, tokens: int) -> Timing:
        each = (STEP if tokens == 1 else CHUNK) * sequences * tokens
        return Timing(sequences=sequences, tokens=tokens, call=CALL, layers={"any": each}, head=0.0, tail=tail)

    speed = HostSpeed(
        format=FORMAT, host="h", model="m", threads=1, numerics="native", n_ubatch=16, depth=1,
        decode=(timing(1, 1), timing(8, 1)), prefill=(timing(1, 16),),
    )  # fmt: skip
    n_stages = split.count(",") + 1
    return RoutePace([speed] * n_stages, [HopSpeed(0.0, math.inf)] * (n_stages + 1), ["any"] * N_LAYERS, boundary=0)


def cuts(split: str) -> tuple[LayerRange, ...]:
    return parse_split(split, N_LAYERS)


async def _first_token(split: str, prompt: int) -> float:
    context = ContextParams(n_ctx=256, n_batch=16, n_ubatch=16, numerics=Numerics.NATIVE)
    async with offline.open_fake_pipeline(split, context=context) as opened, opened.pipeline.session() as session:
        began = trio.current_time()
        await anext(session.generate([1 + at % 7 for at in range(prompt)], max_tokens=2, stop=()))
        return trio.current_time() - began


async def _rate(split: str, sessions: int, tokens: int = 60) -> float:
    times: list[float] = []
    context = ContextParams(n_ctx=256, n_batch=16, n_ubatch=16, n_seq_max=sessions, numerics=Numerics.NATIVE)
    async with offline.open_fake_pipeline(split, context=context) as opened, trio.open_nursery() as nursery:

        async def go(index: int) -> None:
            async with opened.pipeline.session() as session:
                answer = session.generate([1 + index] * (3 + index), max_tokens=tokens, stop=())
                times.extend([trio.current_time() async for _ in answer])

        for index in range(sessions):
            nursery.start_soon(go, index)
    times.sort()
    first, last = len(times) // 2, 9 * len(times) // 10
    return (last - first) / (times[last] - times[first])


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    time_engines(monkeypatch)
    monkeypatch.setattr(offline, "FakeEngine", LayerwiseEngine)


@pytest.mark.parametrize("split", ["0:6", "0:3,3:6", "0:1,1:5,5:6"])
@pytest.mark.parametrize("prompt", [40, 160])
async def test_a_first_token_comes_when_it_was_predicted(
    split: str, prompt: int, timed: None, autojump_clock: MockClock
) -> None:
    predicted = pace(split).first_token(cuts(split), prompt, 16)
    # A last chunk that is shorter than any measured one is a guess between that and a step.
    assert await _first_token(split, prompt) == pytest.approx(predicted, rel=0.04 if prompt % 16 else 0.001)


@pytest.mark.parametrize(
    ("split", "sessions"),
    [("0:6", 1), ("0:3,3:6", 1), ("0:1,1:5,5:6", 1), ("0:6", 5), ("0:3,3:6", 4), ("0:2,2:4,4:6", 6)],
)
async def test_sessions_go_as_fast_as_was_predicted(
    split: str, sessions: int, timed: None, autojump_clock: MockClock
) -> None:
    predicted = pace(split).rate(cuts(split), sessions)
    assert await _rate(split, sessions) == pytest.approx(predicted, rel=0.02 if sessions == 1 else 0.1)


async def test_a_wrong_prediction_would_be_seen(timed: None, autojump_clock: MockClock) -> None:
    """Of a tail that takes nothing beside its layers."""
    split = "0:3,3:6"
    wrong = pace(split, tail=0.0)
    assert await _rate(split, 1) != pytest.approx(wrong.rate(cuts(split), 1), rel=0.02)
    assert await _first_token(split, 160) != pytest.approx(wrong.first_token(cuts(split), 160, 16), rel=0.04)
