"""The plan of a run: settings, read and checked, and the job that is made of them."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_po.optimizers import AUTO, COSINE, LINEAR
from jaxrl_po.run import errors
from jaxrl_po.run.devices import parallel, processes
from jaxrl_po.run.devices.compilation import keep_programs
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.devices.virtual import VIRTUAL
from jaxrl_po.run.errors import UsageError
from jaxrl_po.run.experiment import assembly, flags, microbatches
from jaxrl_po.run.experiment.assembly import Script, Setup
from jaxrl_po.run.experiment.methods import ALGORITHMS
from jaxrl_po.run.experiment.options import LINES, Options
from jaxrl_po.run.loop import programs
from jaxrl_po.run.store import exporters, folder, metrics, provenance, sources

DECAY, WARM_UP = "config.decay_iterations", "config.warm_up_iterations"


# Flags that may differ between processes, or (`out`) are compared separately.
PER_PROCESS = ("out", "coordinator", "process_id")


class Plan(NamedTuple):
    """A run, fully checked; nothing is compiled or written.

    Attributes:
      title: for display.
      options: of the run as a whole.
      settings: the content of `config.json`.
      setup: of one seed, with the curves to draw, which are also shown while it runs.
      placement: on devices.
      job: over all seeds and devices.
      unit: name of a step, plural.
      notes: lines that are shown before the run.
      counted: bytes that a device needs as counted from shapes; None where they are not.
      refit: the bytes that the programs of a device need to the plan with more microbatches; None
        where they fit. It raises RunError where no number does; None where that was not left open.
    """

    title: str
    options: Options
    settings: dict[str, Any]
    setup: Setup
    placement: Placement
    job: programs.Job
    unit: str
    notes: Sequence[str] = ()
    counted: int | None = None
    refit: "Callable[[int], Plan | None] | None" = None

    def job_in(self, out: Path, report: Callable[[str], None]) -> programs.Job:
        """The job, of which a number of microbatches that takes its place is written to `out`."""
        if self.refit is None:
            return self.job
        of_plan = self.refit

        def refit(peak: int) -> programs.Job | None:
            other = of_plan(peak)
            if other is None:
                return None
            report(f"{other.title}: {other.notes[-1]}")
            if processes.is_writer():
                folder.write_settings(out, other.settings)
            return other.job_in(out, report)

        return dataclasses.replace(self.job, refit=refit)

    def exporters(self, out: Path) -> list[exporters.Exporter]:
        """The exporters that the flags ask for; only the first process exports."""
        found = list[exporters.Exporter]()
        if self.options.tensorboard and processes.is_writer():
            found.append(exporters.TensorBoard(out / "tensorboard"))
        if self.options.wandb and processes.is_writer():
            config = {k: v for k, v in self.settings.items() if k not in ("script", "resolved")}
            found.append(exporters.WeightsAndBiases(self.options.wandb, out, self.title, config))
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
      UsageError: settings that cannot work, or not with the run in the folder.
    """
    asked = flags.fill(given, {"": script.options})[""]
    before = {} if described else stored(script, asked)
    records = fill(script, given, before)
    options, sections = records[""], sections_of(script, records[""])
    keep_programs(options.compilation_cache)
    if options.exact:
        provenance.ask_for_determinism(VIRTUAL if options.reproducible else 0)
    settings = flags.flatten(records)
    _agree(options, settings, given, before, require_same)
    with flags.blame(sections):
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
            raise UsageError(
                f"--mesh={options.mesh}: model is for jaxrl-po language; the networks of "
                f"jaxrl-po {script.name} are not sharded"
            )
        make_job = functools.partial(
            assembly.make_job,
            options=options,
            placement=placement,
            kind=script.title(records),
            method=records["config"],
            iterations=iterations,
            steps_per_iteration=script.steps(records),
            log_every=before.get("resolved", {}).get("log_every")
            or options.log_every
            or max(1, iterations // LINES),
        )
        job = make_job(setup)
        programs.check(job)
        chosen = options.exact or microbatches.FLAG in (settings if before else given)
        fit = microbatches.fit(records, job, setup, placement, make_job, chosen=chosen)

    earlier = before.get("resolved", {})
    tuned = {
        name: value for name, value in script.tuned(options, settings).items() if name not in given
    }
    tuned = earlier.get("tuned", {}) if before else tuned
    resolved, changes = _resolve(setup, job, placement, options, settings, earlier)
    lasting = {
        name: value
        for name, value in flags.flatten(records).items()
        if name not in folder.OF_A_START
    }
    plan = Plan(
        f"{script.title(records)}, {metrics.counted(options.seeds, 'seeds')}",
        options,
        {"script": script.name, **lasting, "resolved": {"tuned": tuned, **resolved}},
        setup,
        placement,
        job,
        script.unit,
        _notes(setup, job, options, tuned, changes),
    )
    plan = plan if fit is None else _fitted(plan, fit)
    return plan._replace(refit=None) if chosen else plan


def _agree(
    options: Options,
    settings: dict[str, Any],
    given: Mapping[str, Any],
    before: Mapping[str, Any],
    require_same: Callable[[Mapping[str, Any]], None],
) -> None:
    """Raises UsageError where processes, or an earlier start of the run, have other settings."""
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


def _fitted(plan: Plan, fit: microbatches.Fit) -> Plan:
    """The plan with the job and the number of microbatches of a fit."""

    def refit(peak: int) -> Plan | None:
        smaller = fit.smaller(peak)
        return None if smaller is None else _fitted(plan, smaller)

    return plan._replace(
        job=fit.job,
        settings={**plan.settings, microbatches.FLAG: fit.number},
        notes=[*plan.notes, *filter(None, [fit.note()])],
        counted=fit.need.peak(fit.number),
        refit=refit,
    )


def _place(script: Script, records: Mapping[str, Any], described: tuple[Any, ...]) -> Placement:
    """Where the run is computed."""
    options = records[""]
    if options.reproducible and script.name != "control":
        raise UsageError("--reproducible must be off: it is for jaxrl-po control")
    return parallel.choose(
        options.devices,
        num_seeds=options.seeds,
        num_rows=script.rows(records),
        mesh=options.mesh,
        shard_params=script.shards_params(options),
        num_processes=options.num_processes if options.distributed else 1,
        described=described,
        reproducible=options.reproducible,
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
    now, before = origin, earlier
    if options.reproducible:
        now, before = provenance.without_layout(now), provenance.without_layout(before)
    if options.exact:
        provenance.require_same(now, before, options.out, options.exact)
    data = {provenance.BASE: setup.base, provenance.PROMPTS: setup.prompts}
    for entry, digest in data.items():
        provenance.require_data(entry, digest, earlier, f"--resume: --out={options.out}")
        resolved |= {entry: digest} if digest else {}
    return resolved | provenance.go_on(origin, earlier), provenance.differences(now, before)


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
      UsageError: the folder cannot be used, or holds a run of another script or format.
    """
    found = folder.inspect(options.out, resume=options.resume, overwrite=options.overwrite)
    if found.get("script", script.name) != script.name:
        raise UsageError(
            f"--resume: --out={options.out} holds a run of jaxrl-po {found['script']}, not "
            f"of jaxrl-po {script.name}"
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
      UsageError: the run is shorter than an iteration or has 2³¹ of them, or nothing is learned
        in a part of it.
    """
    options, settled = records[""], dict(records)
    of_one = script.steps(records)
    if 0 < options.total_steps < of_one:
        raise UsageError(
            f"--total_steps={options.total_steps} must be 0 or at least {of_one}, the "
            f"{script.unit} of one iteration"
        )
    iterations = options.total_steps // of_one
    if iterations >= 2**31:  # a state counts them in 32 bits
        raise UsageError(
            f"--total_steps={options.total_steps} must make fewer than {2**31:,} iterations, each "
            f"of {of_one} {script.unit}"
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
            raise UsageError(
                f"--total_steps={options.total_steps} must stay as it was: the step size of this "
                f"run falls to 0 in its {decay_iterations} iterations. Begin another one, with "
                "more steps or with --config.decay_iterations=0"
            )
        raise UsageError(
            f"--config.decay_iterations={decay_iterations} must be 0 or at least "
            f"{iterations}, the iterations of --total_steps: the learning rate is 0 after it"
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
