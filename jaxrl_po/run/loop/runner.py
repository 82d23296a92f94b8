"""The training loop: run a chunk, write its line of metrics, save a checkpoint, until done.

Chunks end at multiples of `log_every`; a shorter chunk is the same program with a smaller count.
The iteration alone, never the clock, decides when to evaluate and save. If a signal cuts a chunk,
the chunk's metrics are stored for the line that the resumed run writes. A run that was killed or
interrupted, and resumed, therefore equals an uninterrupted run, bit for bit.
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
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from jaxrl_po.masked import Mean
from jaxrl_po.run.data.scoring import FAILED, RewardError
from jaxrl_po.run.devices import memory as memory_lib
from jaxrl_po.run.devices import processes
from jaxrl_po.run.errors import RunError
from jaxrl_po.run.host.vector_envs import PoolError
from jaxrl_po.run.loop import programs as programs_lib
from jaxrl_po.run.loop.job import TrainJob
from jaxrl_po.run.loop.progress import (
    SIGNAL,
    MetricWarnings,
    OnRow,
    Stop,
    added_fields,
    first_above,
)
from jaxrl_po.run.loop.signals import handle_signals, result_of
from jaxrl_po.run.store import metrics as metrics_lib
from jaxrl_po.run.store.checkpoint import Store
from jaxrl_po.run.store.exporters import Reporter
from jaxrl_po.types import Metrics, PyTree, Row, TrainState

SKIPPED, NO_ACTION = "skipped", "frac_no_action"
METRICS, EXAMPLES, ASIDE = "metrics.jsonl", "samples.jsonl", ".chunk.json"


class Diverged(RunError):
    """Loss or gradient stayed non-finite; the message names the seed and the iteration."""


class NoAction(RunError):
    """No action was legal in some state; the message names the seed and the iteration."""


FAILURES = Diverged, NoAction, RewardError, PoolError


class Outcome(NamedTuple):
    """Final state of a run, and the reason of its end.

    Attributes:
      state: final training state.
      iteration: number of completed iterations.
      interrupted: whether a signal arrived, even if too late to shorten the run.
      idle: whether the run ended early for lack of a learning signal, see `Patience`.
      stopped: reason why `on_row` ended the run early; empty if `on_row` did not.
    """

    state: TrainState
    iteration: int
    interrupted: bool
    idle: bool = False
    stopped: str = ""


def run(
    job: TrainJob,
    folder: Path,
    reporter: Reporter,
    *,
    resume: bool = False,
    leave_early: bool = False,
    on_row: OnRow | None = None,
    on_chosen: Callable[[int], None] = lambda number: None,
) -> Outcome:
    """Runs `job`; writes `metrics.jsonl`, `samples.jsonl` and `checkpoints/{latest,best}`.

    A line of metrics, and the best checkpoint if the state is the best so far, are on disk before
    the latest checkpoint of the same iteration. A resumed run loads the newest intact checkpoint,
    drops the lines after that checkpoint and writes them again. SIGINT, SIGTERM or SIGHUP saves and
    ends the run after the current iteration or within 5 seconds, whichever is longer; a second
    signal ends the run at once. With several processes, all processes compute and the first process
    writes; a signal to any process ends all processes.

    Args:
      job: run as data, see `TrainJob`.
      folder: existing folder of the run.
      reporter: display of the progress.
      resume: whether to continue from the checkpoints in `folder`, if the folder has any.
      leave_early: whether to end the process, as a command does, on a second signal or on a signal
        before the first iteration; if false, such a signal raises KeyboardInterrupt.
      on_row: `(row) -> fields`, receives each line before it is written, see `progress`; an
        exception in `on_row` saves and ends the run, and KeyboardInterrupt counts as a signal.
      on_chosen: `(num_microbatches) -> None`, called before the first iteration if `job.rebuild`
        leaves the number open.

    Returns:
      Final state of the run, and the reason of its end.

    Raises:
      RunError: the run does not fit in memory.
      Diverged: all updates of a seed were skipped, see `Patience`; the last good checkpoint stays.
      NoAction: an environment's action mask allowed no action; the last checkpoint stays.
      RewardError: A reward function failed on the first batch, where earlier checkpoints stay; or
        on a whole first or last evaluation, after which the run is saved.
      PoolError: An environment of the host failed; the run is saved after the last full iteration.
      CheckpointError: no checkpoint can be used.
      OSError: the folder cannot be written; earlier checkpoints stay.
    """
    with (
        handle_signals(started := threading.Event(), leave_early=leave_early) as stop,
        Store(folder / "checkpoints" / "latest", keep=2) as latest,
        Store(folder / "checkpoints" / "best", keep=1) as best,
        contextlib.ExitStack() as stack,
    ):
        worker = ThreadPoolExecutor(max_workers=1)
        stack.callback(worker.shutdown, wait=False)  # an interrupt does not wait for the compiler

        def wait_for(function: Callable[..., PyTree], *args: Any) -> tuple[PyTree, float]:
            """Returns a call's result and seconds; meanwhile, the main thread handles signals."""
            begun = time.perf_counter()
            result = result_of(worker.submit(lambda: jax.block_until_ready(function(*args))))
            return result, max(time.perf_counter() - begun, 0.0)  # the clock may jump

        def leave_if_interrupted() -> None:
            """Ends all processes after a signal, before there is a state to save."""
            if processes.any_of(stop.is_set()):
                raise SystemExit(128 + signal.SIGINT)

        done = _already_done(job, folder, latest, reporter) if resume else None
        if done is not None:
            return done
        reporter.phase("compiling the training step")
        programs, compile_seconds = wait_for(programs_lib.compile_programs, job)
        placed = jax.tree.leaves(programs.like)[0].sharding
        space = memory_lib.available_bytes(len(placed.addressable_devices))
        if job.rebuild is not None:
            (number, programs), seconds = wait_for(programs_lib.fit_in_memory, job, programs, space)
            compile_seconds += seconds
            on_chosen(number)
        where = job.layout.placement.describe()
        reporter.report("; ".join(filter(None, [where, programs.largest.describe(space)])))
        like = programs.like.with_frozen(None)
        saved = latest.load(like, report=reporter.report) if resume else None
        run = _Run(job, folder, reporter, programs, wait_for, latest, best)
        run.on_row, run.stop = on_row, stop
        run.held["time/compile_seconds"] = compile_seconds
        rows, failed_line = run.open_files(-1 if saved is None else saved[0], resume=resume)
        if saved is None:
            state = run.initial_state(leave_if_interrupted)
            leave_if_interrupted()
            started.set()
            run.begin(state)
        else:
            started.set()
            run.go_on(*saved, rows, failed_line)
        run.train()
    # A signal to another process also ends this process.
    cut = run.iteration < job.length.iterations and not (run.idle or run.stopped)
    interrupted = cut or processes.any_of(stop.is_set())
    return Outcome(run.state, run.iteration, interrupted, run.idle, run.stopped)


