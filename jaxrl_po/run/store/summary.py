"""The content of `summary.json`: final scores of a run, and what its numbers depend on."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_po.run.store import metrics
from jaxrl_po.run.store.metrics import Row


def of_run(
    rows: Sequence[Row], options: Any, resolved: Mapping[str, Any], *, score: str, initial: str = ""
) -> Row:
    """The content of `summary.json`; `steps` counts one seed, `steps_per_second` all of them.

    Args:
      rows: the lines of the run, of which the first and the last hold an evaluation.
      options: of the run as a whole.
      resolved: what the flags left open, such as the placement; see `launch.Plan`.
      score: name of the evaluated score.
      initial: name for the score of the initial policy; empty to leave it out.
    """
    first, last = rows[0], rows[-1]
    seconds = sum(row.get("time/seconds", 0.0) for row in rows)
    return {
        **({initial: first[score]} if initial else {}),
        score: last[score],
        f"{score}_iqm": last[f"{score}/iqm"],
        "steps": last["step"],
        "steps_per_second": last["step"] * options.seeds / seconds if seconds > 0.0 else None,
        "compile_seconds": last["time/compile_seconds"],
        "algorithm": options.algorithm,
        "seed": options.seed,
        "seeds": options.seeds,
        **{name: resolved[name] for name in ("placement", "device", "versions")},
    }


def in_words(rows: Sequence[Row], score: str) -> str:
    """The final score, which is an interquartile mean, and the seeds that it hides.

    A seed stayed behind if it gained less than half of what that mean did since the first line.

    Example:
      >>> rows = [metrics.by_seed({"greedy_return": x}) for x in ([9.0] * 4, [500.0] * 3 + [12.0])]
      >>> in_words(rows, "greedy_return")
      'greedy return 500, worst seed 12: 1 of 4 seeds gained less than half as much'
    """
    final, mean = np.array(rows[-1][score], np.float64), rows[-1][f"{score}/iqm"]
    if mean is None:
        return f"{metrics.label(score)} is no number"
    said = f"{metrics.label(score)} {mean:.4g}"
    if len(final) == 1:
        return said
    said += f", worst seed {final.min():.4g}"
    start = float(metrics.mean(np.array(rows[0][score], np.float64)))
    behind = int(np.sum(~(final - start >= 0.5 * (mean - start)))) if mean > start else 0
    seeds = metrics.counted(len(final), "seeds")
    return said + (f": {behind} of {seeds} gained less than half as much" if behind else "")
