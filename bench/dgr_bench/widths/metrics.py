"""What the units of ``dgr-bench widths`` make: times beside the machine's limits, all layers together, verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dgr import Artifact
from dgr.v4.hyper_parameters import V4_FLASH, LayerKind
from dgr_bench.benchmark import Units, no_error
from dgr_bench.quartiles import median
from dgr_bench.verdicts import Check, judge
from dgr_bench.widths.plan import WidthsPlan
from dgr_bench.widths.roofline import Demand, demand_of, output_demand


def metrics(plan: WidthsPlan, units: Units, artifact: Artifact | None) -> dict[str, Any]:
    """Figures by kind of layer and context; without the model there are no limits to compare with."""
    roofs = {name: float(rate) for name, rate in units.get("roofs", {}).items() if name != "error"}
    layers = {kind: list(_contexts(plan, units, kind, artifact, roofs)) for kind in plan.kinds}
    output = _output(units, artifact, roofs)
    return {
        "roofs": roofs,
        "layers": layers,
        "output": output,
        "range": _range(plan, units),
        "loads": {kind: dict(unit) for kind in plan.kinds if "cold_s" in (unit := units.get(f"load/{kind}", {}))},
        "peaks": {kind: max(peaks) for kind in plan.kinds if (peaks := list(_peaks(plan, units, kind)))},
        "aborts": {kind: units.get(f"abort/{kind}", {}).get("abort_s") for kind in plan.kinds},
        "all_layers": list(_all_layers(plan, layers, output)),
    }


def _beside(seconds: float, demand: Demand, roofs: Mapping[str, float]) -> dict[str, Any]:
    """A time and its roof, the larger of what memory and what computing takes at best."""
    memory, computing = demand.seconds(roofs)
    roof = max(memory, computing)
    return {
        "ms": 1e3 * seconds,
        "roof_ms": 1e3 * roof,
        "bound": "memory" if memory >= computing else "computing",
        "of_roof": roof / seconds,
        "bytes": demand.n_bytes,
        "operations": sum(demand.operations.values()),
    }


def _contexts(
    plan: WidthsPlan, units: Units, kind: str, artifact: Artifact | None, roofs: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    for context in plan.contexts:
        unit = units.get(f"{kind}/{context}", {})
        if "prefill_s" not in unit:
            continue
        row: dict[str, Any] = {"context": context, "position": unit["position"], "computed": unit["computed"]}
        for what, batch, at in (
            ("decode", 1, unit["position"]),
            ("prefill", plan.chunk, unit["prefill_position"]),
        ):
            seconds = median(unit[f"{what}_s"])
            row[what] = {"ms": 1e3 * seconds}
            if artifact is not None and roofs:
                row[what] = _beside(
                    seconds, demand_of(artifact.hp, artifact.tensors, plan.kinds[kind], batch, at), roofs
                )
            row[what]["parts_ms"] = {part: 1e3 * taken for part, taken in unit[f"{what}_ops"].items()}
        if "filled_decode_s" in unit:
            row["filled_to_computed"] = median(unit["filled_decode_s"]) / median(unit["decode_s"])
        row |= {name: unit[f"{name}_s"] for name in ("frontier", "clear", "place")}
        yield row


def _peaks(plan: WidthsPlan, units: Units, kind: str) -> Iterator[int]:
    """Most resident memory, bytes, at each context."""
    for name in _names(plan, kind):
        if (peak := units.get(name, {}).get("peak")) is not None:
            yield peak


def _output(units: Units, artifact: Artifact | None, roofs: Mapping[str, float]) -> dict[str, Any] | None:
    unit = units.get("output", {})
    if "with_s" not in unit:
        return None
    seconds = median([ours - without for ours, without in zip(unit["with_s"], unit["without_s"], strict=True)])
    if artifact is None or not roofs:
        return {"ms": 1e3 * seconds}
    return _beside(seconds, output_demand(artifact.hp, artifact.tensors), roofs)


def _range(plan: WidthsPlan, units: Units) -> dict[str, Any]:
    """The range on one stage, on two, and in llama-bench."""
    found: dict[str, Any] = {}
    for name in ("whole", "split"):
        if "prefill_s" in (unit := units.get(name, {})):
            found[name] = {
                "decode_ms": 1e3 * median(unit["decode_s"]),
                "prefill_ms": 1e3 * unit["prefill_s"] / plan.chunk,
                "load_s": unit["load_s"],
                "resident": unit["resident"],
            }
    if "prefill_s" in (unit := units.get("upstream", {})):
        found["upstream"] = {
            "decode_ms": 1e3 * unit["decode_s"] / plan.decode,
            "prefill_ms": 1e3 * unit["prefill_s"] / plan.chunk,
        }
    return found


def _all_layers(
    plan: WidthsPlan, layers: Mapping[str, list[dict[str, Any]]], output: dict[str, Any] | None
) -> Iterator[dict[str, Any]]:
    """The published schedule, by arithmetic: so many layers of each kind, and the output head once a token."""
    counts = {kind.value: len(V4_FLASH.layers_of(kind, V4_FLASH.whole)) for kind in LayerKind}
    if set(layers) != set(counts) or output is None:
        return
    by_context = {kind: {row["context"]: row for row in rows} for kind, rows in layers.items()}
    for context in plan.contexts:
        rows = {kind: found.get(context) for kind, found in by_context.items()}
        if any(row is None for row in rows.values()):
            continue
        total: dict[str, Any] = {"context": context, "layers": counts}
        for what, batch in (("decode", 1), ("prefill", plan.chunk)):
            total[f"{what}_ms"] = sum(
                counts[kind] * row[what]["ms"] for kind, row in rows.items() if row is not None
            ) / batch + (output["ms"] if batch == 1 else 0.0)
        yield total


# --- verdicts --------------------------------------------------------------------------------------------------------


def checks(plan: WidthsPlan, units: Units) -> list[Check]:
    """The verdicts on all units."""
    wanted = {name: units.get(name, {"error": "not measured"}) for name in unit_names(plan)}
    bits = judge("two stages give what one gives", "bits of everything that comes out", _bits(units))
    return [
        no_error(wanted, "unit"),
        *[bits] * (len(plan.range) > 1),
        judge("what is allocated is what the formulae say", "bytes of weights and of state", _bytes(plan, units)),
        judge("state has the rows of its tokens", "rows of every component", _rows(plan, units)),
    ]


def unit_names(plan: WidthsPlan) -> list[str]:
    """Every unit of a plan."""
    of_kinds = [name for kind in plan.kinds for name in (f"load/{kind}", *_names(plan, kind), f"abort/{kind}")]
    output = ["output"] * (plan.range.end == plan.n_layers)
    both = ["whole", "split"] * (len(plan.range) > 1)
    return ["file", "roofs", *of_kinds, *output, *both, *["upstream"] * plan.upstream]


def _names(plan: WidthsPlan, kind: str) -> list[str]:
    return [f"{kind}/{context}" for context in plan.contexts]


def _bits(units: Units) -> Iterator[tuple[str, str]]:
    whole, split = (units.get(name, {}).get("digests", []) for name in ("whole", "split"))
    steps = max(len(whole), len(split), 1)
    for at in range(steps):
        ours, wants = (of[at] if at < len(of) else "nothing" for of in (split, whole))
        yield f"step {at}", "" if ours == wants != "nothing" else f"{ours}, not {wants}"


def _bytes(plan: WidthsPlan, units: Units) -> Iterator[tuple[str, str]]:
    for kind in plan.kinds:
        unit = units.get(f"load/{kind}", {})
        if "state" not in unit:
            continue
        pairs = {"weights": (unit["weights"], unit["weights_wanted"])}
        pairs |= {name: (unit["state"].get(name), wants) for name, wants in unit["state_wanted"].items()}
        for name, (has, wants) in pairs.items():
            yield f"{kind}, {name}", "" if has == wants else f"{has} bytes, not {wants}"


def _rows(plan: WidthsPlan, units: Units) -> Iterator[tuple[str, str]]:
    for kind in plan.kinds:
        for name in _names(plan, kind):
            unit = units.get(name, {})
            for part, wants in unit.get("rows_wanted", {}).items():
                has = unit["rows"].get(part)
                yield f"{name}, {part}", "" if has == [wants, wants] else f"{has} rows, not {wants}"
