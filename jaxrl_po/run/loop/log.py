"""The lines of metrics of a run, what they tell of it, and those of a chunk that was cut."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxrl_po.masked import Mean
from jaxrl_po.run.data.scoring import FAILED
from jaxrl_po.run.devices import processes
from jaxrl_po.run.loop.job import TrainJob
from jaxrl_po.run.store import metrics as metrics_lib
from jaxrl_po.types import Metrics, Row

SIGNAL, NONFINITE, KL = "signal", "frac_nonfinite", "kl"
# Shares that tell of an environment which breaks its contract.
ENVIRONMENT = {
    "frac_one_step": "all episodes have one step now, as if the environment did not reset itself",
    "frac_out_of_range": "a discrete observation lies outside its space, and is read as zeros",
    "greedy_ended": "no episode of the evaluation ends within the environment's own time limit",
}
LEARNED = 0.05  # a training accuracy above it is not chance
LARGE_KL = 1.0  # nats: in sound training an update stays below 0.1


def write_aside(path: Path, means: Metrics) -> None:
    """Keeps the metrics of a chunk that was cut, leaves `[n, S]`."""
    content = {name: [mean.total.tolist(), mean.count.tolist()] for name, mean in means.items()}
    metrics_lib.write_atomically(path, json.dumps(content))


def read_aside(path: Path, count: int) -> Metrics:
    """What was kept of the last `count` iterations; empty for none, or where it is of others."""
    if not count:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    leaves: dict[str, list[Any]] = {name: list(map(np.array, x)) for name, x in content.items()}
    means = {name: Mean(*each) for name, each in leaves.items()}
    return means if all(len(mean.count) == count for mean in means.values()) else {}


def joined(before: Metrics, after: Metrics) -> Metrics:
    """Metrics of iterations and of those that followed; without the former if they are others."""
    if before.keys() != after.keys():
        return after
    return jax.tree.map(lambda *each: np.concatenate(each), before, after)


class Log:
    """The file of metrics, its best score, and its last iteration with a learning signal.

    Args:
      path: of the file.
      score: the evaluated quantity whose mean over seeds is the score; empty for none.
      after: the iteration after which lines are dropped.
    """

    def __init__(self, path: Path, score: str, *, after: int):
        self._path, self._score = path, score
        self._best, self._signalled = (-math.inf, -math.inf), 0
        rows = (
            metrics_lib.truncate(path, after) if processes.is_writer() else metrics_lib.read(path)
        )
        for row in rows:
            if row["iteration"] <= after:
                self._follow(row)

    def idle(self, iteration: int, fields: Row) -> int:
        """Consecutive iterations, up to this one, without a learning signal in any seed."""
        signal = fields.get(SIGNAL)
        learned = signal is None or np.any(np.asarray(signal, np.float64) > 0)
        return 0 if learned else iteration - self._signalled

    def write(self, row: Row) -> bool:
        """Appends a line; returns whether its score is the best so far."""
        if processes.is_writer():
            metrics_lib.append(self._path, row)
        return self._follow(row)

    def _follow(self, row: Row) -> bool:
        score = row.get(f"{self._score}/mean")
        # Not where a seed has no number, which the mean over seeds leaves out.
        scores = np.asarray(row.get(self._score, ()), np.float64)
        whole = score is not None and np.isfinite(scores).all()
        # Fewer failed rows come first: a mean over a part of the rows says less.
        rank = -float(np.mean(row.get(FAILED, 0.0))), float(score or 0.0)
        improved = bool(whole and rank >= self._best)
        if improved:
            self._best = rank
        if self.idle(row["iteration"], row) == 0:
            self._signalled = row["iteration"]
        return improved


def without_evaluation(job: TrainJob, rows: Sequence[Row], iteration: int) -> Row:
    """The line of an iteration if it lacks the evaluation that was due; else empty."""
    due = iteration == 0 or (iteration > 0 and job.length.due(iteration, job.length.eval_every))
    score = job.evaluation.score
    if not due or not score:
        return {}
    return next((row for row in rows if row["iteration"] == iteration and score not in row), {})


def extend_streaks(
    streak: npt.NDArray[np.int64], skipped: Mean | None, patience: int
) -> tuple[npt.NDArray[np.int64], tuple[int, int] | None]:
    """Counts consecutive iterations in which every update was skipped.

    Args:
      streak: `[S]`, the counts so far.
      skipped: `[n, S]`, updates skipped (total) among those tried (count) in n further iterations;
        None if the learner does not report it.
      patience: the count to look for.

    Returns:
      The counts after the n iterations, and `(index of the iteration, seed)` where one first
      reached `patience`, or None.

    Example:
      >>> both = Mean(np.array([[4.0, 0.0], [4.0, 1.0]]), np.array([[4.0, 4.0], [4.0, 4.0]]))
      >>> counts, stuck = extend_streaks(np.array([1, 1]), both, patience=3)
      >>> counts.tolist(), stuck
      ([3, 0], (1, 0))
    """
    stuck = None
    if skipped is not None:
        for i, bad in enumerate((skipped.count > 0) & (skipped.total >= skipped.count)):
            streak = np.where(bad, streak + 1, 0)
            if stuck is None and streak.max() >= patience:
                stuck = (i, int(streak.argmax()))
    return streak, stuck


class Doubts:
    """Warnings about metrics, each reported once in a run.

    Args:
      smaller_steps: See `Display`.
    """

    def __init__(self, smaller_steps: str = "") -> None:
        self._smaller_steps = smaller_steps or "take smaller steps"
        self._said = set[str | int]()
        self._longer: Any = False  # `[S]`, whether an episode of the seed had several steps

    def about(self, iteration: int, means: Metrics, row: Row) -> Iterator[str]:
        """Yields a line for each doubt that was not reported before.

        Args:
          iteration: the last one before those of `means`.
          means: leaves `[n, S]`: n iterations, S seeds.
          row: their line of metrics.
        """
        spoiled = first_above(means.get(NONFINITE), 0.0)
        if spoiled is not None and self._is_new(spoiled[1]):
            yield (
                f"seed {spoiled[1]}: a reward or observation of iteration "
                f"{iteration + spoiled[0] + 1} is not finite; minibatches that it spoils are "
                f"skipped, and such steps are counted in {NONFINITE}"
            )
        signal = means.get(SIGNAL)
        taught = np.ones(1) if signal is None else np.any(np.asarray(signal.total) > 0, axis=1)
        if not taught.all() and self._is_new(SIGNAL):
            yield (
                f"iteration {iteration + int(taught.argmin()) + 1} taught nothing: all members of "
                "a group scored alike, in every group of every seed; metrics.jsonl counts in "
                f"{SIGNAL} what teaches, and this is reported once"
            )
        large = first_above(means.get(KL), LARGE_KL)
        if large is not None and self._is_new(KL):
            yield (
                f"seed {large[1]}: the update of iteration {iteration + large[0] + 1} has a "
                f"{KL} of {means[KL].total[large] / means[KL].count[large]:.2g} nats, by which a "
                f"policy can lose all that it learned: {self._smaller_steps}; this is reported once"
            )
        held_out, seen = (
            np.array(row.get(name, []), np.float64) for name in ("greedy_accuracy", "accuracy")
        )
        if held_out.shape == seen.shape:
            lost = np.flatnonzero((held_out == 0.0) & (seen > LEARNED))
            if lost.size and self._is_new("greedy_accuracy"):
                yield (
                    f"seed {lost[0]}: held-out greedy accuracy 0, though {seen[lost[0]]:.2g} in "
                    "training: held-out prompts may be of another kind, or --reward scores what "
                    "the task's answers do not; samples.jsonl has what is written, and this is "
                    "reported once"
                )
        yield from self._about_environment(iteration, row)

    def _about_environment(self, iteration: int, row: Row) -> Iterator[str]:
        """Yields lines about an environment that breaks its contract; arguments as for `about`."""
        share = {name: np.array(row.get(name, []), np.float64) for name in ENVIRONMENT}
        # A bandit's episodes have one step by design, and so from the first line on.
        single = share["frac_one_step"] == 1.0
        found = (
            single & self._longer,
            share["frac_out_of_range"] > 0.0,
            share["greedy_ended"] == 0.0,
        )
        self._longer = self._longer | ~single
        for (name, what), seeds in zip(ENVIRONMENT.items(), found, strict=True):
            if seeds.any() and self._is_new(name):
                yield (
                    f"seed {seeds.argmax()}, after iteration {iteration}: {what}; {name} is the "
                    "share, and this is reported once"
                )

    def _is_new(self, what: str | int) -> bool:
        new = what not in self._said
        self._said.add(what)
        return new


def first_above(metric: Mean | None, limit: float) -> tuple[int, int] | None:
    """Finds where a metric `[n, S]` first exceeds a limit: `(index of the iteration, seed)`.

    Returns None if the metric exceeds it nowhere; an empty mean or NaN does not exceed it.

    Example:
      >>> first_above(Mean(np.array([[4.0, 8.0], [0.0, 9.0]]), np.full((2, 2), 8.0)), 1.0)
      (1, 1)
    """
    if metric is None or not (found := np.argwhere(metric.total > limit * metric.count)).size:
        return None
    return int(found[0][0]), int(found[0][1])
