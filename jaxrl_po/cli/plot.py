"""Compares runs: `jaxrl-po plot runs/a runs/b --out=runs/plot`.

The figure shows learning curves (interquartile mean over seeds with its 95 % bootstrap interval)
and the performance profile of the scores (share of the seeds at or above each score). The table has
the probability of improvement over the first run, with the 95 % score interval and the p-value of a
permutation test. The command writes `plot.png` and `table.txt` to `--out`, or the figure alone to a
file, and prints the settings in which the runs differ. Runs on different environments or tasks are
compared by environment or task, each in a table and in a row of the figure.
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxrl_po import config
from jaxrl_po.config import ConfigError, Values, static
from jaxrl_po.run import errors
from jaxrl_po.run.errors import UsageError
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.figures.plotting import COLOURS, Panel, Series
from jaxrl_po.run.store import folder, metrics, sources, statistics

SCORES = ("greedy_return", "greedy_accuracy", "held_out_log_prob")
UNITS = {"control": "environment steps", "language": "completions"}
FINAL, AREA = "final", "area"


@config.record
class PlotOptions:
    """Options of a comparison; the folders of the runs come before the flags."""

    metric: str = static(
        "",
        "metric to compare, higher is better; empty takes the greedy return, the held-out greedy "
        "accuracy, or the score of runs of run.train",
    )
    out: str = static(
        "runs/plot",
        "folder for the results, where an earlier comparison is replaced; or, for the figure "
        f"alone, a file that ends in {', '.join(plotting.PICTURES)}",
    )
    by: str = static(
        FINAL,
        "score of a seed: its last value, or the mean of its curve, which is the area under it, "
        "over the steps at which every seed of every run has a value",
        choices=(FINAL, AREA),
    )
    title: str = static("", "title of the curves; empty for the metric and where the runs were")
    labels: str = static("", "names of the runs, separated by commas; empty for their folders")


class Run(NamedTuple):
    """An earlier run, as read from its folder.

    Attributes:
      label: folder of the run, without the leading folders that all runs share.
      rows: lines of metrics of the run.
      config: settings of the run, by flag name.
      place: environment or task of the run.
    """

    label: str
    rows: list[metrics.Row]
    config: dict[str, Any]
    place: str


def read_runs(paths: Sequence[str], names: str = "") -> list[Run]:
    """Reads the runs in the folders `paths`.

    Args:
      paths: Folders of the runs.
      names: Labels of the runs, separated by commas; empty for `labels`.

    Raises:
      UsageError: No folder is named, more folders than colours are named, or a folder does not hold
        a run.
      ConfigError: The number of names differs from the number of folders.
    """
    if not 1 <= len(paths) <= len(COLOURS):
        raise UsageError(
            f"name 1 to {len(COLOURS)} folders of runs, as in jaxrl-po plot runs/a runs/b; "
            f"got {len(paths)}"
        )
    given = names.split(",") if names else labels(paths)
    if len(given) != len(paths):
        raise ConfigError("labels", f"must name the {len(paths)} runs, got {names!r}")
    runs = []
    for path, label in zip(paths, given, strict=True):
        try:
            settings = folder.read_settings(Path(path))
        except ConfigError as error:
            raise UsageError(f"{path}: {error.message}") from None
        if settings.get("script") == "sweep":
            raise UsageError(f"{path} must be the folder of a run; a sweep has its own sweep.png")
        try:
            rows = metrics.read(Path(path) / "metrics.jsonl")
        except ConfigError as error:
            raise UsageError(error.message) from None
        if not rows:
            raise UsageError(f"{path} has no line in metrics.jsonl yet; wait for the first")
        runs.append(Run(label, rows, settings, ""))
    named = places([run.config for run in runs])
    return [run._replace(place=place) for run, place in zip(runs, named, strict=True)]


def places(configs: Sequence[Values]) -> list[str]:
    """Returns the environment or task of each run, with the settings of the task that differ.

    Example:
      >>> places([{"env": "Acrobot-v1"}, {"task": "addition", "task.num_digits": 2}])
      ['Acrobot-v1', 'addition']
      >>> places([{"task": "addition", "task.num_digits": n} for n in (2, 3)])
      ['addition num_digits=2', 'addition num_digits=3']
    """
    named = [sources.short(config.get("env", config.get("task", ""))) for config in configs]
    found = []
    for name, mine in zip(named, configs, strict=True):
        others = [config for other, config in zip(named, configs, strict=True) if other == name]
        settings = [
            f"{key.removeprefix('task.')}={errors.spell(value)}"
            for key, value in mine.items()
            if key.startswith("task.") and any(value != other.get(key) for other in others)
        ]
        found.append(" ".join([name, *settings]))
    return found


def by_place(runs: Sequence[Run]) -> list[list[Run]]:
    """Returns the runs on each environment or task; the place of the first run comes first."""
    places = dict.fromkeys(run.place for run in runs)
    return [[run for run in runs if run.place == place] for place in places]


def labels(paths: Sequence[str]) -> list[str]:
    """Returns the paths without the leading folders that all paths share.

    Example:
      >>> labels(["runs/a/first", "runs/b/first"]), labels(["runs/a"])
      (['a/first', 'b/first'], ['a'])
    """
    parts = [Path(path).parts for path in paths]
    shared = 0
    while all(len(each) > shared + 1 and each[shared] == parts[0][shared] for each in parts):
        shared += 1
    return ["/".join(each[shared:]) for each in parts]


def choose_metric(asked: str, runs: Sequence[Run]) -> str:
    """Returns the name of the metric to compare: `asked`, or a score that all runs have.

    Raises:
      ConfigError: a run lacks the metric `asked`.
      UsageError: the runs have no metric in common.
    """
    available = [
        {name for row in run.rows for name, value in row.items() if isinstance(value, list)}
        for run in runs
    ]
    shared = set.intersection(*available)
    if not shared:
        raise UsageError(
            "the runs have no metric in common: name evaluated runs of one environment or task"
        )
    known = ", ".join(sorted(shared))
    known_scores = [*SCORES, *(run.config.get("score", "") for run in runs)]
    name = asked or next((score for score in known_scores if score in shared), "")
    if not name:
        raise ConfigError(
            "metric", f"must be given, one of {known}: the runs have no score in common"
        )
    if name not in shared:
        raise ConfigError("metric", f"must be in all runs, which have {known}, got {name}")
    return name


def final_values(run: Run, metric: str) -> npt.NDArray[np.float64]:
    """Returns the last logged value of each seed, `[S]`; −∞ for a value that is not finite."""
    return statistics.worst_if_missing(_curve(run, metric)[1][:, -1])


def _curve(run: Run, metric: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    step, values = metrics.curve(run.rows, metric)
    return step, statistics.carried(values) if metric.startswith(metrics.EPISODES) else values


def scores_of(runs: Sequence[Run], metric: str, by: str) -> list[npt.NDArray[np.float64]]:
    """Returns the scores of seeds, `[S]` per run; −∞ for a score that is not a finite number.

    Args:
      runs: Runs as `read_runs` returns them.
      metric: Name of the metric.
      by: Definition of a seed's score, as in `PlotOptions`. A curve is linear between its points.
    """
    if by == FINAL:
        return [final_values(run, metric) for run in runs]
    first, last = shared_steps(runs, metric)
    means = []
    for step, values in (_curve(run, metric) for run in runs):
        inside = np.array([first, *step[(step > first) & (step < last)], last], np.float64)
        lines = np.stack([np.interp(inside, step, each) for each in values])
        means.append(np.trapezoid(lines, inside, axis=1) / (last - first))
    return [statistics.worst_if_missing(mean) for mean in means]


def shared_steps(runs: Sequence[Run], metric: str) -> tuple[float, float]:
    """Returns the first step at which every seed of the runs has a value, and the last shared step.

    A return has no value before the first episode of a seed ends. A seed that never has a value is
    left out; its score is −∞.

    Raises:
      ConfigError: The runs do not share two steps.
    """
    curves = [_curve(run, metric) for run in runs]
    firsts = []
    for step, values in curves:
        present = ~np.isnan(values)
        firsts.append(step[present.argmax(axis=1)[present.any(axis=1)].max(initial=0)])
    first, last = float(max(firsts)), float(min(step[-1] for step, _ in curves))
    if first >= last:
        raise ConfigError(
            "by", f"must be {FINAL}: the runs have no two steps of {metric} in common"
        )
    return first, last


def format_comparisons(runs: Sequence[Run], metric: str, by: str = FINAL) -> str:
    """Returns the comparison with the first run on each environment or task, as text.

    Args:
      runs: Runs as `read_runs` returns them.
      metric: Name of the metric.
      by: Definition of a seed's score, as in `PlotOptions`.
    """
    texts = []
    for alike in by_place(runs):
        how = "final"
        if by == AREA:
            how = "mean over steps {:,.0f} to {:,.0f}, where every seed has a value,"
            how = how.format(*shared_steps(alike, metric))
        compared = statistics.format_comparison(
            [run.label for run in alike], scores_of(alike, metric, by)
        )
        texts.append(f"{metric}{_where(alike)}, {how} of each seed\n{compared}")
    return "\n".join(texts)


def _where(runs: Sequence[Run]) -> str:
    return f" on {runs[0].place}" if runs[0].place else ""


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Returns `name: value, value, …` for each setting that all runs have with different values.

    Example:
      >>> runs = [Run("", [], {"algorithm": x, "seeds": 8}, "") for x in ("ppo", "trpo")]
      >>> differing_settings(runs)
      ['algorithm: ppo, trpo']
    """
    shared = [
        name
        for name in runs[0].config
        if name not in ("out", "resolved") and all(name in run.config for run in runs)
    ]
    values = {name: [errors.spell(run.config[name]) for run in runs] for name in shared}
    return [f"{name}: {', '.join(x)}" for name, x in values.items() if len(set(x)) > 1]


