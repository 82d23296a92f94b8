"""The training loop: run a chunk, write its line of metrics, save a checkpoint, until done.

Chunks end at multiples of `log_every`, and a shorter one is the same program with a smaller count.
When to evaluate and save depends on the iteration alone, never on the clock; the metrics of a chunk
that a signal cuts are set aside for its line. So a run that was killed or interrupted, and resumed,
equals an uninterrupted one, bit for bit.
"""

import contextlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import numpy.typing as npt

from jaxrl_po.masked import Mean
from jaxrl_po.run.data.scoring import RewardError
from jaxrl_po.run.devices import processes
from jaxrl_po.run.devices.compilation import compiled
from jaxrl_po.run.host.vector_envs import PoolError
from jaxrl_po.run.loop import programs as programs_lib
from jaxrl_po.run.loop import supervised
from jaxrl_po.run.loop.doubts import SIGNAL, Doubts, first_above_zero
from jaxrl_po.run.loop.interrupts import hear_signals, result_of
from jaxrl_po.run.loop.programs import Job, RolloutsFailed
from jaxrl_po.run.store import metrics as metrics_lib
from jaxrl_po.run.store.checkpoint import Store
from jaxrl_po.run.store.metrics import Row
from jaxrl_po.types import Metrics, PyTree, TrainState

SKIPPED = "skipped"
NO_ACTION = "frac_no_action"
METRICS, EXAMPLES, ASIDE = "metrics.jsonl", "samples.jsonl", ".chunk.json"


class Diverged(Exception):
    """Loss or gradient stayed non-finite; the message names the seed and the iteration."""


class NoAction(Exception):
    """No action was legal in some state; the message names the seed and the iteration."""


