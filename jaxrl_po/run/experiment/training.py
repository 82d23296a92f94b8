"""`train` and `resume`: carry out experiments, or the training of user-defined learners."""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import jax

from jaxrl_po.config import ConfigError, Values, with_field_docs
from jaxrl_po.control.acting import Acting
from jaxrl_po.run.data.scoring import opened
from jaxrl_po.run.devices import processes
from jaxrl_po.run.devices.seeds import select_seed
from jaxrl_po.run.errors import format_error
from jaxrl_po.run.experiment import settings, user_code
from jaxrl_po.run.experiment.experiment import DOMAINS, Experiment, read_experiment
from jaxrl_po.run.experiment.options import RunOptions
from jaxrl_po.run.experiment.prepare import prepare, prepare_learner
from jaxrl_po.run.experiment.settings import Domain
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.loop import runner
from jaxrl_po.run.loop.job import Iterate, Measure, TrainJob
from jaxrl_po.run.loop.programs import MICROBATCHES
from jaxrl_po.run.loop.progress import OnRow, Progress
from jaxrl_po.run.loop.signals import Interrupted, handle_signals
from jaxrl_po.run.store import checkpoint, folder, metrics
from jaxrl_po.run.store.checkpoint import CheckpointError
from jaxrl_po.run.store.exporters import Exporter, ExportingReporter, Reporter, require_exporters
from jaxrl_po.types import Learner, Row, TrainState, short_repr

# Errors that end a run but keep its lines and its last checkpoint.
FAILURES = runner.FAILURES


@with_field_docs
class Trained(NamedTuple):
    """Results of a run.

    Attributes:
      state: final training state; leaves lead with the seeds, except frozen parameters.
      rows: lines of `metrics.jsonl`; each metric is a list of one number per seed.
      folder: folder of the run; None for a run without a folder.
      interrupted: whether a signal arrived, even if too late to shorten the run; see `Interrupted`.
      stopped: reason why `on_row` ended the run early; empty if `on_row` did not.
      act: `act(observation, key=None) -> action`, acts with the final policy of the first seed in
        a control environment, see `ControlPolicy`; `run.load` returns the policy of another seed
        or checkpoint. Raises ConfigError if the learner was not built by a method's `make`, or if
        the record was pickled.
      save: `save("policy.npz")`, writes the final policy of the first seed, see `ControlPolicy`.
    """

    state: TrainState
    rows: list[Row]
    folder: Path | None
    interrupted: bool
    stopped: str
    act: Callable[..., jax.Array]
    save: Callable[[str | Path], None]


Trained.__repr__ = short_repr  # type: ignore[method-assign]


@overload
def train(  # noqa: D418
    what: Experiment,
    *,
    on_row: OnRow | None = None,
    exporters: Sequence[Exporter] = (),
    quiet: bool = False,
) -> Trained:
    """Carries out an experiment."""


@overload
def train(  # noqa: D418
    what: Learner,
    iterations: int,
    *,
    seeds: int = 1,
    seed: int = 0,
    steps_per_iteration: int | None = None,
    evaluate: Measure | None = None,
    score: str = "",
    watch: Sequence[str] = (),
    out: str | Path = "",
    resume: bool = False,
    overwrite: bool = False,
    log_every: int = 0,
    eval_every: int = 5,
    title: str = "training",
    devices: int | str = "auto",
    iterate: Iterate | None = None,
    on_row: OnRow | None = None,
    exporters: Sequence[Exporter] = (),
    quiet: bool = False,
) -> Trained:
    """Trains a user-defined learner."""


