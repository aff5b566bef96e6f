"""Tables and layer lists for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dgr.text import one_line

__all__ = ["layer_runs", "render_table"]


def layer_runs(layers: Sequence[int]) -> str:
    """Layers in short: ``0-1``, ``2,4..42``, ``3``; a gap starts a new run."""
    runs: list[str] = []
    at = 0
    while at < len(layers):
        end = at + 1
        step = layers[end] - layers[at] if end < len(layers) else 1
        while end < len(layers) and layers[end] - layers[end - 1] == step:
            end += 1
        run = layers[at:end]
        if step == 1 and len(run) > 1:
            runs.append(f"{run[0]}-{run[-1]}")
        elif len(run) > 2:
            runs.append(f"{run[0]},{run[1]}..{run[-1]}")
        else:
            # Two layers with a gap are not a pattern: the second may begin a run.
            end = at + 1
            runs.append(str(run[0]))
        at = end
    return ",".join(runs)


def render_table(rows: Sequence[Sequence[str]], numeric: Iterable[int] = ()) -> str:
    """Rows of equal length in aligned columns, the first being the heading; ``numeric`` columns align right."""
    right = frozenset(numeric)
    rows = [[one_line(cell) for cell in row] for row in rows]  # a model's and a host's names are among them
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