class Reporter(Protocol):
    """Shows the progress of a run."""

    def report(self, line: str) -> None:
        """Shows a permanent line."""

    def phase(self, name: str, detail: str = "", left: str = "") -> None:
        """Shows what happens outside the training itself, how far it is, and the time left."""

    def update(self, row: Row, seconds_left: float) -> None:
        """Shows one line of metrics."""


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
      state: the final training state.
      iteration: iterations done.
      interrupted: whether a signal ended it early.
      idle: whether it ended early for lack of a learning signal, see `Job.idle_patience`.
    """

    state: TrainState
    iteration: int
    interrupted: bool
    idle: bool = False


def run(
    job: Job, folder: Path, reporter: Reporter, *, resume: bool = False, leave_early: bool = False
) -> Outcome:
    """Runs `job`; writes `metrics.jsonl`, `samples.jsonl` and `checkpoints/{latest,best}`.

    A line of metrics, and the best checkpoint if it is the best so far, are on disk before the
    latest checkpoint of the same iteration. A resumed run loads the newest intact checkpoint, drops
    the lines after it and writes them again. SIGINT, SIGTERM or SIGHUP ends the run after the
    current iteration or within 5 seconds, whichever is longer, saved; a second one kills it. With
    several processes, all compute and the first one writes; a signal to any of them ends all.

    Args:
      job: see `Job`.
      folder: an existing folder.
      reporter: shows progress.
      resume: continue from the checkpoints in `folder`, if there are any.
      leave_early: end the process on a signal before the first iteration, as a command does.

    Returns:
      The `Outcome`.

    Raises:
      Diverged: see `Job.patience`; the last good checkpoint is kept.
      NoAction: an environment's mask of actions allowed none; the last checkpoint is kept.
      RewardError: a reward function failed on the first batch; earlier checkpoints are kept.
      PoolError: an environment of the host failed; saved after the last whole iteration.
      RewardError: a reward function failed on a whole evaluation, likewise; or on the first batch.
      CheckpointError: no checkpoint can be used.
      OSError: the folder cannot be written; earlier checkpoints are kept.
    """
    with (
        Store(folder / "checkpoints" / "latest", keep=2) as latest,
        Store(folder / "checkpoints" / "best", keep=1) as best,
        contextlib.ExitStack() as stack,
        hear_signals(started := threading.Event(), leave_early=leave_early) as stop,
    ):
        worker = ThreadPoolExecutor(max_workers=1)
        stack.callback(worker.shutdown, wait=False)  # an interrupt does not wait for the compiler

        def wait_for(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
            """The result of a call and its seconds, run in a thread: this one handles signals."""
            begun = time.perf_counter()
            result = result_of(worker.submit(lambda: jax.block_until_ready(function(*args))))
            return result, max(time.perf_counter() - begun, 0.0)  # a clock may jump

        def leave_if_interrupted() -> None:
            """Ends all of several processes, before there is anything to save."""
            if processes.any_of(stop.is_set()):
                raise SystemExit(128 + signal.SIGINT)

        if resume and max(latest.iterations(), default=-1) >= job.iterations:
            like = jax.eval_shape(job.learner.init, job.start)
            finished = latest.load(without_frozen(like), report=reporter.report)
            rows = metrics_lib.read(folder / METRICS)
            done = finished[0] if finished is not None else -1
            again = processes.any_of(bool(_without_evaluation(job, rows, done)))
            if finished is not None and done >= job.iterations and not again:
                reporter.report(
                    f"nothing left to do: iteration {finished[0]} "
                    f"(step {finished[0] * job.steps_per_iteration:,}) is reached"
                )
                return Outcome(with_frozen(finished[1], job), finished[0], False)

        reporter.phase("compiling")
        programs, compile_seconds = wait_for(programs_lib.compile_programs, job)
        reporter.report("; ".join(filter(None, [job.where, programs.memory.describe()])))
        like = without_frozen(programs.like)
        saved = latest.load(like, report=reporter.report) if resume else None
        done = saved[0] if saved else -1
        rows = metrics_lib.read(folder / METRICS)
        # A line whose evaluation failed is written again, with its evaluation.
        failed_line = _without_evaluation(job, rows, done)
        # Together, and before any process shortens the file: evaluations are.
        again = processes.any_of(bool(failed_line))
        if resume and saved is None and rows:
            reporter.report(
                "no checkpoint is left to resume from: the run starts again at iteration 0"
            )
        log = Log(folder / METRICS, job.score, after=done - again)
        if job.examples is not None and processes.is_writer():
            metrics_lib.truncate(folder / EXAMPLES, done)

        failure: PoolError | RewardError | None = None

        def evaluation(place: Row, state: TrainState) -> Row:
            """The fields of an evaluation; writes its examples, unless either of them fails."""
            fields: Row = {}
            if programs.evaluate is not None:
                values, seconds = wait_for(programs.evaluate, state)
                fields = {**metrics_lib.by_seed(values), "time/evaluation_seconds": seconds}
            if job.examples is not None:
                arrays, _ = wait_for(programs.describe, state)
                if processes.is_writer():
                    examples = job.examples.render(jax.device_get(arrays))
                    metrics_lib.append(
                        folder / EXAMPLES, *({**place, **example} for example in examples)
                    )
            return fields

        def record(iteration: int, state: TrainState, fields: Row, *, evaluated: bool) -> Row:
            """Writes the line of `iteration`; saves the state as the best one if it is."""
            nonlocal failure
            place = {"iteration": iteration, "step": iteration * job.steps_per_iteration}
            # Twice: first in the line, and not overwritten by a metric of the same name.
            row = {**place, **fields, **place}
            try:
                row |= evaluation(place, state) if evaluated else {}
            except (PoolError, RewardError) as error:
                failure = error  # the line is written without its evaluation
            row["time/compile_seconds"] = compile_seconds
            # Never saved while all updates of some seed are being skipped: it is not a good state.
            if log.write(row) and not streak.any():
                best.save(iteration, without_frozen(state))
            return row

        aside: Metrics = {}  # of the chunk that is under way
        streak = np.zeros(job.num_seeds, np.int64)
        if saved is None:
            start: PyTree = job.start
            if programs.warm is not None:
                fitted = supervised.run(
                    programs.warm,
                    job.start,
                    wait_for,
                    reporter.phase,
                    leave_if_interrupted,
                    given=job.given,
                )
                start = job.start, fitted
            reporter.phase("initialising")
            state, _ = wait_for(programs.init, start)
            del start  # the state holds its own copy of the parameters
            leave_if_interrupted()
            started.set()
            iteration = kept = 0
            held = {
                f"memory/{name}_bytes": value for name, value in programs.memory._asdict().items()
            }
            reporter.update(record(0, state, held, evaluated=True), math.inf)
            latest.save(0, without_frozen(state), after=best)
        else:
            iteration, state = saved[0], with_frozen(saved[1], job)
            lines = [row["iteration"] for row in rows if row["iteration"] <= iteration]
            aside = read_aside(folder / ASIDE, iteration - max(lines, default=iteration))
            started.set()
            kept = iteration
            reporter.report(
                f"resuming at iteration {iteration} (step {iteration * job.steps_per_iteration:,})"
            )
            if again:
                record(iteration, state, failed_line, evaluated=True)

        doubts = Doubts(on_host=job.rollouts is not None)
        first, begun, idle = iteration, time.perf_counter(), False

        def unfinished() -> bool:
            ended = idle or failure is not None or iteration >= job.iterations
            return not ended and not processes.any_of(stop.is_set())

        while unfinished():
            end, chunk_begun = job.boundary(iteration), time.perf_counter()
            try:
                (state, buffer, count), seconds = wait_for(
                    programs.chunk, state, np.int32(end - iteration), reporter.report, stop
                )
                end = iteration + count
            except RolloutsFailed as failed:
                failure, state, end = failed.error, failed.state, iteration + len(failed.rows)
                if end == iteration:
                    break
                buffer = programs_lib.stacked(failed.rows)
                seconds = max(time.perf_counter() - chunk_begun, 0.0)
            means = jax.tree.map(np.asarray, buffer)
            aside = joined(aside, means)
            streak, stuck = extend_streaks(streak, means.get(SKIPPED), job.patience)
            rate = (
                (end - iteration) * job.steps_per_iteration * job.num_seeds / seconds
                if seconds
                else math.nan
            )
            fields = {
                **metrics_lib.by_seed(metrics_lib.pool(aside)),
                "time/seconds": seconds,
                "time/steps_per_second": rate,
            }
            row = metrics_lib.by_seed(metrics_lib.pool(means))
            if end == job.boundary(iteration) or failure is not None:
                idle = log.idle(end, fields) >= job.idle_patience
                due = failure is None and (idle or job.due(end, job.eval_every))
                row = record(end, state, fields, evaluated=due)
                each = max(time.perf_counter() - begun, 0.0) / (end - first)
                reporter.update(row, each * (job.iterations - end))
                aside = {}
            elif processes.is_writer():
                write_aside(folder / ASIDE, aside)
            for doubt in doubts.about(iteration, means, row):
                reporter.report(doubt)
            if stuck is not None:
                where = iteration + stuck[0] + 1
                raise Diverged(
                    f"seed {stuck[1]}: loss or gradient was not finite in any update of the "
                    f"{job.patience} iterations up to iteration {where} (step "
                    f"{where * job.steps_per_iteration:,}); the last good checkpoint, of "
                    f"iteration {kept}, stays in {folder / 'checkpoints'}"
                )
            if (found := first_above_zero(means.get(NO_ACTION))) is not None:
                where = iteration + found[0] + 1
                raise NoAction(
                    f"seed {found[1]}: no action was legal in some state of iteration {where} "
                    f"(step {where * job.steps_per_iteration:,}): the action_mask of the "
                    f"environment must allow one in every state that is not the last of an "
                    f"episode; the checkpoint of iteration {kept} stays in "
                    f"{folder / 'checkpoints'}"
                )
            iteration = end
            if job.due(iteration, job.checkpoint_every) and not streak.any():
                latest.save(iteration, without_frozen(state), after=best)
                kept = iteration
        if kept != iteration and not streak.any():
            latest.save(iteration, without_frozen(state), after=best)
            kept = iteration
        if failure is not None:
            raise type(failure)(f"{failure}; saved at iteration {kept}") from failure
    return Outcome(state, iteration, iteration < job.iterations and not idle, idle)


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


def _without_evaluation(job: Job, rows: Sequence[Row], iteration: int) -> Row:
    """The line of an iteration if it lacks the evaluation that was due; else empty."""
    due = iteration == 0 or (iteration > 0 and job.due(iteration, job.eval_every))
    if not due or not job.score:
        return {}
    return next((row for row in rows if row["iteration"] == iteration and job.score not in row), {})


def without_frozen(state: TrainState) -> TrainState:
    """The part of a state that checkpoints hold: without the frozen parameters."""
    return state._replace(params=state.params.trained())


def with_frozen(state: TrainState, job: Job) -> TrainState:
    """A checkpoint's state with the frozen parameters, which `init` makes again."""
    if not jax.tree.leaves(jax.eval_shape(job.learner.init, job.start).params.frozen):
        return state
    # Compiled as the init of the run was: other effort may round otherwise.
    frozen = compiled(lambda start: job.learner.init(start).params.frozen, job.start)(job.start)
    return state._replace(params=state.params._replace(frozen=frozen))


