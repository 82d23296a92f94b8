"""Vmapped training over hyperparameters and seeds: one run for all, by the loop of any other."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jaxrl_po.run.devices import parallel
from jaxrl_po.run.experiment import assembly
from jaxrl_po.run.experiment.assembly import Setup
from jaxrl_po.run.experiment.options import Options
from jaxrl_po.run.experiment.registry import MethodConfig
from jaxrl_po.run.loop import runner
from jaxrl_po.run.loop.progress import Progress
from jaxrl_po.run.store import metrics
from jaxrl_po.types import Row

ALONE = parallel.Placement(1, 1, 1)  # of one seed, which is then vmapped
Curves = Mapping[str, npt.NDArray[np.float64]]
"""Name to `[N, E]`: N runs, E evaluations."""


def train(
    setup: Setup,
    settings: Sequence[MethodConfig],
    options: Options,
    place: Path,
    title: str,
    *,
    iterations: int,
    steps_per_iteration: int,
    evaluations: int,
) -> tuple[list[Row], bool]:
    """Trains the C settings of a method on S seeds each; a run that began in the folder goes on.

    Args:
      setup: of any of them; it knows `learner_of`.
      settings: those of the method, which differ in numbers alone.
      options: with the seeds of each.
      place: folder of the run.
      title: for display.
      iterations: of each run.
      steps_per_iteration: of each run.
      evaluations: of each run, at most; as evenly spaced as lines of whole iterations can be.

    Returns:
      The lines with an evaluation after training began; lists `[C·S]`, seeds innermost. The seeds
      of each setting have the same random numbers. And whether a signal came, see `runner.Outcome`.

    Raises:
      KeyboardInterrupt: a signal came before there was such a line.
      runner.NoAction, PoolError: see `runner.run`.
    """
    place.mkdir(parents=True, exist_ok=True)
    runs = len(settings) * options.seeds
    job = assembly.make_job(
        setup._replace(examples=None, warm=None),
        dataclasses.replace(options, eval_every=1, checkpoint_every=1),
        parallel.choose(options.devices, num_seeds=runs, num_rows=1, mesh=options.mesh),
        iterations=iterations,
        steps_per_iteration=steps_per_iteration,
        log_every=-(-iterations // evaluations),
        settings=settings,
    )
    # A step size that diverges is a result, and so is one that learns nothing.
    job = dataclasses.replace(job, patience=iterations + 1, idle_patience=iterations + 1)
    total = iterations * steps_per_iteration
    with Progress(title, total, watch=[setup.score], num_seeds=runs) as progress:
        outcome = runner.run(job, place, progress, resume=True)
    rows = metrics.read(place / runner.METRICS)
    rows = [row for row in rows if row["iteration"] and setup.score in row]
    if outcome.interrupted and not rows:
        raise KeyboardInterrupt
    return rows, outcome.interrupted


def curves(rows: Sequence[Row]) -> Curves:
    """What lines hold for each run; NaN where there was no sample."""
    return {
        name: np.array([row.get(name) for row in rows], np.float64).T
        for name, value in rows[-1].items()
        if isinstance(value, list)
    }
