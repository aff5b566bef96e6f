"""Engines that do wrong on purpose: each stands for a mistake that a proof must catch.

They wrap any engine but a head, and change what comes in.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import Any

from attrs import evolve

from dgr.core.values import StateSummary
from dgr.engine.base import Output, ShardEngine, Work

__all__ = ["BadResidual", "Mutant", "OffByOne", "StaleChunk", "StaleRow", "SwappedSideband"]


class Mutant:
    """Stands in for an engine; what it does not change goes through. This one changes nothing."""

    def __init__(self, engine: ShardEngine) -> None:
        self.engine = engine
        #: Bytes of a row of the residual that comes in.
        self.width = 4 * engine.describe().width_in

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def change(self, work: Work) -> Work:
        """What the stage gets in place of its work."""
        return work

    def run(self, batch: Sequence[Work]) -> list[Output]:
        return self.engine.run([self.change(work) for work in batch])

    # Who works in pieces must not get round what a mutant does to the whole.

    def close_pieces(self, slot: int) -> Generator[None, None, None]:
        self.close(slot)
        yield from ()

    def fork_pieces(self, source: int, target: int) -> Generator[None, None, None]:
        self.fork(source, target)
        yield from ()

    def state_pieces(self, slot: int) -> Generator[StateSummary | None, None, None]:
        yield self.state_summary(slot)


def _rows(work: Work) -> bytearray:
    return bytearray(work.residual or b"")


class SwappedSideband(Mutant):
    """Two neighbours' token ids change places on their way, the residual rows do not."""

    def change(self, work: Work) -> Work:
        tokens = list(work.tokens)
        if len(tokens) > 1:
            tokens[0], tokens[1] = tokens[1], tokens[0]
        return evolve(work, tokens=tokens)


class OffByOne(Mutant):
    """Every position of the stage is one too high: it has seen a token that nobody sent."""

    def change(self, work: Work) -> Work:
        if work.position == 0:
            self.engine.run([evolve(work, tokens=work.tokens[:1], residual=bytes(_rows(work)[: self.width]))])
        return evolve(work, position=work.position + 1)


class StaleRow(Mutant):
    """One row of the residual is the one before it again."""

    def change(self, work: Work) -> Work:
        rows = _rows(work)
        if len(work.tokens) > 1:
            rows[self.width : 2 * self.width] = rows[: self.width]
        return evolve(work, residual=bytes(rows))


class StaleChunk(Mutant):
    """The residual is that of the chunk before, when that has the same size."""

    def __init__(self, engine: ShardEngine) -> None:
        super().__init__(engine)
        self._before = b""

    def change(self, work: Work) -> Work:
        before, self._before = self._before, bytes(_rows(work))
        return evolve(work, residual=before) if len(before) == len(self._before) else work


class BadResidual(Mutant):
    """One value of the residual of one token is another one, as long as :attr:`armed`."""

    def __init__(self, engine: ShardEngine, value: float, token: int) -> None:
        super().__init__(engine)
        self.value = value
        #: The token id whose row is spoilt.
        self.token = token
        self.armed = True

    def change(self, work: Work) -> Work:
        if not self.armed or self.token not in work.tokens:
            return work
        rows = _rows(work)
        struct.pack_into("<f", rows, self.width * list(work.tokens).index(self.token) + 4, self.value)
        return evolve(work, residual=bytes(rows))
