"""The plan of a run: settings, read and checked, and the job that is made of them."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_po.config import ConfigError
from jaxrl_po.optimizers import AUTO, COSINE, LINEAR
from jaxrl_po.run import errors
from jaxrl_po.run.devices import parallel, processes
from jaxrl_po.run.devices.compilation import keep_programs
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import assembly, flags
from jaxrl_po.run.experiment.assembly import Script, Setup
from jaxrl_po.run.experiment.methods import ALGORITHMS
from jaxrl_po.run.experiment.options import LINES, Options
from jaxrl_po.run.loop import programs
from jaxrl_po.run.loop.microbatches import FLAG
from jaxrl_po.run.store import exporters, folder, metrics, provenance, sources

DECAY, WARM_UP = "config.decay_iterations", "config.warm_up_iterations"


# Flags that may differ between processes, or (`out`) are compared separately.
PER_PROCESS = ("out", "coordinator", "process_id")


class Plan(NamedTuple):
    """A run, fully checked; nothing is compiled or written.

    Attributes:
      title: for display.
      options: of the run as a whole.
      settings: content of `config.json`, without a number of microbatches that is left open until
        `record` adds it.
      setup: of one seed, with the curves to draw, which are also shown while it runs.
      placement: on devices.
      job: over all seeds and devices.
      unit: name of a step, plural.
      notes: lines that are shown before the run.
      order: names of all settings, as they stand in `config.json`.
    """

    title: str
    options: Options
    settings: dict[str, Any]
    setup: Setup
    placement: Placement
    job: programs.Job
    unit: str
    notes: Sequence[str] = ()
    order: Sequence[str] = ()

    def record(self, number: int, out: Path, report: Callable[[str], None]) -> None:
        """Writes the number of microbatches that was left open to `out`, and reports it."""
        chosen = {**self.settings, FLAG: number}
        self.settings.clear()  # and filled again: exporters hold it
        self.settings.update({name: chosen[name] for name in self.order if name in chosen})
        if processes.is_writer():
            folder.write_settings(out, self.settings)
        if number > 1:
            report(f"{self.title}: --{FLAG}={number}, to fit in memory")

    def exporters(self, out: Path) -> list[exporters.Exporter]:
        """The exporters that the flags ask for; only the first process exports."""
        found = list[exporters.Exporter]()
        if self.options.tensorboard and processes.is_writer():
            found.append(exporters.TensorBoard(out / "tensorboard"))
        if self.options.wandb and processes.is_writer():
            found.append(
                exporters.WeightsAndBiases(self.options.wandb, out, self.title, self.settings)
            )
        return found


def prepare(
    script: Script,
    given: Mapping[str, Any],
    require_same: Callable[[Mapping[str, Any]], None] = lambda settings: None,
    described: tuple[Any, ...] = (),
) -> Plan:
    """Checks all settings, chooses the placement and builds the job.

    Args:
      script: see `Script`.
      given: flag name to value, of the flags given.
      require_same: see `processes.together`.
      described: devices of a machine that is not here, see `Placement`.

    Raises:
      ConfigError: settings that cannot work, or not with the run in the folder.
    """
    asked = flags.fill(given, {"": script.options})[""]
    before = {} if described else stored(script, asked)
    records = fill(script, given, before)
    options, sections = records[""], sections_of(script, records[""])
    keep_programs(options.compilation_cache)
    if options.deterministic:
        provenance.ask_for_determinism()
    settings = flags.flatten(records)
    _agree(options, settings, given, before, require_same)
    with flags.locating(sections):
        placement = _place(script, records, described)
        records, iterations = settle(
            script, records, settings if before else given, resumed=bool(before)
        )
        begun = script.continued(records) if before else records
        setup = script.build(begun, ALGORITHMS[options.algorithm], placement)
        setup = setup._replace(
            curves=setup.curves or script.curves, y_label=setup.y_label or script.y_label
        )
        if placement.cuts_params and setup.axes is None:
            raise ConfigError(
                "mesh", f"must have no model axis with jaxrl-po {script.name}, got {options.mesh}"
            )
        make_job = functools.partial(
            assembly.make_job,
            options=options,
            placement=placement,
            cheap_init=True,
            method=records["config"],
            iterations=iterations,
            steps_per_iteration=script.steps(records),
            log_every=before.get("resolved", {}).get("log_every")
            or options.log_every
            or max(1, iterations // LINES),
        )
        job = make_job(setup)
        programs.check(job)
        if setup.learned and not options.deterministic and FLAG not in {**before, **given}:
            rebuild = functools.partial(_rebuild, records, setup, make_job)
            job = dataclasses.replace(job, rebuild=rebuild)
    earlier = before.get("resolved", {})
    tuned = {
        name: value for name, value in script.tuned(options, settings).items() if name not in given
    }
    tuned = earlier.get("tuned", {}) if before else tuned
    resolved, changes = _resolve(setup, job, placement, options, settings, earlier)
    lasting = {
        name: value
        for name, value in flags.flatten(records).items()
        if name not in folder.OF_A_START and (name != FLAG or job.rebuild is None)
    }
    return Plan(
        f"{script.title(records)}, {metrics.counted(options.seeds, 'seeds')}",
        options,
        {"script": script.name, **lasting, "resolved": {"tuned": tuned, **resolved}},
        setup,
        placement,
        job,
        script.unit,
        [*folder.removed(before), *_notes(setup, job, options, tuned, changes)],
        ("script", *flags.flatten(records), "resolved"),
    )


def _agree(
    options: Options,
    settings: dict[str, Any],
    given: Mapping[str, Any],
    before: Mapping[str, Any],
    require_same: Callable[[Mapping[str, Any]], None],
) -> None:
    """Raises ConfigError where processes, or an earlier start of the run, have other settings."""
    # All processes must see the same folder, so whether it holds a run is compared too.
    holds = f"{options.out} ({'with a run' if before else 'without a run'})"
    require_same(
        {"out": holds, **{name: settings[name] for name in settings if name not in PER_PROCESS}}
    )
    # Given flags first: the error names the cause, not a default that differs as a consequence.
    given_first = {name: settings[name] for name in given} | settings
    folder.require_same(given_first, before, options.out)
    for flag, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        if getattr(options, flag):
            errors.require(flag, package, flag)


def _rebuild(
    records: Mapping[str, Any],
    setup: Setup,
    make_job: Callable[[Setup], programs.Job],
    number: int,
) -> programs.Job | None:
    """Builds the job with a number of microbatches; None if that does not divide its rows.

    A microbatch is some prompts with all their completions, or some completions of one prompt:
    otherwise the completions of a prompt cannot share its activations.
    """
    assert setup.learner_of is not None
    assert setup.learned is not None
    rows, members = setup.learned
    prompts = rows // members
    if rows % number or (prompts % number and number % prompts):
        return None
    method = dataclasses.replace(records["config"], num_microbatches=number)
    job = make_job(setup._replace(learner=setup.learner_of(method)))
    try:
        programs.check(job)
    except ConfigError:  # a method may learn from some of the completions
        return None
    return job


def _place(script: Script, records: Mapping[str, Any], described: tuple[Any, ...]) -> Placement:
    """Where the run is computed."""
    options = records[""]
    return parallel.choose(
        options.devices,
        num_seeds=options.seeds,
        num_rows=script.rows(records),
        mesh=options.mesh,
        shard_params=script.shards_params(options),
        num_processes=options.num_processes if options.distributed else 1,
        described=described,
    )


def _resolve(
    setup: Setup,
    job: programs.Job,
    placement: Placement,
    options: Options,
    settings: Mapping[str, Any],
    earlier: Mapping[str, Any],
) -> tuple[dict[str, Any], list[str]]:
    """Values that the flags left open, and what changed since the last start of a resumed run."""
    origin = provenance.describe(placement.describe(), sources.digests(settings))
    resolved: dict[str, Any] = {
        "iterations": job.iterations,
        "steps_per_iteration": job.steps_per_iteration,
        "log_every": job.log_every,
    }
    if options.deterministic:
        provenance.require_same(origin, earlier, options.out)
    data = {provenance.BASE: setup.base, provenance.PROMPTS: setup.prompts}
    for entry, digest in data.items():
        provenance.require_data(entry, digest, earlier, "resume", options.out)
        resolved |= {entry: digest} if digest else {}
    return resolved | provenance.go_on(origin, earlier), provenance.differences(origin, earlier)


def _notes(
    setup: Setup,
    job: programs.Job,
    options: Options,
    tuned: Mapping[str, Any],
    changes: Sequence[str],
) -> list[str]:
    """What is said before the run."""
    notes, done = list[str](), job.iterations * job.steps_per_iteration
    if tuned:
        shown = ", ".join(f"{name}={errors.shown(value)}" for name, value in tuned.items())
        notes.append(f"with settings that suit it, which flags may replace: {shown}")
    if options.total_steps != done:
        notes.append(
            f"--total_steps: {options.total_steps:,} becomes {done:,}: a whole number of iterations"
        )
    for name, value in vars(options).items():
        if str(value).startswith(sources.OWN):
            notes.append(
                f"{name}={value} cannot be imported: run.load and run.resume must be given it again"
            )
    return [*notes, *setup.notes, *provenance.note(changes)]


def stored(script: Script, options: Options) -> dict[str, Any]:
    """The settings of the run that is resumed; empty for a new one.

    Raises:
      ConfigError: the folder cannot be used, or holds a run of another script or format.
    """
    found = folder.inspect(options.out, resume=options.resume, overwrite=options.overwrite)
    if found.get("script", script.name) != script.name:
        raise ConfigError(
            "resume",
            f"{options.out} holds a run of jaxrl-po {found['script']}, not of jaxrl-po "
            f"{script.name}",
        )
    return found | sources.absolute(found)


def parse(script: Script, argv: Sequence[str], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Prefix to record, from arguments and, for flags not given, an earlier `config.json`."""
    options = flags.parse(argv, {"": script.options}, stored=stored, partial=True)[""]
    return fill(script, flags.given(argv, sections_of(script, options)), stored)


