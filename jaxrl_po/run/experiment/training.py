"""`train` and `resume`: experiments, and learners of one's own with all that commands have."""

import contextlib
import inspect
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import jax

from jaxrl_po import config
from jaxrl_po.config import NON_NEGATIVE, ConfigError, Values, check_size
from jaxrl_po.run.data.scoring import opened
from jaxrl_po.run.devices import parallel, processes
from jaxrl_po.run.errors import format_error
from jaxrl_po.run.experiment import assembly, settings, user_code
from jaxrl_po.run.experiment.assembly import Command
from jaxrl_po.run.experiment.earlier import TRAIN
from jaxrl_po.run.experiment.experiment import SCRIPTS, Experiment, of_folder
from jaxrl_po.run.experiment.options import LINES, Options
from jaxrl_po.run.experiment.plan import Plan, prepare
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.loop import programs, runner
from jaxrl_po.run.loop.progress import OnRow, Progress
from jaxrl_po.run.loop.signals import Interrupted, hear_signals
from jaxrl_po.run.store import checkpoint, folder, metrics, provenance
from jaxrl_po.run.store.checkpoint import CheckpointError
from jaxrl_po.run.store.exporters import Exporter, Exporting, require_exporters
from jaxrl_po.types import ActorCritic, CollectorState, Learner, Row, TrainState, short_repr

SUCCESS = ("episode_return", "accuracy")  # drawn where no metric is named
Evaluate = Callable[[ActorCritic, CollectorState, jax.Array], Mapping[str, jax.Array]]
# Arguments of `train` for a learner that are fields of `Options`.
OF_LEARNER = {"seeds", "seed", "devices", "out", "resume", "overwrite", "log_every", "eval_every"}
# A run that one of these ends keeps its lines and its last checkpoint.
FAILURES = runner.FAILURES


class Trained(NamedTuple):
    """What a run leaves.

    Attributes:
      state: the final state; leaves lead with the seeds, but for what is frozen.
      rows: the lines of `metrics.jsonl`, a list of one number for each seed under each name.
      folder: where they lie, or None.
      interrupted: whether a signal came, even if too late to shorten the run; see `Interrupted`.
      stopped: why an `on_row` ended it early; empty if none did.
    """

    state: TrainState
    rows: list[Row]
    folder: Path | None
    interrupted: bool
    stopped: str = ""


Trained.__repr__ = short_repr  # type: ignore[method-assign]


@overload
def train(  # noqa: D418
    what: Experiment, *, on_row: OnRow | None = None, exporters: Sequence[Exporter] = ()
) -> Trained:
    """Carries out an experiment."""


@overload
def train(  # noqa: D418
    what: Learner,
    iterations: int,
    *,
    seeds: int = 1,
    seed: int = 0,
    steps_per_iteration: int = 1,
    evaluate: Evaluate | None = None,
    score: str = "",
    watch: Sequence[str] = (),
    out: str | Path = "",
    resume: bool = False,
    overwrite: bool = False,
    log_every: int = 0,
    eval_every: int = 5,
    title: str = "training",
    devices: int | str = "auto",
    iterate: programs.Iterate | None = None,
    on_row: OnRow | None = None,
    exporters: Sequence[Exporter] = (),
) -> Trained:
    """Trains a learner of one's own."""


