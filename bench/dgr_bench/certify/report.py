"""A certificate as people read it: ``report.md`` and its plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dgr.model.units import human_bytes
from dgr_bench.plots import BLUE, GREEN, GREY, RED, draw
from dgr_bench.reports import heading, machine, picture, table, verdicts, write_report
from dgr_bench.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["write_certificate"]

_LIMITS = """A certificate speaks of the artifact, the kernels (by fingerprint), the split and the lengths named above, and of
nothing else. It compares stages with the whole model of the same build: that this build computes what upstream's does is
shown by the tests against the unpatched pin. Times are of this machine under the load stated below; compare ratios."""

_CANARY = """Digests of every component's live rows after prompt and answer, by length and stage; `dgr-bench compare` holds two
certificates against each other part by part."""


def write_certificate(result: Result, folder: Path) -> Path:
    """Write report and plots; gives the report's path."""
    metrics, lengths = result.metrics, result.metrics["lengths"]
    open_ends = [f"- {line}" for line in metrics["not_certified"]]
    parts = [
        heading(result, f"Long-context certificate of {result.subject['model']}"),
        _LIMITS,
        "## Verdicts",
        verdicts(result),
        *(["Not certified by this profile:", "\n".join(open_ends)] if open_ends else []),
        "## State over context",
        picture(draw(folder, "state", "State in use", "context (tokens)", "MiB", _state(lengths)), "state in use"),
        "## Time over context",
        picture(
            draw(folder, "first-token", "Time to the first token", "prompt (tokens)", "seconds", _first_token(lengths)),
            "time to the first token",
        ),
        picture(
            draw(folder, "inter-token", "Time between tokens", "context (tokens)", "milliseconds", _token(lengths)),
            "time between tokens",
        ),
        _slopes(metrics["decode_slope"]),
        _lengths_table(lengths),
        "## Memory by context size",
        *_memory_picture(metrics["memory"], folder),
        _memory(metrics["memory"]),
        "## Cancellation, clean-up",
        _cancellation(metrics),
        *_distances(metrics["distances"]),
        "## Canary",
        _CANARY,
        _canary(metrics["canary"]),
        "## What was locked",
        _plan(result.plan),
        "## Machine",
        machine(result),
        *_facts(result.subject),
    ]
    return write_report(folder, *parts)


def _points(lengths: Sequence[Mapping[str, Any]], key: str, scale: float) -> tuple[list[int], list[float]]:
    rows = [row for row in lengths if row.get(key) is not None]
    return [row["length"] for row in rows], [row[key] * scale for row in rows]


def _log(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if value < 1024 else f"{value / 1024:g} k")


def _state(lengths: Sequence[Mapping[str, Any]]) -> Callable[[Axes], None]:
    def paint(axes: Axes) -> None:
        axes.plot(
            *_points(lengths, "state_formula_bytes", 2**-20), color=GREY, label="closed form", linewidth=3, alpha=0.5
        )
        axes.plot(*_points(lengths, "state_in_use_bytes", 2**-20), "o", color=BLUE, label="rows in the tensors")
        _log(axes)
        axes.set_ylim(bottom=0)

    return paint


def _first_token(lengths: Sequence[Mapping[str, Any]]) -> Callable[[Axes], None]:
    def paint(axes: Axes) -> None:
        axes.plot(*_points(lengths, "whole_first_token_s", 1), "s--", color=GREY, label="whole model, one thread")
        axes.plot(*_points(lengths, "first_token_s", 1), "o-", color=BLUE, label="stages, one thread each")
        axes.plot(*_points(lengths, "reprefill_s", 1), "^:", color=RED, label="stages, re-prefill")
        _log(axes)
        axes.set_yscale("log")

    return paint


def _token(lengths: Sequence[Mapping[str, Any]]) -> Callable[[Axes], None]:
    def paint(axes: Axes) -> None:
        axes.plot(*_points(lengths, "whole_token_s", 1e3), "s--", color=GREY, label="whole model, one thread")
        axes.plot(*_points(lengths, "token_s", 1e3), "o-", color=GREEN, label="stages, one thread each")
        _log(axes)
        axes.set_ylim(bottom=0)

    return paint


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


