"""The report of ``dgr-bench frontier``: prefill and decode over context, as tables and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgr_bench import reports
from dgr_bench.frontier.metrics import BASELINE, FrontierPlan, Line
from dgr_bench.plots import BLUE, GREEN, GREY, draw
from dgr_bench.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["write"]

_LOOKS = {"one": (BLUE, "o"), "whole": (GREY, "s"), "split": (GREEN, "^")}

_HOW = """Every subject runs one thread an engine and begins a fresh session for every length. The last chunk's time is from
the end of the chunk before it; stages work on several chunks at once. In decode the subjects draw tokens in turns, at the
same context, and so does a baseline: the whole model after a short prompt. What a token took over the baseline's next to
it, times the baseline's usual time, is its time at steady speed. Medians, with quartiles in brackets."""

_LINES = """Least squares through the medians at steady speed; the interval is of a block bootstrap over pairs of tokens, the
last range is of the ratio with each length left out in turn."""

_UPSTREAM = """A pipeline of one stage in native numerics, then llama-bench at the same depth (unpatched, no token drawn, its
start, load and prefill untimed): medians over blocks of tokens. The two sides do not alternate: compare slopes."""


def write(result: Result, plan: FrontierPlan, folder: Path) -> Path:
    """Write ``report.md`` and the plots."""
    metrics, lengths = result.metrics, result.metrics["lengths"]
    names = _names(plan)
    parts = [reports.heading(result, "Speed over context"), reports.verdicts(result), _HOW]
    if lengths:
        parts += [
            "## Prefill",
            _prefill(lengths, names),
            _prefill_picture(folder, lengths, names, plan.chunk),
            "## Decode",
            _measured(lengths, {**names, BASELINE: "baseline"}),
            _steady(lengths, names),
            _LINES,
            _lines(metrics["decode"], names),
            _decode_picture(folder, metrics, names),
        ]
    if metrics["upstream"] is not None:
        parts += ["## Beside upstream's llama-bench", _UPSTREAM, *_upstream(metrics["upstream"])]
    return reports.write_report(folder, *parts, "## Machine", reports.machine(result))


def _names(plan: FrontierPlan) -> dict[str, str]:
    """Subjects as people call them."""
    stages = plan.split.count(",") + 1
    names = {"one": "one stage", "whole": "whole model", "split": f"{stages} stages"}
    return {name: names[name] for name in plan.subjects if name in names}


def _spread(found: Mapping[str, float], digits: int) -> str:
    return f"{found['median']:.{digits}f} ({found['low']:.{digits}f} to {found['high']:.{digits}f})"


def _prefill(lengths: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    heads = [
        "prompt, tokens",
        *(f"first token, {name}, s" for name in names.values()),
        *(f"tokens/s, {name}" for name in names.values()),
        *(f"last chunk, {name}" for name in names.values()),
    ]
    rows = [
        (
            row["length"],
            *(f"{row['subjects'][name]['first_token_ms'] / 1e3:.2f}" for name in names),
            *(f"{row['subjects'][name]['prefill_tokens_per_s']:.1f}" for name in names),
            *(f"{row['subjects'][name]['last_chunk_tokens_per_s']:.1f}" for name in names),
        )
        for row in lengths
    ]
    return reports.table(heads, rows)


def _measured(lengths: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    heads = ("context, tokens", *(f"{name}, ms a token" for name in names.values()))
    rows = [
        (row["length"], *(f"{row['subjects'][name]['token_ms']['median']:.2f}" for name in names)) for row in lengths
    ]
    return reports.table(heads, rows)


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
            *(_spread(row["subjects"][name]["steady_token_ms"], 2) for name in names),
            *(_spread(row["subjects"][name]["token_ratio"], 3) for name in compared),
        )
        for row in lengths
    ]
    return reports.table(heads, rows)


