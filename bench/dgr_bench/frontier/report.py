"""The report of ``dgr-bench frontier``: prefill and decode over context, as tables and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dgr_bench.frontier.metrics import BASELINE, FrontierPlan
from dgr_bench.plots import BLUE, GREEN, GREY, Axes, Plot, curve
from dgr_bench.quartiles import Line, Quartiles
from dgr_bench.reports import Section, number, table
from dgr_bench.results import Result

_LOOKS = {"one": (BLUE, "o"), "whole": (GREY, "s"), "split": (GREEN, "^")}

_HOW = """Every subject runs one thread an engine and begins a fresh session for every length. The last chunk's time is from
the end of the chunk before it; stages work on several chunks at once."""

_TURNS = """The subjects draw tokens in turns, at the same context, and so does a baseline: the whole model after a short
prompt. What a token took over the baseline's next to it, times the baseline's usual time, is its time at steady speed.
Medians, with quartiles in brackets."""

_LINES = """Least squares through the medians at steady speed; the interval is of a block bootstrap over pairs of tokens, the
last range is of the ratio with each length left out in turn."""

_UPSTREAM = """A pipeline of one stage in native numerics, then llama-bench at the same depth (unpatched, no token drawn, its
start, load and prefill untimed): medians over blocks of tokens. The two sides do not alternate: compare slopes."""


def tables(result: Result, plan: FrontierPlan) -> list[Section]:
    """Prefill, decode, and what upstream does."""
    metrics, lengths, names = result.metrics, result.metrics["lengths"], _names(plan)
    sections = []
    if lengths:
        decode = _medians(lengths, names), _steady(lengths, names), _LINES, _lines(metrics["decode"], names)
        sections += [Section("Prefill", (_HOW, _prefill(lengths, names))), Section("Decode", (_TURNS, *decode))]
    if metrics["upstream"] is not None:
        sections.append(Section("Beside upstream's llama-bench", (_UPSTREAM, *_upstream(metrics["upstream"]))))
    return sections


def _names(plan: FrontierPlan) -> dict[str, str]:
    """Subjects as people call them."""
    names = {"one": "one stage", "whole": "whole model", "split": f"{plan.split.count(',') + 1} stages"}
    return {name: names[name] for name in plan.subjects if name in names}


def _quartiles(found: Any, digits: int) -> str:
    return format(msgspec.convert(found, Quartiles), f".{digits}f")


def _prefill(lengths: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    words = ("first token, {}, s", "tokens/s, {}", "last chunk, {}")
    heads = ["prompt, tokens", *(word.format(name) for word in words for name in names.values())]
    shown = (
        ("first_token_ms", (2, 1e-3)), ("prefill_tokens_per_s", (1, 1.0)), ("last_chunk_tokens_per_s", (1, 1.0)),
    )  # fmt: skip
    rows = [
        (row["length"], *(number(row["subjects"][name][key], *how) for key, how in shown for name in names))
        for row in lengths
    ]
    return table(heads, rows)


def _medians(lengths: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    shown = {**names, BASELINE: "baseline"}
    rows = [
        (row["length"], *(number(row["subjects"][name]["token_ms"]["median"], 2) for name in shown)) for row in lengths
    ]
    return table(("context, tokens", *(f"{name}, ms a token" for name in shown.values())), rows)


def _steady(lengths: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    compared = [name for name in names if name != "whole"]
    heads = (
        "context, tokens",
        *(f"{name}, ms at steady speed" for name in names.values()),
        *(f"{names[name]} / whole model" for name in compared),
    )
    rows = [
        (
            row["length"],
            *(_quartiles(row["subjects"][name]["steady_token_ms"], 2) for name in names),
            *(_quartiles(row["subjects"][name]["token_ratio"], 3) for name in compared),
        )
        for row in lengths
    ]
    return table(heads, rows)


def _lines(decode: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> str:
    heads = (
        "subject", "ms per 1000 tokens of context", "ms without context", "slope / whole model's", "95 % interval",
        "one length left out", "slope as measured", "ratio",
    )  # fmt: skip
    intervals = ("slope_ratio_interval", "slope_ratio_leaving_one_out")
    rows = [
        (
            text,
            number(decode[name]["slope_ms_per_1000"], 3),
            number(decode[name]["base_ms"], 2),
            number(decode[name].get("slope_ratio"), 3),
            *("" if (of := decode[name].get(key)) is None else f"{of[0]:.3f} to {of[1]:.3f}" for key in intervals),
            number(decode[name]["raw"]["slope_ms_per_1000"], 3),
            number(decode[name]["raw"].get("slope_ratio"), 3),
        )
        for name, text in names.items()
    ]
    return table(heads, rows)


def _upstream(upstream: Mapping[str, Any]) -> list[str]:
    rows = [
        (row["length"], _quartiles(row["ours_ms"], 2), _quartiles(row["theirs_ms"], 2)) for row in upstream["lengths"]
    ]
    sides = [
        (name, number(upstream[side]["slope_ms_per_1000"], 3), number(upstream[side]["base_ms"], 2))
        for side, name in (("ours", "one stage"), ("theirs", "llama-bench"))
    ]
    ratio = upstream["slope_ratio"]
    return [
        table(("context, tokens", "one stage, ms a token", "llama-bench, ms a token"), rows),
        table(("side", "ms per 1000 tokens of context", "ms without context"), sides),
        "No ratio: llama-bench's decode does not grow." if ratio is None else f"Ratio of the slopes: {ratio:.3f}.",
    ]


# --- plots -----------------------------------------------------------------------------------------------------------


def plots(result: Result, plan: FrontierPlan) -> list[Plot]:
    """Prefill and decode over context."""
    metrics, names = result.metrics, _names(plan)
    lengths: list[dict[str, Any]] = metrics["lengths"]
    if not lengths:
        return []

    def prefill(axes: Axes) -> None:
        for name, text in names.items():
            colour, marker = _LOOKS[name]
            rows = [{"length": row["length"], **row["subjects"][name]} for row in lengths]
            several = [row for row in rows if row["length"] > plan.chunk]  # a prompt of one chunk is its own last one
            look: dict[str, Any] = {"marker": marker, "color": colour}
            curve(axes, rows, "length", "prefill_tokens_per_s", 1, "-", f"{text}, whole prompt", **look)
            if several:
                look["mfc"] = "white"
                curve(axes, several, "length", "last_chunk_tokens_per_s", 1, ":", f"{text}, last chunk", **look)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)

    def decode(axes: Axes) -> None:
        xs = [row["length"] for row in lengths]
        for name, text in names.items():
            colour, marker = _LOOKS[name]
            steady = [msgspec.convert(row["subjects"][name]["steady_token_ms"], Quartiles) for row in lengths]
            errors = [[one.median - one.low for one in steady], [one.high - one.median for one in steady]]
            line = Line(metrics["decode"][name]["slope_ms_per_1000"], metrics["decode"][name]["base_ms"])
            axes.errorbar(
                xs, [one.median for one in steady], yerr=errors, fmt=marker, color=colour, capsize=3, elinewidth=1
            )
            label = f"{text}: {line.base_ms:.1f} ms {line.slope_ms:+.3f} ms per 1000 tokens"
            style = "--" if name == "whole" else "-"
            axes.plot([0, xs[-1]], [line.at(0), line.at(xs[-1])], style, color=colour, label=label)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)

    speed, time = "prefill (tokens per second)", "time per token at steady speed (ms)"
    return [
        Plot("Prefill", "prefill", "Prefill over context", "prompt (tokens)", speed, prefill),
        Plot("Decode", "decode", "Time per token over context", "context (tokens)", time, decode),
    ]
