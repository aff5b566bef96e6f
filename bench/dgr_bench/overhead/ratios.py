"""Two sides that do the same work, round by round; what their speeds make, as numbers, verdicts, a table and a picture."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import msgspec
from attrs import frozen

from dgr_bench.benchmark import Group, Unit, Units
from dgr_bench.plots import BLUE, GREY, RED, Axes, Plot
from dgr_bench.quartiles import Quartiles, quartiles_of
from dgr_bench.reports import Section, table
from dgr_bench.verdicts import Check, Goal

#: Seconds that one run of one side took.
Timed: TypeAlias = Callable[[], Awaitable[float]]
#: Both sides, ready to run: ours first.
Sides: TypeAlias = tuple[Timed, Timed]


@frozen
class Comparison:
    """Two sides that do the same work."""

    name: str
    #: Tokens of one run.
    tokens: int
    rounds: int
    #: For the median of the ratios; None: it is shown, and nothing is asked of it.
    goal: Goal | None
    open: Callable[[], AbstractAsyncContextManager[Sides]]

    def group(self) -> Group:
        """Its rounds."""
        units = [Unit(self._unit(number), partial(self._round, number)) for number in range(self.rounds)]
        return Group(units, self._warm)

    def _unit(self, number: int) -> str:
        return f"{self.name}, round {number}"

    @asynccontextmanager
    async def _warm(self) -> AsyncIterator[Sides]:
        async with self.open() as sides:
            for side in sides:
                await side()
            yield sides

    async def _round(self, number: int, sides: Sides) -> dict[str, Any]:
        order = (0, 1) if number % 2 == 0 else (1, 0)
        seconds = {side: await sides[side]() for side in order}
        began = ("ours", "theirs")[order[0]]
        return {"tokens": self.tokens, "ours_s": seconds[0], "theirs_s": seconds[1], "began": began}

    def measured(self, units: Units) -> list[dict[str, Any]]:
        """The rounds that were measured to their end."""
        found = (units.get(self._unit(number), {}) for number in range(self.rounds))
        return [dict(unit) for unit in found if "ours_s" in unit]


@frozen
class Ratios:
    """What a benchmark compares."""

    compared: Sequence[Comparison]

    def metrics(self, units: Units) -> dict[str, Any]:
        """Quartiles of the ratios; and tokens a second of both sides, for a feeling of the size."""
        speed = {}
        for each in self.compared:
            if rounds := each.measured(units):
                speed[each.name] = {
                    "ratio": quartiles_of([unit["theirs_s"] / unit["ours_s"] for unit in rounds]),
                    "ours_tokens_per_s": quartiles_of([unit["tokens"] / unit["ours_s"] for unit in rounds]),
                    "theirs_tokens_per_s": quartiles_of([unit["tokens"] / unit["theirs_s"] for unit in rounds]),
                }
        return speed

    def checks(self, units: Units) -> list[Check]:
        """Every goal."""
        speed = self.metrics(units)
        return [
            each.goal.check(f"speed of {each.name}", speed[each.name]["ratio"])
            for each in self.compared
            if each.goal is not None and each.name in speed
        ]

    def _speeds(self, metrics: dict[str, Any]) -> list[tuple[Comparison, dict[str, Quartiles]]]:
        speed = msgspec.convert(metrics, dict[str, dict[str, Quartiles]])
        return [(each, speed[each.name]) for each in self.compared if each.name in speed]

    def section(self, metrics: dict[str, Any]) -> Section:
        """The table."""
        rows = [
            (
                each.name,
                f"{speed['ours_tokens_per_s'].median:.1f}",
                f"{speed['theirs_tokens_per_s'].median:.1f}",
                speed["ratio"],
                each.goal or "",
            )
            for each, speed in self._speeds(metrics)
        ]
        said = "Medians, with quartiles in brackets; ratios of speed are per round, above 1 the first side is faster."
        return Section(
            "Speed", (said, table(("ours / theirs", "ours, tokens/s", "theirs, tokens/s", "ratio", "goal"), rows))
        )

    def plot(self, metrics: dict[str, Any], name: str, title: str) -> Plot:
        """The ratios, and their goals."""
        speeds = list(reversed(self._speeds(metrics)))

        def paint(axes: Axes) -> None:
            for place, (each, speed) in enumerate(speeds):
                ratio = speed["ratio"]
                errors = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
                axes.barh(place, ratio.median, 0.6, color=BLUE, xerr=errors, ecolor=GREY, capsize=4)
                if each.goal is not None:
                    axes.plot([each.goal.value] * 2, [place - 0.4, place + 0.4], color=RED, linestyle="--")
            axes.set_yticks(range(len(speeds)), [each.name.replace(", ", "\n", 1) for each, _ in speeds])

        return Plot("Speed", name, title, "ratio of speed; goals are dashed", "", paint)
