"""Learning curves: interquartile mean over seeds, 95 % bootstrap band, and each seed faintly."""

import contextlib
import itertools
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import matplotlib.style
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from jaxrl_po.run.store import metrics, statistics
from jaxrl_po.types import Row

FEWEST_SEEDS = 4  # below which a bootstrap band says nothing that the seeds do not
INK, QUIET = "#1b1f24", "#8a929c"
DASHES = ("-", "--", ":", "-.")  # the next one once all colours are used
COLOURS = ("#0b6e99", "#c4501b", "#3a7d44", "#7b4fa3", "#b8860b", "#0a9a8f", "#a8325e", "#4d5560")

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
    "axes.formatter.useoffset": False,
    "pdf.fonttype": 42,  # TrueType: publishers refuse Type 3
    "text.parse_math": False,  # a name stands as it is, whatever `$`, `_` or `\\` it has
}
PICTURES = (".png", ".pdf", ".svg")


def style(more: Mapping[str, Any] = MappingProxyType({})) -> AbstractContextManager[None]:
    """Inside, pictures have our style and `more`, whatever a user's matplotlibrc asks for."""
    return matplotlib.style.context({**STYLE, **more}, after_reset=True)


@contextlib.contextmanager
def beside(path: Path) -> Iterator[None]:
    """Inside, the picture of what is done and on disk may fail: that is one line on stderr."""
    try:
        yield
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"warning: {path} was not drawn, all else is there: {why}", file=sys.stderr)


class Series(NamedTuple):
    """One curve of a panel.

    Attributes:
      metric: its name in the lines of metrics.
      label: in the legend.
      rows: its lines of metrics, if not the panel's.
    """

    metric: str
    label: str
    rows: Sequence[Row] | None = None


class Panel(NamedTuple):
    """One set of axes.

    Attributes:
      rows: the lines of a run, see `metrics.read`.
      series: curves to draw.
      title: above it.
      x_label: with the unit.
      y_label: with the unit.
      target: a level to mark, or None.
      seeds: draw each seed faintly behind the mean.
    """

    rows: Sequence[Row]
    series: Sequence[Series]
    title: str
    x_label: str
    y_label: str
    target: float | None = None
    seeds: bool = True


