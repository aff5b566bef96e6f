"""Engines that do wrong on purpose: each stands for a mistake that a proof must catch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from dgr.engine.base import Output, ShardEngine, Work


class Mutant:
    """Stands in for an engine; what it does not change goes through."""

    def __init__(self, engine: ShardEngine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def change(self, work: Work) -> Work:
        return work

    def run(self, batch: Sequence[Work]) -> list[Output]:
        return self.engine.run([self.change(work) for work in batch])


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
            width = 4 * self.engine.describe().width_in
            self.engine.run([evolve(work, tokens=work.tokens[:1], residual=bytes(memoryview(work.residual)[:width]))])
        return evolve(work, position=work.position + 1)


class StaleRow(Mutant):
    """One row of the residual is the one before it again."""

    def change(self, work: Work) -> Work:
        width = 4 * self.engine.describe().width_in
        if len(work.tokens) < 2:
            return work
        rows = bytearray(work.residual)
        rows[width : 2 * width] = rows[:width]
        return evolve(work, residual=bytes(rows))


class StaleChunk(Mutant):
    """The residual is that of the chunk before, when that has the same size."""

    def __init__(self, engine: ShardEngine) -> None:
        super().__init__(engine)
        self.before: bytes | None = None

    def change(self, work: Work) -> Work:
        before, self.before = self.before, bytes(work.residual)
        same = before is not None and len(before) == len(self.before)
        return evolve(work, residual=before) if same else work
