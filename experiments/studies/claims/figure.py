"""Draws the outcomes of a claim: `verdict.png`."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib.style
from claim import Outcome
from matplotlib.figure import Figure

DIM, STRONG, QUIET = "#0072b2", "#d55e00", "#6b7280"


def save(outcomes: Sequence[Outcome], title: str, x_label: str, path: Path) -> None:
    """Writes a figure of differences with their intervals, one below another.

    Args:
      outcomes: Outcome of each comparison, drawn bold over all settings, then in each setting.
      title: Text above the figure, wrapped.
      x_label: Label of the horizontal axis, with the unit.
      path: Path of the PNG file.
    """
    rows = []
    for each in outcomes:
        parts = each.each.items() if len(each.each) > 1 else ()
        whole = each.difference, each.low, each.high
        rows.append((str(each.comparison), whole, each.comparison.by, each.verdict))
        rows += [(name, values, each.comparison.by, "") for name, values in parts]
    with matplotlib.style.context({"text.parse_math": False}, after_reset=True):
        figure = Figure(figsize=(9.5, 1.6 + 0.34 * len(rows)), layout="constrained", dpi=150)
        axes = figure.subplots()
        for y, (_, (centre, low, high), margin, note) in enumerate(rows):
            colour, width = (STRONG, 2.6) if note else (DIM, 1.4)
            axes.hlines(y, low, high, color=colour, linewidth=width)
            axes.plot(centre, y, "o", color=colour, markersize=3 + width)
            axes.vlines(margin, y - 0.45, y + 0.45, color=QUIET, linestyle=(0, (2, 1)))
            axes.annotate(note, (1.01, y), xycoords=("axes fraction", "data"), va="center")
        axes.axvline(0.0, color=QUIET, linewidth=0.8)
        axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
        axes.invert_yaxis()
        # The margin is relative to the figure, not to the axes: long labels leave the axes little
        # space.
        above = "\n".join(textwrap.wrap(title, 95))
        figure.suptitle(above, x=0.01, ha="left", fontsize=11, fontweight="bold")
        axis = f"{x_label}: differences with 95 % intervals; dashed: the margin"
        axes.set_xlabel("\n".join(textwrap.wrap(axis, 80)))
        figure.savefig(path)
