"""Distances as quantiles, a table and a picture; and the one thing among them that must hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dgr_bench.benchmark import Units
from dgr_bench.distance.measurements import CONTROL, Distance
from dgr_bench.plots import BLUE, GREEN, GREY, RED, Axes, Plot
from dgr_bench.quartiles import percentile
from dgr_bench.reports import Section, table
from dgr_bench.verdicts import Check, judge

_HEADING = "Between numerics"
_SAYS = """The same given tokens in exact numerics on one thread and in other ways, by row of logits: the largest difference
of a logit, the Kullback-Leibler divergence of the distributions in nats, and how often the likeliest token is the same.
Nothing here passes or fails: native numerics promise no equality with exact ones. A fixture's random weights make near-ties
of experts and of the indexer's rows, so single rows are off by units where a token took another way; the median shows the
arithmetic."""
_SHARES = (0.5, 0.9, 0.99, 1.0)
_COLOURS = (BLUE, RED, GREEN, GREY)


def _distances(units: Units) -> list[Distance]:
    found = (unit for name, unit in units.items() if name.startswith("distance/") and not unit.get("error"))
    return [msgspec.convert(unit, Distance) for unit in found]


def distance_metrics(units: Units) -> list[dict[str, Any]]:
    """Quantiles by model and way."""
    return [
        {
            "model": one.model,
            "way": one.way,
            "devices": one.devices,
            "rows": len(one.difference),
            "deviation": one.deviation,
            "difference": {f"p{100 * share:g}": percentile(one.difference, share) for share in _SHARES},
            "divergence": {f"p{100 * share:g}": percentile(one.divergence, share) for share in _SHARES},
            "same_top": sum(one.same_top),
            "seconds": one.seconds,
        }
        for one in _distances(units)
    ]


def reference_check(units: Units) -> Check:
    """Exact numerics in other chunks are at no distance: what is measured is not the measuring."""
    tally = [
        (one.model, "" if max(one.difference) == 0 else f"is off by {max(one.difference):.3g}")
        for one in _distances(units)
        if one.way == CONTROL
    ]
    failed = [(name, str(unit["error"])) for name, unit in units.items() if CONTROL in name and unit.get("error")]
    return judge("the reference of distances is exact", "exact numerics in other chunks, row by row", tally + failed)


def distance_sections(rows: Sequence[Mapping[str, Any]]) -> list[Section]:
    """The section of the report; none without distances."""
    if not rows:
        return []
    heads = (
        "model",
        "way",
        "rows",
        "same top",
        "logit p50",
        "p90",
        "p99",
        "max",
        "of deviation",
        "KL p50",
        "p99",
        "max",
    )
    cells = [
        (
            row["model"],
            row["way"],
            row["rows"],
            f"{row['same_top'] / row['rows']:.1%}",
            *(f"{row['difference'][share]:.3g}" for share in ("p50", "p90", "p99", "p100")),
            f"{row['deviation']:.3g}",
            *(f"{row['divergence'][share]:.3g}" for share in ("p50", "p99", "p100")),
        )
        for row in rows
    ]
    return [Section(_HEADING, (_SAYS, table(heads, cells)))]


def distance_plots(rows: Sequence[Mapping[str, Any]], units: Units) -> list[Plot]:
    """The rows of each way in ascending order of their distance; one line a model."""
    ways = list(dict.fromkeys(row["way"] for row in rows if row["way"] != CONTROL))
    found = _distances(units)

    def paint_of(way: str) -> Any:
        def paint(axes: Axes) -> None:
            for index, one in enumerate(one for one in found if one.way == way):
                values = sorted(one.difference)
                shares = [(at + 1) / len(values) for at in range(len(values))]
                style = ("-", "--", ":")[index // len(_COLOURS) % 3]
                axes.plot(shares, values, style, color=_COLOURS[index % len(_COLOURS)], label=one.model)
            axes.set_yscale("symlog", linthresh=1e-4)

        return paint

    return [
        Plot(
            _HEADING,
            f"distance-{'-'.join(''.join(c if c.isalnum() else ' ' for c in way).lower().split())}",
            f"{way}: distance from exact numerics",
            "share of rows",
            "largest difference of a logit",
            paint_of(way),
        )
        for way in ways
    ]