def _already_done(job: TrainJob, folder: Path, latest: Store, reporter: Reporter) -> Outcome | None:
    """Returns the outcome of a run whose last iteration is done, without compiling; or None."""
    if max(latest.iterations(), default=-1) < job.length.iterations:
        return None
    like = jax.eval_shape(job.learner.init, job.start)
    finished = latest.load(like.with_frozen(None), report=reporter.report)
    done = finished[0] if finished is not None else -1
    rows = metrics_lib.read(folder / METRICS)
    again = processes.any_of(bool(without_evaluation(job, rows, done)))
    if finished is None or done < job.length.iterations or again:
        return None
    reporter.report(
        f"nothing left to do: iteration {done} (step {job.length.steps(done):,}) is reached"
    )
    return Outcome(programs_lib.with_frozen(finished[1], job), done, False)


class _Run:
    """A run in progress: its programs, files and iteration; see the function `run`."""

    def __init__(
        self,
        job: TrainJob,
        folder: Path,
        reporter: Reporter,
        programs: programs_lib.Programs,
        wait_for: Callable[..., tuple[PyTree, float]],
        latest: Store,
        best: Store,
    ):
        self.job, self.length, self.score = job, job.length, job.evaluation.score
        self.folder, self.reporter, self.programs = folder, reporter, programs
        self.wait_for, self.latest, self.best = wait_for, latest, best
        self.state: TrainState
        self.log: Log
        self.iteration = self.kept = 0
        self.stop, self.idle, self.stopped = threading.Event(), False, ""
        self.on_row: OnRow | None = None
        self.failure: Exception | None = None
        self.aside: Metrics = {}  # metrics of the chunk in progress
        self.held: Row = {}  # fields that every line contains
        self.shown: list[Row] = []  # examples of the last evaluation
        self.streak = np.zeros(job.num_seeds, np.int64)
        self.stuck: tuple[int, int] | None = None
        self.warnings = MetricWarnings(job.display.smaller_steps)

    def open_files(self, done: int, *, resume: bool) -> tuple[list[Row], Row]:
        """Drops the lines after iteration `done`; returns all lines, and a line to write again.

        The line to write again lacks its evaluation; the line is dropped, too, and later written
        with the evaluation.
        """
        rows = metrics_lib.read(self.folder / METRICS)
        failed_line = without_evaluation(self.job, rows, done)
        # All processes check before a process shortens the file, since they evaluate together.
        again = processes.any_of(bool(failed_line))
        if resume and done < 0 and rows:
            self.reporter.report("no checkpoint is left to resume from: starts at iteration 0")
        self.log = Log(self.folder / METRICS, self.score, after=done - again)
        if self.job.examples is not None and processes.is_writer():
            metrics_lib.truncate(self.folder / EXAMPLES, done)
        return rows, failed_line

    def initial_state(self, leave_if_interrupted: Callable[[], None]) -> TrainState:
        """Computes the state before the first iteration, including any warm start."""
        start, warm, show = self.job.start, self.programs.warm, self.reporter.phase
        if warm is not None:
            fitted = programs_lib.run_warm_start(
                warm, start, self.wait_for, show, leave_if_interrupted, given=self.job.given
            )
            start = start, fitted
        self.reporter.phase("initialising")
        state: TrainState = self.wait_for(self.programs.init, start)[0]
        return state  # contains a copy of the parameters of the warm start

    def begin(self, state: TrainState) -> None:
        """Writes the line and the checkpoint of iteration 0."""
        self.state = state
        memory = self.programs.memory
        held = {"memory/state_bytes": memory.state, "memory/peak_bytes": memory.peak}
        row = self.record(0, held, evaluated=True)
        self.reporter.update(row, math.inf)
        explain = self.job.evaluation.explain
        if explain is not None and not np.any(row.get(self.score, 1.0)):
            for line in explain(self.shown):
                self.reporter.report(line)
        self.save()

    def go_on(
        self, iteration: int, saved: TrainState, rows: Sequence[Row], failed_line: Row
    ) -> None:
        """Continues from a checkpoint; writes the last line again if it lacks its evaluation."""
        self.state = programs_lib.with_frozen(saved, self.job)
        self.iteration = self.kept = iteration
        lines = [row["iteration"] for row in rows if row["iteration"] <= iteration]
        self.aside = read_aside(self.folder / ASIDE, iteration - max(lines, default=iteration))
        self.reporter.report(
            f"resuming at iteration {iteration} (step {self.length.steps(iteration):,})"
        )
        if processes.any_of(bool(failed_line)):
            self.record(iteration, failed_line, evaluated=True)

    def train(self) -> None:
        """Runs chunks until all iterations are done, a signal arrives, or something fails."""
        first, begun = self.iteration, time.perf_counter()

        def unfinished() -> bool:
            ended = self.idle or self.stopped or self.failure is not None
            ended = ended or self.iteration >= self.length.iterations
            return not ended and not processes.any_of(self.stop.is_set())

        while unfinished():
            before = self.iteration
            row, means = self.chunk()
            if means is None:
                break
            if row:
                each = max(time.perf_counter() - begun, 0.0) / (self.iteration - first)
                self.reporter.update(row, each * (self.length.iterations - self.iteration))
            seen = row or metrics_lib.by_seed(metrics_lib.pool(means))
            for warning in self.warnings.about(before, means, seen):
                self.reporter.report(warning)
            self.require_sound(before, means)
            due = self.length.due(self.iteration, self.length.checkpoint_every)
            if due and not self.streak.any():
                self.save()
        if self.kept != self.iteration and not self.streak.any():
            self.save()
        if self.failure is not None:
            saved = f"saved at iteration {self.kept}"
            if isinstance(self.failure, PoolError | RewardError):
                raise type(self.failure)(f"{self.failure}; {saved}") from self.failure
            self.failure.add_note(f"on_row ended the run, which is {saved}")
            raise self.failure

    def chunk(self) -> tuple[Row, Metrics | None]:
        """Trains until the next line, or until a signal or a failure.

        Returns:
          The line, empty if the chunk was cut; and the metrics `[n, S]` of the n iterations of the
          chunk, None if n is 0.
        """
        done, boundary = self.iteration, self.length.boundary(self.iteration)
        given = self.state, np.int32(boundary - done), self.reporter.report, self.stop
        result, seconds = self.wait_for(self.programs.chunk, *given)
        self.state, buffer, count, self.failure = result
        if not count:
            return {}, None
        end, means = done + count, jax.tree.map(np.asarray, buffer)
        self.aside = joined(self.aside, means)
        self.iteration = end
        self.streak, self.stuck = extend_streaks(
            self.streak, means.get(SKIPPED), self.job.patience.skipped
        )
        if end < boundary and self.failure is None:
            if processes.is_writer():
                write_aside(self.folder / ASIDE, self.aside)
            return {}, means
        steps = (end - done) * self.length.steps_per_iteration * self.job.num_seeds
        fields = {
            **metrics_lib.by_seed(metrics_lib.pool(self.aside)),
            "time/seconds": seconds,
            "time/steps_per_second": steps / seconds if seconds else math.nan,
        }
        self.idle = self.log.idle(end, fields) >= self.job.patience.idle
        due = self.failure is None and (self.idle or self.length.due(end, self.length.eval_every))
        self.aside = {}
        return self.record(end, fields, evaluated=due), means

    def record(self, iteration: int, fields: Row, *, evaluated: bool) -> Row:
        """Writes the line of `iteration`; saves the best checkpoint if the state is the best."""
        place = {"iteration": iteration, "step": self.length.steps(iteration)}
        # `place` is written twice, so that it comes first and no metric can overwrite it.
        row = {**place, **fields, **place}
        row |= (self.evaluation(place) if evaluated else {}) | self.held
        if self.on_row is not None and self.failure is None:
            try:
                row |= added_fields(self.on_row, row, self.job.num_seeds, self.score)
            except Stop as stop:
                self.stopped = str(stop) or "on_row raised Stop"
                row |= {} if evaluated else self.evaluation(place)
            except KeyboardInterrupt:
                if self.stop.is_set():  # a second interrupt
                    raise
                self.stop.set()
            except Exception as error:  # an error in the user's own code
                self.failure = error
        # A state is not saved as best while all updates of some seed are being skipped.
        if self.log.write(row) and not self.streak.any():
            self.best.save(iteration, self.state.with_frozen(None))
        return row

    def evaluation(self, place: Row) -> Row:
        """Returns the fields of an evaluation and writes the examples, unless the host fails.

        A failure on the host leaves no fields, and ends the run. A failure of a reward function
        ends the run only in the first or the last evaluation; otherwise training continues.
        """
        fields: Row = {}
        try:
            if self.programs.evaluate is not None:
                values, seconds = self.wait_for(self.programs.evaluate, self.state)
                fields = {**metrics_lib.by_seed(values), "time/evaluation_seconds": seconds}
            if self.job.examples is not None:
                arrays, _ = self.wait_for(self.programs.describe, self.state)
                if processes.is_writer():
                    self.shown = self.job.examples.render(jax.device_get(arrays))
                    lines = ({**place, **example} for example in self.shown)
                    metrics_lib.append(self.folder / EXAMPLES, *lines)
        except (PoolError, RewardError) as error:
            fields = {}
            last = self.idle or self.stopped or place["iteration"] in (0, self.length.iterations)
            if isinstance(error, RewardError) and not last:
                self.reporter.report(f"{error}; training continues without this evaluation")
            else:
                self.failure = error
        return fields

    def save(self) -> None:
        """Saves the state as the latest checkpoint."""
        self.latest.save(self.iteration, self.state.with_frozen(None), after=self.best)
        self.kept = self.iteration

    def require_sound(self, before: int, means: Metrics) -> None:
        """Raises Diverged or NoAction for failures in iterations after `before`; see `run`."""
        if self.stuck is not None:
            where = before + self.stuck[0] + 1
            raise Diverged(
                f"seed {self.stuck[1]}: loss or gradient was not finite in any update of the "
                f"{self.job.patience.skipped} iterations up to iteration {where} (step "
                f"{self.length.steps(where):,}); the last good checkpoint, of "
                f"iteration {self.kept}, stays in {self.folder / 'checkpoints'}"
            )
        if (found := first_above(means.get(NO_ACTION), 0.0)) is not None:
            where = before + found[0] + 1
            raise NoAction(
                f"seed {found[1]}: no action was legal in some state of iteration {where} "
                f"(step {self.length.steps(where):,}): the action_mask of the "
                f"environment must allow one in every state that is not the last of an "
                f"episode; the checkpoint of iteration {self.kept} stays in "
                f"{self.folder / 'checkpoints'}"
            )


