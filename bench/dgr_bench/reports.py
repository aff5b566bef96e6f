"""What every Markdown report shares: the heading, the verdicts, the machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dgr_bench.results import Result

__all__ = ["heading", "machine", "picture", "table", "verdicts", "write_report"]


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; columns whose cells are all numbers align right."""
    cells = [[str(cell) for cell in row] for row in rows]
    numeric = [all(_is_number(row[column]) for row in cells) for column in range(len(heads))]
    rule = "|".join("---:" if right and cells else "---" for right in numeric)
    lines = [f"| {' | '.join(heads)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in cells)]
    return "\n".join(lines)


def _is_number(text: str) -> bool:
    return bool(text) and text.replace(",", "").replace(".", "", 1).lstrip("+-").replace("e-", "").isdigit()


def picture(path: str, what: str) -> str:
    """A picture, with what it shows for those who cannot see it."""
    return f"![{what}]({path})"


def heading(result: Result, title: str) -> str:
    """Title, verdict, and what was locked."""
    verdict = "PASSED" if result.passed else "NOT PASSED" if result.complete else "NOT COMPLETE"
    return "\n".join(
        [
            f"# {title}",
            "",
            f"**{verdict}**. Plan {result.plan.get('name', '')} `{result.plan_digest}`, schema `{result.schema}`.",
        ]
    )


def verdicts(result: Result) -> str:
    """The checks as a table."""
    rows = [(check.name, "pass" if check.passed else "**FAIL**", check.cases, check.detail) for check in result.checks]
    return table(("check", "verdict", "cases", "what was compared, or the first failure"), rows)


def machine(result: Result) -> str:
    """Subject, software, hardware, load and commands."""
    env = result.environment
    rows = [
        *((name, f"`{value}`") for name, value in result.subject.items() if isinstance(value, str | int | float)),
        ("runtime", env.runtime),
        ("kernel fingerprint", f"`{env.kernel_fingerprint}`"),
        ("wire schema", f"`{env.wire_schema}`"),
        ("machine", f"{env.cpu}, {env.cpus} CPUs, {env.memory_bytes / 2**30:.1f} GiB, {env.system}"),
        ("software", ", ".join(f"{name} {number}" for name, number in {"Python": env.python, **env.packages}.items())),
        ("load average", ", ".join(f"{load.average[0]:.2f} at {load.at}" for load in result.loads)),
        ("commands", ", ".join(f"`{command}`" for command in result.commands)),
    ]
    return table(("what", "value"), rows)


def write_report(folder: Path, *parts: str) -> Path:
    """Write ``report.md``, the parts with an empty line between."""
    path = folder / "report.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path