def unit_of(settings: Values) -> str:
    """Returns the plural name of a step of a run.

    Example:
      >>> unit_of({"script": "control"}), unit_of({"script": "train", "unit": "completions"})
      ('environment steps', 'completions')
    """
    unit: str = settings.get("unit") or UNITS.get(settings.get("script", ""), "steps")
    return unit


def is_tuned(run: Run) -> bool:
    """Returns whether the run used a setting that was tuned for its environment or task."""
    return "tuned" in run.config.get("resolved", {}).get("origin", {}).values()


def draw_profiles(
    axes: Axes, finals: Sequence[npt.NDArray[np.float64]], metric: str, by: str = FINAL
) -> None:
    """Draws the share of the seeds at or above each score, with the 95 % bootstrap band."""
    everything = np.concatenate(finals)
    finite = everything[np.isfinite(everything)]
    low, high = (finite.min(), finite.max()) if finite.size else (np.nan, np.nan)
    # Levels end at the best score, where a run has share 1 if all of its seeds reach that score.
    levels = np.linspace(low - 0.05 * (high - low or abs(high) or 1.0), high, 200)
    below = np.nextafter(levels, -np.inf)
    for i, (scores, colour) in enumerate(zip(finals, COLOURS, strict=False)):
        # Array [S, R] of R bootstrap resamples of the seeds.
        draws = scores[np.random.default_rng(0).integers(len(scores), size=(len(scores), 2000))]
        band = np.percentile(statistics.performance_profile(draws, below), statistics.TAILS, axis=1)
        axes.fill_between(levels, *band, color=colour, alpha=0.18, linewidth=0)
        profile = statistics.performance_profile(scores, below)
        # Equal profiles lie on top of each other, so the profile that is drawn first is the widest.
        width = 2.2 + 1.5 * (len(finals) - 1 - i)
        axes.plot(levels, profile, color=colour, linewidth=width, solid_capstyle="butt")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    score = f"final {metrics.axis(metric)}" if by == FINAL else f"mean {metrics.axis(metric)}"
    axes.set(title="performance profile", xlabel=score)
    axes.set(ylabel="share of the seeds at or above", ylim=(-0.02, 1.04))


