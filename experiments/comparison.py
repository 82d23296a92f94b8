"""Several runs of one script side by side, each in a folder of its own."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_po import metrics
from jaxrl_po.flags import UsageError
from jaxrl_po.metrics import Row


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
