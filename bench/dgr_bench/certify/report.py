"""A certificate as people read it: its tables and its plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dgr.core.units import human_bytes
from dgr_bench.distance.report import distance_plots, distance_sections
from dgr_bench.plots import BLUE, GREEN, GREY, RED, Axes, Plot, curve, log_context
from dgr_bench.reports import Section, number, table
from dgr_bench.results import Result

_LIMITS = """A certificate speaks of the artifact, the kernels (by fingerprint), the split and the lengths named here, and of
nothing else. It compares stages with the whole model of the same build: that this build computes what upstream's does is
shown by the tests against the unpatched pin. Times are of this machine under the load stated below; compare ratios."""

_CANARY = """Digests of every component's live rows after prompt and answer, by length and stage; `dgr-bench compare` holds two
certificates against each other part by part."""

_STATE, _TIME, _MEMORY = "State over context", "Time over context", "Memory by context size"

Rows = Sequence[Mapping[str, Any]]


def tables(result: Result) -> list[Section]:
    """The sections of the report."""
    metrics = result.metrics
    open_ends = "\n".join(f"- {line}" for line in metrics["not_certified"])
    left_open = ("Not certified by this profile:", open_ends) if open_ends else ()
    sections = [
        Section("What it says", (_LIMITS, *left_open)),
        Section(_STATE),
        Section(_TIME, (_slopes(metrics["decode_slope"]), _lengths(metrics["lengths"]))),
        Section(_MEMORY, (_memory(metrics["memory"]),)),
        Section("Cancellation, clean-up", _cancellation(metrics)),
    ]
    if metrics["distances"]:
        sections.append(Section("Distances in native numerics", (_distances(metrics["distances"]),)))
    sections += distance_sections(metrics.get("between_numerics", []))
    sections += [
        Section("Canary", (_CANARY, _canary(metrics["canary"]))),
        Section("What was locked", (_json_table(result.plan),)),
    ]
    # What the real-model lane recorded besides.
    facts = {name: value for name in _FACTS if (value := result.subject.get(name))}
    return sections + ([Section("What was run", (_json_table(facts),))] if facts else [])


_FACTS = ("files", "split_digests", "split_bytes", "drivers", "network", "given")


def _json_table(values: Mapping[str, Any]) -> str:
    rows = [(name, f"`{msgspec.json.encode(value).decode()}`") for name, value in values.items()]
    return table(("what", "value"), rows)


def _slopes(slopes: Mapping[str, float | None]) -> str:
    split, whole = slopes["split_s_per_1000"], slopes["whole_s_per_1000"]
    if split is None:
        return "No slope: it takes two lengths of 500 tokens or more."
    text = f"A decode step grows by {1e3 * split:.2f} ms for each thousand tokens of context through the stages"
    if whole is None:
        return f"{text}."
    ratio = f"ratio {split / whole:.2f}"
    return f"{text}, by {1e3 * whole:.2f} ms in the whole model (least squares over the medians; {ratio})."


def _bytes(value: int | None) -> str:
    return "" if value is None else human_bytes(value)


def _ms(seconds: float | None) -> str:
    return number(seconds, 1, 1e3)


def _lengths(lengths: Rows) -> str:
    columns: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
        ("first token s", "first_token_s", lambda value: number(value, 3)),
        ("whole s", "whole_first_token_s", lambda value: number(value, 3)),
        ("re-prefill s", "reprefill_s", lambda value: number(value, 3)),
        ("token ms", "token_s", _ms),
        ("whole ms", "whole_token_s", _ms),
        ("state", "state_in_use_bytes", _bytes),
        ("closed form", "state_formula_bytes", _bytes),
        ("bytes per decode frame", "bytes_per_decode_frame", lambda value: number(value, 0)),
        ("bytes per prompt token", "bytes_per_prompt_token", lambda value: number(value, 0)),
    )
    rows = [(row["length"], *(shown(row.get(key)) for _, key, shown in columns)) for row in lengths]
    return table(("tokens", *(head for head, *_ in columns)), rows)


def _memory(rows: Rows) -> str:
    heads = ("n_ctx", "state", "formula", "weights", "compute buffers", "resident before any token")
    keys = ("state_bytes", "formula_bytes", "weights_bytes", "compute_bytes", "resident_growth_bytes")
    return table(heads, [(row["n_ctx"], *(human_bytes(row[key]) for key in keys)) for row in rows])


def _cancellation(metrics: Mapping[str, Any]) -> tuple[str, ...]:
    heads = ("cancelled in", "cases", "caller out p50 ms", "p99 ms", "session usable p50 ms", "p99 ms")
    keys = ("caller_p50_s", "caller_p99_s", "usable_p50_s", "usable_p99_s")
    rows = [(during, row["cases"], *(_ms(row[key]) for key in keys)) for during, row in metrics["cancellation"].items()]
    if (clean_up := metrics["clean_up"]) is None:
        return (table(heads, rows),)
    gone = f"A session is gone from every stage {_ms(clean_up['seconds'])} ms after its block was left."
    return table(heads, rows), gone


def _distances(rows: Rows) -> str:
    heads = ("variant", "tokens of context", "against", "drawn tokens alike", "largest difference of a logit")
    cells = [
        (
            row["variant"],
            row["length"],
            row["against"],
            f"{row['tokens_alike']} of {row['tokens']}",
            "" if row["logits_max_difference"] is None else f"{row['logits_max_difference']:.3g}",
        )
        for row in rows
    ]
    return table(heads, cells)


def _canary(canary: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    names = list(dict.fromkeys(name for stages in canary.values() for parts in stages.values() for name in parts))
    rows = [
        (length, layers, *(f"`{parts[name][:8]}`" if name in parts else "" for name in names))
        for length, stages in canary.items()
        for layers, parts in stages.items()
    ]
    return table(("tokens", "layers", *names), rows)


# --- plots -----------------------------------------------------------------------------------------------------------


def plots(result: Result) -> list[Plot]:
    """State, times and memory over context."""
    lengths, parts = result.metrics["lengths"], ("weights_bytes", "compute_bytes", "state_bytes")
    memory = [{**row, "allocated_bytes": sum(row[part] for part in parts)} for row in result.metrics["memory"]]
    thick = {"color": GREY, "linewidth": 3, "alpha": 0.5}

    def state(axes: Axes) -> None:
        curve(axes, lengths, "length", "state_formula_bytes", 2**-20, "-", "closed form", **thick)
        curve(axes, lengths, "length", "state_in_use_bytes", 2**-20, "o", "rows in the tensors", color=BLUE)
        log_context(axes)
        axes.set_ylim(bottom=0)

    def first_token(axes: Axes) -> None:
        curve(axes, lengths, "length", "whole_first_token_s", 1, "s--", "whole model, one thread", color=GREY)
        curve(axes, lengths, "length", "first_token_s", 1, "o-", "stages, one thread each", color=BLUE)
        curve(axes, lengths, "length", "reprefill_s", 1, "^:", "stages, re-prefill", color=RED)
        log_context(axes)
        axes.set_yscale("log")

    def token(axes: Axes) -> None:
        curve(axes, lengths, "length", "whole_token_s", 1e3, "s--", "whole model, one thread", color=GREY)
        curve(axes, lengths, "length", "token_s", 1e3, "o-", "stages, one thread each", color=GREEN)
        log_context(axes)
        axes.set_ylim(bottom=0)

    def sizes(axes: Axes) -> None:
        said = "allocated: weights, compute buffers, state"
        curve(axes, memory, "n_ctx", "allocated_bytes", 2**-20, "--", said, color=GREY)
        said = "resident before any token is run"
        curve(axes, memory, "n_ctx", "resident_growth_bytes", 2**-20, "o-", said, color=RED)
        curve(axes, memory, "n_ctx", "formula_bytes", 2**-20, "-", "state by the formula", **thick)
        curve(axes, memory, "n_ctx", "state_bytes", 2**-20, "o", "state allocated", color=BLUE)
        log_context(axes)
        axes.set_ylim(bottom=0)

    drawn = [
        Plot(_STATE, "state", "State in use", "context (tokens)", "MiB", state),
        Plot(_TIME, "first-token", "Time to the first token", "prompt (tokens)", "seconds", first_token),
        Plot(_TIME, "inter-token", "Time between tokens", "context (tokens)", "milliseconds", token),
    ]
    if memory:
        drawn.append(Plot(_MEMORY, "memory", "Memory of all stages", "context size n_ctx (tokens)", "MiB", sizes))
    return drawn + distance_plots(result.metrics.get("between_numerics", []), result.units)