def _lines(decode: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> str:
    heads = (
        "subject",
        "ms per 1000 tokens of context",
        "ms without context",
        "slope / whole model's",
        "95 % interval",
        "one length left out",
        "slope as measured",
        "ratio",
    )
    rows = []
    for name, text in names.items():
        found = decode[name]
        ratio, intervals = found.get("slope_ratio"), ("slope_ratio_interval", "slope_ratio_leaving_one_out")
        rows.append(
            (
                text,
                f"{found['slope_ms_per_1000']:.3f}",
                f"{found['base_ms']:.2f}",
                "" if ratio is None else f"{ratio:.3f}",
                *("" if (of := found.get(key)) is None else f"{of[0]:.3f} to {of[1]:.3f}" for key in intervals),
                f"{found['raw']['slope_ms_per_1000']:.3f}",
                "" if (raw := found["raw"].get("slope_ratio")) is None else f"{raw:.3f}",
            )
        )
    return reports.table(heads, rows)


def _upstream(upstream: Mapping[str, Any]) -> list[str]:
    rows = [(row["length"], _spread(row["ours_ms"], 2), _spread(row["theirs_ms"], 2)) for row in upstream["lengths"]]
    sides = [
        (name, f"{upstream[side]['slope_ms_per_1000']:.3f}", f"{upstream[side]['base_ms']:.2f}")
        for side, name in (("ours", "one stage"), ("theirs", "llama-bench"))
    ]
    ratio = upstream["slope_ratio"]
    return [
        reports.table(("context, tokens", "one stage, ms a token", "llama-bench, ms a token"), rows),
        reports.table(("side", "ms per 1000 tokens of context", "ms without context"), sides),
        "No ratio: llama-bench's decode does not grow." if ratio is None else f"Ratio of the slopes: {ratio:.3f}.",
    ]


# --- plots -----------------------------------------------------------------------------------------------------------


def _prefill_picture(folder: Path, lengths: Sequence[Mapping[str, Any]], names: Mapping[str, str], chunk: int) -> str:
    several = [row for row in lengths if row["length"] > chunk]  # a prompt of one chunk is its own last one

    def paint(axes: Axes) -> None:
        top = 0.0
        for rows, key, style, what in (
            (lengths, "prefill_tokens_per_s", "-", "whole prompt"),
            (several, "last_chunk_tokens_per_s", ":", "last chunk"),
        ):
            for name, text in names.items() if rows else ():
                colour, marker = _LOOKS[name]
                ys = [row["subjects"][name][key] for row in rows]
                top = max(top, *ys)
                axes.plot(
                    [row["length"] for row in rows],
                    ys,
                    style,
                    marker=marker,
                    color=colour,
                    mfc=colour if style == "-" else "white",
                    label=f"{text}, {what}",
                )
        axes.set_ylim(0, 1.05 * top)
        _from_zero(axes, lengths)

    path = draw(folder, "prefill", "Prefill over context", "prompt (tokens)", "prefill (tokens per second)", paint)
    return reports.picture(path, "prefill speed over the prompt's length")


def _decode_picture(folder: Path, metrics: Mapping[str, Any], names: Mapping[str, str]) -> str:
    lengths = metrics["lengths"]

    def paint(axes: Axes) -> None:
        xs = [row["length"] for row in lengths]
        for name, text in names.items():
            colour, marker = _LOOKS[name]
            spreads = [row["subjects"][name]["steady_token_ms"] for row in lengths]
            medians = [one["median"] for one in spreads]
            quartiles = [
                [one["median"] - one["low"] for one in spreads],
                [one["high"] - one["median"] for one in spreads],
            ]
            found = metrics["decode"][name]
            fitted = Line(found["slope_ms_per_1000"], found["base_ms"])
            axes.errorbar(xs, medians, yerr=quartiles, fmt=marker, color=colour, capsize=3, elinewidth=1)
            label = f"{text}: {fitted.base_ms:.1f} ms {fitted.slope_ms:+.3f} ms per 1000 tokens"
            axes.plot(
                [0, xs[-1]],
                [fitted.at(0), fitted.at(xs[-1])],
                "--" if name == "whole" else "-",
                color=colour,
                label=label,
            )
        axes.set_ylim(bottom=0)
        _from_zero(axes, lengths)

    path = draw(
        folder,
        "decode",
        "Time per token over context",
        "context (tokens)",
        "time per token at steady speed (ms)",
        paint,
    )
    return reports.picture(path, "time per token over context, with fitted lines")


def _from_zero(axes: Axes, lengths: Sequence[Mapping[str, Any]]) -> None:
    axes.set_xlim(0, 1.04 * lengths[-1]["length"])
