"""What the training commands share: the way from flags to a folder of results."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_po.run import (
    checkpoint,
    exporters,
    extras,
    flags,
    folder,
    jobs,
    metrics,
    parallel,
    plotting,
    processes,
    programs,
    provenance,
    runner,
    summary,
    user_code,
)
from jaxrl_po.run.checkpoint import CheckpointError
from jaxrl_po.run.compilation import keep_programs
from jaxrl_po.run.flags import UsageError
from jaxrl_po.run.jobs import Experiment
from jaxrl_po.run.methods import ALGORITHMS
from jaxrl_po.run.options import LINES, Options
from jaxrl_po.run.pools import PoolError
from jaxrl_po.run.progress import Progress
from jaxrl_po.run.scoring import RewardError
from jaxrl_po.run.script import Script

DECAY = "config.decay_iterations"
# Flags that may differ between processes, or (`out`) are compared separately.
PER_PROCESS = ("out", "coordinator", "process_id")


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
        outcome = train(plan, out, script)
        if processes.is_writer():
            rows = metrics.read(out / "metrics.jsonl")
            plotting.save([panel(script, plan.title, rows)], out / "curves.png")
            # Without an outcome the run failed, and its last line may lack an evaluation.
            if outcome is not None and (
                outcome.idle or rows[-1]["iteration"] == plan.job.iterations
            ):
                experiment = plan.experiment
                content = summary.of_run(
                    rows, options, plan.resolved, score=experiment.score, initial=experiment.initial
                )
                folder.write_json(out / "summary.json", content)
    return outcome


def broken_off(out: str, error: OSError) -> str:
    """One line on a run that a failed write ended: why, what is intact, and how to continue."""
    why = (
        str(error)
        if isinstance(error, checkpoint.SaveError)
        else f"--out={out}: {folder.reason(error)}"
    )
    newest = checkpoint.newest_intact(Path(out) / "checkpoints" / "latest")
    if newest is None:
        return f"{why}; nothing was saved yet, begin again with --overwrite where there is room"
    return (
        f"{why}; all up to iteration {newest} is intact in {out}: free some space there, then "
        "--resume continues from it"
    )


class Plan(NamedTuple):
    """A run, fully checked.

    Attributes:
      records: prefix to record.
      experiment: of one seed.
      job: over all seeds and devices.
      title: for display.
      resolved: values that the flags left open, and `provenance.describe`.
      changes: differences in provenance since the last start of the resumed run.
    """

    records: dict[str, Any]
    experiment: Experiment
    job: programs.Job
    title: str
    resolved: dict[str, Any]
    changes: list[str]


def prepare(
    script: Script,
    argv: Sequence[str],
    options: Options,
    require_same: Callable[[Mapping[str, Any]], None],
) -> Plan:
    """Reads all flags, chooses the placement and builds the job; nothing is compiled or written.

    Args:
      script: see `Script`.
      argv: its arguments.
      options: those of the run as a whole, from the arguments alone.
      require_same: see `processes.together`.
    """
    stored = folder.inspect(options.out, resume=options.resume, overwrite=options.overwrite)
    if stored.get("script", script.name) != script.name:
        raise UsageError(
            f"--resume: --out={options.out} holds a run of jaxrl-po {stored['script']}, not "
            f"of jaxrl-po {script.name}"
        )
    provenance.require_readable(stored.get("resolved", {}), options.out)
    stored |= user_code.absolute(stored)
    records = parse(script, argv, stored)
    options = records[""]
    keep_programs(options.compilation_cache)
    if options.deterministic:
        provenance.ask_for_determinism()
    sections = sections_of(script, options)
    settings, given = flags.flatten(records), flags.given(argv, sections)
    # All processes must see the same folder, so whether it holds a run is compared too.
    holds = f"{options.out} ({'with a run' if stored else 'without a run'})"
    require_same(
        {"out": holds, **{name: settings[name] for name in settings if name not in PER_PROCESS}}
    )
    # Given flags first: the error names the cause, not a default that differs as a consequence.
    given_first = {name: settings[name] for name in given} | settings
    folder.require_same(given_first, stored, options.out)

    if options.tensorboard:
        extras.require("tensorboard", "tensorboardX", "tensorboard")
    if options.wandb:
        extras.require("wandb", "wandb", "wandb")
    title = f"{script.title(records)}, {options.seeds} seeds"
    with flags.blame(sections):
        placement = parallel.choose(
            options.devices,
            num_seeds=options.seeds,
            num_rows=script.rows(records),
            mesh=options.mesh,
            shard_params=script.shards_params(options),
            num_processes=options.num_processes if options.distributed else 1,
        )
        records, iterations = settle(script, records, settings if stored else given)
        experiment = script.build(records, ALGORITHMS[options.algorithm], placement)
        if placement.cuts_params and experiment.axes is None:
            raise UsageError(
                f"--mesh={options.mesh}: model is for jaxrl-po language; the networks of "
                f"jaxrl-po {script.name} are not sharded"
            )
        log_every = (
            stored.get("resolved", {}).get("log_every")
            or options.log_every
            or max(1, iterations // LINES)
        )
        job = jobs.make_job(
            experiment,
            options,
            placement,
            iterations=iterations,
            steps_per_iteration=script.steps(records),
            log_every=log_every,
        )
        programs.check(job)

    origin = provenance.describe(placement.describe(), user_code.files(settings))
    before = stored.get("resolved", {})
    found = {name: value for name, value in script.tuned(options).items() if name not in given}
    sizes = {
        "iterations": iterations,
        "steps_per_iteration": job.steps_per_iteration,
        "log_every": log_every,
        "tuned": before.get("tuned", {}) if stored else found,
    }
    if options.deterministic:
        provenance.require_same(origin, before, options.out)
    if experiment.base:
        provenance.require_base(experiment.base, before, f"--resume: --out={options.out}")
        sizes[provenance.BASE] = experiment.base
    if experiment.prompts:
        provenance.require_prompts(experiment.prompts, before, f"--resume: --out={options.out}")
        sizes[provenance.PROMPTS] = experiment.prompts
    resolved = sizes | provenance.go_on(origin, before)
    return Plan(records, experiment, job, title, resolved, provenance.differences(origin, before))


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


def train(plan: Plan, out: Path, script: Script) -> runner.Outcome | None:
    """Runs the job and reports how it ended.

    Returns:
      Its outcome, or None if it diverged, a reward function failed on the first batch, or an
      environment of the host failed.
    """
    job, title = plan.job, plan.title
    watch, quiet = [series.metric for series in script.curves], not processes.is_writer()
    with (
        Progress(
            title,
            job.iterations * job.steps_per_iteration,
            unit=script.unit,
            watch=watch,
            num_seeds=plan.records[""].seeds,
            quiet=quiet,
        ) as progress,
        exporters.Exporting(progress, exporters_of(plan, out)) as reporter,
    ):
        if tuned := plan.resolved["tuned"]:
            shown = ", ".join(f"{name}={flags.shown(value)}" for name, value in tuned.items())
            progress.report(f"{title}: with tuned settings, which flags may replace: {shown}")
        for note in plan.experiment.notes:
            progress.report(f"{title}: {note}")
        if plan.changes:
            progress.report(
                f"{title}: resumes in a changed environment, so the last digits may differ: "
                f"{'; '.join(plan.changes)}"
            )
        try:
            resume = plan.records[""].resume
            outcome = runner.run(job, out, reporter, resume=resume, leave_early=True)
        except (runner.Diverged, runner.NoAction, RewardError, PoolError) as error:
            print(f"error: {error}", file=sys.stderr)
            return None
        except CheckpointError as error:
            raise UsageError(
                f"--resume: {error}; start afresh with --overwrite or another --out"
            ) from None
        if outcome.interrupted:
            progress.report(
                f"{title}: stopped and saved at iteration {outcome.iteration}; --resume "
                "continues from there"
            )
        elif outcome.idle:
            progress.report(
                f"{title}: ended at iteration {outcome.iteration}: all members of a group "
                "scored alike in every group of every seed for "
                f"--idle_patience={job.idle_patience} iterations. The task is too hard or "
                "too easy for the policy: warm start it further, choose another "
                "difficulty, or raise --problem.group_size"
            )
        else:
            progress.report(f"{title}: done, results in {out}")
    return outcome


def parse(script: Script, argv: Sequence[str], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Prefix to record, from arguments and, for flags not given, an earlier `config.json`."""
    options = flags.parse(argv, {"": script.options}, stored=stored, partial=True)[""]
    records = flags.parse(
        argv, sections_of(script, options), stored=stored, defaults=script.defaults(options)
    )
    return {prefix: _with_absolute(prefix, record) for prefix, record in records.items()}