def train(
    what: Experiment | Learner,
    *arguments: Any,
    on_row: OnRow | None = None,
    exporters: Sequence[Exporter] = (),
    quiet: bool = False,
    **options: Any,
) -> Trained:
    """Carries out an experiment, or trains a user-defined learner in the same way.

    All seeds are vmapped, and sharded over the devices if these divide the number of seeds.

    Args:
      what: an `Experiment`, which takes no further arguments than `on_row`, `exporters` and
        `quiet`; or a learner of one seed.
      iterations: total number of iterations, including earlier iterations of a resumed run.
      seeds: number of seeds, each an independent run.
      seed: base seed, which determines the random numbers of all seeds.
      steps_per_iteration: environment steps (or completions) of one seed in one iteration; None for
        the steps of the learner's problem, or 1 if the problem is unknown.
      evaluate: `(params, collector, key) -> {name: array}`, evaluates one seed; the means of the
        arrays are logged. The key is the same at each evaluation. None to disable evaluations.
      score: name of the evaluated score that marks the best checkpoint; empty to keep only the
        latest checkpoint.
      watch: metrics to show during training, and to draw in `curves.png`; empty for the episodes'
        return or the accuracy, if the learner logs either metric.
      out: folder for `metrics.jsonl`, `checkpoints/`, `curves.png` and `config.json`; empty to keep
        no files.
      resume: whether to continue the run in `out`; the run must have been started with the same
        learner and arguments, but `iterations` may grow.
      overwrite: whether to replace the run in `out`.
      log_every: number of iterations pooled into one line of metrics; 0 for about 50 lines.
      eval_every: number of lines between evaluations.
      title: title of the run for progress, curves and exporters.
      devices: number of devices to shard the seeds over; `auto` for as many devices as divide the
        number of seeds, on a CPU one device per core.
      iterate: `(step, state) -> (state, metrics)`, an iteration with work on the host around the
        compiled `step`, which `iterate` calls once, and with its own metrics `[S]`; None to call
        `step` alone.
      on_row: `(line) -> None | {name: number}`, receives each line of metrics, including
        evaluations, as plain numbers or lists of one number per seed; the returned numbers are
        added to the line. `raise run.Stop("why")` in `on_row` ends the run; `Stop` and any other
        error save the run.
      exporters: objects with the methods of `Exporter`, such as `run.TensorBoard()`, that receive
        each line of metrics. A resumed run needs its exporters again.
      quiet: whether to print nothing about the progress of the run.

    Returns:
      The final state, the lines of metrics and the folder of the run.

    Raises:
      Interrupted: an interrupt (SIGINT, SIGTERM or SIGHUP) ended the run after the current
        iteration, saved.
      KeyboardInterrupt: a second interrupt, or an interrupt before the first iteration, ended the
        run immediately.
      ConfigError: an argument is invalid, raised before compilation and before files are written;
        the error names the argument.
      runner.Diverged: no update was finite for 10 iterations; the last good checkpoint stays.
      runner.NoAction: an environment's action mask allowed no action.

    Example:
      >>> import gymnax
      >>> from jaxrl_po import control
      >>> from jaxrl_po.algorithms import ppo
      >>> problem = control.make_problem(gymnax.make("CartPole-v1")[0], num_envs=4, num_steps=8)
      >>> learner = ppo.make(ppo.Config(num_minibatches=2), problem)
      >>> trained = train(learner, 2, seeds=2)  # doctest: +ELLIPSIS
      training: ...
      >>> trained.rows[-1]["iteration"], len(trained.rows[-1]["entropy"])
      (2, 2)
    """
    user_code.require_not_imported()
    require_exporters("exporters", exporters)
    if not isinstance(what, Experiment):
        if not isinstance(what, Learner):
            raise ConfigError("what", f"must be an Experiment or a Learner, got {what!r}")
        if not arguments and "iterations" not in options:
            raise ConfigError("iterations", "must be given with a learner")
        job = prepare_learner(what, *arguments, **options)
        return run_job(job, on_row=on_row, exporters=exporters, quiet=quiet)
    if arguments or options:
        raise ConfigError(
            next(iter(options), "iterations"),
            "must be left out beside an Experiment, which has its own",
        )
    domain = DOMAINS[what.script]
    asked = settings.options_of(domain.OPTIONS, what.settings)
    if asked.compile_for:
        raise ConfigError(
            "compile_for", "trains nothing: call run.compile_for(experiment, machine)"
        )
    job = prepare_experiment(domain, what.settings, asked)
    if on_row is not None and asked.distributed:
        raise ConfigError("on_row", "must be left out with distributed: it runs in one process")
    return run_job(job, on_row=on_row, exporters=exporters, quiet=quiet)