def train(
    what: Experiment | Learner,
    *arguments: Any,
    on_row: OnRow | None = None,
    exporters: Sequence[Exporter] = (),
    **options: Any,
) -> Trained:
    """Carries out an experiment, or trains a learner of one's own in the same way.

    All seeds are vmapped, and sharded over the devices that they divide among.

    Args:
      what: an `Experiment`, which has no further arguments but `on_row` and `exporters`; or a
        learner of one seed.
      iterations: in all, a resumed run's earlier ones included.
      seeds: the number of runs.
      seed: base seed, from which those of all runs follow.
      steps_per_iteration: environment steps (or completions) of one iteration of one seed.
      evaluate: `(params, collector, key) -> {name: array}` of one seed, whose means are logged;
        its key is the same at each evaluation. None evaluates nothing.
      score: the evaluated name that marks the best checkpoint; empty keeps the latest only.
      watch: metrics to show while it runs, and to draw in `curves.png`; empty takes the episodes'
        return or the accuracy, if the learner logs one.
      out: folder for `metrics.jsonl`, `checkpoints/`, `curves.png` and `config.json`; empty writes
        nothing that stays.
      resume: continue the run in `out`; it must have been started with the same learner and
        arguments, but `iterations` may grow.
      overwrite: replace the run in `out`.
      log_every: iterations pooled into one line; 0 makes about 50 lines.
      eval_every: lines between evaluations.
      title: Name of the run for progress, curves and exporters.
      devices: Number of devices to shard the seeds over; `auto` takes as many as divide them, on a
        CPU one per core.
      iterate: `(step, state) -> (state, metrics)`, an iteration with work on the host around the
        compiled `step`, which it calls once, and metrics `[S]` of its own; None for `step` alone.
      on_row: `on_row(line) -> None | {name: number}` gets each line of metrics, evaluation and all,
        as plain numbers (lists hold one for each seed); what it returns is added to the line.
        `raise run.Stop("why")` in it ends the run; that and any other error leave it saved.
      exporters: Objects with the methods of `Exporter`, such as `run.TensorBoard()`, that get each
        line of metrics. A resumed run needs them again.

    Returns:
      `Trained`.

    Raises:
      Interrupted: at an interrupt (SIGINT, SIGTERM or SIGHUP), after the current iteration, saved.
      KeyboardInterrupt: at a second one, or at one before the first iteration: immediately.
      ConfigError: names the argument that cannot work; nothing is compiled or written.
      runner.Diverged: no update was finite for 10 iterations; the last good checkpoint stays.
      runner.NoAction: an environment's mask of actions allowed none.

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
        plan = plan_of(what, *arguments, **options)
        return carry_out(plan._replace(exporters=exporters), on_row=on_row)
    if arguments or options:
        raise ConfigError(
            next(iter(options), "iterations"),
            "must be left out beside an Experiment, which has its own",
        )
    script = SCRIPTS[what.script]
    asked = settings.options_of(script, what.settings)
    if asked.compile_for:
        raise ConfigError(
            "compile_for", "trains nothing: call run.compile_for(experiment, machine)"
        )
    plan = plan_experiment(script, what.settings, asked)
    if on_row is not None and plan.options.distributed:
        raise ConfigError("on_row", "must be left out with distributed: it runs in one process")
    return carry_out(plan._replace(exporters=[*plan.exporters, *exporters]), on_row=on_row)


def resume(
    out: str | Path, *, on_row: OnRow | None = None, exporters: Sequence[Exporter] = (), **more: Any
) -> Trained:
    """Goes on with the run of an `Experiment` or a command in a folder.

    Args:
      out: the folder.
      on_row: see `train`.
      exporters: see `train`.
      more: keywords of `Experiment` that may change, such as `total_steps`, which may grow.

    Raises:
      ConfigError: it holds no such run, or another value must stay as it was.
      Interrupted: see `train`.
    """
    experiment = of_folder(str(out), **more)
    return train(experiment, on_row=on_row, exporters=exporters)


def _earlier(options: Options, iterations: int) -> dict[str, Any]:
    """The settings of the run of a learner that is resumed; empty for a new one.

    Raises:
      ConfigError: it is another kind of run, or a longer one.
    """
    out = options.out
    if (options.resume or options.overwrite) and not out:
        raise ConfigError("out", "must name the folder of a run that is resumed or replaced")
    if processes.several():
        raise ConfigError("learner", "is trained in one process; an Experiment can be distributed")
    switches = {"resume": options.resume, "overwrite": options.overwrite}
    stored = folder.inspect(out, **switches, script=TRAIN) if out else {}
    least = stored.get("total_steps", 0) // stored.get("steps_per_iteration", 1)
    if iterations < least:
        raise ConfigError(
            "iterations",
            f"must be at least {least}, those of the run in {out}, got {iterations}: they may "
            "only grow",
        )
    return stored


def plan_of(
    learner: Learner,
    iterations: int,
    *,
    steps_per_iteration: int = 1,
    evaluate: Evaluate | None = None,
    score: str = "",
    watch: Sequence[str] = (),
    title: str = "training",
    iterate: programs.Iterate | None = None,
    **given: Any,
) -> Plan:
    """Builds the plan of a user's learner; see `train`."""
    for name in given.keys() - OF_LEARNER:
        known = [*list(inspect.signature(plan_of).parameters)[1:-1], *sorted(OF_LEARNER)]
        raise ConfigError(name, f"is not an argument of train with a learner: {', '.join(known)}")
    iterations = check_size("iterations", iterations, NON_NEGATIVE)
    steps_per_iteration = check_size("steps_per_iteration", steps_per_iteration)
    title = config.static_value("title", title, str)
    if score and evaluate is None:
        raise ConfigError("evaluate", f"must be given where score = {score!r}")
    given |= {name: str(given[name]) for name in ("out", "devices") if name in given}
    options = Options(**{"seeds": 1, "total_steps": iterations * steps_per_iteration, **given})
    config.check(options)
    stored = _earlier(options, iterations)
    before = stored.get("resolved", {})
    lasting: dict[str, Any] = {
        **{name: getattr(options, name) for name in ("seeds", "seed", "eval_every", "total_steps")},
        "steps_per_iteration": steps_per_iteration,
        "log_every": options.log_every or stored.get("log_every") or max(1, iterations // LINES),
        "score": score,
    }
    folder.require_same(lasting, stored, settings.fields_of({"": Options}), options.out)
    cores = parallel.cores(options.devices, options.seeds)
    placement = parallel.choose(
        options.devices, num_seeds=options.seeds, num_rows=1, described=cores
    )
    setup = assembly.Setup(learner, evaluate, score, iterate=iterate)
    job = assembly.make_job(
        setup,
        options,
        placement,
        iterations=iterations,
        steps_per_iteration=steps_per_iteration,
        log_every=lasting["log_every"],
    )
    shown = choose_metrics(job, score, watch)
    now = provenance.describe(placement.describe())
    if options.out:
        now["program"] = provenance.program(learner)
    if stored:
        require_same_learner(job, now, before, Path(options.out))
    curves = tuple(plotting.Series(name, metrics.label(name)) for name in shown)
    units = {metrics.unit(name) for name in shown}
    y_label = metrics.axis(shown[0]) if len(shown) == 1 else " or ".join(sorted(units))
    return Plan(
        title=title,
        options=options,
        settings={"script": TRAIN, **lasting, "resolved": provenance.go_on(now, before)},
        setup=setup._replace(curves=curves, y_label=y_label),
        placement=placement,
        job=job,
        unit="iterations" if steps_per_iteration == 1 else "steps",
        notes=provenance.note(provenance.differences(now, before)),
    )


def require_same_learner(
    job: programs.Job, now: Mapping[str, Any], before: Mapping[str, Any], out: Path
) -> None:
    """Refuses to resume a run with another learner; nothing is compiled.

    Args:
      job: of this start.
      now: see `provenance.describe`, with the learner's `program`.
      before: the same, of the run in the folder.
      out: the folder.

    Raises:
      ConfigError: the state has other names, shapes or dtypes than that of the run, or the program
        of an iteration differs under equal versions, code and devices.
    """
    why = ""
    try:
        like = jax.eval_shape(job.learner.init, job.keys).with_frozen(None)
        checkpoint.peek(out / "checkpoints" / "latest", like)
    except CheckpointError as error:
        why = str(error)
    if not why and provenance.another_program(now, before):
        why = "the program of an iteration is another (method, settings or problem)"
    if why:
        raise ConfigError(
            "learner",
            f"must be the learner of the run in {out} that is resumed: {why}; give that learner, "
            "or choose another out",
        )


def choose_metrics(job: programs.Job, score: str, watch: Sequence[str]) -> list[str]:
    """Names to show and to draw: `watch`, or else what tells of success, and the score.

    Raises:
      ConfigError: sizes that do not fit, or a name that nothing logs.
    """
    programs.check(job)
    state = jax.eval_shape(job.learner.init, job.keys)
    logged = set(jax.eval_shape(job.learner.step, state)[1])
    evaluated = set() if job.evaluate is None else set(jax.eval_shape(job.evaluate, state))
    if score and score not in evaluated:
        raise ConfigError("score", f"must be one of {', '.join(sorted(evaluated))}, got {score!r}")
    for name in watch:
        if name not in logged | evaluated:
            known = ", ".join(sorted(logged | evaluated))
            raise ConfigError("watch", f"must name metrics of the learner ({known}), got {name!r}")
    chosen = watch or [name for name in SUCCESS if name in logged]
    return list(dict.fromkeys([*filter(None, [score]), *chosen]))


def plan_experiment(script: Command, given: Values, options: Options) -> Plan:
    """Joins the processes of a distributed run, before anything is computed; returns its plan.

    Args:
      script: Command of the run.
      given: Flag name to text or value.
      options: Options among these.
    """
    if options.distributed:
        processes.start(
            coordinator=options.coordinator,
            num_processes=options.num_processes,
            process_id=options.process_id,
            timeout=options.coordinator_timeout,
        )
    with processes.together() as require_same:
        return prepare(script, settings.read(script, given), require_same)


def carry_out(plan: Plan, *, leave_early: bool = False, on_row: OnRow | None = None) -> Trained:
    """Carries out the plan and writes its results to the folder.

    Args:
      plan: the run.
      leave_early: whether to return after a signal too, as a command does; see `runner.run`.
      on_row: hook that gets each line; see `runner.run`.

    Raises:
      ConfigError: the folder is unusable or locked, or no checkpoint in it can be used.
      OSError: the folder can no longer be written.
      Interrupted: see `train`.
      FAILURES: see `runner.run`.
    """
    with contextlib.ExitStack() as hearing, contextlib.ExitStack() as stack:
        with processes.together():
            stack.enter_context(opened(plan.setup.rewarded))
            if plan.job.rollouts is not None:
                stack.enter_context(contextlib.closing(plan.job.rollouts))
            out = stack.enter_context(_place(plan))
            if processes.is_writer():
                folder.write_settings(out, plan.settings)
        progress = Progress(
            plan.title,
            plan.job.iterations * plan.job.steps_per_iteration,
            unit=plan.unit,
            watch=sorted((x.metric for x in plan.setup.curves), key=lambda x: x != plan.job.score),
            num_seeds=plan.job.num_seeds,
            quiet=not processes.is_writer(),
        )
        try:
            outcome, stop = _train(plan, out, progress, leave_early, on_row, hearing)
        except FAILURES:
            draw(plan, out)
            raise
        rows = draw(plan, out)
        if processes.is_writer() and plan.options.out:
            # An interrupted run's last line may lack an evaluation.
            ended = outcome.idle or outcome.stopped
            whole = ended or (rows and rows[-1]["iteration"] == plan.job.iterations)
            score, initial = plan.job.score, plan.setup.initial
            if score and whole:
                resolved = plan.settings["resolved"]
                content = metrics.summary(
                    rows, plan.options, resolved, score=score, initial=initial
                )
                content |= {"stopped": outcome.stopped} if outcome.stopped else {}
                folder.write_json(out / "summary.json", content)
            progress.report(ending(plan, outcome, rows))
    where = Path(plan.options.out) if plan.options.out else None
    interrupted = outcome.interrupted or processes.any_of(stop.is_set())
    state = outcome.state
    if plan.placement.described:  # the devices of the run's own client
        state = jax.device_put(state, jax.devices()[0])
    trained = Trained(state, rows, where, interrupted, outcome.stopped)
    if interrupted and not leave_early:
        raise Interrupted(trained=trained)
    return trained


@contextlib.contextmanager
def _place(plan: Plan) -> Iterator[Path]:
    """The folder of the run, or one that is deleted with its end."""
    if plan.options.out:
        with folder.claim(plan.options.out, overwrite=plan.options.overwrite) as place:
            yield place
    else:
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)


