"""Time per token over a ring whose every cable takes a while.

A token goes from the client to the head, from stage to stage, and from the tail to the client: one hop more than there are
stages. Delay and no delay alternate within one answer, so that both are measured on the same machine at the same time.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import trio

from dgr import Generation
from dgr.testing.network.proxy import FaultyProxy
from dgr_bench.drill.fault_injection import Leftovers, Scenario, into_error, open_testbed
from dgr_bench.quartiles import median

#: Seconds after which a round hangs.
_HANG = 300.0
#: Tokens after each change of the delay that are not measured: a heartbeat may still be on its way.
_SETTLE = 1


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    #: Milliseconds that each cable takes, each way. None at all shows how far apart two measurements of the same are.
    delays_ms: tuple[float, ...] = (0, 1, 5, 10, 20, 40, 150)
    #: Tokens measured in a row, of each kind.
    tokens: int = 3
    #: Times that the kinds alternate at one delay in a round.
    turns: int = 3
    rounds: int = 6


class Times(msgspec.Struct, kw_only=True):
    """Seconds of tokens around one delay, alternating."""

    #: Without it, one after the other.
    usual: list[float] = []
    #: Without it, the stages idle before each for as long as the delays around the ring would have kept them so.
    rested: list[float] = []
    #: With it.
    delayed: list[float] = []


class RingRound(msgspec.Struct, kw_only=True):
    """One pass over all delays."""

    #: Type and message of the error that it ended with; empty when it ended well.
    error: str = ""
    #: By delay in milliseconds.
    times: dict[str, Times] = {}
    leftovers: Leftovers = msgspec.field(name="remains", default_factory=Leftovers)


class RingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A delay, over all rounds; times are medians in milliseconds a token."""

    delay_ms: float
    #: The one-way delays around the ring.
    added_ms: float
    usual_ms: float
    rested_ms: float
    delayed_ms: float
    #: Tokens of each kind.
    count: int

    @property
    def over(self) -> float:
        """Measured to compute and delays, less one, where the stages compute as they do one token after the other."""
        return self.delayed_ms / (self.usual_ms + self.added_ms) - 1

    @property
    def over_rested(self) -> float:
        """The same where they compute as they do after as much idleness: what the links themselves add."""
        return self.delayed_ms / (self.rested_ms + self.added_ms) - 1


def name_of(delay_ms: float) -> str:
    """A delay as a key."""
    return f"{delay_ms:g}"


async def run_round(model: Path, scenario: Scenario, delays: Delays, number: int) -> RingRound:
    """Measure every delay once; odd rounds go downwards. An error is part of what comes back."""
    found = RingRound()
    order = delays.delays_ms if number % 2 == 0 else tuple(reversed(delays.delays_ms))
    n_tokens = 1 + len(order) * delays.turns * 3 * (_SETTLE + delays.tokens)
    longer = msgspec.structs.replace(scenario, answer=n_tokens, prompt=scenario.chunk)
    hops = len(scenario.split) + 1
    with into_error(found, _HANG):
        async with open_testbed(model, longer, found.leftovers) as testbed, testbed.pipeline.session() as session:
            answer = session.generate(longer.tokens(0), max_tokens=n_tokens, stop=())
            await anext(answer)
            for delay in (delay_ms / 1e3 for delay_ms in order):
                times = found.times[name_of(1e3 * delay)] = Times()
                for _ in range(delays.turns):
                    times.usual += await _pace(answer, delays.tokens)
                    times.rested += await _pace(answer, delays.tokens, rest=hops * delay)
                    _delay(testbed.cables, delay)
                    times.delayed += await _pace(answer, delays.tokens)
                    _delay(testbed.cables, 0.0)
    return found


def _delay(cables: list[FaultyProxy], seconds: float) -> None:
    for cable in cables:
        cable.delay = seconds


async def _pace(answer: Generation, count: int, rest: float = 0.0) -> list[float]:
    """Seconds of each of ``count`` tokens, with ``rest`` seconds of idleness before it."""
    times = []
    for index in range(_SETTLE + count):
        if rest:
            await trio.sleep(rest)
        began = trio.current_time()
        await anext(answer)
        if index >= _SETTLE:
            times.append(trio.current_time() - began)
    return times


def points_of(rounds: list[RingRound], delays: Delays, n_stages: int) -> list[RingPoint]:
    """The delays that were measured, over all rounds."""
    points = []
    for delay_ms in delays.delays_ms:
        times = [one.times[name_of(delay_ms)] for one in rounds if name_of(delay_ms) in one.times]
        delayed = [seconds for one in times for seconds in one.delayed]
        if delayed:
            points.append(
                RingPoint(
                    delay_ms=delay_ms,
                    added_ms=(n_stages + 1) * delay_ms,
                    usual_ms=1e3 * median(seconds for one in times for seconds in one.usual),
                    rested_ms=1e3 * median(seconds for one in times for seconds in one.rested),
                    delayed_ms=1e3 * median(delayed),
                    count=len(delayed),
                )
            )
    return points
