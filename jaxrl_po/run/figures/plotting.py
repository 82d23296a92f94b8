"""Learning curves: interquartile mean over seeds, 95 % bootstrap band, and each seed faintly."""

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

FEWEST_SEEDS = 4  # minimum for a bootstrap band; fewer seeds are readable as single curves
INK, QUIET = "#1b1f24", "#8a929c"
DASHES = ("-", "--", ":", "-.")  # line styles; a style is used with all colours before the next
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
    "pdf.fonttype": 42,  # TrueType, since publishers refuse Type 3
    "text.parse_math": False,  # prints a name unchanged, even with `$`, `_` or `\\`
}
PICTURES = (".png", ".pdf", ".svg")
SweptRows = Sequence[tuple[Mapping[str, str], npt.ArrayLike]]  # settings and scores


def style(more: Mapping[str, Any] = MappingProxyType({})) -> AbstractContextManager[None]:
    """Context that applies `STYLE` and `more` to figures, ignoring the user's matplotlibrc."""
    return matplotlib.style.context({**STYLE, **more}, after_reset=True)


@contextlib.contextmanager
def report_failure(path: Path) -> Iterator[None]:
    """Context that turns a failure to draw into one line on stderr, since the data are on disk."""
    try:
        yield
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"warning: {path} was not drawn, all else is there: {why}", file=sys.stderr)


class Series(NamedTuple):
    """One curve of a panel.

    Attributes:
      metric: name of the metric in the lines of metrics.
      label: label of the curve in the legend.
      rows: lines of metrics of the curve; None for the lines of the panel.
    """

    metric: str
    label: str
    rows: Sequence[Row] | None = None


class Panel(NamedTuple):
    """One set of axes with its curves and labels.

    Attributes:
      rows: lines of metrics of a run, see `metrics.read`.
      series: curves to draw.
      title: title above the axes.
      x_label: label of the x axis, with the unit.
      y_label: label of the y axis, with the unit.
      target: level of the y axis to mark; None to mark no level.
      seeds: whether to draw each seed faintly behind the mean.
      log: whether the y axis is logarithmic, if its values span a decade.
    """

    rows: Sequence[Row]
    series: Sequence[Series]
    title: str
    x_label: str
    y_label: str
    target: float | None = None
    seeds: bool = True
    log: bool = False


def draw_panel(axes: Axes, panel: Panel, *, legend: bool = True) -> None:
    """Draws one panel of at most 32 curves; a metric without any value is skipped."""
    drawn: set[int] = set()  # numbers of seeds of the drawn curves
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
        if panel.log and np.isfinite(values).any():
            _scale(axes, "y", values[np.isfinite(values)])
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
        # The labels are passed, since an automatic legend omits labels that start with `_`.
        names = [str(line.get_label()) for line in named]
        size = {"fontsize": 9, "title_fontsize": 9}
        axes.legend(named, names, loc="best", title=what, alignment="left", **size)


def save_panels(panels: Sequence[Panel], path: Path) -> None:
    """Writes the panels side by side as a figure; four or more panels fill two rows.

    Neighbouring panels with curves of the same labels share a legend.

    Args:
      panels: panels from left to right.
      path: path of the file; its suffix chooses PNG, PDF or SVG.
    """
    rows = 2 if len(panels) >= 4 else 1
    columns = math.ceil(len(panels) / rows)
    names = [[series.label for series in panel.series] for panel in panels]
    with style():
        figure = Figure(figsize=(6.6 * columns, 4.2 * rows), layout="constrained", dpi=150)
        places = figure.subplots(rows, columns, squeeze=False).flat
        for i, (axes, panel) in enumerate(zip(places, panels, strict=False)):
            draw_panel(axes, panel, legend=i == 0 or names[i] != names[i - 1])
        for axes in places[len(panels) :]:
            axes.set_axis_off()
        write_figure(figure, path)