def _train(
    plan: Plan,
    out: Path,
    progress: Progress,
    leave_early: bool,
    on_row: OnRow | None,
    hearing: contextlib.ExitStack,
) -> tuple[runner.Outcome, threading.Event]:
    found = plan.exporters if processes.is_writer() else ()
    place = out if plan.options.out else None
    with progress, Exporting(progress, found, (plan.title, plan.settings, place)) as reporter:
        for note in plan.notes:
            progress.report(f"{plan.title}: {note}")
        try:
            outcome = runner.run(
                plan.job,
                out,
                reporter,
                resume=plan.options.resume,
                leave_early=leave_early,
                on_row=on_row,
                on_chosen=lambda number: plan.record(number, out, progress.report),
            )
            # Without a folder, the state is in memory only: a signal must not lose it.
            return outcome, hearing.enter_context(hear_signals(None, leave_early=leave_early))
        except CheckpointError as error:
            raise ConfigError(
                "resume", f"{error}; put the files back, or choose another out"
            ) from None


def draw(plan: Plan, out: Path) -> list[Row]:
    """Draws the learning curves; returns the lines of the run."""
    rows = metrics.read(out / runner.METRICS)
    if processes.is_writer() and plan.options.out:
        panel = plotting.Panel(
            rows, plan.setup.curves, plan.title, f"{plan.unit}, each seed", plan.setup.y_label
        )
        with plotting.beside(out / "curves.png"):
            plotting.save([panel], out / "curves.png")
    return rows