def _slopes(slopes: Mapping[str, float | None]) -> str:
    split, whole = slopes["split_s_per_1000"], slopes["whole_s_per_1000"]
    if split is None:
        return "No slope: it takes two lengths of 500 tokens or more."
    text = f"A decode step grows by {1e3 * split:.2f} ms for each thousand tokens of context through the stages"
    if whole is None:
        return text + "."
    return (
        text
        + f", by {1e3 * whole:.2f} ms in the whole model (least squares over the medians; ratio {split / whole:.2f})."
    )


def _lengths_table(lengths: Sequence[Mapping[str, Any]]) -> str:
    heads = (
        "tokens", "first token s", "whole s", "re-prefill s", "token ms", "whole ms", "state", "closed form",
        "bytes per decode frame", "bytes per prompt token",
    )  # fmt: skip
    rows = [
        (
            row["length"],
            *(
                f"{row[key]:.3f}" if key in row else ""
                for key in ("first_token_s", "whole_first_token_s", "reprefill_s")
            ),
            *(_ms(row.get(key)) for key in ("token_s", "whole_token_s")),
            *(human_bytes(row[key]) if key in row else "" for key in ("state_in_use_bytes", "state_formula_bytes")),
            *(f"{row[key]:.0f}" if key in row else "" for key in ("bytes_per_decode_frame", "bytes_per_prompt_token")),
        )
        for row in lengths
    ]
    return table(heads, rows)


def _memory_picture(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    def paint(axes: Axes) -> None:
        sizes = [row["n_ctx"] for row in rows]

        def mib(key: str) -> list[float]:
            return [row[key] / 2**20 for row in rows]

        whole = [(row["weights_bytes"] + row["compute_bytes"] + row["state_bytes"]) / 2**20 for row in rows]
        axes.plot(sizes, whole, "--", color=GREY, label="allocated: weights, compute buffers, state")
        axes.plot(sizes, mib("resident_growth_bytes"), "o-", color=RED, label="resident before any token is run")
        axes.plot(sizes, mib("formula_bytes"), color=GREY, linewidth=3, alpha=0.5, label="state by the formula")
        axes.plot(sizes, mib("state_bytes"), "o", color=BLUE, label="state allocated")
        _log(axes)
        axes.set_ylim(bottom=0)

    if not rows:
        return []
    drawn = draw(folder, "memory", "Memory of all stages", "context size n_ctx (tokens)", "MiB", paint)
    return [picture(drawn, "memory by context size")]


def _memory(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = ("n_ctx", "state", "formula", "weights", "compute buffers", "resident before any token")
    keys = ("state_bytes", "formula_bytes", "weights_bytes", "compute_bytes", "resident_growth_bytes")
    return table(heads, [(row["n_ctx"], *(human_bytes(row[key]) for key in keys)) for row in rows])


def _cancellation(metrics: Mapping[str, Any]) -> str:
    heads = ("cancelled in", "cases", "caller out p50 ms", "p99 ms", "session usable p50 ms", "p99 ms")
    keys = ("caller_p50_s", "caller_p99_s", "usable_p50_s", "usable_p99_s")
    rows = [(during, row["cases"], *(_ms(row[key]) for key in keys)) for during, row in metrics["cancellation"].items()]
    text = table(heads, rows)
    if metrics["clean_up"] is not None:
        text += (
            f"\n\nA session is gone from every stage {_ms(metrics['clean_up']['seconds'])} ms after its block was left."
        )
    return text


def _distances(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
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
    return ["## Distances in native numerics", table(heads, cells)]


def _canary(canary: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    names = list(dict.fromkeys(name for stages in canary.values() for parts in stages.values() for name in parts))
    rows = [
        (length, layers, *(f"`{parts[name][:8]}`" if name in parts else "" for name in names))
        for length, stages in canary.items()
        for layers, parts in stages.items()
    ]
    return table(("tokens", "layers", *names), rows)


def _facts(subject: Mapping[str, Any]) -> list[str]:
    """What the real-model lane recorded besides."""
    names = ("files", "split_digests", "split_bytes", "drivers", "network", "given")
    rows = [(name, f"`{msgspec.json.encode(subject[name]).decode()}`") for name in names if subject.get(name)]
    return ["## What was run", table(("what", "value"), rows)] if rows else []


def _plan(plan: Mapping[str, Any]) -> str:
    return table(
        ("what", "value"), [(name, f"`{msgspec.json.encode(value).decode()}`") for name, value in plan.items()]
    )