def _with_absolute(prefix: str, record: Any) -> Any:
    """The record with absolute paths."""
    names = {flags.join(prefix, field.name): field.name for field in flags.settable(type(record))}
    own = user_code.absolute({flag: getattr(record, name) for flag, name in names.items()})
    return dataclasses.replace(record, **{names[flag]: value for flag, value in own.items()})


def settle(
    script: Script, records: Mapping[str, Any], given: Collection[str]
) -> tuple[dict[str, Any], int]:
    """The records with a decay that ends with the run, unless one is given, and its iterations.

    Raises:
      UsageError: the run is shorter than an iteration, or nothing is learned in it.
    """
    options, settled = records[""], dict(records)
    iterations = count_iterations(options.total_steps, script.steps(records), script.unit)
    if iterations and DECAY in script.defaults(options) and DECAY not in given:
        settled["config"] = dataclasses.replace(records["config"], decay_iterations=iterations)
    decay_iterations = vars(settled["config"]).get("decay_iterations", 0)
    if options.resume and 0 < decay_iterations < iterations and DECAY not in given:
        raise UsageError(
            f"--total_steps={options.total_steps} must stay as it was: the step size of this run "
            f"falls to 0 in its {decay_iterations} iterations. Begin another one, with more steps "
            "or without --config.decay_iterations"
        )
    require_learning(settled["config"], iterations)
    return settled, iterations


