"""Carrying out a plan: the run, its reports, and the results in its folder."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_po.run.data.scoring import RewardError
from jaxrl_po.run.devices import processes
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.experiment.flags import UsageError
from jaxrl_po.run.experiment.plan import Plan
from jaxrl_po.run.experiment.script import Script
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.host.vector_envs import PoolError
from jaxrl_po.run.loop import runner
from jaxrl_po.run.loop.progress import Progress
from jaxrl_po.run.store import checkpoint, exporters, failures, folder, metrics, summary
from jaxrl_po.run.store.named_arrays import CheckpointError


def carry_out(script: Script, plan: "Plan") -> runner.Outcome | None:
    """Carries out the plan and writes its results to the folder; returns what `train` does.

    Raises:
      UsageError: the folder is unusable or locked, or no checkpoint in it can be used.
      OSError: the folder can no longer be written.
    """
    records, options = plan.records, plan.records[""]
    with contextlib.ExitStack() as stack:
        with processes.together(), flags.blame({"": script.options}):
            if plan.experiment.rewarded is not None:
                stack.enter_context(plan.experiment.rewarded)
            if plan.job.rollouts is not None:
                stack.enter_context(contextlib.closing(plan.job.rollouts))
            out = stack.enter_context(folder.claim(options.out, overwrite=options.overwrite))
            if processes.is_writer():
                settings = {
                    name: value
                    for name, value in flags.flatten(records).items()
                    if name not in folder.OF_A_START
                }
                folder.write_json(
                    out / folder.CONFIG,
                    {"script": script.name, **settings, "resolved": plan.resolved},
                )
        experiment = plan.experiment
        progress = Progress(
            plan.title,
            plan.job.iterations * plan.job.steps_per_iteration,
            unit=script.unit,
            watch=[experiment.score, *(series.metric for series in script.curves)],
            num_seeds=options.seeds,
            quiet=not processes.is_writer(),
        )
        outcome = train(plan, out, progress)
        if processes.is_writer():
            rows = metrics.read(out / "metrics.jsonl")
            # Without an outcome the run failed, and its last line may lack an evaluation.
            if outcome is not None and (
                outcome.idle or rows[-1]["iteration"] == plan.job.iterations
            ):
                content = summary.of_run(
                    rows, options, plan.resolved, score=experiment.score, initial=experiment.initial
                )
                folder.write_json(out / "summary.json", content)
            with plotting.beside(out / "curves.png"):
                plotting.save([panel(script, plan.title, rows)], out / "curves.png")
            if outcome is not None:
                progress.report(ending(plan, outcome, rows, out))
    return outcome


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


def exporters_of(plan: Plan, out: Path) -> list[exporters.Exporter]:
    """The exporters that the flags ask for; only the first process exports."""
    options, found = plan.records[""], list[exporters.Exporter]()
    if options.tensorboard and processes.is_writer():
        found.append(exporters.TensorBoard(out / "tensorboard"))
    if options.wandb and processes.is_writer():
        found.append(
            exporters.WeightsAndBiases(options.wandb, out, plan.title, flags.flatten(plan.records))
        )
    return found


def train(plan: Plan, out: Path, progress: Progress) -> runner.Outcome | None:
    """Runs the job.

    Returns:
      Its outcome, or None if it diverged, a reward function failed on the first batch, or an
      environment of the host failed.
    """
    title = plan.title
    with progress, exporters.Exporting(progress, exporters_of(plan, out)) as reporter:
        if tuned := plan.resolved["tuned"]:
            shown = ", ".join(f"{name}={flags.shown(value)}" for name, value in tuned.items())
            progress.report(f"{title}: with tuned settings, which flags may replace: {shown}")
        for note in [*rounded(plan), *plan.experiment.notes]:
            progress.report(f"{title}: {note}")
        if plan.changes:
            progress.report(
                f"{title}: resumes in a changed environment, so the last digits may differ: "
                f"{'; '.join(plan.changes)}"
            )
        try:
            resume = plan.records[""].resume
            return runner.run(plan.job, out, reporter, resume=resume, leave_early=True)
        except (runner.Diverged, runner.NoAction, RewardError, PoolError) as error:
            print(f"error: {error}", file=sys.stderr)
            return None
        except CheckpointError as error:
            raise UsageError(
                f"--resume: {error}; put back what was there, or choose another --out"
            ) from None


def panel(
    script: Script, title: str, rows: Sequence[metrics.Row], target: float | None = None
) -> plotting.Panel:
    """The learning curves of a run."""
    return plotting.Panel(
        rows, script.curves, title, f"{script.unit}, each seed", script.y_label, target
    )


def ending(plan: "Plan", outcome: runner.Outcome, rows: Sequence[metrics.Row], out: Path) -> str:
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
    return f"done: {summary.in_words(rows, plan.experiment.score)}; results in {out}"


def rounded(plan: Plan) -> list[str]:
    """What is said where the steps that were asked for are no whole number of iterations."""
    asked, done = plan.records[""].total_steps, plan.job.iterations * plan.job.steps_per_iteration
    if asked == done:
        return []
    return [f"--total_steps: {asked:,} becomes {done:,}: a whole number of iterations"]
