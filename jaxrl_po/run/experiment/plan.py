"""The plan of a run: the job that is made of its settings."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_po.config import ConfigError, Json, Setting, Values
from jaxrl_po.run import errors
from jaxrl_po.run.devices import parallel, processes
from jaxrl_po.run.devices.compilation import keep_programs
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import assembly, flags, user_code
from jaxrl_po.run.experiment.assembly import Command, Setup
from jaxrl_po.run.experiment.options import LINES, Options, RunConfig
from jaxrl_po.run.experiment.registry import MethodConfig
from jaxrl_po.run.experiment.settings import Settings, fields_of, settle, stored_settings
from jaxrl_po.run.loop import programs
from jaxrl_po.run.loop.microbatches import FLAG
from jaxrl_po.run.store import exporters, folder, metrics, provenance, sources
from jaxrl_po.run.store.exporters import Exporter


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
      exporters: Destinations of each line of metrics.
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
    exporters: Sequence[Exporter] = ()

    def record(self, number: int, out: Path, report: Callable[[str], None]) -> None:
        """Writes the number of microbatches that was left open to `out`, and reports it."""
        chosen = {**self.settings, FLAG: number}
        self.settings.clear()  # and filled again: `Exporting` holds it
        self.settings.update({name: chosen[name] for name in self.order if name in chosen})
        if processes.is_writer():
            folder.write_settings(out, self.settings)
        if number > 1:
            report(f"{self.title}: --{FLAG}={number}, to fit in memory")


def prepare(
    script: Command,
    settings: Settings[Any],
    require_same: Callable[[Values], None] = lambda settings: None,
    described: tuple[jax.Device, ...] = (),
) -> Plan:
    """Checks all settings, chooses the placement and builds the job.

    Args:
      script: Command of the run.
      settings: Settings of the run.
      require_same: Comparison of the settings of all processes; see `processes.together`.
      described: Devices of a machine that is not attached, see `Placement`.

    Raises:
      ConfigError: Settings that cannot work, or not with the run in the folder.
    """
    config, before = settings.config, settings.stored
    options, sections = config.run, {x: type(y) for x, y in config.sections().items()}
    if not described:
        stored_settings(script, options)
    keep_programs(options.compilation_cache)
    if options.deterministic:
        provenance.ask_for_determinism()
    values, fields = flags.flatten(config.sections()), fields_of(sections)
    # All processes must see the same folder, so whether it holds a run is compared too.
    holds = f"{options.out} ({'with a run' if before else 'without a run'})"
    require_same({"out": holds, **{x: y for x, y in values.items() if fields[x].compared}})
    with flags.locating(sections):
        placement = _place(script, config, described)
        chosen_exporters = _exporters(options) if processes.is_writer() and not described else []
        world = script.open_world(config)
        config, iterations = settle(script, settings, world)
        setup = script.build(script.continued(config) if before else config, placement, world)
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
            method=config.method,
            iterations=iterations,
            steps_per_iteration=script.steps(config, world),
            log_every=before.get("resolved", {}).get("log_every")
            or options.log_every
            or max(1, iterations // LINES),
        )
        job = make_job(setup)
        programs.check(job)
        if setup.learned and not options.deterministic and FLAG not in {**before, **settings.given}:
            rebuild = functools.partial(_rebuild, config.method, setup, make_job)
            job = dataclasses.replace(job, rebuild=rebuild)
    earlier = before.get("resolved", {})
    resolved, changes = _resolve(setup, job, placement, options, values, earlier)
    chosen = {
        "tuned": flags.current(earlier.get("tuned", {}), sections) if before else settings.tuned,
        "origin": earlier.get("origin", {}) | new_origins(settings, fields),
    }
    values = flags.flatten(config.sections())
    lasting = {
        name: value
        for name, value in values.items()
        if fields[name].stored and (name != FLAG or job.rebuild is None)
    }
    return Plan(
        f"{script.title(config)}, {metrics.counted(options.seeds, 'seeds')}",
        options,
        {"script": script.name, **lasting, "resolved": {**chosen, **resolved}},
        setup,
        placement,
        job,
        script.unit,
        [*folder.removed(before), *_notes(setup, job, values, chosen["tuned"], changes)],
        ("script", *values, "resolved"),
        chosen_exporters,
    )


def _exporters(options: Options) -> list[Exporter]:
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
    """Returns the origins of values that this start sets: given, tuned or preset."""
    values, stored = flags.flatten(settings.config.sections()), settings.stored
    return {
        name: origin
        for name, origin in settings.origins.items()
        if origin not in ("default", "stored") and fields[name].stored
        if name not in stored or metrics.strict(values[name]) != stored[name]
    }


def _rebuild(
    method: MethodConfig, setup: Setup, make_job: Callable[[Setup], programs.Job], number: int
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
    method = dataclasses.replace(method, num_microbatches=number)
    job = make_job(setup._replace(learner=setup.learner_of(method)))
    try:
        programs.check(job)
    except ConfigError:  # a method may learn from some of the completions
        return None
    return job


def _place(script: Command, config: RunConfig, described: tuple[jax.Device, ...]) -> Placement:
    """Returns the placement of the run."""
    options = config.run
    return parallel.choose(
        options.devices,
        num_seeds=options.seeds,
        num_rows=script.rows(config),
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
    settings: Values,
    earlier: Values,
) -> tuple[Json, list[str]]:
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
    values: Values,
    tuned: Values,
    changes: Sequence[str],
) -> list[str]:
    """What is said before the run."""
    notes, done = list[str](), job.iterations * job.steps_per_iteration
    if tuned:
        shown = ", ".join(f"{name}={errors.shown(value)}" for name, value in tuned.items())
        notes.append(f"with settings that suit it, which flags may replace: {shown}")
    if values["total_steps"] != done:
        notes.append(
            f"--total_steps: {values['total_steps']:,} becomes {done:,}: a whole number of "
            "iterations"
        )
    for name, value in values.items():
        if str(value).startswith(sources.OWN):
            notes.append(
                f"{name}={value} cannot be imported: run.load and run.resume must be given it again"
            )
    return [*notes, *setup.notes, *provenance.note(changes)]