def draw(axes: Axes, panel: Panel, *, legend: bool = True) -> None:
    """Draws one panel of at most 32 curves; a metric without any value is skipped."""
    drawn: set[int] = set()  # number of seeds of each curve
    named: list[Line2D] = []
    looks = itertools.product(DASHES, COLOURS)
    for series, (dashes, colour) in zip(panel.series, looks, strict=False):
        rows = panel.rows if series.rows is None else series.rows
        step, values = metrics.curve(rows, series.metric)
        if not step.size:
            continue
        if series.metric.startswith(metrics.EPISODES):
            values = statistics.carried(values)
        has_band = len(values) >= FEWEST_SEEDS
        if panel.seeds or not has_band:
            alpha = min(0.35, 2.5 / len(values))
            axes.plot(step, values.T, color=colour, alpha=alpha, linewidth=0.7)
        if has_band:
            low, high = statistics.bootstrap_interval(values)
            axes.fill_between(step, low, high, color=colour, alpha=0.22, linewidth=0)
        centre = statistics.interquartile_mean(values)
        named += axes.plot(step, centre, dashes, color=colour, linewidth=2.2, label=series.label)
        axes.plot(step[-1], centre[-1], "o", color=colour, markersize=5, clip_on=False)
        drawn.add(len(values))
    if panel.target is not None:
        level = axes.axhline(panel.target, color=QUIET, linewidth=1.2, linestyle=(0, (4, 3)))
        level.set_label(f"target {panel.target:g}")
        named.append(level)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_xlim(0, max(1.0, axes.get_xlim()[1]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # steps (or devices) are integers
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if drawn and legend:
        seeds = " – ".join(map(str, sorted({min(drawn), max(drawn)})))
        band = " and 95 % band" if max(drawn) >= FEWEST_SEEDS else " and each seed"
        what = f"IQM{band}, {seeds} seeds" if max(drawn) > 1 else None
        # By name, since a legend of its own accord leaves out a name that begins with `_`.
        names = [str(line.get_label()) for line in named]
        size = {"fontsize": 9, "title_fontsize": 9}
        axes.legend(named, names, loc="best", title=what, alignment="left", **size)


def save(panels: Sequence[Panel], path: Path) -> None:
    """Writes the panels side by side as a figure, four or more of them in two rows.

    Neighbours with the same curves share a legend.

    Args:
      panels: left to right.
      path: of the file, a PNG, PDF or SVG by its ending.
    """
    rows = 2 if len(panels) >= 4 else 1
    columns = math.ceil(len(panels) / rows)
    names = [[series.label for series in panel.series] for panel in panels]
    with style():
        figure = Figure(figsize=(6.6 * columns, 4.2 * rows), layout="constrained", dpi=150)
        places = figure.subplots(rows, columns, squeeze=False).flat
        for i, (axes, panel) in enumerate(zip(places, panels, strict=False)):
            draw(axes, panel, legend=i == 0 or names[i] != names[i - 1])
        for axes in places[len(panels) :]:
            axes.set_axis_off()
        write(figure, path)


def write(figure: Figure, path: Path) -> None:
    """Replaces a file, a PNG, PDF or SVG by its ending."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:].lower())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write in place of another, of which a reader sees the old or the new one."""
    temporary = path.with_name(f".{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_sweep(
    rows: Sequence[tuple[Mapping[str, str], npt.ArrayLike]], y_label: str, path: Path
) -> None:
    """Writes a figure of a sweep: the score of every combination, against each swept setting.

    A whole grid of two settings with four numbers or more of each is a landscape: a pixel for each
    run, the seeds of a combination side by side, sorted.

    Args:
      rows: per combination, its settings by name and the scores of its seeds `[S]`; best first.
      y_label: of the score, with the unit.
      path: of the file, a PNG, PDF or SVG by its ending.
    """
    names = list(rows[0][0]) or ["all"]
    grid = {name: sorted({_as_number(row.get(name, "")) for row, _ in rows}) for name in names}
    if len(names) == 2 and _is_landscape(rows, *grid.values()):
        _save_landscape(rows, grid, y_label, path)
        return
    with style():
        figure = Figure(figsize=(3.6 * len(names) + 1.0, 3.8), layout="constrained", dpi=150)
        columns = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for axes, name in zip(columns, names, strict=True):
            ticks = sorted({values.get(name, "") for values, _ in rows}, key=_as_number)
            numbers = [_as_number(tick)[0] for tick in ticks]
            drawn = len(ticks) == len(rows) > 4 and math.isfinite(max(numbers))
            if drawn and min(numbers) > 0.0 and max(numbers) > 10.0 * min(numbers):
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter("{x:g}")
                axes.xaxis.set_minor_formatter("")
            # The best is drawn last, on top.
            for rank, (values, scores) in reversed(list(enumerate(rows))):
                finite = np.asarray(scores, np.float64)
                finite = finite[np.isfinite(finite)]
                if not finite.size:
                    continue
                colour = COLOURS[1] if rank == 0 else COLOURS[0]
                tick = values.get(name, "")
                at = ticks.index(tick)
                alike = [i for i, (each, _) in enumerate(rows) if each.get(name, "") == tick]
                middle = (len(alike) - 1) / 2
                x = numbers[at] if drawn else at + 0.5 * (alike.index(rank) - middle) / len(alike)
                axes.vlines(x, finite.min(), finite.max(), color=colour, alpha=0.35, linewidth=1.2)
                axes.plot(x, finite.mean(), "o", color=colour, markersize=5)
            if not drawn:
                axes.set_xticks(range(len(ticks)), ticks)
            if not drawn and sum(map(len, ticks)) > 30:
                axes.tick_params(axis="x", labelrotation=20)
            axes.set_xlabel(name)
        columns[0].set_ylabel(y_label)
        what = "dot: mean of a combination; line: its seeds"
        figure.suptitle(what, x=0.01, ha="left", fontsize="medium")
        write(figure, path)


def _is_landscape(rows: Sequence[Any], *numbers: Sequence[tuple[float, str]]) -> bool:
    whole = len(rows) == math.prod(map(len, numbers)) and min(map(len, numbers)) >= 4
    return whole and all(math.isfinite(each[-1][0]) for each in numbers)


def _save_landscape(
    rows: Sequence[tuple[Mapping[str, str], npt.ArrayLike]],
    numbers: Mapping[str, Sequence[tuple[float, str]]],
    y_label: str,
    path: Path,
) -> None:
    (across, columns), (up, lines) = numbers.items()
    scores = {(values[across], values[up]): np.sort(np.ravel(each)) for values, each in rows}
    grid = [np.concatenate([scores[x, y] for _, x in columns]) for _, y in lines]
    seeds = len(grid[0]) // len(columns)
    with style():
        figure = Figure(figsize=(8.0, 4.2), layout="constrained", dpi=150)
        axes = figure.subplots()
        image = axes.imshow(grid, origin="lower", aspect="auto", interpolation="nearest")
        axes.set_xticks(np.arange(len(columns)) * seeds + (seeds - 1) / 2, [x for _, x in columns])
        axes.set_yticks(range(len(lines)), [y for _, y in lines])
        axes.vlines(np.arange(1, len(columns)) * seeds - 0.5, -0.5, len(lines) - 0.5, color="white")
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.grid(visible=False)
        figure.colorbar(image, label=y_label)
        what = f"a pixel is a run: {seeds} seeds of each combination, sorted"
        figure.suptitle(what, x=0.01, ha="left", fontsize="medium")
        write(figure, path)


class Difference(NamedTuple):
    """A row of `save_differences`.

    Attributes:
      label: left of it.
      centre: the difference.
      low: end of its interval.
      high: likewise.
      margin: to mark.
      note: right of it.
    """

    label: str
    centre: float
    low: float
    high: float
    margin: float
    note: str = ""


def save_differences(rows: Sequence[Difference], title: str, x_label: str, path: Path) -> None:
    """Writes a figure of differences with their intervals, one below another.

    Args:
      rows: top to bottom; one with a note is drawn bold.
      title: above them, wrapped.
      x_label: with the unit.
      path: of the file, a PNG, PDF or SVG by its ending.
    """
    with style():
        figure = Figure(figsize=(9.5, 1.6 + 0.34 * len(rows)), layout="constrained", dpi=150)
        axes = figure.subplots()
        for y, row in enumerate(rows):
            colour, width = (COLOURS[1], 2.6) if row.note else (COLOURS[0], 1.4)
            axes.hlines(y, row.low, row.high, color=colour, linewidth=width)
            axes.plot(row.centre, y, "o", color=colour, markersize=3 + width)
            axes.vlines(row.margin, y - 0.45, y + 0.45, color=QUIET, linestyle=(0, (2, 1)))
            if row.note:
                place = (1.01, y)
                axes.annotate(row.note, place, xycoords=("axes fraction", "data"), va="center")
        axes.axvline(0.0, color=QUIET, linewidth=0.8)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        # Of the figure, not of the axes: long labels leave these little room.
        above = "\n".join(textwrap.wrap(title, 95))
        figure.suptitle(above, x=0.01, ha="left", fontsize=11, fontweight="bold")
        axis = f"{x_label}: differences with 95 % intervals; dashed: the margin"
        axes.set_xlabel("\n".join(textwrap.wrap(axis, 80)))
        write(figure, path)


def _as_number(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return np.inf, text