def save_figure(
    runs: Sequence[Run], metric: str, path: Path, *, by: str = FINAL, title: str = ""
) -> None:
    """Writes the figure with curves beside profiles; see `plotting.write_figure`, `PlotOptions`."""
    alike = by_place(runs)
    with plotting.style():
        figure = Figure(figsize=(11.6, 4.2 * len(alike)), layout="constrained", dpi=150)
        for each, axes in zip(alike, figure.subplots(len(alike), 2, squeeze=False), strict=True):
            series = [Series(metric, run.label, run.rows) for run in each]
            unit = " or ".join(dict.fromkeys(unit_of(run.config) for run in each))
            where = "" if title and len(alike) == 1 else _where(each)
            head = (title or metrics.label(metric)) + where
            labels = head, f"{unit}, each seed", metrics.axis(metric)
            plotting.draw_panel(axes[0], Panel([], series, *labels, seeds=len(each) == 1))
            draw_profiles(axes[1], scores_of(each, metric, by), metric, by)
        plotting.write_figure(figure, path)


def split_arguments(
    argv: Sequence[str], name: str, summary: str, record: type[Any]
) -> tuple[list[str], Any]:
    """Splits arguments into folders of runs, which come first, and options; see `flags.ask`."""
    folders = list(itertools.takewhile(lambda argument: not argument.startswith("-"), argv))
    return folders, flags.ask(argv[len(folders) :], name, summary, record)


def main(argv: Sequence[str]) -> int:
    """Runs the command `plot`; returns the exit status."""
    summary = "Compares runs: jaxrl-po plot runs/a runs/b --out=runs/plot"
    folders, options = split_arguments(argv, "jaxrl-po plot", summary, PlotOptions)
    if options is None:
        return 0
    runs = read_runs(folders, options.labels)
    metric = choose_metric(options.metric, runs)
    if 0 < (count := sum(map(is_tuned, runs))) < len(runs):
        names = ", ".join(run.label for run in runs if is_tuned(run))
        print(f"note: only {count} of {len(runs)} have tuned settings: {names}", file=sys.stderr)
    text, picture = format_comparisons(runs, metric, options.by), Path(options.out)

    def draw(path: Path) -> None:
        save_figure(runs, metric, path, by=options.by, title=options.title)

    if picture.suffix.lower() in plotting.PICTURES and not picture.is_dir():
        folder.require_file(options.out, picture.suffix.lower())
        with folder.writing(picture):
            draw(picture)
    else:
        folder.inspect(options.out, resume=False, overwrite=True)
        with folder.claim(options.out, overwrite=False) as out:
            (out / "table.txt").write_text(text, encoding="utf-8")
            draw(out / "plot.png")
        picture /= "plot.png"
    print(text, end="")
    if different := differing_settings(runs):
        print("the runs differ in", *different, sep="\n  ")
    print(f"see {picture}")
    return 0
