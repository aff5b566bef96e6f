"""One look for every plot, written as SVG and PNG."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

from dgr.errors import InputError

__all__ = ["BLUE", "GREEN", "GREY", "RED", "draw"]

#: Colours that people with any colour vision tell apart.
BLUE, RED, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#767676"

#: Letters of a label from which on two do not fit beside each other.
_WIDE = 45

_STYLE: Any = {
    "figure.figsize": (7.2, 4.2),
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "lines.markersize": 4,
    "legend.frameon": False,
    "svg.hashsalt": "dgr-bench",
}


def draw(
    folder: Path,
    stem: str,
    title: str,
    x: str,
    y: str,
    paint: Callable[[Axes], None],
    size: tuple[float, float] | None = None,
) -> str:
    """Write ``plots/STEM.svg`` and ``.png``: ``paint`` fills the axes; ``x`` and ``y`` are labels with units.

    ``size``: width and height, inches.
    Gives the picture's path relative to ``folder``.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as missing:
        raise InputError("plots need matplotlib; install it with: pip install 'dgr[bench]'") from missing
    plots = folder / "plots"
    plots.mkdir(exist_ok=True)
    with mpl.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=size)
        axes.set(title=title, xlabel=x, ylabel=y)
        paint(axes)
        if (named := axes.get_legend_handles_labels())[0]:  # below the axes: within them it may cover a line
            columns = 2 if max(map(len, named[1])) < _WIDE else 1
            figure.legend(*named, loc="outside lower center", ncols=columns)
        figure.savefig(text := StringIO(), format="svg", metadata={"Date": None})
        lines = (line.rstrip() for line in text.getvalue().splitlines())  # git calls spaces at the end of a line errors
        (plots / f"{stem}.svg").write_text("\n".join(lines) + "\n", encoding="utf-8")
        figure.savefig(plots / f"{stem}.png", dpi=120)
        plt.close(figure)
    return f"plots/{stem}.png"