def sections_of(script: Script, options: Any) -> dict[str, type]:
    """Prefix to record class, including the algorithm's."""
    algorithm = flags.lookup("algorithm", options.algorithm, ALGORITHMS)
    return {"": script.options, "config": algorithm.Config, **script.sections(options)}


def count_iterations(total_steps: int, steps_per_iteration: int, unit: str) -> int:
    """Whole iterations in `total_steps`; raises UsageError if positive but below one iteration."""
    if 0 < total_steps < steps_per_iteration:
        raise UsageError(
            f"--total_steps={total_steps} must be 0 or at least {steps_per_iteration}, the "
            f"{unit} of one iteration"
        )
    return total_steps // steps_per_iteration


def require_learning(settings: Any, iterations: int) -> None:
    """Raises UsageError if the learning rate would decay to 0 before the last iteration."""
    decay_iterations = vars(settings).get("decay_iterations", 0)
    if 0 < decay_iterations < iterations:
        raise UsageError(
            f"--config.decay_iterations={decay_iterations} must be 0 or at least "
            f"{iterations}, the iterations of --total_steps: the learning rate is 0 after it"
        )


def panel(
    script: Script, title: str, rows: Sequence[metrics.Row], target: float | None = None
) -> plotting.Panel:
    """The learning curves of a run."""
    return plotting.Panel(
        rows, script.curves, title, f"{script.unit}, each seed", script.y_label, target
    )