def write_aside(path: Path, means: Metrics) -> None:
    """Stores the metrics of a chunk that was cut, leaves `[n, S]`."""
    content = {name: [mean.total.tolist(), mean.count.tolist()] for name, mean in means.items()}
    metrics_lib.write_atomically(path, json.dumps(content))


def read_aside(path: Path, count: int) -> Metrics:
    """Returns the stored metrics of the last `count` iterations; empty if none are stored."""
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
    """Joins metrics of earlier and later iterations; drops the earlier if the names differ."""
    if before.keys() != after.keys():
        return after
    return jax.tree.map(lambda *each: np.concatenate(each), before, after)


class Log:
    """The file of metrics, its best score, and its last iteration with a learning signal.

    Args:
      path: path of the file of metrics.
      score: name of the evaluated metric whose mean over seeds is the score; empty for no score.
      after: iteration after which lines are dropped.
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
        """Returns the number of latest iterations without a learning signal in any seed."""
        signal = fields.get(SIGNAL)
        learned = signal is None or np.any(np.asarray(signal, np.float64) > 0)
        return 0 if learned else iteration - self._signalled

    def write(self, row: Row) -> bool:
        """Appends a line; returns whether the score in the line is the best so far."""
        if processes.is_writer():
            metrics_lib.append(self._path, row)
        return self._follow(row)

    def _follow(self, row: Row) -> bool:
        score = row.get(f"{self._score}/mean")
        # A seed without a finite score rules a line out, since the mean over seeds ignores NaN.
        scores = np.asarray(row.get(self._score, ()), np.float64)
        whole = score is not None and np.isfinite(scores).all()
        # Lines with fewer failed answers rank higher: a mean over a part of the answers says less.
        rank = -float(np.mean(row.get(FAILED, 0.0))), float(score or 0.0)
        improved = bool(whole and rank >= self._best)
        if improved:
            self._best = rank
        if self.idle(row["iteration"], row) == 0:
            self._signalled = row["iteration"]
        return improved


def without_evaluation(job: TrainJob, rows: Sequence[Row], iteration: int) -> Row:
    """Returns the line of an iteration if the line lacks the evaluation that was due; else {}."""
    due = iteration == 0 or (iteration > 0 and job.length.due(iteration, job.length.eval_every))
    score = job.evaluation.score
    if not due or not score:
        return {}
    return next((row for row in rows if row["iteration"] == iteration and score not in row), {})


def extend_streaks(
    streak: npt.NDArray[np.int64], skipped: Mean | None, patience: int
) -> tuple[npt.NDArray[np.int64], tuple[int, int] | None]:
    """Counts the consecutive iterations of each seed in which every update was skipped.

    Args:
      streak: counts so far, `[S]`.
      skipped: skipped updates (total) among attempted updates (count) in n further iterations,
        `[n, S]`; None if the learner does not report skipped updates.
      patience: count to look for.

    Returns:
      The counts after the n iterations, and `(index of the iteration, seed)` at which a count first
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