def resume(
    out: str | Path,
    *,
    on_row: OnRow | None = None,
    exporters: Sequence[Exporter] = (),
    quiet: bool = False,
    **more: Any,
) -> Trained:
    """Continues the run of an `Experiment` or a command in a folder.

    Args:
      out: folder of the run.
      on_row: function that receives each line, see `train`.
      exporters: further destinations of each line, see `train`.
      quiet: whether to print nothing about the progress of the run.
      more: keywords of `Experiment` that may change, such as `total_steps`, which may grow.

    Raises:
      ConfigError: the folder holds no such run, or the value of a keyword must not change.
      Interrupted: an interrupt ended the run, see `train`.
    """
    experiment = read_experiment(str(out), **more)
    return train(experiment, on_row=on_row, exporters=exporters, quiet=quiet)


def prepare_experiment(domain: Domain[Any], given: Values, options: RunOptions) -> TrainJob:
    """Joins the processes of a distributed run, before any computation; returns the run's job.

    Args:
      domain: Domain of the run.
      given: Text or value of each given flag, by flag name.
      options: Options among the given flags.
    """
    if options.distributed:
        processes.join_processes(
            coordinator=options.coordinator,
            num_processes=options.num_processes,
            process_id=options.process_id,
            timeout=options.coordinator_timeout,
        )
    with processes.collective_errors() as require_same:
        return prepare(domain, settings.merge_settings(domain, given), require_same)


def run_job(
    job: TrainJob,
    *,
    leave_early: bool = False,
    on_row: OnRow | None = None,
    exporters: Sequence[Exporter] = (),
    quiet: bool = False,
) -> Trained:
    """Carries out a run and writes the results to the folder of the run.

    Args:
      job: Job of the run.
      leave_early: Whether to return after a signal, too, as a command does; see `runner.run`.
      on_row: Function that receives each line of metrics; see `runner.run`.
      exporters: Further destinations of each line of metrics.
      quiet: Whether to print nothing about progress.

    Raises:
      ConfigError: The folder is unusable or locked, or no checkpoint in the folder can be used.
      OSError: The folder can no longer be written.
      Interrupted: An interrupt ended the run, see `train`.
      FAILURES: Training failed, see `runner.run`.
    """
    output, display, length, score = job.output, job.display, job.length, job.evaluation.score
    with contextlib.ExitStack() as hearing, contextlib.ExitStack() as stack:
        with processes.collective_errors():
            stack.enter_context(opened(job.host.scorer))
            if job.host.rollouts is not None:
                stack.enter_context(contextlib.closing(job.host.rollouts))
            claim = functools.partial(folder.claim, output.folder, overwrite=output.overwrite)
            place: Any = claim() if output.folder else tempfile.TemporaryDirectory()
            out = Path(stack.enter_context(place))
            if processes.is_writer():
                known = {x: y for x, y in output.settings.items() if (x, y) != (MICROBATCHES, None)}
                folder.write_settings(out, known)
        progress = Progress(
            display.title,
            length.steps(length.iterations),
            unit=display.unit,
            watch=sorted((x.metric for x in display.curves), key=lambda x: x != score),
            num_seeds=job.num_seeds,
            quiet=quiet or not processes.is_writer(),
            flags=leave_early,
        )
        found = [*output.exporters, *exporters] if processes.is_writer() else ()
        start = display.title, output.settings, out if output.folder else None
        try:
            with progress, ExportingReporter(progress, found, start) as reporter:
                for note in display.notes:
                    progress.report(f"{display.title}: {note}")
                outcome = _run(job, out, reporter, leave_early, on_row)
                # Without a folder, the state is only in memory: a signal must not lose the state.
                stop = hearing.enter_context(handle_signals(None, leave_early=leave_early))
        except FAILURES:
            draw_curves(job, out)
            raise
        rows = draw_curves(job, out)
        if processes.is_writer() and output.folder:
            # The last line of an interrupted run may lack an evaluation.
            ended = outcome.idle or outcome.stopped
            if score and (ended or (rows and rows[-1]["iteration"] == length.iterations)):
                initial = job.evaluation.initial
                content = metrics.summary(rows, output.settings, score=score, initial=initial)
                content |= {"stopped": outcome.stopped} if outcome.stopped else {}
                folder.write_json(out / "summary.json", content)
            progress.report(ending(job, outcome, rows))
    where = Path(output.folder) if output.folder else None
    interrupted = outcome.interrupted or processes.any_of(stop.is_set())
    state = outcome.state
    if job.layout.placement.described:  # the state is on devices of the run's own client
        state = jax.device_put(state, jax.devices()[0])
    acting = Acting(job.learner.problem, state, select=select_seed, settings=output.settings)
    functions = acting.act, acting.save
    trained = Trained(state, rows, where, interrupted, outcome.stopped, *functions)
    if interrupted and not leave_early:
        raise Interrupted(trained=trained)
    return trained


