"""What follows from the units: figures, verdicts, tables and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from dgr.selftest.learned.recall import VALUES, Kind
from dgr_bench.benchmark import Units, no_error
from dgr_bench.plots import BLUE, GREEN, GREY, RED, Axes, Plot, log_context
from dgr_bench.quality.damage import Damaged
from dgr_bench.quality.measurements import CHANGES, Changed, Quality, Recalled
from dgr_bench.quality.ways import REFERENCE
from dgr_bench.quartiles import percentile
from dgr_bench.reports import Section, table
from dgr_bench.results import Result
from dgr_bench.verdicts import Check, Tally

__all__ = ["checks", "metrics", "plots", "sections"]

_T = TypeVar("_T")

_COLOURS = (BLUE, RED, GREEN, GREY)
#: How much more a right answer must surprise, nats, where a component is damaged: it was 1.6 times as likely before.
LOST = 0.5
#: Recall below which nothing could be seen to be lost; chance is one answer in 26.
TELLING = 4 / len(VALUES)

_SAYS = """The same held-out text and the same questions in every way to run. Bits a byte: mean surprise at the text. Same top:
how often the likeliest token is the reference's. KL: divergence from the reference's distribution, nats, by row of the text.
The reference is exact numerics on one thread in one stage, weights and K in float32. Ways that promise its bits, or another
way's, are held to them; the others have their distance."""
_RECALL = """Share of questions whose likeliest answer is the stated value, by tokens between the two; one in 26 is chance.
PAIR: twelve statements sixteen tokens apart. MARK: four statements 128 apart, one in each HCA row."""
_CHANGED = """The same questions after the state was changed between statement and question; every change must give the bits of
no change."""
_DAMAGED = f"""The same questions after one component of the state was damaged in every layer: fewer answers must be right, and
the right ones must surprise more by {LOST} nats at least. Written back as it was, a state may lose nothing."""


def _found(units: Units, prefix: str, kind: type[_T]) -> Iterator[_T]:
    for name, unit in units.items():
        if name.startswith(prefix) and not unit.get("error"):
            yield msgspec.convert(unit, kind)


def _share(one: Recalled) -> float:
    return one.right / one.asked


def metrics(units: Units) -> dict[str, Any]:
    """Figures by way, by change and by damage."""
    return {
        "ways": [
            {
                "way": one.way,
                "tokens": one.tokens,
                "bits_per_byte": one.bits_per_byte,
                "same_top": sum(one.same_top) / len(one.same_top),
                "divergence": {
                    "mean": sum(one.divergence) / len(one.divergence),
                    "p99": percentile(one.divergence, 0.99),
                    "max": max(one.divergence),
                },
                "recall": {
                    kind: {str(each.distance): _share(each) for each in one.recalled if each.kind == kind}
                    for kind in Kind
                },
                "surprise": {
                    kind: {str(each.distance): each.surprise for each in one.recalled if each.kind == kind}
                    for kind in Kind
                },
                "seconds": one.seconds,
            }
            for one in _found(units, "quality/", Quality)
        ],
        "changes": [
            {"change": one.change, "sent_again": one.sent_again, "recall": {r.kind: _share(r) for r in one.recalled}}
            for one in _found(units, "change/", Changed)
        ],
        "damages": [
            {
                "damage": one.damage,
                "when": one.when,
                "rows": one.rows,
                "kind": one.damaged.kind,
                "recall": {"undamaged": _share(one.undamaged), "damaged": _share(one.damaged)},
                "surprise": {"undamaged": one.undamaged.surprise, "damaged": one.damaged.surprise},
                "answered_stale": one.answered_stale / one.damaged.asked,
            }
            for one in _found(units, "damage/", Damaged)
        ],
    }


def _digests(one: Quality) -> tuple[str, ...]:
    return (one.digest, *(each.digest for each in one.recalled))


def checks(units: Units, equals: Mapping[str, str], lost: bool) -> list[Check]:
    """Bits that are promised are there; a damaged component is seen. ``lost``: whether the model has learned to recall."""
    found = {one.way: one for one in _found(units, "quality/", Quality)}
    same = Tally("what promises equal bits gives them", "every row of the text and of every answer, by digest")
    for way, other in equals.items():
        if way in found and other in found:
            same.same(f"{way} beside {other}", _digests(found[way]), _digests(found[other]))
        else:
            same.hold(False, f"{way}: not measured")
    changes = {one.change: one for one in _found(units, "change/", Changed)}
    undisturbed = Tally(
        "a changed state recalls the same", "rows of every answer, by digest, beside those of no change"
    )
    for change in CHANGES[1:]:
        has, wants = (
            [each.digest for each in changes[name].recalled] if name in changes else None
            for name in (change, CHANGES[0])
        )
        undisturbed.hold(has is not None and has == wants, f"{change}: other answers, or none")
    verdicts = [no_error(units, "unit"), same.check(), undisturbed.check()]
    return verdicts + _damage_checks(units, lost)


