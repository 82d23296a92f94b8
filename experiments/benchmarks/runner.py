"""Overhead of the runner: a whole run compared with the bare loop of its chunks.

`python experiments/benchmarks/runner.py` runs the same iterations of one program both ways, in
alternation in one process: PPO on CartPole-v1 at the defaults of `jaxrl-po control`. A run writes
its lines, shows its progress and saves a checkpoint after each line; all of that is counted, to the
last byte on disk. Excluded are compilation, the initial state with its line, and evaluations with
the best checkpoint. CPU seconds are reported beside wall-clock seconds: on a shared machine they
are the more reliable ones.
"""

import contextlib
import dataclasses
import io
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np
import timing

from jaxrl_po import config
from jaxrl_po.config import COUNT, static
from jaxrl_po.run.experiment import control, flags
from jaxrl_po.run.experiment.plan import prepare
from jaxrl_po.run.loop import programs, runner
from jaxrl_po.run.loop.progress import Progress
from jaxrl_po.run.store import metrics


@config.record
class Options:
    """What is measured."""

    lines: int = static(20, "lines of a run, one checkpoint each", unit="lines", within=COUNT)
    rounds: int = static(
        5, "timed runs of each, in alternation, after one for warm-up", unit="rounds", within=COUNT
    )
    seeds: int = static(16, "parallel seeds", unit="seeds", within=COUNT)
    devices: str = static("auto", "devices; auto on a CPU: one per core")
    json: bool = static(False, "print one JSON object as the last line")


class Took(NamedTuple):
    """Elapsed time.

    Attributes:
      clock: wall-clock seconds.
      processor: CPU seconds of all cores.
    """

    clock: float
    processor: float


def now() -> Took:
    """The clocks of this process."""
    return Took(time.perf_counter(), time.process_time())


def since(begun: Took) -> Took:
    """Time elapsed since `begun`."""
    return Took(*(end - start for end, start in zip(now(), begun, strict=True)))


class Watch(Progress):
    """Progress that records when the first line was written; after that only the loop runs."""

    begun: Took

    def update(self, row: metrics.Row, seconds_left: float) -> None:
        """Shows one line of metrics."""
        super().update(row, seconds_left)
        if row["iteration"] == 0:
            self.begun = now()


def bare(job: programs.Job, compiled: programs.Programs) -> Took:
    """The chunks alone, each given the state of the previous one; only the last is read."""
    state = jax.block_until_ready(compiled.init(job.keys))
    iteration, begun, never = 0, now(), threading.Event()
    while iteration < job.iterations:
        end = job.boundary(iteration)
        state, *_ = compiled.chunk(state, np.int32(end - iteration), print, never)
        iteration = end
    jax.block_until_ready(state)
    return since(begun)


def whole(job: programs.Job, title: str) -> Took:
    """A run, from its first line on."""
    with (
        tempfile.TemporaryDirectory() as out,
        contextlib.redirect_stdout(io.StringIO()),
        Watch(title, job.iterations * job.steps_per_iteration, watch=("episode_return",)) as watch,
    ):
        runner.run(job, Path(out), watch)
        return since(watch.begun)


def measure(options: Options) -> dict[str, Any]:
    """Medians of both, measured in alternation, and the overhead of the runner."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"seeds": options.seeds, "devices": options.devices, "out": f"{folder}/none"}
        prepared = prepare(control.SCRIPT, given)
    job = dataclasses.replace(
        prepared.job, iterations=options.lines * prepared.job.log_every, evaluate=None
    )
    compiled = programs.compile_programs(job)
    took: dict[str, list[Took]] = {"bare": [], "run": []}

    def timed(name: str, function: Callable[[], Took]) -> Callable[[], float]:
        def call() -> float:
            took[name].append(function())
            return took[name][-1].clock

        return call

    alone = timed("bare", lambda: bare(job, compiled))
    in_run = timed("run", lambda: whole(job, prepared.title))
    timing.in_turns({"bare": alone, "run": in_run}, options.rounds)
    row: dict[str, Any] = {"lines": options.lines, "log_every": job.log_every}
    row["placement"] = job.where
    for field in Took._fields:
        pairs = [
            (getattr(a, field), getattr(b, field))
            for a, b in zip(took["bare"][1:], took["run"][1:], strict=True)
        ]
        apart, together = (median(values) for values in zip(*pairs, strict=True))
        row |= {
            f"bare_{field}_seconds": round(apart, 3),
            f"run_{field}_seconds": round(together, 3),
            f"{field}_ratio": round(together / apart, 4),
            f"{field}_ratios": [round(b / a, 3) for a, b in pairs],
            f"added_{field}_ms_per_line": round(1e3 * (together - apart) / options.lines, 2),
        }
    return row


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    summary = "Times a whole run against the bare loop of its chunks."
    return timing.measured(argv, "benchmarks/runner.py", summary, Options, measure)


if __name__ == "__main__":
    flags.entry(main)