def fill(script: Script, given: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Prefix to record, from flags by name and, for those not given, an earlier `config.json`."""
    options = flags.fill(given, {"": script.options}, stored=stored)[""]
    sections, defaults = sections_of(script, options), script.defaults(options, {**stored, **given})
    records = flags.fill(given, sections, stored=stored, defaults=defaults)
    return {prefix: _with_absolute(prefix, record) for prefix, record in records.items()}


def _with_absolute(prefix: str, record: Any) -> Any:
    """The record with absolute paths."""
    names = {flags.join(prefix, field.name): field.name for field in flags.settable(type(record))}
    own = sources.absolute({flag: getattr(record, name) for flag, name in names.items()})
    return dataclasses.replace(record, **{names[flag]: value for flag, value in own.items()})


def settle(
    script: Script, records: Mapping[str, Any], given: Collection[str], *, resumed: bool = False
) -> tuple[dict[str, Any], int]:
    """The records with a decay that ends with the run, and its iterations.

    A warm-up lasts for a tenth of them at most. Both are left as they are if they are given.

    Raises:
      ConfigError: the run is shorter than an iteration or has 2³¹ of them, or nothing is learned
        in a part of it.
    """
    options, settled = records[""], dict(records)
    of_one = script.steps(records)
    if 0 < options.total_steps < of_one:
        raise ConfigError(
            "total_steps",
            f"must be 0 or at least {of_one} {script.unit}, those of an iteration, got "
            f"{options.total_steps}",
        )
    iterations = options.total_steps // of_one
    if iterations >= 2**31:  # a state counts them in 32 bits
        raise ConfigError(
            "total_steps",
            f"must make fewer than {2**31:,} iterations of {of_one}, got {options.total_steps}",
        )
    defaults = script.defaults(options, flags.flatten(records))
    schedule = vars(records["config"]).get("schedule", AUTO)
    asked = schedule in (LINEAR, COSINE)
    if DECAY not in given and (asked or (iterations and DECAY in defaults and schedule == AUTO)):
        length = max(iterations, 1)
        settled["config"] = dataclasses.replace(records["config"], decay_iterations=length)
    if WARM_UP in defaults and WARM_UP not in given:
        warm_up = min(defaults[WARM_UP], iterations // 10)
        settled["config"] = dataclasses.replace(settled["config"], warm_up_iterations=warm_up)
    decay_iterations = vars(settled["config"]).get("decay_iterations", 0)
    if 0 < decay_iterations < iterations:
        if resumed:
            raise ConfigError(
                "total_steps",
                f"must stay as it was, got {options.total_steps}: the learning rate of this run "
                f"reaches 0 after its {decay_iterations} iterations. Begin another one, with more "
                "steps or config.decay_iterations = 0",
            )
        raise ConfigError(
            "config.decay_iterations",
            f"must be 0 or at least {iterations}, the iterations of total_steps, got "
            f"{decay_iterations}: the learning rate is 0 afterwards",
        )
    return settled, iterations


def sections_of(script: Script, options: Any) -> dict[str, type]:
    """Prefix to record class, including the algorithm's."""
    algorithm = errors.lookup("algorithm", options.algorithm, ALGORITHMS)
    return {
        "": script.options,
        "config": algorithm.Config,
        **script.sections(options),
    }
