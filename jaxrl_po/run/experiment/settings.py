"""Reads, merges and completes the settings of a run."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from jaxrl_po.config import ConfigError, Json, Setting, Values, setting_of
from jaxrl_po.optimizers import AUTO, COSINE, LINEAR, Optimization
from jaxrl_po.run import errors
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.experiment.options import LINES, InitialModel, OptionsOf, RunConfig, RunOptions
from jaxrl_po.run.loop.job import Length, TrainJob
from jaxrl_po.run.store import folder, sources

Config = TypeVar("Config", bound=RunConfig[Any])

DECAY, WARM_UP = "config.decay_iterations", "config.warm_up_iterations"


class Domain(Protocol[Config]):
    """Functions that distinguish one training command from another: a module, such as `control`."""

    NAME: str
    """Name of the command."""
    SUMMARY: str
    """First line of `--help`."""
    UNIT: str
    """Plural name of a step, such as `environment steps`."""
    CURVES: Sequence[Any]
    """Metrics to draw, with their labels."""
    Y_LABEL: str
    """Label of the y axis of the curves."""
    OPTIONS: type[Any]
    """Record class of the flags without a prefix, a subclass of `options.RunOptions`."""
    CONFIG: type[Config]
    """Class of the config of a run."""

    def initial_model(self, options: Any, /) -> InitialModel:
        """Reads from the files of `--init_from` which model a run starts from."""

    def require_known(self, options: Any, given: Values, initial: InitialModel, /) -> None:
        """Raises ConfigError for given flags of sections that the run lacks."""

    def presets(self, options: Any, values: Values, initial: InitialModel, /) -> Values:
        """Returns defaults, by flag name, that replace the defaults of the record classes."""

    def tuned(self, options: Any, values: Values, initial: InitialModel, /) -> Values:
        """Returns defaults, by flag name, that are reported before the run starts."""

    def sections(self, options: Any, initial: InitialModel, /) -> Mapping[str, type]:
        """Returns record classes by prefix of sections, except the method's section `config`."""

    def open_world(self, config: Config, /) -> Any:
        """Makes, once, the world that the run acts in, such as an environment."""

    def rows(self, config: Config, /) -> int:
        """Returns the number of environments or prompts of one seed."""

    def steps(self, config: Config, world: Any, /) -> int:
        """Returns the environment steps or completions of one seed in one iteration."""

    def build(
        self, config: Config, placement: Placement, world: Any, methods: Sequence[Any] = (), /
    ) -> TrainJob:
        """Builds the job of a run; a sweep gives its `methods`, see `build_job`.

        Raises:
          ConfigError: Settings are invalid or contradict each other.
        """

    def title(self, config: Config, /) -> str:
        """Returns a title with the method and the environment or task."""


class Settings(NamedTuple, Generic[Config]):
    """Merged settings of a run, with their origins.

    Attributes:
      config: All settings of the run.
      given: Values of the flags that the user set, by flag name.
      tuned: Values that a start of the run reports, by flag name: found by a sweep, or chosen for a
        pretrained model or a memory cell.
      origins: Origin of each value by flag name; see `flags.ORIGINS`.
      stored: Content of `config.json` of the run that is resumed; empty for a new run.
    """

    config: Config
    given: dict[str, Any]
    tuned: dict[str, Any]
    origins: dict[str, str]
    stored: dict[str, Any]


def merge_settings(
    domain: Domain[Config], given: Values, *, stored: Values | None = None
) -> Settings[Config]:
    """Merges given, stored, tuned, preset and default values into the config of a run.

    Args:
      domain: Domain of the run.
      given: Text or Python value of each flag, by flag name; see `flags.convert`.
      stored: Content of a run's `config.json`, used without comparison; if None and `resume` is
        set, the run in `--out` is read and compared.

    Raises:
      ConfigError: A flag or value cannot be used, or differs from the resumed run's.
    """
    options, compares = options_of(domain.OPTIONS, given), stored is None
    if stored is None:
        stored = stored_settings(domain, options) if options.resume else {}
    stored = flags.current(stored, {"": domain.OPTIONS})
    options = options_of(domain.OPTIONS, given, stored)
    initial = domain.initial_model(options)
    domain.require_known(options, given, initial)
    sections = sections_of(domain, options, initial)
    stored = flags.current(stored, sections)
    typed = flags.convert(given, sections)
    typed |= sources.absolute(typed)
    if compares:  # an option that a former version lacked counts as stored with its default
        before = {field.name: field.default for field in flags.settable(domain.OPTIONS)} | stored
        folder.require_same(typed, before if stored else {}, fields_of(sections), options.out)
    values = {**stored, **typed}
    suited = flags.current(domain.tuned(options, values, initial), sections)
    presets = domain.presets(options, values, initial)
    tuned = {name: x for name, x in suited.items() if name not in presets}
    layers = {"given": typed, "stored": stored, "tuned": tuned, "preset": presets}
    records, origins = flags.merge_layers(sections, layers)
    suited = {name: x for name, x in suited.items() if origins.get(name) in ("tuned", "preset")}
    return Settings(domain.CONFIG.of_sections(records, initial), typed, suited, origins, stored)


def parse_settings(domain: Domain[Config], argv: Sequence[str]) -> Settings[Config]:
    """Returns the settings of a new run from command-line arguments, without reading a folder."""
    return merge_settings(domain, flags.tokenize(argv, {"": domain.OPTIONS}), stored={})