def broken_off(out: str, error: OSError) -> str:
    """One line on a run that a failed write ended: why, what is intact, and how to continue."""
    newest = None
    with contextlib.suppress(OSError):  # the failure of the folder may last
        newest = checkpoint.newest_intact(Path(out) / "checkpoints" / "latest")
    if newest is None:
        return format_error(error, out, "--resume continues from what is there, or begins again")
    kept = f"--resume continues from iteration {newest}, which is intact in {out}"
    return format_error(error, out, kept)


def ending(plan: Plan, outcome: runner.Outcome, rows: Sequence[Row]) -> str:
    """The last line: how the run ended."""
    if outcome.stopped:
        return f"{plan.title}: stopped at iteration {outcome.iteration}: {outcome.stopped}"
    if outcome.idle:
        return (
            f"{plan.title}: ended at iteration {outcome.iteration}: all members of a group "
            "scored alike in every group of every seed for "
            f"{plan.job.idle_patience} iterations. The task is too hard or too "
            "easy for the policy: warm start it further, choose another difficulty, or raise "
            "--problem.group_size"
        )
    if outcome.iteration < plan.job.iterations:
        return (
            f"{plan.title}: stopped and saved at iteration {outcome.iteration}; --resume "
            "continues from there"
        )
    score = f"{metrics.in_words(rows, plan.job.score)}; " if plan.job.score and rows else ""
    return f"done: {score}results in {plan.options.out}"
