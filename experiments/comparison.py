"""Several runs of one script side by side, each in a folder or a process of its own."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_po import metrics, plotting
from jaxrl_po.flags import UsageError
from jaxrl_po.metrics import Row
from jaxrl_po.plotting import Panel, Series


class Result(NamedTuple):
    """What a run left.

    Attributes:
      name: of the run.
      rows: its lines.
      summary: its summary.
    """

    name: str
    rows: list[Row]
    summary: Mapping[str, Any]


def run_each(
    main: Callable[[Sequence[str]], int], runs: Mapping[str, Sequence[str]], shared: Sequence[str], out: Path
) -> list[Result]:
    """Runs a script once for each name, one after another; what an earlier comparison left is replaced.

    Args:
      main: of the script.
      runs: name to the arguments that set it apart.
      shared: arguments of every run.
      out: folder of the folders.

    Raises:
      UsageError: a run that did not finish ends the comparison.
    """
    results = []
    for name, arguments in runs.items():
        status = main([*shared, *arguments, f"--out={out / name}", "--overwrite"])
        if status or not (out / name / "summary.json").exists():
            raise UsageError(f"{name} did not finish; see {out / name}")
        results.append(read(out, name))
    return results


def read(out: Path, name: str) -> Result:
    """What the run of this name left in its folder."""
    summary = json.loads((out / name / "summary.json").read_text())
    return Result(name, metrics.read(out / name / "metrics.jsonl"), summary)


def panel(results: Sequence[Result], metric: str, title: str, x_label: str, y_label: str, target: float | None = None) -> Panel:
    """One metric of every run, a curve each."""
    series = [Series(metric, result.name, result.rows) for result in results]
    return Panel([], series, title, x_label, y_label, target, seeds=False)


def leave(out: Path, name: str, panels: Sequence[Panel], heading: str, table: str) -> None:
    """Writes the picture `name.png` and `table.txt`, and prints the table under its heading."""
    plotting.save(panels, out / f"{name}.png")
    (out / "table.txt").write_text(table)
    print(heading, table, sep="\n", end="")
    print(f"see {out / name}.png")


def measure_apart(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs a benchmark in a process of its own, so that its memory and its devices are its own; returns its last line."""
    command = [sys.executable, script, *arguments, "--json"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    row: dict[str, Any] = json.loads(output.splitlines()[-1])
    return row
