"""What a route of some cuts would do: seconds of a ring, tokens a second, seconds to a first token.

The model of a route: a stage computes one native call at a time, calls of different stages overlap, and a boundary leaves
for the next stage when its call ends. A hop takes half a round trip, and the time of its bytes, which follow each other.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from functools import partial

from attrs import frozen

from dgr.artifact.speeds import HostSpeed, stage_seconds
from dgr.core.route import LayerRange

#: Of which chunks are multiples, and the least of them (dgr.client.pace).
_UNIT, _LEAST = 16, 32

__all__ = ["HopSpeed", "Pace", "RoutePace", "Workload"]


@frozen
class HopSpeed:
    """The network between two stages, or between a client and a stage."""

    #: Seconds, there and back.
    round_trip: float
    #: Bytes a second; infinity where it does not matter.
    bandwidth: float


@frozen
class Workload:
    """What a route is for."""

    #: Conversations that draw tokens at once.
    sessions: int
    #: Tokens of a prompt, and of a chunk of it.
    prompt: int
    chunk: int


@frozen
class Pace:
    """What is predicted; seconds."""

    #: One token's way around, alone.
    ring: float
    #: All sessions together, tokens a second.
    tokens_per_second: float
    #: From a prompt to its first token, alone.
    first_token: float
    #: Of each stage, head first: a decode step alone, and a chunk.
    decode: tuple[float, ...]
    chunk: tuple[float, ...]
    #: Tokens of such a chunk.
    chunk_tokens: int


@frozen
class RoutePace:
    """Predictions for cuts of one model over some hosts."""

    #: Of each stage's host, head first.
    speeds: Sequence[HostSpeed]
    #: Client to head, then each boundary, then tail to client: one more than stages.
    hops: Sequence[HopSpeed]
    kinds: Sequence[str]
    #: Bytes of one token's boundary.
    boundary: int

    def step(self, index: int, layers: LayerRange, sequences: int) -> float:
        """Seconds of a stage's decode step."""
        return stage_seconds(self.speeds[index], self.kinds, layers, sequences=sequences)

    def chunk(self, index: int, layers: LayerRange, tokens: int) -> float:
        """Seconds of a stage's chunk."""
        return stage_seconds(self.speeds[index], self.kinds, layers, tokens=tokens)

    def _wire(self, hop: int, tokens: int) -> float:
        """Seconds for which a hop is busy with boundaries; to and from the client there are none."""
        is_boundary = 0 < hop < len(self.hops) - 1
        return tokens * self.boundary / self.hops[hop].bandwidth if is_boundary else 0.0

    def ring(self, cuts: Sequence[LayerRange], sequences: int = 1) -> float:
        """Seconds of a token's way around, when ``sequences`` go together."""
        compute = sum(self.step(index, layers, sequences) for index, layers in enumerate(cuts))
        return compute + sum(hop.round_trip / 2 + self._wire(at, sequences) for at, hop in enumerate(self.hops))

    def rate(self, cuts: Sequence[LayerRange], sessions: int) -> float:
        """Tokens a second of ``sessions`` at once, in the number of groups that goes best, of sizes as equal as may be.

        Groups follow each other around; a round takes as long as the largest group's ring, or as the slowest stage or link
        needs for all of them.
        """

        def round_of(groups: int) -> float:
            size, larger = divmod(sessions, groups)

            def of_all(seconds: Callable[[int], float]) -> float:
                """Of all groups: ``larger`` of them have one session more."""
                return (groups - larger) * seconds(size) + (larger * seconds(size + 1) if larger else 0.0)

            steps = (of_all(partial(self.step, index, layers)) for index, layers in enumerate(cuts))
            wires = (of_all(partial(self._wire, hop)) for hop in range(len(self.hops)))
            return max(self.ring(cuts, size + bool(larger)), *steps, *wires)

        return sessions / min(round_of(groups) for groups in range(1, sessions + 1))

    def first_token(self, cuts: Sequence[LayerRange], prompt: int, chunk: int) -> float:
        """Seconds from a prompt to its first token: its chunks go through the stages one behind the other."""
        n_stages, window = len(cuts), len(cuts) + 1
        sizes = [min(chunk, prompt - begin) for begin in range(0, prompt, chunk)]
        stage_free, wire_free = [0.0] * n_stages, [0.0] * len(self.hops)
        ends: list[float] = []
        for number, size in enumerate(sizes):
            # The client holds back what is beyond the window, until it hears of the chunk that went before.
            now = 0.0 if number < window else ends[number - window] + self.hops[-1].round_trip / 2
            for index, layers in enumerate(cuts):
                wire_free[index] = max(now, wire_free[index]) + self._wire(index, size)
                now = wire_free[index] + self.hops[index].round_trip / 2
                stage_free[index] = now = max(now, stage_free[index]) + self.chunk(index, layers, size)
            ends.append(now)
        return ends[-1] + self.hops[-1].round_trip / 2

    def timely_chunk(self, cuts: Sequence[LayerRange], most: int, seconds: float) -> int:
        """Tokens of a chunk, up to ``most``, that no stage needs more than about ``seconds`` for; never below 32."""

        def slowest(tokens: int) -> float:
            return max(self.chunk(index, layers, tokens) for index, layers in enumerate(cuts))

        fitting = bisect.bisect_right(range(most + 1), seconds, lo=2, key=slowest) - 1
        return min(most, max(fitting // _UNIT * _UNIT, _LEAST))

    def predict(self, cuts: Sequence[LayerRange], load: Workload) -> Pace:
        """What the cuts would do."""
        return Pace(
            ring=self.ring(cuts),
            tokens_per_second=self.rate(cuts, load.sessions),
            first_token=self.first_token(cuts, load.prompt, load.chunk),
            decode=tuple(self.step(index, layers, 1) for index, layers in enumerate(cuts)),
            chunk=tuple(self.chunk(index, layers, min(load.chunk, load.prompt)) for index, layers in enumerate(cuts)),
            chunk_tokens=min(load.chunk, load.prompt),
        )
