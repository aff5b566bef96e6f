"""The report of a drill: tables of losses and of the delayed ring, and their plots."""

from __future__ import annotations

from functools import partial

from dgr_bench.drill.fault_injection import FAULTS, Injection, Scenario
from dgr_bench.drill.metrics import Found
from dgr_bench.drill.ring import RingPoint
from dgr_bench.plots import BLUE, GREEN, GREY, RED, Axes, Plot
from dgr_bench.reports import Section, number, table
from dgr_bench.results import Result

_MARKERS = {"prefill": "o", "token 1": "s", "token n": "^", "cancel": "D", "twice": "v"}
_COLOURS = dict(zip(FAULTS, (RED, BLUE, GREEN, GREY), strict=True))


def tables(result: Result, found: Found, points: list[RingPoint], scenario: Scenario) -> list[Section]:
    """Losses, slow cables, the ring: what was measured of them."""
    sections = []
    if any(case.fault != "slow" for case, _ in found):
        sections.append(Section("Losses", (_losses(result), _cases(found, scenario))))
    if slow := result.metrics["slow"]:
        heads = ("fault/stage", "added, ms a token", "usual, ms a token", "slow, ms a token")
        rows = [
            (name, f"{times['added_ms']:g}", number(times["usual_ms"]), number(times["slow_ms"]))
            for name, times in slow.items()
        ]
        sections.append(Section("A slow cable", (table(heads, rows),)))
    if points:
        sections.append(Section("A delayed ring", (_ring(points),)))
    return sections


def _losses(result: Result) -> str:
    heads = ("fault/stage", "reported after, ms", "worst", "next token after, ms", "worst")
    cells = [(what, which) for what in ("detected_ms", "recovered_ms") for which in ("median", "worst")]
    rows = [
        (name, *(number(times.get(what, {}).get(which), 0) or "none" for what, which in cells))
        for name, times in result.metrics["losses"].items()
    ]
    return table(heads, rows)


def _cases(found: Found, scenario: Scenario) -> str:
    heads = ("case", "reported after, ms", "next token after, ms", "tokens re-prefilled", "outcome")
    rows = [
        (
            case.name(scenario),
            ", ".join(number(one.detected, 0, 1e3) or "never" for one in outcome.injections),
            ", ".join(number(one.recovered, 0, 1e3) or "never" for one in outcome.injections),
            ", ".join(map(str, outcome.reprefilled)) or "none",
            outcome.error or "answered",
        )
        for case, outcome in found
        if case.fault != "slow"
    ]
    return table(heads, rows)


def _ring(points: list[RingPoint]) -> str:
    heads = (
        "delay of a cable, ms", "around the ring, ms", "compute, ms", "compute after as much idleness, ms",
        "measured, ms a token", "over compute after idleness + delays", "over compute + delays", "tokens",
    )  # fmt: skip
    rows = [
        (
            *(f"{ms:g}" for ms in (one.delay_ms, one.added_ms)),
            *(f"{ms:.2f}" for ms in (one.usual_ms, one.rested_ms, one.delayed_ms)),
            *(f"{share:+.1%}" for share in (one.over_rested, one.over)),
            one.count,
        )
        for one in points
    ]
    return table(heads, rows)


# --- plots -----------------------------------------------------------------------------------------------------------


def plots(found: Found, points: list[RingPoint], scenario: Scenario) -> list[Plot]:
    """Losses by stage and fault; the ring over its delay."""
    drawn = []
    lost = [(case, outcome) for case, outcome in found if case.fault != "slow"]
    if lost:
        for stem, title, what in (
            ("detection", "A loss is reported", "from the fault to the pipeline's event, ms"),
            ("recovery", "The answer goes on", "from the fault to the next token, ms"),
        ):
            paint = partial(_paint_losses, lost, scenario, stem == "detection")
            drawn.append(Plot("Losses", stem, title, "stage and fault", what, paint))
    if points:
        title = f"Time per token over a delayed ring of {len(scenario.split) + 1} hops"
        x, y = "one-way delay of each cable, ms", "median time per token, ms"
        drawn.append(Plot("A delayed ring", "ring", title, x, y, partial(_paint_ring, points)))
    return drawn


def _paint_losses(lost: Found, scenario: Scenario, detection: bool, axes: Axes) -> None:
    def seconds(injection: Injection) -> float | None:
        return injection.detected if detection else injection.recovered

    places = sorted({(FAULTS.index(case.fault), case.stage) for case, _ in lost})
    for at, (moment, marker) in enumerate(_MARKERS.items()):
        cases = [(case, outcome) for case, outcome in lost if case.moment == moment]
        for case, outcome in cases:
            place = places.index((FAULTS.index(case.fault), case.stage)) + 0.1 * (at - 2)
            times = [1e3 * time for one in outcome.injections if (time := seconds(one)) is not None]
            axes.plot([place] * len(times), times, marker, color=_COLOURS[case.fault])
        if cases:
            axes.plot([], [], marker, color="black", label=moment)
    if detection:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlim(-0.6, len(places) - 0.4)
    axes.set_xticks(range(len(places)), [f"{scenario.stage_name(stage)}\n{FAULTS[fault]}" for fault, stage in places])
    axes.grid(visible=False, axis="x")


def _paint_ring(points: list[RingPoint], axes: Axes) -> None:
    delays, expected = [one.delay_ms for one in points], [one.rested_ms + one.added_ms for one in points]
    axes.plot(delays, expected, "-", color=GREY, label="compute after as much idleness + delays")
    axes.plot(delays, [one.delayed_ms for one in points], "o", color=BLUE, label="measured")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