def _damage_checks(units: Units, lost: bool) -> list[Check]:
    control = Tally("a state written back as it was loses nothing", "rows of every answer, by digest")
    seen = Tally("a damaged component is seen", f"other rows, fewer right answers, {LOST} nats more surprise")
    for one in _found(units, "damage/", Damaged):
        control.same(one.damage, one.untouched.digest, one.undamaged.digest)
        seen.hold(one.rows > 0, f"{one.damage}: no row was there to damage")
        seen.hold(one.damaged.digest != one.undamaged.digest, f"{one.damage}: the same rows")
        if lost:
            before, after = one.undamaged, one.damaged
            seen.hold(_share(before) >= TELLING, f"{one.damage}: recall is {_share(before):.0%}, too little to tell")
            risen = after.surprise - before.surprise
            seen.hold(
                after.right < before.right and risen >= LOST,
                f"{one.damage}: {after.right} of {before.right} answers are still right, {risen:.2f} nats less likely",
            )
    return [control.check(), seen.check()]


def sections(found: Mapping[str, Any]) -> list[Section]:
    """The tables."""
    parts: list[Section] = []
    cells: list[tuple[object, ...]]
    if rows := found["ways"]:
        heads = ("way", "bits a byte", "same top", "KL mean", "p99", "max")
        cells = [
            (
                row["way"],
                f"{row['bits_per_byte']:.4f}",
                f"{row['same_top']:.2%}",
                *(f"{row['divergence'][name]:.2e}" for name in ("mean", "p99", "max")),
            )
            for row in rows
        ]
        parts.append(Section("Text", (_SAYS, table(heads, cells))))
        tables = []
        for kind in Kind:
            distances = list(rows[0]["recall"][kind])
            cells = [(row["way"], *(f"{row['recall'][kind][at]:.0%}" for at in distances)) for row in rows]
            tables.append(table((f"{kind}, tokens back", *distances), cells))
        parts.append(Section("Recall", (_RECALL, *tables)))
    if changes := found["changes"]:
        heads_of_change = ("change", "tokens sent again", *Kind)
        cells = [
            (row["change"], row["sent_again"], *(f"{row['recall'][kind]:.0%}" for kind in Kind)) for row in changes
        ]
        parts.append(Section("Changes of state", (_CHANGED, table(heads_of_change, cells))))
    if damages := found["damages"]:
        heads_of_damage = (
            "component",
            "when",
            "asked",
            "recall",
            "damaged",
            "surprise",
            "damaged, nats",
            "stale answers",
        )
        cells = [
            (
                row["damage"],
                row["when"],
                row["kind"],
                *(f"{row['recall'][name]:.0%}" for name in ("undamaged", "damaged")),
                *(f"{row['surprise'][name]:.2f}" for name in ("undamaged", "damaged")),
                f"{row['answered_stale']:.0%}",
            )
            for row in damages
        ]
        parts.append(Section("Damaged state", (_DAMAGED, table(heads_of_damage, cells))))
    return parts


def _recall_plot(kind: Kind, rows: Sequence[Mapping[str, Any]]) -> Plot:
    def paint(axes: Axes) -> None:
        for index, row in enumerate(rows):
            points = [(int(at), share) for at, share in row["recall"][kind].items()]
            style = ("-", "--", ":", "-.")[index // len(_COLOURS) % 4]
            axes.plot(*zip(*points, strict=True), style, marker="o", color=_COLOURS[index % 4], label=row["way"])
        axes.axhline(1 / len(VALUES), color=GREY, linewidth=0.8)
        log_context(axes)
        axes.set_ylim(-0.03, 1.03)

    return Plot("Recall", f"recall-{kind}", f"Recall: {kind}", "tokens back", "share of right answers", paint)


def _divergence_plot(rows: Sequence[Mapping[str, Any]]) -> Plot:
    apart = [row for row in rows if row["divergence"]["max"] > 0]

    def paint(axes: Axes) -> None:
        for place, row in enumerate(reversed(apart)):
            axes.barh(place, row["divergence"]["mean"], color=BLUE)
        axes.set_yticks(range(len(apart)), [row["way"] for row in reversed(apart)])
        axes.set_xscale("log")

    return Plot("Text", "divergence", f"Mean divergence from {REFERENCE}", "nats a token", "", paint, (7.2, 5.2))


def plots(result: Result) -> list[Plot]:
    """Recall by distance, and divergence by way."""
    rows = result.metrics["ways"]
    if not rows:
        return []
    told = [row for row in rows if not row["way"].endswith(", split") and row["way"] != "exact, other chunks"]
    return [*(_recall_plot(kind, told) for kind in Kind), _divergence_plot(rows)]
