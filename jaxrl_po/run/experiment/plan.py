"""The plan of a run: settings, read and checked, and the job that is made of them."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.compilation import keep_programs
from jaxrl_po.run.experiment import assembly, extras, flags, user_code
from jaxrl_po.run.experiment.assembly import Experiment
from jaxrl_po.run.experiment.flags import UsageError
from jaxrl_po.run.experiment.methods import ALGORITHMS
from jaxrl_po.run.experiment.options import LINES, Options
from jaxrl_po.run.experiment.script import Script
from jaxrl_po.run.loop import programs
from jaxrl_po.run.store import folder, metrics, provenance

DECAY = "config.decay_iterations"


# Flags that may differ between processes, or (`out`) are compared separately.
PER_PROCESS = ("out", "coordinator", "process_id")


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
    title = f"{script.title(records)}, {metrics.counted(options.seeds, 'seeds')}"
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
        job = assembly.make_job(
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
    if code := user_code.digests(settings):
        sizes[user_code.DIGESTS] = code
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
