"""Compares runs of one command in separate folders, by curves and tables."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_po.run.errors import UsageError
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.figures.plotting import Panel, Series
from jaxrl_po.run.store import metrics
from jaxrl_po.types import Row

START = "warm start"  # folder of the initial policy that several runs start from


class Result(NamedTuple):
    """Result of a run: its name, its lines of metrics and its `summary.json`."""

    name: str
    rows: list[Row]
    summary: Mapping[str, Any]


def run_each(
    main: Callable[[Sequence[str]], int],
    runs: Mapping[str, Sequence[str]],
    shared: Sequence[str],
    out: Path,
) -> list[Result]:
    """Runs a command once per name, one after another; replaces earlier results.

    Args:
      main: `(argv) -> exit status`, function that runs the command.
      runs: map from a name to the arguments of that run alone.
      shared: arguments of all runs.
      out: folder that contains one folder per run.

    Raises:
      UsageError: a run did not finish; later runs are not started.
    """
    for name, arguments in runs.items():
        status = main([*shared, *arguments, f"--out={out / name}", "--overwrite"])
        if status or not (out / name / "summary.json").exists():
            raise UsageError(f"{name} did not finish; see {out / name}")
    return [read(out, name) for name in runs]


def run_from_one(
    main: Callable[[Sequence[str]], int],
    runs: Mapping[str, Sequence[str]],
    shared: Mapping[str, Any],
    start: Mapping[str, Any],
    rows: Mapping[str, Any],
    out: Path,
) -> list[Result]:
    """Trains one initial policy in the folder `START`, then runs a command from it for each name.

    Args:
      main: `(argv) -> exit status` of `jaxrl-po language`, see `run_each`.
      runs: map from a name to the arguments of that run alone.
      shared: map from a flag's name to its value, for the initial policy and all runs.
      start: flags of the initial policy alone, which has a warm start but no further training.
      rows: flags of all runs, without the initial policy.
      out: folder that contains one folder per run.
    """
    first = {**shared, "seeds": 1, "total_steps": 0, **start}
    others = {**shared, "init_from": out / START, **rows}
    run_each(main, {START: []}, [f"--{name}={value}" for name, value in first.items()], out)
    return run_each(main, runs, [f"--{name}={value}" for name, value in others.items()], out)


def read(out: Path, name: str) -> Result:
    """Loads the results of the run with a name, from the run's folder."""
    summary = json.loads((out / name / "summary.json").read_text(encoding="utf-8"))
    return Result(name, metrics.read(out / name / "metrics.jsonl"), summary)


def panel(
    results: Sequence[Result],
    metric: str,
    title: str,
    x_label: str,
    y_label: str,
    target: float | None = None,
) -> Panel:
    """Builds a panel that shows one metric, with a curve per run."""
    series = [Series(metric, result.name, result.rows) for result in results]
    return Panel([], series, title, x_label, y_label, target, seeds=False)


def leave(out: Path, name: str, panels: Sequence[Panel], heading: str, table: str) -> None:
    """Writes the figure `<name>.png` and `table.txt`; prints the table under its heading."""
    path = out / f"{name}.png"
    (out / "table.txt").write_text(table, encoding="utf-8")
    with plotting.report_failure(path):
        plotting.save_panels(panels, path)
    print(heading, table, sep="\n", end="")
    print(f"see {path}")
