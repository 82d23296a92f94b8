"""Learning curves: interquartile mean over seeds, a 95 % bootstrap band, and each seed faintly behind them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from jaxrl_po import metrics
from jaxrl_po.metrics import Row

INK, QUIET = "#1b1f24", "#8a929c"
COLOURS = ("#0b6e99", "#c4501b", "#3a7d44", "#7b4fa3")

STYLE: dict[Any, Any] = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e7ea",
    "grid.linewidth": 0.8,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}


class Series(NamedTuple):
    """One curve of a panel.

    Attributes:
      metric: its name in the lines.
      label: in the legend.
    """

    metric: str
    label: str


class Panel(NamedTuple):
    """One set of axes.

    Attributes:
      rows: the lines of a run, see `metrics.read`.
      series: what to draw.
      title: above it.
      x_label: with the unit.
      y_label: with the unit.
      target: a level to mark, or None.
    """

    rows: Sequence[Row]
    series: Sequence[Series]
    title: str
    x_label: str
    y_label: str
    target: float | None = None


def draw(axes: Axes, panel: Panel) -> None:
    """Draws one panel; a metric that no line holds is left out."""
    drawn = 0
    for series, colour in zip(panel.series, COLOURS, strict=False):
        step, values = metrics.curve(panel.rows, series.metric)
        if not step.size:
            continue
        low, high = metrics.bootstrap_interval([values])
        axes.plot(step, values.T, color=colour, alpha=min(0.35, 2.5 / len(values)), linewidth=0.7)
        axes.fill_between(step, low, high, color=colour, alpha=0.22, linewidth=0)
        centre = metrics.interquartile_mean(values)
        axes.plot(step, centre, color=colour, linewidth=2.2, label=f"{series.label}: IQM, 95 % band, {len(values)} seeds")
        axes.plot(step[-1], centre[-1], "o", color=colour, markersize=5, clip_on=False)
        drawn += 1
    if panel.target is not None:
        axes.axhline(panel.target, color=QUIET, linewidth=1.2, linestyle=(0, (4, 3)), label=f"target {panel.target:g}")
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if drawn:
        axes.legend(loc="best", fontsize=9)


def save(panels: Sequence[Panel], path: Path) -> None:
    """Writes the panels side by side as a picture.

    Args:
      panels: left to right.
      path: of the PNG file.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.6 * len(panels), 4.2), layout="constrained", dpi=150)
        for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
            draw(axes, panel)
        temporary = path.with_name(f".{path.name}")
        figure.savefig(temporary, format="png")
        temporary.replace(path)
