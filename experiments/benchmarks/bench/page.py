"""The table and the picture of the measurements, and their place on a page."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import libraries
import machine
import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter
from rows import Row

from jaxrl_po import backend
from jaxrl_po.config import ConfigError
from jaxrl_po.run.figures.plotting import COLOURS, QUIET, style
from jaxrl_po.run.store import provenance

OURS, THEIRS = "ours", "theirs"
BEGIN, END = "<!-- begin: written by `make bench` -->", "<!-- end: written by `make bench` -->"


def noise(result: Mapping[str, Any]) -> str:
    """Describes why the measurements of a row are doubtful, see `machine.noise`."""
    programs = {name: result[name] for name in (OURS, THEIRS)}
    rates = {name: each["rates"] for name, each in programs.items()}
    return machine.noise(rates, [share for each in programs.values() for share in each["others"]])


def ratios(result: Mapping[str, Any]) -> list[float]:
    """Computes the ratio of jaxrl_po's speed to the peer's speed, in each round."""
    pairs = zip(result[OURS]["rates"], result[THEIRS]["rates"], strict=True)
    return [ours / theirs for ours, theirs in pairs]


def shown(values: Sequence[float], form: Callable[[float], str] = "{:.2f}".format) -> str:
    """Formats the median of several numbers with their range.

    Example:
      >>> shown([1.0, 3.0, 2.0])
      '2.00 (1.00 – 3.00)'
    """
    return f"{form(median(values))} ({form(min(values))} – {form(max(values))})"


def short(number: float) -> str:
    """Formats a number with three digits and a unit.

    Example:
      >>> short(1_684_000), short(85_816), short(999_900), short(12.0)
      ('1.68M', '85.8k', '1M', '12')
    """
    rounded = float(f"{number:.3g}")
    unit, size = next(each for each in (("M", 1e6), ("k", 1e3), ("", 0.0)) if rounded >= each[1])
    return f"{rounded / (size or 1.0):.3g}{unit}"


def speeds(row: Row, rates: Sequence[float]) -> str:
    """Formats speeds in the row's unit: steps per second, or seconds per iteration."""
    if row.script == "language.py":
        return f"{shown([1.0 / each for each in rates], '{:.3g}'.format)} s"
    return f"{shown(rates, short)} steps/s"


def line(row: Row, result: Mapping[str, Any] | None) -> str:
    """Formats one line of the table."""
    begin = f"| `{row.name}` | {libraries.PEERS[row.peer].title}: {row.work} |"
    if result is None:
        return f"{begin} not measured | | | | |"
    if result["failed"]:
        return f"{begin} failed: {result['failed'].replace('|', '/')} | | | | |"
    ours, theirs = result[OURS], result[THEIRS]
    doubts, fast = noise(result), shown(ratios(result))
    how = f", with {', '.join(theirs['choice'])}" if theirs["choice"] else ""
    compiling = " / ".join(
        f"{median(each['compile_seconds']):.1f}" if each["compile_seconds"] else "–"
        for each in (ours, theirs)
    )
    return (
        f"{begin} {speeds(row, ours['rates'])} | {speeds(row, theirs['rates'])}{how} "
        f"| {fast if doubts else f'**{fast}**'} | {compiling} "
        f"| {f'noisy: {doubts}' if doubts else 'quiet'} |"
    )


def table(rows: Sequence[Row], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the table in Markdown, with the machine and a note on doubtful rows."""
    done = [each for each in results.values() if not each["failed"]]
    rounds = min((len(each[OURS]["rates"]) for each in done), default=0)
    days = sorted({each["day"] for each in results.values()})
    versions = provenance.versions()
    lines = [
        f"{provenance.processor()}, {backend.cores()} processors, "
        f"jaxrl_po {versions['jaxrl_po']}, jax {versions['jax']}, "
        f"{' – '.join(dict.fromkeys([days[0], days[-1]])) if days else ''}; "
        f"medians of {rounds} rounds and their ranges. Ours is so many times as fast as the peer; "
        "compile time, in seconds (ours / theirs), is not part of it.",
        "",
        "| row | peer and work | ours | peer | times as fast | compile | machine |",
        "|---|---|---|---|---|---|---|",
        *(line(row, results.get(row.name)) for row in rows),
    ]
    if any(noise(each) for each in done):
        lines += ["", "The machine was not quiet in the rows marked noisy: they decide nothing."]
    return "\n".join(lines) + "\n"


def draw(measured: Sequence[Row], results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draws the picture of speed ratios: median and range of each measured row.

    Noisy rows have hollow markers.
    """
    with style():
        size = (7.6, 1.4 + 0.36 * len(measured))
        figure = Figure(figsize=size, layout="constrained", dpi=150)
        axes = figure.subplots()
        for place, row in enumerate(measured):
            values = ratios(results[row.name])
            colour = COLOURS[list(libraries.PEERS).index(row.peer)]
            axes.plot([min(values), max(values)], [place, place], color=colour, linewidth=2)
            filled = "white" if noise(results[row.name]) else colour
            axes.plot(median(values), place, "o", color=colour, markerfacecolor=filled)
        axes.axvline(1.0, color=QUIET, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_yticks(range(len(measured)), [row.name for row in measured])
        axes.set_ylim(len(measured) - 0.5, -0.5)
        axes.set(xscale="log", xlabel="times as fast as the peer (hollow: noisy)")
        axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        figure.savefig(path)


def put(page: str, text: str) -> str:
    """Returns the page with the text between two marks replaced.

    Raises:
      ConfigError: the page lacks the marks.
    """
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        raise ConfigError("page", f"must be a page with the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{text}{END}{after}"
