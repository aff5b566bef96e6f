"""What repeated measurements come to: medians with quartiles, percentiles, the line of a time over context."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from attrs import frozen

#: Context in tokens -> seconds a token, in the order in which tokens were drawn.
Times: TypeAlias = Mapping[int, Sequence[float]]


class Quartiles(msgspec.Struct, frozen=True):
    """Repeated measurements, in their own unit."""

    median: float
    #: First and third quartile.
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return format(self)

    def __format__(self, form: str) -> str:
        form = form or ".3f"
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


def quartiles_of(values: Sequence[float]) -> Quartiles:
    """Median and quartiles of at least one number."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Quartiles(middle, low, high, len(values))


def median(values: Iterable[float]) -> float:
    """The median of some numbers; NaN of none."""
    numbers = list(values)
    return float(statistics.median(numbers)) if numbers else math.nan


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all do not exceed (nearest rank); NaN of none."""
    return float(np.quantile(values, share, method="inverted_cdf")) if values else math.nan


@frozen
class Line:
    """Median time per token over context, least squares."""

    #: Milliseconds that a thousand tokens of context add to a token.
    slope_ms: float
    #: Milliseconds of a token without context.
    base_ms: float

    def at(self, context: int) -> float:
        """Milliseconds of a token at a context."""
        return self.base_ms + self.slope_ms * context / 1000


def line_over(times: Times) -> Line:
    """The line through the medians; NaN of fewer than two contexts."""
    if len(times) < 2:
        return Line(math.nan, math.nan)
    contexts, medians = [context / 1000 for context in times], [1e3 * median(seconds) for seconds in times.values()]
    return Line(*statistics.linear_regression(contexts, medians))
