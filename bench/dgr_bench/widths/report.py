"""The report of ``dgr-bench widths``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dgr.core.units import human_bytes
from dgr.v4.hyper_parameters import V4_FLASH
from dgr_bench.plots import BLUE, GREEN, GREY, RED, Axes, Plot, log_context
from dgr_bench.reports import Section, number, table
from dgr_bench.results import Result
from dgr_bench.widths.parts import PARTS, REST
from dgr_bench.widths.plan import WidthsPlan

_COLOURS = {"SWA": GREY, "CSA": BLUE, "HCA": GREEN}

_LAYERS = """One layer as a stage. The roof is the larger of two times: all weights (experts as often as tokens hit them at
random) and all rows of state that are read, at the memory's rate; and all products, at the processor's peak for their kind of
number. Of the roof: how much of what the machine could do is done. A state that is not computed was filled with random rows."""

_PARTS = """Milliseconds by part, one operation at a time: their sum is somewhat more than the time above, which has no callback
between operations."""

_ALL = """**Not measured: computed.** So many times the time of a layer of each kind, and for a token the output head once.
A machine that holds all of them is not this one."""

_RANGE = """All layers of the file. Two stages run one after the other, so that their times add up. llama-bench computes in
native numerics, draws no token, and its times hold no start, load or warm-up."""

_LATENCIES = """Seconds, by the clock on the wall. A cancelled session waits for the chunk that is under way; a stage that is
told to stop does not."""


def tables(result: Result, plan: WidthsPlan) -> list[Section]:
    """The machine, layers, where their time goes, the range, memory, latencies, all layers."""
    found = result.metrics
    sections = [Section("The machine's limits", (_roofs(found["roofs"], plan),))]
    layers: Mapping[str, Sequence[Mapping[str, Any]]] = found["layers"]
    sections.append(Section("Layers", (_LAYERS, _times(layers, found["output"], plan))))
    sections.append(Section("Where the time goes", (_PARTS, *_parts(layers, plan))))
    sections.append(Section("The range on one stage and on two", (_RANGE, _range(found["range"], plan))))
    sections.append(Section("Memory and loading", (_loads(found["loads"], found["peaks"], result.units),)))
    sections.append(Section("Latencies", (_LATENCIES, _latencies(found, plan))))
    sections.append(Section("All 43 layers", (_ALL, _all_layers(found["all_layers"]))))
    return sections


def _roofs(roofs: Mapping[str, float], plan: WidthsPlan) -> str:
    names = {
        "read": ("memory, read", "GB/s"),
        "triad": ("memory, triad", "GB/s"),
        "f32": ("products of float32", "GFLOP/s"),
        "bf16": ("products of bfloat16", "GFLOP/s"),
        "int8": ("products of 8-bit integers", "GOP/s"),
    }
    rows = [
        (*names[kind], number(rate, 1, 1e-9) if rate else "no instruction known")
        for kind, rate in roofs.items()
        if kind in names
    ]
    limits = table((f"{plan.threads} thread{'s' * (plan.threads > 1)}", "unit", "at best"), rows)
    return f"{limits}\n\nMemory is read and written in buffers of {human_bytes(plan.roof_bytes)} in all."


def _share(row: Mapping[str, Any]) -> tuple[str, str, str]:
    if "roof_ms" not in row:
        return "", "", ""
    return number(row["roof_ms"], 3), row["bound"], f"{row['of_roof']:.0%}"


def _times(
    layers: Mapping[str, Sequence[Mapping[str, Any]]], output: Mapping[str, Any] | None, plan: WidthsPlan
) -> str:
    heads = (
        "kind", "layer", "context", "state", "ms a token", "roof", "bound by", "of the roof",
        f"ms a chunk of {plan.chunk}", "roof", "bound by", "of the roof", "filled / computed",
    )  # fmt: skip
    rows: list[tuple[object, ...]] = []
    for kind, measured in layers.items():
        for row in measured:
            state = "computed" if row["computed"] else "filled"
            decode, prefill = row["decode"], row["prefill"]
            cells = (number(decode["ms"], 3), *_share(decode), number(prefill["ms"], 1), *_share(prefill))
            ratio = number(row.get("filled_to_computed"), 3)
            rows.append((kind, plan.kinds[kind], row["position"], state, *cells, ratio))
    if output is not None:
        rows.append(("output head", "", "", "", number(output["ms"], 3), *_share(output), "", "", "", "", ""))
    return table(heads, rows)


def _parts(layers: Mapping[str, Sequence[Mapping[str, Any]]], plan: WidthsPlan) -> Iterator[str]:
    names = [*PARTS, REST]
    for what, words in (("decode", "ms a token"), ("prefill", f"ms a chunk of {plan.chunk}")):
        rows = []
        for kind, measured in layers.items():
            for row in measured:
                parts: Mapping[str, float] = row[what]["parts_ms"]
                cells = [number(parts.get(name), 2) for name in names]
                rows.append((kind, row["position"], *cells, number(sum(parts.values()), 2)))
        used = [at for at in range(len(names)) if any(row[2 + at] for row in rows)]
        kept = [(*row[:2], *(row[2 + at] for at in used), row[-1]) for row in rows]
        yield table((f"{words}: kind", "context", *(names[at] for at in used), "sum"), kept)


def _range(found: Mapping[str, Any], plan: WidthsPlan) -> str:
    names = {"whole": "one stage", "split": "two stages", "upstream": "llama-bench"}
    rows = [
        (
            names[name],
            number(row["decode_ms"], 2),
            number(row["prefill_ms"], 2),
            number(row.get("load_s"), 1),
            human_bytes(row["resident"]) if "resident" in row else "",
        )
        for name, row in found.items()
    ]
    heads = (f"layers {plan.range}", "ms a token", f"ms a token of a chunk of {plan.chunk}", "load, s", "resident")
    return table(heads, rows)


def _loads(
    loads: Mapping[str, Mapping[str, Any]], peaks: Mapping[str, int], units: Mapping[str, Mapping[str, Any]]
) -> str:
    heads = (
        "kind", "weights", "state", "compute", "resident", "peak while loading", "peak", "load from disk, s", "GB/s",
        "load from cache, s", "GB/s",
    )  # fmt: skip
    rows = []
    for kind, one in loads.items():
        resident = one["resident_loaded"] - one["resident_before"]
        most = ["" if peak is None else human_bytes(peak) for peak in (one["peak_loading"], peaks.get(kind))]
        sizes = [human_bytes(size) for size in (one["weights"], sum(one["state"].values()), one["compute"], resident)]
        rates = [cell for how in ("cold_s", "warm_s") for cell in (number(one[how], 2), number(_rate(one, how), 2))]
        rows.append((kind, *sizes, *most, *rates))
    parts = [table(heads, rows)]
    file = units.get("file", {})
    if "bytes" in file:
        written = f", written in {file['write_s']:.0f} s" if file["write_s"] is not None else ""
        parts.append(
            f"The file: {human_bytes(file['bytes'])}{written}; read for its identity in {file['digest_s']:.1f} s"
            f" ({file['bytes'] / file['digest_s'] / 1e9:.2f} GB/s)."
        )
    return "\n\n".join(parts)


def _rate(one: Mapping[str, Any], how: str) -> float:
    return float(1e-9 * one["weights"] / one[how])


def _latencies(found: Mapping[str, Any], plan: WidthsPlan) -> str:
    heads = ("kind", "context", "state's digest", "clearing", "a chunk", "told to stop", "admission")
    rows = []
    for kind, measured in found["layers"].items():
        load, abort = found["loads"].get(kind, {}), found["aborts"].get(kind)
        for row in measured:
            last = row["position"] == plan.at(plan.contexts[-1])
            rows.append(
                (
                    kind,
                    row["position"],
                    number(row["frontier"], 4),
                    number(row["clear"], 4),
                    number(row["prefill"]["ms"], 3, 1e-3),
                    number(abort, 4) if last else "",
                    number(load.get("admission_s"), 3) if last else "",
                )
            )
    return table(heads, rows)


def _all_layers(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            row["context"],
            number(row["decode_ms"], 0),
            number(1e3 / row["decode_ms"], 2),
            number(row["prefill_ms"], 0),
            number(1e3 / row["prefill_ms"], 2),
        )
        for row in found
    ]
    counts = ", ".join(f"{count} {kind}" for kind, count in found[0]["layers"].items()) if found else ""
    assert not found or sum(found[0]["layers"].values()) == V4_FLASH.n_layers
    heads = ("context", "decode, ms a token", "tokens/s", "prefill, ms a token", "tokens/s")
    return (
        f"{counts}.\n\n{table(heads, rows)}"
        if found
        else "The file does not hold every kind of layer and the output head."
    )


# --- plots -----------------------------------------------------------------------------------------------------------


def plots(result: Result, plan: WidthsPlan) -> list[Plot]:
    """A token's time over context, by kind of layer, with its roof."""
    layers = {kind: rows for kind, rows in result.metrics["layers"].items() if rows}
    if not layers:
        return []

    def paint(what: str, axes: Axes) -> None:
        for kind, rows in layers.items():
            contexts = [max(1, row["position"]) for row in rows]
            colour = _COLOURS.get(kind, RED)
            axes.plot(contexts, [row[what]["ms"] for row in rows], "-o", color=colour, label=kind)
            if all("roof_ms" in row[what] for row in rows):
                axes.plot(contexts, [row[what]["roof_ms"] for row in rows], ":", color=colour, label=f"{kind}, roof")
        log_context(axes)
        axes.set_yscale("log")

    return [
        Plot(
            "Layers", "decode", "A token through one layer", "context (tokens)", "milliseconds",
            lambda axes: paint("decode", axes),
        ),
        Plot(
            "Layers", "prefill", f"A chunk of {plan.chunk} tokens through one layer", "context (tokens)", "milliseconds",
            lambda axes: paint("prefill", axes),
        ),
    ]  # fmt: skip
