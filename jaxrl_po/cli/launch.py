"""What the training commands share: from flags to a run."""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_po.run.devices import processes
from jaxrl_po.run.experiment import control as control_experiment
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.experiment import language as language_experiment
from jaxrl_po.run.experiment.plan import Plan, prepare, sections_of
from jaxrl_po.run.experiment.script import Script
from jaxrl_po.run.loop import runner
from jaxrl_po.run.loop.execution import broken_off, carry_out
from jaxrl_po.run.store import metrics, summary


def main(script: Script, argv: Sequence[str]) -> int:
    """Runs a script from its arguments; returns its exit status.

    It is 0 if the run is done, or was interrupted and saved; 1 if it diverged, a reward function
    failed on the first batch, an environment failed, or the folder could no longer be written.

    Raises:
      UsageError: invalid flags, before anything is compiled or the folder is changed; or later, a
        resumed run none of whose checkpoints can be used.
    """
    if {"--help", "-help", "-h"} & set(argv):
        options = flags.parse(
            [a for a in argv if a.lstrip("-") not in ("h", "help")],
            {"": script.options},
            partial=True,
        )[""]
        sections = sections_of(script, options)
        print(
            flags.usage(
                f"jaxrl-po {script.name}", script.summary, sections, script.defaults(options)
            )
        )
        return 0

    options = flags.parse(argv, {"": script.options}, partial=True)[""]
    if options.distributed:
        processes.start(
            coordinator=options.coordinator,
            num_processes=options.num_processes,
            process_id=options.process_id,
            timeout=options.coordinator_timeout,
        )
    with processes.together() as require_same:
        plan = prepare(script, argv, options, require_same)
    options = plan.records[""]
    try:
        outcome = carry_out(script, plan)
    except OSError as error:
        print(f"error: {broken_off(options.out, error)}", file=sys.stderr)
        return 1
    return 1 if outcome is None else 0


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


def control(argv: Sequence[str]) -> int:
    """`jaxrl-po control`; returns its exit status."""
    return main(control_experiment.SCRIPT, argv)


def language(argv: Sequence[str]) -> int:
    """`jaxrl-po language`; returns its exit status."""
    return main(language_experiment.SCRIPT, argv)
