"""The report of a drill: tables of losses and of the delayed ring, and their plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dgr_bench import reports
from dgr_bench.drill.fault_injection import FAULTS, DrillCase, Outcome, Scenario
from dgr_bench.drill.ring import RingPoint
from dgr_bench.plots import BLUE, GREEN, GREY, RED, draw
from dgr_bench.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["write"]

_MARKERS = {"prefill": "o", "token 1": "s", "token n": "^", "cancel": "D", "twice": "v"}
_COLOURS = dict(zip(FAULTS, (RED, BLUE, GREEN, GREY), strict=True))


def write(
    result: Result, folder: Path, found: list[tuple[DrillCase, Outcome]], points: list[RingPoint], scenario: Scenario
) -> Path:
    """Write ``report.md`` and the plots."""
    parts = [reports.heading(result, "Drill"), reports.verdicts(result)]
    if any(case.fault != "slow" for case, _ in found):
        parts += ["## Losses", _losses(result), _pictures(folder, found, scenario), _cases(found, scenario)]
    if result.metrics["slow"]:
        parts += ["## A slow cable", _slow(result)]
    if points:
        parts += ["## A delayed ring", _ring(points), _ring_picture(folder, points, len(scenario.split) + 1)]
    parts += ["## Machine", reports.machine(result)]
    return reports.write_report(folder, *parts)


def _losses(result: Result) -> str:
    rows = []
    for name, times in result.metrics["losses"].items():
        cells = [
            times.get(what, {}).get(which) for what in ("detected_ms", "recovered_ms") for which in ("median", "worst")
        ]
        rows.append((name, *("none" if cell is None else f"{cell:.0f}" for cell in cells)))
    heads = ("act/stage", "reported after, ms", "worst", "next token after, ms", "worst")
    return reports.table(heads, rows)


def _cases(found: list[tuple[DrillCase, Outcome]], scenario: Scenario) -> str:
    rows = []
    for case, outcome in found:
        reported = ", ".join(
            "never" if one.detected is None else f"{1e3 * one.detected:.0f}" for one in outcome.injections
        )
        back = ", ".join(f"{1e3 * one.recovered:.0f}" for one in outcome.injections if one.recovered is not None)
        again = ", ".join(map(str, outcome.reprefilled)) or "none"
        if case.fault != "slow":
            rows.append((case.name(scenario), reported, back or "none", again, outcome.error or "answered"))
    heads = ("case", "reported after, ms", "next token after, ms", "tokens re-prefilled", "outcome")
    return reports.table(heads, rows)


def _slow(result: Result) -> str:
    rows = [
        (name, f"{times['added_ms']:g}", f"{times['usual_ms']:.1f}", f"{times['slow_ms']:.1f}")
        for name, times in result.metrics["slow"].items()
    ]
    return reports.table(("act/stage", "added, ms a token", "usual, ms a token", "slow, ms a token"), rows)


def _ring(points: list[RingPoint]) -> str:
    rows = [
        (
            f"{one.delay_ms:g}",
            f"{one.added_ms:g}",
            f"{one.usual_ms:.2f}",
            f"{one.rested_ms:.2f}",
            f"{one.delayed_ms:.2f}",
            f"{one.over_rested:+.1%}",
            f"{one.over:+.1%}",
            one.count,
        )
        for one in points
    ]
    heads = (
        "delay of a cable, ms",
        "around the ring, ms",
        "compute, ms",
        "compute after as much idleness, ms",
        "measured, ms a token",
        "over compute after idleness + delays",
        "over compute + delays",
        "tokens",
    )
    return reports.table(heads, rows)


def _pictures(folder: Path, found: list[tuple[DrillCase, Outcome]], scenario: Scenario) -> str:
    pictures = []
    for stem, title, what in (
        ("detection", "A loss is reported", "from the act to the pipeline's event, ms"),
        ("recovery", "The answer goes on", "from the act to the next token, ms"),
    ):
        lost = [(case, outcome) for case, outcome in found if case.fault != "slow"]

        def paint(axes: Axes, stem: str = stem, lost: list[tuple[DrillCase, Outcome]] = lost) -> None:
            places = sorted({(FAULTS.index(case.fault), case.stage) for case, _ in lost})
            for moment, marker in _MARKERS.items():
                spots = [
                    (places.index((FAULTS.index(case.fault), case.stage)), 1e3 * seconds, case.fault)
                    for case, outcome in lost
                    for one in outcome.injections
                    if case.moment == moment
                    and (seconds := one.detected if stem == "detection" else one.recovered) is not None
                ]
                shift = 0.1 * (list(_MARKERS).index(moment) - 2)
                for act in {act for _, _, act in spots}:
                    xs, ys = zip(*((x + shift, y) for x, y, of in spots if of == act), strict=True)
                    axes.plot(xs, ys, marker, color=_COLOURS[act])
                if spots:
                    axes.plot([], [], marker, color="black", label=moment)
            if stem == "detection":
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            axes.set_xlim(-0.6, len(places) - 0.4)
            names = [f"{scenario.stage_name(stage)}\n{FAULTS[act]}" for act, stage in places]
            axes.set_xticks(range(len(places)), names)
            axes.grid(visible=False, axis="x")

        path = draw(folder, stem, title, "stage and act", what, paint)
        pictures.append(reports.picture(path, f"{title}: {what}, by stage and act"))
    return "\n".join(pictures)


def _ring_picture(folder: Path, points: list[RingPoint], hops: int) -> str:
    def paint(axes: Axes) -> None:
        delays = [one.delay_ms for one in points]
        axes.plot(
            delays,
            [one.rested_ms + one.added_ms for one in points],
            "-",
            color=GREY,
            label="compute after as much idleness + delays",
        )
        axes.plot(delays, [one.delayed_ms for one in points], "o", color=BLUE, label="measured")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)

    title = f"Time per token over a delayed ring of {hops} hops"
    path = draw(folder, "ring", title, "one-way delay of each cable, ms", "median time per token, ms", paint)
    return reports.picture(path, title)