def _run(
    job: TrainJob, out: Path, reporter: Reporter, leave_early: bool, on_row: OnRow | None
) -> runner.Outcome:
    """Runs the job in a folder, see `runner.run`; raises ConfigError for unusable checkpoints."""
    try:
        return runner.run(
            job,
            out,
            reporter,
            resume=job.output.resume,
            leave_early=leave_early,
            on_row=on_row,
            on_chosen=lambda number: record_microbatches(job, number, out, reporter.report),
        )
    except CheckpointError as error:
        raise ConfigError("resume", f"{error}; put the files back, or choose another out") from None


def record_microbatches(
    job: TrainJob, number: int, out: Path, report: Callable[[str], None]
) -> None:
    """Writes the chosen number of microbatches to the settings in `out`, and reports the number."""
    job.output.settings[MICROBATCHES] = number
    if processes.is_writer():
        folder.write_settings(out, job.output.settings)
    if number > 1:
        report(f"{job.display.title}: --{MICROBATCHES}={number}, to fit in memory")


def draw_curves(job: TrainJob, out: Path) -> list[Row]:
    """Draws the learning curves; returns the lines of metrics of the run."""
    rows, shown = metrics.read(out / runner.METRICS), job.display
    if processes.is_writer() and job.output.folder:
        panel = plotting.Panel(
            rows, shown.curves, shown.title, f"{shown.unit}, each seed", shown.y_label
        )
        with plotting.report_failure(out / "curves.png"):
            plotting.save_panels([panel], out / "curves.png")
    return rows


def broken_off(out: str, error: OSError) -> str:
    """Returns a line on a run that a failed write ended: reason, intact state, how to continue."""
    newest = None
    with contextlib.suppress(OSError):  # the folder may still be inaccessible
        newest = checkpoint.newest_intact(Path(out) / "checkpoints" / "latest")
    if newest is None:
        return format_error(error, out, "--resume continues from what is there, or begins again")
    kept = f"--resume continues from iteration {newest}, which is intact in {out}"
    return format_error(error, out, kept)


def ending(job: TrainJob, outcome: runner.Outcome, rows: Sequence[Row]) -> str:
    """Returns the last line for the user, which states how the run ended."""
    title = job.display.title
    if outcome.stopped:
        return f"{title}: stopped at iteration {outcome.iteration}: {outcome.stopped}"
    if outcome.idle:
        return (
            f"{title}: ended at iteration {outcome.iteration}: all members of a group "
            "scored alike in every group of every seed for "
            f"{job.patience.idle} iterations. The task is too hard or too "
            "easy for the policy: warm start it further, choose another difficulty, or raise "
            "--problem.group_size"
        )
    if outcome.iteration < job.length.iterations:
        return (
            f"{title}: stopped and saved at iteration {outcome.iteration}; --resume "
            "continues from there"
        )
    score = job.evaluation.score
    said = f"{metrics.in_words(rows, score)}; " if score and rows else ""
    return f"done: {said}results in {job.output.folder}"