def options_of(
    record: type[OptionsOf], given: Values, stored: Values = MappingProxyType({})
) -> OptionsOf:
    """Returns the options of a run, from given and stored values."""
    top: dict[str, type] = {"": record}
    fields = flags.flag_fields(top.items())
    asked = flags.convert({name: x for name, x in given.items() if name in fields}, top)
    options: OptionsOf = flags.merge_layers(top, {"given": asked, "stored": stored})[0][""]
    return options


def format_usage(
    domain: Domain[Any],
    given: Values,
    *,
    everything: bool,
    command: tuple[str, str, type[RunOptions]] | None = None,
) -> str:
    """Returns the text of `--help` for the sections that the given flags select.

    Args:
      domain: Domain of the command.
      given: Texts of the given flags, by flag name.
      everything: Whether to show every field instead of only the common fields.
      command: Name, summary and record class of the flags without a prefix; None for the domain's
        own.
    """
    name, summary, record = command or (domain.NAME, domain.SUMMARY, domain.OPTIONS)
    options = options_of(record, given)
    initial = domain.initial_model(options)
    sections = sections_of(domain, options, initial)
    values = flags.convert(given, sections)
    tuned = flags.current(domain.tuned(options, values, initial), sections)
    layers = {"tuned": tuned, "preset": domain.presets(options, values, initial)}
    fields = flags.flag_fields(sections.items())
    notes = {
        name: f"  ({origin}: {errors.spell(value)})"
        for origin, layer in layers.items()
        for name, value in layer.items()
        if name in fields and value != fields[name].default
    }
    program = f"jaxrl-po {name}"
    return flags.format_help(program, summary, sections, notes, everything=everything)


def fields_of(sections: Mapping[str, type]) -> dict[str, Setting]:
    """Returns the metadata of each setting by flag name."""
    return {name: setting_of(field) for name, field in flags.flag_fields(sections.items()).items()}


def stored_settings(domain: Domain[Any], options: RunOptions) -> Json:
    """Returns the settings of the run that is resumed; empty for a new run.

    Raises:
      ConfigError: The folder cannot be used, or holds a run of another command or format.
    """
    switches = {"resume": options.resume, "overwrite": options.overwrite}
    found = folder.inspect(options.out, **switches, script=domain.NAME)
    return found | sources.absolute(found)


def length_of(options: RunOptions, steps: int) -> Length:
    """Returns the length of a run whose iterations have `steps` steps each."""
    iterations = options.total_steps // steps
    log_every = options.log_every or max(1, iterations // LINES)
    return Length(iterations, steps, log_every, options.eval_every, options.checkpoint_every)


def settle(domain: Domain[Config], settings: Settings[Config], world: Any) -> Config:
    """Returns the config with a learning-rate decay that ends with the run.

    A warm-up lasts at most a tenth of the iterations. Given and stored values do not change.

    Args:
      domain: Domain of the run.
      settings: Settings of the run.
      world: Result of the domain's `open_world`.

    Raises:
      ConfigError: The run is shorter than an iteration or has 2³¹ iterations or more, or the
        learning rate reaches 0 before the end of the run.
    """
    config, origins, resumed = settings.config, settings.origins, bool(settings.stored)
    total, of_one = config.run.total_steps, domain.steps(config, world)
    if 0 < total < of_one:
        raise ConfigError(
            "total_steps",
            f"must be 0 or at least {of_one} {domain.UNIT}, one iteration, got {total}",
        )
    iterations = total // of_one
    if iterations >= 2**31:  # a training state counts iterations in 32 bits
        raise ConfigError(
            "total_steps", f"must make fewer than {2**31:,} iterations of {of_one}, got {total}"
        )
    method, chosen = config.method, ("tuned", "preset")
    if not isinstance(method, Optimization):
        return config
    follows = iterations and origins.get(DECAY) in chosen and method.schedule == AUTO
    follows = follows or method.schedule in (LINEAR, COSINE)
    if follows and not resumed and origins.get(DECAY) not in ("given", "stored"):
        method = dataclasses.replace(method, decay_iterations=max(iterations, 1))
    if not resumed and origins.get(WARM_UP) in chosen:
        warm_up = min(method.warm_up_iterations, iterations // 10)
        method = dataclasses.replace(method, warm_up_iterations=warm_up)
    if 0 < method.decay_iterations < iterations:
        if resumed:
            raise ConfigError(
                "total_steps",
                f"must stay as it was, got {total}: the learning rate of this run reaches 0 after "
                f"its {method.decay_iterations} iterations; start another run with more steps or "
                "config.decay_iterations = 0",
            )
        raise ConfigError(
            DECAY,
            f"must be 0 or at least {iterations}, the iterations of total_steps, got "
            f"{method.decay_iterations}: the learning rate is 0 afterwards",
        )
    return dataclasses.replace(config, method=method)


def sections_of(
    domain: Domain[Any], options: RunOptions, initial: InitialModel | None = None
) -> dict[str, type]:
    """Returns the record class of each section by its prefix, including the method's.

    Args:
      domain: Domain of the run.
      options: Options of the run, which select the method and the sections.
      initial: Model that the run starts from; None to read it from the files of `init_from`.
    """
    initial = domain.initial_model(options) if initial is None else initial
    method = options.entry.Config
    return {"": type(options), "config": method, **domain.sections(options, initial)}
