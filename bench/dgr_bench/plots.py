"""One look for every plot, written as PNG for Markdown and as SVG for pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from dgr.cli.options import require_extra
from dgr.core.files.outputs import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
else:
    Axes = Any  # matplotlib is loaded when something is drawn

#: Colours that people with any colour vision tell apart.
BLUE, RED, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#767676"

#: Letters of a label from which on two do not fit beside each other.
_WIDE = 45
#: A plot has few colours; in a palette of so many a picture takes a third of the bytes.
_COLOURS = 64

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
    # Text as text: a page can be searched, and is small. The same drawing has the same bytes.
    "svg.fonttype": "none",
    "svg.hashsalt": "dgr-bench",
}


@frozen
class Plot:
    """A picture of a report."""

    #: Heading of the section in which it stands.
    section: str
    #: ``plots/STEM.png``, ``plots/STEM.svg``.
    stem: str
    title: str
    #: Labels of the axes, with units.
    x: str
    y: str
    paint: Callable[[Axes], None]
    #: Width and height, inches.
    size: tuple[float, float] | None = None

    @property
    def markdown(self) -> str:
        """The picture, with what it shows for those who cannot see it."""
        return f"![{self.title}: {self.y or self.x}](plots/{self.stem}.png)"


def draw(folder: Path, plots: Iterable[Plot]) -> None:
    """Write every ``plots/STEM.png`` and ``.svg``. Raises :class:`~dgr.errors.InputError` where matplotlib is missing."""
    require_extra("plots", "bench", ["matplotlib", "PIL"])
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    (folder / "plots").mkdir(exist_ok=True)
    for plot in plots:
        with mpl.rc_context(_STYLE):
            figure, axes = plt.subplots(figsize=plot.size)
            axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y)
            plot.paint(axes)
            if (named := axes.get_legend_handles_labels())[0]:  # below the axes: within them it may cover a line
                columns = 2 if max(map(len, named[1])) < _WIDE else 1
                figure.legend(*named, loc="outside lower center", ncols=columns)
            figure.savefig(drawn := BytesIO(), dpi=80)
            figure.savefig(lines := BytesIO(), format="svg", metadata={"Date": None, "Creator": None})
            plt.close(figure)
        picture = (
            Image.open(drawn).convert("RGB").quantize(_COLOURS, Image.Quantize.MAXCOVERAGE)
        )  # small marks keep their colour
        picture.save(packed := BytesIO(), "PNG", optimize=True)
        write_file(folder / "plots" / f"{plot.stem}.png", packed.getvalue())
        write_file(folder / "plots" / f"{plot.stem}.svg", lines.getvalue())


def log_context(axes: Axes) -> None:
    """An axis of context in tokens, doubling."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if value < 1024 else f"{value / 1024:g} k")


def curve(
    axes: Axes, rows: Iterable[Mapping[str, Any]], x: str, y: str, scale: float, style: str, label: str, **look: Any
) -> None:
    """``scale`` times ``y`` over ``x``, of the rows that have both."""
    points = [(row[x], scale * row[y]) for row in rows if row.get(y) is not None]
    axes.plot([point[0] for point in points], [point[1] for point in points], style, label=label, **look)
