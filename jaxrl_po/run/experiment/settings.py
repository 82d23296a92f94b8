"""Reads, merges and completes the settings of a run."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple

from jaxrl_po.config import ConfigError, Json, Setting, Values, setting_of
from jaxrl_po.optimizers import AUTO, COSINE, LINEAR, Optimization
from jaxrl_po.run import errors
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.experiment.assembly import Command, Config, OptionsOf, Script, World
from jaxrl_po.run.experiment.options import InitialModel, Options
from jaxrl_po.run.store import folder, sources

DECAY, WARM_UP = "config.decay_iterations", "config.warm_up_iterations"


class Settings(NamedTuple, Generic[Config]):
    """Settings of a run, merged.

    Attributes:
      config: All settings.
      given: Flag name to value, for each flag that the user set.
      tuned: Flag name to value, which a start reports: found by a sweep, or chosen for a pretrained
        model or a memory.
      origins: Flag name to the origin of its value; see `flags.ORIGINS`.
      stored: Content of `config.json` of the run that is resumed; empty for a new one.
    """

    config: Config
    given: dict[str, Any]
    tuned: dict[str, Any]
    origins: dict[str, str]
    stored: dict[str, Any]


def read(
    script: Script[OptionsOf, Config, World],
    given: Values,
    *,
    stored: Values | None = None,
) -> Settings[Config]:
    """Merges given, stored, tuned, preset and default values into the config of a run.

    Args:
      script: Command of the run.
      given: Flag name to text or to a value of Python; see `flags.convert`.
      stored: Content of a run's `config.json`, used without comparison; None reads and compares the
        run in `--out` if `resume` is given.

    Raises:
      ConfigError: A flag or value that cannot be used, or differs from that of the resumed run.
    """
    options, compares = options_of(script, given), stored is None
    if stored is None:
        stored = stored_settings(script, options) if options.resume else {}
    stored = flags.current(stored, {"": script.options})
    options = options_of(script, given, stored)
    initial = script.initial(options)
    script.require_known(options, given, initial)
    sections = sections_of(script, options, initial)
    stored = flags.current(stored, sections)
    typed = flags.convert(given, sections)
    typed |= sources.absolute(typed)
    if compares:  # an option that a former version lacked has its default
        before = {field.name: field.default for field in flags.settable(script.options)} | stored
        folder.require_same(typed, before if stored else {}, fields_of(sections), options.out)
    values = {**stored, **typed}
    suited = flags.current(script.tuned(options, values, initial), sections)
    presets = script.presets(options, values, initial)
    tuned = {name: x for name, x in suited.items() if name not in presets}
    layers = {"given": typed, "stored": stored, "tuned": tuned, "preset": presets}
    records, origins = flags.merge(sections, layers)
    suited = {name: x for name, x in suited.items() if origins.get(name) in ("tuned", "preset")}
    return Settings(script.config.of_sections(records, initial), typed, suited, origins, stored)


def parse(script: Script[OptionsOf, Config, World], argv: Sequence[str]) -> Settings[Config]:
    """Returns the settings of a new run from arguments; no folder is read."""
    return read(script, tokenize(script, argv), stored={})


def tokenize(script: Command, argv: Sequence[str]) -> dict[str, flags.Text]:
    """Returns the texts of a command's flags by name; see `flags.tokenize`."""
    return flags.tokenize(argv, {"": script.options})


def options_of(
    script: Script[OptionsOf, Config, World],
    given: Values,
    stored: Values = MappingProxyType({}),
) -> OptionsOf:
    """Returns the settings of the run as a whole, of given and stored values."""
    top: dict[str, type] = {"": script.options}
    fields = flags.named(top.items())
    asked = flags.convert({name: x for name, x in given.items() if name in fields}, top)
    options: OptionsOf = flags.merge(top, {"given": asked, "stored": stored})[0][""]
    return options


def usage(script: Command, given: Values, *, everything: bool) -> str:
    """Returns the text of `--help` for the sections that the given flags select.

    Args:
      script: Command.
      given: Flag name to text.
      everything: Whether to show every field, and not the common ones alone.
    """
    options = options_of(script, given)
    initial = script.initial(options)
    sections = sections_of(script, options, initial)
    values = flags.convert(given, sections)
    tuned = flags.current(script.tuned(options, values, initial), sections)
    layers = {"tuned": tuned, "preset": script.presets(options, values, initial)}
    fields = flags.named(sections.items())
    notes = {
        name: f"  ({origin}: {errors.shown(value)})"
        for origin, layer in layers.items()
        for name, value in layer.items()
        if name in fields and value != fields[name].default
    }
    name = f"jaxrl-po {script.name}"
    return flags.usage(name, script.summary, sections, notes, everything=everything)


def fields_of(sections: Mapping[str, type]) -> dict[str, Setting]:
    """Returns the metadata of each setting by its flag."""
    return {name: setting_of(field) for name, field in flags.named(sections.items()).items()}


def stored_settings(script: Command, options: Options) -> Json:
    """Returns the settings of the run that is resumed; empty for a new one.

    Raises:
      ConfigError: the folder cannot be used, or holds a run of another script or format.
    """
    switches = {"resume": options.resume, "overwrite": options.overwrite}
    found = folder.inspect(options.out, **switches, script=script.name)
    return found | sources.absolute(found)


def settle(
    script: Script[OptionsOf, Config, World], settings: Settings[Config], world: World
) -> tuple[Config, int]:
    """Returns the config with a decay that ends with the run, and the number of iterations.

    A warm-up lasts at most a tenth of the iterations. Given and stored values stay.

    Args:
      script: Command of the run.
      settings: Settings of the run.
      world: Result of the command's `open_world`.

    Raises:
      ConfigError: The run is shorter than an iteration or has 2³¹ of them, or the learning rate
        reaches 0 before its end.
    """
    config, origins, resumed = settings.config, settings.origins, bool(settings.stored)
    total, of_one = config.run.total_steps, script.steps(config, world)
    if 0 < total < of_one:
        raise ConfigError(
            "total_steps",
            f"must be 0 or at least {of_one} {script.unit}, one iteration, got {total}",
        )
    iterations = total // of_one
    if iterations >= 2**31:  # a state counts them in 32 bits
        raise ConfigError(
            "total_steps", f"must make fewer than {2**31:,} iterations of {of_one}, got {total}"
        )
    method, chosen = config.method, ("tuned", "preset")
    if not isinstance(method, Optimization):
        return config, iterations
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
    return dataclasses.replace(config, method=method), iterations


def sections_of(
    script: Command, options: Options, initial: InitialModel | None = None
) -> dict[str, type]:
    """Returns the record class of each section by its prefix, including the method's.

    Args:
      script: Command of the run.
      options: Settings of the run as a whole.
      initial: Model that the run starts from; None to read it from the files of `init_from`.
    """
    initial = script.initial(options) if initial is None else initial
    return {"": script.options, "config": options.entry.Config, **script.sections(options, initial)}