def write_figure(figure: Figure, path: Path) -> None:
    """Writes a figure in place of the file `path`, whose suffix chooses PNG, PDF or SVG."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:].lower())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context with a temporary file that replaces `path` at the end, atomically for readers."""
    temporary = path.with_name(f".{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_sweep(rows: SweptRows, y_label: str, path: Path) -> None:
    """Writes a figure of a sweep: the score of every combination, against each swept setting.

    A complete grid of two settings, each with at least four numbers, is drawn as a heat map: one
    pixel per seed of a combination, with a combination's seeds side by side, sorted by score. Two
    drawn numbers are the axes of a map, where a dot's colour is the mean score of a combination.

    Args:
      rows: settings by name and scores of seeds `[S]` for each combination; the best combination
        comes first.
      y_label: label of the score, with the unit of the score.
      path: path of the file; its suffix chooses PNG, PDF or SVG.
    """
    names = list(rows[0][0]) or ["all"]
    grid = {name: sorted({_as_number(row.get(name, "")) for row, _ in rows}) for name in names}
    drawn = [len(x) == len(rows) > 4 and math.isfinite(x[-1][0]) for x in grid.values()]
    if len(names) == 2 and (all(drawn) or _is_grid(rows, *grid.values())):
        _save_landscape(rows, grid, y_label, path, draw=_draw_dots if all(drawn) else _draw_grid)
        return
    with style():
        figure = Figure(figsize=(3.6 * len(names) + 1.0, 3.8), layout="constrained", dpi=150)
        columns = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for axes, name, is_drawn in zip(columns, names, drawn, strict=True):
            ticks = sorted({values.get(name, "") for values, _ in rows}, key=_as_number)
            numbers = [_as_number(tick)[0] for tick in ticks]
            if is_drawn:
                _scale(axes, "x", numbers)
            # The best combination is drawn last, on top.
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
                x = (
                    numbers[at]
                    if is_drawn
                    else at + 0.5 * (alike.index(rank) - middle) / len(alike)
                )
                axes.vlines(x, finite.min(), finite.max(), color=colour, alpha=0.35, linewidth=1.2)
                axes.plot(x, finite.mean(), "o", color=colour, markersize=5)
            if not is_drawn:
                axes.set_xticks(range(len(ticks)), ticks)
            if not is_drawn and sum(map(len, ticks)) > 30:
                axes.tick_params(axis="x", labelrotation=20)
            axes.set_xlabel(name)
        columns[0].set_ylabel(y_label)
        what = "dot: mean of a combination; line: its seeds"
        figure.suptitle(what, x=0.01, ha="left", fontsize="medium")
        write_figure(figure, path)


def _is_grid(rows: Sequence[Any], *numbers: Sequence[tuple[float, str]]) -> bool:
    whole = len(rows) == math.prod(map(len, numbers)) and min(map(len, numbers)) >= 4
    return whole and all(math.isfinite(each[-1][0]) for each in numbers)


def _save_landscape(
    rows: SweptRows,
    numbers: Mapping[str, Sequence[tuple[float, str]]],
    y_label: str,
    path: Path,
    *,
    draw: Callable[..., tuple[Any, str]],
) -> None:
    with style():
        figure = Figure(figsize=(8.0, 4.2), layout="constrained", dpi=150)
        axes = figure.subplots()
        axes.set(**dict(zip(("xlabel", "ylabel"), numbers, strict=True)))
        coloured, what = draw(axes, rows, numbers)
        figure.colorbar(coloured, label=y_label)
        figure.suptitle(what, x=0.01, ha="left", fontsize="medium")
        write_figure(figure, path)


def _draw_grid(
    axes: Axes, rows: SweptRows, numbers: Mapping[str, Sequence[tuple[float, str]]]
) -> tuple[Any, str]:
    (across, columns), (up, lines) = numbers.items()
    scores = {(values[across], values[up]): np.sort(np.ravel(each)) for values, each in rows}
    grid = [np.concatenate([scores[x, y] for _, x in columns]) for _, y in lines]
    seeds = len(grid[0]) // len(columns)
    image = axes.imshow(grid, origin="lower", aspect="auto", interpolation="nearest")
    axes.set_xticks(np.arange(len(columns)) * seeds + (seeds - 1) / 2, [x for _, x in columns])
    axes.set_yticks(range(len(lines)), [y for _, y in lines])
    axes.vlines(np.arange(1, len(columns)) * seeds - 0.5, -0.5, len(lines) - 0.5, color="white")
    axes.grid(visible=False)
    return image, f"a pixel is a run: {seeds} seeds of each combination, sorted"


def _draw_dots(axes: Axes, rows: SweptRows, numbers: Iterable[str]) -> tuple[Any, str]:
    x, y = (np.array([_as_number(row[name])[0] for row, _ in rows]) for name in numbers)
    means = np.array([np.mean(np.asarray(scores, np.float64)) for _, scores in rows])
    scored = np.isfinite(means)
    axes.scatter(x[~scored], y[~scored], color=QUIET, marker="x")
    dots = axes.scatter(x[scored], y[scored], s=90, c=means[scored])
    axes.scatter(x[:1], y[:1], s=220, facecolors="none", edgecolors=INK)
    _scale(axes, "x", x)
    _scale(axes, "y", y)
    return dots, "dot: mean of a combination; ring: the best; cross: a seed without a score"


def _scale(axes: Axes, which: str, numbers: Sequence[float] | npt.NDArray[np.float64]) -> None:
    """Makes the axis `x` or `y` logarithmic if its numbers are positive and span a decade."""
    if np.min(numbers) > 0.0 and np.max(numbers) > 10.0 * np.min(numbers):
        axes.set(**{f"{which}scale": "log"})
        getattr(axes, f"{which}axis").set_major_formatter("{x:g}")
        getattr(axes, f"{which}axis").set_minor_formatter("")


def _as_number(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return np.inf, text
