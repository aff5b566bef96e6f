"""What every Markdown report shares: the heading, the verdicts, sections, the machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from attrs import frozen

from dgr.core.files.outputs import write_file
from dgr_bench.plots import Plot, draw
from dgr_bench.results import Result
from dgr_bench.verdicts import Check


@frozen
class Section:
    """A part of a report: its plots (:class:`~dgr_bench.plots.Plot` names the section), then Markdown."""

    title: str
    parts: tuple[str, ...] = ()


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; columns whose cells are all numbers align right."""
    cells = [[str(cell) for cell in row] for row in rows]
    numeric = [all(_is_number(row[column]) for row in cells) for column in range(len(heads))]
    rule = "|".join("---:" if right and cells else "---" for right in numeric)
    lines = [f"| {' | '.join(heads)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in cells)]
    return "\n".join(lines)


def _is_number(text: str) -> bool:
    return bool(text) and text.replace(",", "").replace(".", "", 1).lstrip("+-").replace("e-", "").isdigit()


def number(value: float | None, digits: int = 1, scale: float = 1.0) -> str:
    """A cell: ``scale`` times the value; empty where there is none."""
    return "" if value is None else f"{scale * value:.{digits}f}"


def verdict_line(check: Check) -> str:
    """A verdict as it is printed."""
    return f"{'pass' if check.passed else 'FAIL'}  {check.name} ({check.cases} cases): {check.detail}"


def _verdicts(result: Result) -> str:
    rows = [(check.name, "pass" if check.passed else "**FAIL**", check.cases, check.detail) for check in result.checks]
    return table(("check", "verdict", "cases", "what was compared, or the first failure"), rows)


def _machine(result: Result) -> str:
    """Subject, software, hardware, load and commands."""
    env = result.environment
    rows = [
        *((name, f"`{value}`") for name, value in result.subject.items() if isinstance(value, str | int | float)),
        ("runtime", env.runtime),
        ("kernel fingerprint", f"`{env.kernel_fingerprint}`"),
        ("wire schema", f"`{env.wire_schema}`"),
        ("machine", f"{env.cpu}, {env.cpus} CPUs, {env.memory_bytes / 2**30:.1f} GiB, {env.system}"),
        ("software", ", ".join(f"{name} {found}" for name, found in {"Python": env.python, **env.packages}.items())),
        ("load average", ", ".join(f"{load.average[0]:.2f} at {load.at}" for load in result.loads)),
        ("commands", ", ".join(f"`{command}`" for command in result.commands)),
    ]
    return table(("what", "value"), rows)


def write_report(
    folder: Path, title: str, result: Result | None, sections: Iterable[Section], plots: Sequence[Plot] = ()
) -> None:
    """Write ``report.md`` and its plots; of a result also heading, verdicts and machine."""
    draw(folder, plots)
    parts = [f"# {title}"]
    if result is not None:
        verdict = "PASSED" if result.passed else "NOT PASSED" if result.complete else "NOT COMPLETE"
        name = result.plan.get("name", "")
        parts += [
            f"**{verdict}**. Plan {name} `{result.plan_digest}`, schema `{result.schema}`.",
            "## Verdicts",
            _verdicts(result),
        ]
    for section in sections:
        drawn = [plot.markdown for plot in plots if plot.section == section.title]
        parts += [f"## {section.title}", *drawn, *section.parts]
    if result is not None:
        parts += ["## Machine", _machine(result)]
    write_file(folder / "report.md", ("\n\n".join(parts) + "\n").encode())
