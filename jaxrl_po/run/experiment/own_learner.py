"""The plan of a run of a user's learner; see `training.train`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl_po import backend, config
from jaxrl_po.config import NON_NEGATIVE, ConfigError, check_size
from jaxrl_po.run.devices import parallel, processes
from jaxrl_po.run.experiment import assembly
from jaxrl_po.run.experiment.earlier import TRAIN
from jaxrl_po.run.experiment.options import LINES, Options
from jaxrl_po.run.experiment.plan import Plan
from jaxrl_po.run.experiment.settings import fields_of
from jaxrl_po.run.figures.plotting import Series
from jaxrl_po.run.loop import programs
from jaxrl_po.run.store import checkpoint, folder, metrics, provenance
from jaxrl_po.run.store.checkpoint import CheckpointError
from jaxrl_po.types import ActorCritic, CollectorState, Learner

SUCCESS = ("episode_return", "accuracy")  # drawn where no metric is named
Evaluate = Callable[[ActorCritic, CollectorState, jax.Array], Mapping[str, jax.Array]]


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
) -> Plan:
    """The plan of a user's learner; see `train`."""
    iterations = check_size("iterations", iterations, NON_NEGATIVE)
    steps_per_iteration = check_size("steps_per_iteration", steps_per_iteration)
    if score and evaluate is None:
        raise ConfigError("evaluate", f"must be given where score = {score!r}")
    total = iterations * steps_per_iteration
    lasting: Any = {"seeds": seeds, "seed": seed, "eval_every": eval_every, "total_steps": total}
    options = Options(
        **lasting, log_every=log_every, out=str(out), resume=resume, overwrite=overwrite
    )
    config.check(options)
    lasting = {name: getattr(options, name) for name in lasting}
    stored = _earlier(options, iterations)
    before = stored.get("resolved", {})
    settings: dict[str, Any] = {
        **lasting,
        "steps_per_iteration": steps_per_iteration,
        "log_every": options.log_every or stored.get("log_every") or max(1, iterations // LINES),
        "score": score,
    }
    folder.require_same(settings, stored, fields_of({"": Options}), str(out))
    placement = parallel.choose("auto", num_seeds=options.seeds, num_rows=1)
    setup = assembly.Setup(learner, evaluate, score)
    job = assembly.make_job(
        setup,
        options,
        placement,
        iterations=iterations,
        steps_per_iteration=steps_per_iteration,
        log_every=settings["log_every"],
    )
    shown = choose_metrics(job, score, watch)
    now = provenance.describe(placement.describe())
    if out:
        now["program"] = provenance.program(learner)
    if stored:
        require_same_learner(job, now, before, Path(out))
    return Plan(
        title="training",
        options=options,
        settings={"script": TRAIN, **settings, "resolved": provenance.go_on(now, before)},
        setup=setup._replace(
            curves=tuple(Series(name, metrics.label(name)) for name in shown),
            y_label=_y_label(shown),
        ),
        placement=placement,
        job=job,
        unit="iterations" if steps_per_iteration == 1 else "steps",
        notes=[*_on_one_core(options.seeds), *provenance.note(provenance.differences(now, before))],
    )


def _y_label(shown: Sequence[str]) -> str:
    units = {metrics.unit(name) for name in shown}
    return metrics.axis(shown[0]) if len(shown) == 1 else " or ".join(sorted(units))


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


def _on_one_core(seeds: int) -> list[str]:
    """What to say where the backend started with one device for all cores of a CPU."""
    here = backend.here()
    if not here.on_cpu or here.devices > 1 or min(here.cores, seeds) == 1:
        return []
    first = f'jax.config.update("jax_num_cpu_devices", {here.cores})'
    return [
        f"on one of {here.cores} cores: for all of them, {first} must come before JAX computes "
        "anything, as the import of gymnax does; an Experiment has them by itself"
    ]