class Log:
    """The file of metrics, its best score, and its last iteration with a learning signal.

    Args:
      path: of the file.
      score: the evaluated quantity whose mean over seeds is the score; empty for none.
      after: the iteration after which lines are dropped.
    """

    def __init__(self, path: Path, score: str, *, after: int):
        self._path, self._score = path, score
        self._best, self._signalled = -math.inf, 0
        rows = (
            metrics_lib.truncate(path, after) if processes.is_writer() else metrics_lib.read(path)
        )
        for row in rows:
            if row["iteration"] <= after:
                self._follow(row)

    def idle(self, iteration: int, fields: Row) -> int:
        """Consecutive iterations, up to this one, without a learning signal in any seed."""
        signal = fields.get(SIGNAL)
        return (
            0
            if signal is None or np.any(np.asarray(signal, np.float64) > 0)
            else iteration - self._signalled
        )

    def write(self, row: Row) -> bool:
        """Appends a line; returns whether its score is the best so far."""
        if processes.is_writer():
            metrics_lib.append(self._path, row)
        return self._follow(row)

    def _follow(self, row: Row) -> bool:
        score = row.get(f"{self._score}/mean")
        # Not where a seed has no number, which the mean over seeds leaves out.
        whole = np.isfinite(np.asarray(row.get(self._score, ()), np.float64)).all()
        improved = bool(score is not None and whole and score > self._best)
        if score is not None and improved:
            self._best = float(score)
        if self.idle(row["iteration"], row) == 0:
            self._signalled = row["iteration"]
        return improved


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
