"""Carrying out a plan: the run, its reports, and the results in its folder."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxrl_po.run.data.scoring import RewardError
from jaxrl_po.run.devices import processes
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.experiment.flags import UsageError
from jaxrl_po.run.experiment.plan import Plan
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.host.vector_envs import PoolError
from jaxrl_po.run.loop import runner
from jaxrl_po.run.loop.progress import Progress
from jaxrl_po.run.store import checkpoint, exporters, failures, folder, metrics, summary
from jaxrl_po.run.store.metrics import Row
from jaxrl_po.run.store.named_arrays import CheckpointError
from jaxrl_po.types import TrainState

# A run that one of these ends keeps its lines and its last checkpoint.
FAILURES = (runner.Diverged, runner.NoAction, RewardError, PoolError)


class Trained(NamedTuple):
    """What a run leaves.

    Attributes:
      state: the final state; leaves lead with the seeds, but for what is frozen.
      rows: the lines of `metrics.jsonl`, a list of one number for each seed under each name.
      folder: where they lie, or None.
      interrupted: whether a signal ended it early.
    """

    state: TrainState
    rows: list[Row]
    folder: Path | None
    interrupted: bool


def carry_out(plan: Plan, *, leave_early: bool = False) -> Trained:
    """Carries out the plan and writes its results to the folder.

    Args:
      plan: see `Plan`.
      leave_early: see `runner.run`.

    Raises:
      UsageError: the folder is unusable or locked, or no checkpoint in it can be used.
      OSError: the folder can no longer be written.
      FAILURES: see `runner.run`.
    """
    with contextlib.ExitStack() as stack:
        with processes.together(), flags.blame({"": type(plan.options)}):
            if plan.rewarded is not None:
                stack.enter_context(plan.rewarded)
            if plan.job.rollouts is not None:
                stack.enter_context(contextlib.closing(plan.job.rollouts))
            out = stack.enter_context(_place(plan))
            if processes.is_writer():
                folder.write_json(out / folder.CONFIG, plan.settings)
        progress = Progress(
            plan.title,
            plan.job.iterations * plan.job.steps_per_iteration,
            unit=plan.unit,
            watch=[*filter(None, [plan.job.score]), *(series.metric for series in plan.curves)],
            num_seeds=plan.job.num_seeds,
            quiet=not processes.is_writer(),
        )
        try:
            outcome = _train(plan, out, progress, leave_early)
        except FAILURES:
            draw(plan, out)
            raise
        rows = draw(plan, out)
        if processes.is_writer() and plan.options.out:
            # An interrupted run's last line may lack an evaluation.
            if plan.job.score and (outcome.idle or rows[-1]["iteration"] == plan.job.iterations):
                content = summary.of_run(
                    rows,
                    plan.options,
                    plan.settings["resolved"],
                    score=plan.job.score,
                    initial=plan.initial,
                )
                folder.write_json(out / "summary.json", content)
            progress.report(ending(plan, outcome, rows))
    where = Path(plan.options.out) if plan.options.out else None
    return Trained(outcome.state, rows, where, outcome.interrupted)


@contextlib.contextmanager
def _place(plan: Plan) -> Iterator[Path]:
    """The folder of the run, or one that is deleted with its end."""
    if plan.options.out:
        with folder.claim(plan.options.out, overwrite=plan.options.overwrite) as place:
            yield place
    else:
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)


def _train(plan: Plan, out: Path, progress: Progress, leave_early: bool) -> runner.Outcome:
    with progress, exporters.Exporting(progress, plan.exporters(out)) as reporter:
        for note in plan.notes:
            progress.report(f"{plan.title}: {note}")
        try:
            return runner.run(
                plan.job, out, reporter, resume=plan.options.resume, leave_early=leave_early
            )
        except CheckpointError as error:
            raise UsageError(
                f"--resume: {error}; put back what was there, or choose another --out"
            ) from None


def draw(plan: Plan, out: Path) -> list[Row]:
    """Draws the learning curves; returns the lines of the run."""
    rows = metrics.read(out / runner.METRICS)
    if processes.is_writer() and plan.options.out:
        panel = plotting.Panel(
            rows, plan.curves, plan.title, f"{plan.unit}, each seed", plan.y_label
        )
        with plotting.beside(out / "curves.png"):
            plotting.save([panel], out / "curves.png")
    return rows


def broken_off(out: str, error: OSError) -> str:
    """One line on a run that a failed write ended: why, what is intact, and how to continue."""
    newest = None
    try:
        (Path(out) / folder.CONFIG).stat()
        newest = checkpoint.newest_intact(Path(out) / "checkpoints" / "latest")
    except FileNotFoundError:
        return f"--out={out} was moved or removed meanwhile; --resume continues it where it is now"
    except OSError:
        pass  # what is the matter with the folder may be so still
    if newest is None:
        return failures.line(error, out, "--resume goes on from what is there, or begins again")
    kept = f"--resume continues from iteration {newest}, which is intact in {out}"
    return failures.line(error, out, kept)


def ending(plan: Plan, outcome: runner.Outcome, rows: Sequence[Row]) -> str:
    """The last line: how the run ended."""
    if outcome.interrupted:
        return (
            f"{plan.title}: stopped and saved at iteration {outcome.iteration}; --resume "
            "continues from there"
        )
    if outcome.idle:
        return (
            f"{plan.title}: ended at iteration {outcome.iteration}: all members of a group "
            "scored alike in every group of every seed for "
            f"--idle_patience={plan.job.idle_patience} iterations. The task is too hard or too "
            "easy for the policy: warm start it further, choose another difficulty, or raise "
            "--problem.group_size"
        )
    score = f"{summary.in_words(rows, plan.job.score)}; " if plan.job.score else ""
    return f"done: {score}results in {plan.options.out}"
