"""Median and quartiles of repeated measurements, and goals for them."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Sequence

from attrs import frozen

from dgr_bench.results import Check

__all__ = ["Goal", "Quartiles", "quartiles_of"]


@frozen
class Quartiles:
    """What repeated measurements gave, in their own unit."""

    median: float
    #: First and third quartile.
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def quartiles_of(values: Sequence[float]) -> Quartiles:
    """Median and quartiles of at least one figure."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Quartiles(median, low, high, len(values))


@frozen
class Goal:
    """What a median must reach."""

    #: ``at least`` or ``at most``.
    bound: str
    value: float
    #: Of the measurements; empty for a ratio.
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.bound} {self.value:g}{self.unit and ' ' + self.unit}"

    def check(self, name: str, found: Quartiles) -> Check:
        """The verdict on the median."""
        holds = operator.ge if self.bound == "at least" else operator.le
        detail = f"median {found}{self.unit and ' ' + self.unit}, quartiles in brackets; goal {self}"
        return Check(name=name, passed=holds(found.median, self.value), cases=found.count, detail=detail)
