"""The content of `summary.json`: final scores of a run, and what its numbers depend on."""

from collections.abc import Mapping, Sequence
from typing import Any

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
