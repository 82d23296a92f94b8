"""The jobs of runs: of experiments, built from settings, and of user-defined learners."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl_po import config as config_lib
from jaxrl_po.config import (
    COUNT,
    NON_NEGATIVE,
    SEED,
    ConfigError,
    Json,
    Setting,
    Values,
    check_size,
)
from jaxrl_po.run import errors
from jaxrl_po.run.devices import parallel, processes
from jaxrl_po.run.devices.compilation import keep_programs
from jaxrl_po.run.experiment import flags, user_code
from jaxrl_po.run.experiment.earlier import TRAIN
from jaxrl_po.run.experiment.options import LINES, TUNED, RunOptions
from jaxrl_po.run.experiment.settings import Domain, Settings, fields_of, settle, stored_settings
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.loop import programs
from jaxrl_po.run.loop.job import (
    Display,
    Evaluation,
    Host,
    Iterate,
    Layout,
    Length,
    Measure,
    Output,
    TrainJob,
    build_job,
)
from jaxrl_po.run.loop.programs import MICROBATCHES
from jaxrl_po.run.store import checkpoint, exporters, folder, metrics, provenance, sources
from jaxrl_po.run.store.checkpoint import CheckpointError
from jaxrl_po.run.store.exporters import Exporter
from jaxrl_po.types import Learner

SUCCESS = ("episode_return", "accuracy")  # metrics that are drawn if no metric is named
# Ranges and units of the numbers that a run of a user-defined learner takes.
RANGES = {
    "seeds": (COUNT, "seeds"),
    "seed": (SEED, ""),
    "log_every": (NON_NEGATIVE, "iterations"),
    "eval_every": (COUNT, "lines"),
}


def prepare(
    domain: Domain[Any],
    settings: Settings[Any],
    require_same: Callable[[Values], None] = lambda settings: None,
    described: tuple[jax.Device, ...] = (),
) -> TrainJob:
    """Checks all settings, chooses the placement and builds the job, without compiling or writing.

    Args:
      domain: Domain of the run.
      settings: Settings of the run.
      require_same: Comparison of the settings of all processes; see `processes.collective_errors`.
      described: Devices of a machine that is not attached, see `Placement`.

    Raises:
      ConfigError: Settings are invalid, or contradict the run in the folder.
    """
    config, before = settings.config, settings.stored
    options, sections = config.run, {x: type(y) for x, y in config.sections().items()}
    if not described:
        stored_settings(domain, options)
    keep_programs(options.compilation_cache)
    if options.deterministic:
        provenance.ask_for_determinism()
    values, fields = flags.flatten(config.sections()), fields_of(sections)
    # Processes also compare whether the folder holds a run, since all must see the same folder.
    holds = f"{options.out} ({'with a run' if before else 'without a run'})"
    require_same({"out": holds, **{x: y for x, y in values.items() if fields[x].compared}})
    earlier = before.get("resolved", {})
    with flags.locating(sections):
        placement = parallel.choose(
            options.devices,
            num_seeds=options.seeds,
            num_rows=domain.rows(config),
            mesh=options.mesh,
            shard_params=options.shards_params,
            num_processes=options.num_processes if options.distributed else 1,
            described=described,
        )
        exports = processes.is_writer() and not described
        chosen_exporters = _exporters(options) if exports else []
        world = domain.open_world(config)
        config = settle(domain, settings, world)
        job = domain.build(config.continued() if before else config, placement, world)
        if placement.cuts_params and job.layout.axes is None:
            raise ConfigError(
                "mesh", f"must have no model axis with jaxrl-po {domain.NAME}, got {options.mesh}"
            )
        log_every = earlier.get("log_every") or job.length.log_every
        job = dataclasses.replace(job, length=job.length._replace(log_every=log_every))
        programs.check_job(job)
        if options.deterministic or MICROBATCHES in {**before, **settings.given}:
            job = dataclasses.replace(job, rebuild=None)
    resolved, changes = _resolve(job, options, values, earlier)
    chosen = {
        "tuned": flags.current(earlier.get("tuned", {}), sections) if before else settings.tuned,
        "origin": earlier.get("origin", {}) | new_origins(settings, fields),
    }
    values = flags.flatten(config.sections())
    lasting = {name: value for name, value in values.items() if fields[name].stored}
    lasting |= {} if job.rebuild is None else {MICROBATCHES: None}
    notes = [*folder.removed(before), *_notes(job, values, chosen["tuned"], changes)]
    title = f"{job.display.title}, {metrics.counted(options.seeds, 'seeds')}"
    return dataclasses.replace(
        job,
        display=job.display._replace(title=title, notes=notes),
        output=Output(
            {"script": domain.NAME, **lasting, "resolved": {**chosen, **resolved}},
            options.out,
            options.resume,
            options.overwrite,
            chosen_exporters,
        ),
    )


def _exporters(options: RunOptions) -> list[Exporter]:
    """Makes the exporters that flags name.

    Raises:
      ConfigError: The package of an exporter is missing, or a user's class is not an `Exporter`.
    """
    found: list[Any] = [exporters.TensorBoard()] if options.tensorboard else []
    found += [exporters.WeightsAndBiases(options.wandb)] if options.wandb else []
    found += [user_code.make("exporter", options.exporter)] if options.exporter else []
    exporters.require_exporters("exporter", found)
    return found


def new_origins(settings: Settings[Any], fields: Mapping[str, Setting]) -> dict[str, str]:
    """Returns the origins of values that this start of a run sets: given, tuned or preset."""
    values, stored = flags.flatten(settings.config.sections()), settings.stored
    return {
        name: origin
        for name, origin in settings.origins.items()
        if origin not in ("default", "stored") and fields[name].stored
        if name not in stored or metrics.strict(values[name]) != stored[name]
    }


def _resolve(
    job: TrainJob, options: RunOptions, settings: Values, earlier: Values
) -> tuple[Json, list[str]]:
    """Returns values that the flags left open, and changes since the run was last started."""
    where = job.layout.placement.describe()
    origin = provenance.describe_process(where, sources.digests(settings))
    names = ("iterations", "steps_per_iteration", "log_every")
    resolved: dict[str, Any] = {name: getattr(job.length, name) for name in names}
    if options.deterministic:
        provenance.require_same_process(origin, earlier, options.out)
    for entry, digest in job.digests.items():
        provenance.require_data(entry, digest, earlier, "resume", options.out)
        resolved |= {entry: digest} if digest else {}
    return resolved | provenance.go_on(origin, earlier), provenance.differences(origin, earlier)


def _notes(job: TrainJob, values: Values, tuned: Values, changes: Sequence[str]) -> list[str]:
    """Returns the lines that are shown before the run starts."""
    notes, done = list[str](), job.length.steps(job.length.iterations)
    if tuned:
        notes.append(f"{TUNED}: {errors.spell_all(tuned)}")
    if values["total_steps"] != done:
        notes.append(
            f"--total_steps: {values['total_steps']:,} becomes {done:,}: a whole number of "
            "iterations"
        )
    for name, value in values.items():
        if str(value).startswith(sources.OWN):
            needed_by = (
                "run.resume" if name in ("reward", *sources.LOSS) else "run.load and run.resume"
            )
            notes.append(f"{name}={value} cannot be imported: give it to {needed_by} again")
    return [*notes, *job.display.notes, *provenance.note(changes)]


def prepare_learner(
    learner: Learner,
    iterations: int,
    *,
    steps_per_iteration: int | None = None,
    evaluate: Measure | None = None,
    score: str = "",
    watch: Sequence[str] = (),
    title: str = "training",
    iterate: Iterate | None = None,
    devices: int | str = "auto",
    eval_every: int = 5,
    log_every: int = 0,
    out: str | Path = "",
    overwrite: bool = False,
    resume: bool = False,
    seed: int = 0,
    seeds: int = 1,
    **unknown: Any,
) -> TrainJob:
    """Builds the job of a user-defined learner; see `train` for the arguments."""
    for name in unknown:
        known = list(inspect.signature(prepare_learner).parameters)[1:-1]
        raise ConfigError(name, f"is not an argument of train with a learner: {', '.join(known)}")
    iterations = check_size("iterations", iterations, NON_NEGATIVE)
    title = config_lib.static_value("title", title, str)
    if score and evaluate is None:
        raise ConfigError("evaluate", f"must be given where score = {score!r}")
    given = {"seeds": seeds, "seed": seed, "log_every": log_every, "eval_every": eval_every}
    numbers = {x: config_lib.static_value(x, value, int) for x, value in given.items()}
    switches = (("resume", resume), ("overwrite", overwrite))
    output = Output({}, str(out), *(config_lib.static_value(*each, bool) for each in switches))
    for name, (within, unit) in RANGES.items():
        config_lib.check_number(name, numbers[name], within, unit)
    stored = _stored_of_learner(output, iterations)
    before = stored.get("resolved", {})
    steps, unit = steps_of(learner, steps_per_iteration, stored)
    every = numbers["log_every"] or stored.get("log_every") or max(1, iterations // LINES)
    lasting = {
        **{name: numbers[name] for name in ("seeds", "seed", "eval_every")},
        "total_steps": iterations * steps,
        "steps_per_iteration": steps,
        "log_every": every,
        "score": score,
    }
    folder.require_same(lasting, stored, {"total_steps": Setting("", resume="grows")}, str(out))
    where = {"devices": str(devices), "num_seeds": numbers["seeds"]}
    placement = parallel.choose(**where, num_rows=1, described=parallel.core_devices(**where))
    job = build_job(
        learner,
        Layout(placement),
        Length(iterations, steps, every, numbers["eval_every"]),
        seed=numbers["seed"],
        evaluation=Evaluation(evaluate, score=score),
        display=Display(title, unit),
    )
    job = dataclasses.replace(job, host=Host(iterate=iterate))
    shown = choose_metrics(job, score, watch)
    now = provenance.describe_process(placement.describe())
    if out:
        now["program"] = provenance.program(learner)
    if stored:
        require_same_learner(job, now, before, Path(out))
    units = {metrics.unit(name) for name in shown}
    display = job.display._replace(
        curves=tuple(plotting.Series(name, metrics.label(name)) for name in shown),
        y_label=metrics.axis(shown[0]) if len(shown) == 1 else " or ".join(sorted(units)),
        notes=provenance.note(provenance.differences(now, before)),
    )
    settings = {"script": TRAIN, **lasting, "unit": unit, "resolved": provenance.go_on(now, before)}
    return dataclasses.replace(job, display=display, output=output._replace(settings=settings))


def steps_of(learner: Learner, given: int | None, stored: Values) -> tuple[int, str]:
    """Returns the steps of one iteration and the plural name of a step.

    By default they are the resumed run's, or else the problem's.
    """
    problem = learner.problem
    known = 1 if problem is None else problem.steps
    steps = stored.get("steps_per_iteration", known) if given is None else given
    steps = check_size("steps_per_iteration", steps)
    if problem is not None and steps == known:
        return steps, problem.unit
    return steps, stored.get("unit", "iterations" if steps == 1 else "steps")


def _stored_of_learner(output: Output, iterations: int) -> dict[str, Any]:
    """Returns the settings of a learner's run that is resumed; empty for a new run.

    Raises:
      ConfigError: The folder holds another kind of run, or a longer run.
    """
    out = output.folder
    if (output.resume or output.overwrite) and not out:
        raise ConfigError("out", "must name the folder of a run that is resumed or replaced")
    if processes.is_multi_process():
        raise ConfigError("learner", "is trained in one process; an Experiment can be distributed")
    switches = {"resume": output.resume, "overwrite": output.overwrite}
    stored = folder.inspect(out, **switches, script=TRAIN) if out else {}
    least = stored.get("total_steps", 0) // stored.get("steps_per_iteration", 1)
    if iterations < least:
        raise ConfigError(
            "iterations",
            f"must be at least {least}, those of the run in {out}, got {iterations}: they may "
            "only grow",
        )
    return stored


def require_same_learner(
    job: TrainJob, now: Mapping[str, Any], before: Mapping[str, Any], out: Path
) -> None:
    """Raises ConfigError if a run is resumed with another learner; compiles nothing.

    Args:
      job: Job of this start.
      now: Result of `provenance.describe_process`, with the learner's `program`.
      before: Result of `provenance.describe` that the run in the folder stored.
      out: Folder of the run.

    Raises:
      ConfigError: The state has other names, shapes or dtypes than the run's, or the program of an
        iteration differs under equal versions, code and devices.
    """
    why = ""
    try:
        like = jax.eval_shape(job.learner.init, job.start).with_frozen(None)
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


def choose_metrics(job: TrainJob, score: str, watch: Sequence[str]) -> list[str]:
    """Returns names of metrics to show and draw: the score, and `watch` or metrics of success.

    Raises:
      ConfigError: Sizes in the settings are inconsistent, or no metric has a name in `watch`.
    """
    programs.check_job(job)
    state = jax.eval_shape(job.learner.init, job.start)
    logged = set(jax.eval_shape(job.learner.step, state)[1])
    evaluated = (
        set() if job.evaluation.measure is None else set(jax.eval_shape(job.evaluate, state))
    )
    if score and score not in evaluated:
        raise ConfigError("score", f"must be one of {', '.join(sorted(evaluated))}, got {score!r}")
    for name in watch:
        if name not in logged | evaluated:
            known = ", ".join(sorted(logged | evaluated))
            raise ConfigError("watch", f"must name metrics of the learner ({known}), got {name!r}")
    chosen = watch or [name for name in SUCCESS if name in logged]
    return list(dict.fromkeys([*filter(None, [score]), *chosen]))
