"""Search space of a sweep: its options, its flags, and the combinations of their values."""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_po import config
from jaxrl_po.config import COUNT, NON_NEGATIVE, ConfigError, Json, Setting, Values
from jaxrl_po.run import errors
from jaxrl_po.run.experiment import control, flags, language, settings
from jaxrl_po.run.experiment.control_config import ControlOptions
from jaxrl_po.run.experiment.language_config import LanguageOptions
from jaxrl_po.run.experiment.options import InitialModel, RunConfig, RunOptions, common_option
from jaxrl_po.run.experiment.settings import Domain, Settings
from jaxrl_po.run.store import folder, sources

Combination = dict[str, str]
DRAW = re.compile(r"(\w+) *\((.*)\)")
DISTRIBUTIONS = ("log_uniform", "uniform", "choice")
TIE = "@"  # begins a value that is the value of another searched flag
TRAINING, EVALUATION = "training", "evaluation"  # scores that rank a population
BEST = "programs/best"  # folder with the run of the best member of a population


@config.record
class Search:
    """Options of the search that a sweep carries out."""

    evaluations: int = common_option(
        10,
        "greedy evaluations of each run, at most; the score is the mean of the last three",
        within=COUNT,
    )
    draws: int = common_option(
        0,
        "combinations that are drawn of the flags with a distribution, such as "
        "--config.learning_rate=log_uniform(1e-5,1e-2), uniform(a,b) or choice(a,b,c)",
        within=NON_NEGATIVE,
    )
    confirm: int = common_option(
        0,
        "fresh seeds on which the best combination and the run without the searched flags train "
        "again, to compare them; 0 to disable",
        unit="seeds",
        within=NON_NEGATIVE,
        resume="any",
    )
    exploit_every: int = common_option(
        0,
        "population-based training: after so many iterations the lowest fifth of the draws, by "
        "score, continues from the highest, with drawn numbers times 0.8 or 1.2; 0 to disable",
        unit="iterations",
        within=NON_NEGATIVE,
    )
    exploit_by: str = common_option(
        TRAINING,
        "score that ranks a population: the training score since the last exploit, or the "
        "evaluation",
        choices=(TRAINING, EVALUATION),
        when=("exploit_every", COUNT),
    )


@config.record
class ControlSweep(Search, ControlOptions):
    """Options of a sweep in control environments."""


@config.record
class LanguageSweep(Search, LanguageOptions):
    """Options of a sweep of a language model."""


Sweep = ControlSweep | LanguageSweep
SUMMARY = (
    "Searches hyperparameters: give a flag several values, separated by commas, or a distribution."
)
RECORDS: dict[str, type[Sweep]] = {control.NAME: ControlSweep, language.NAME: LanguageSweep}


class SweepSpec(NamedTuple):
    """Flags that a sweep was asked to search, and flags with one value.

    Attributes:
      flags: Values of the flags with one value, by flag name.
      swept: Values, as written, of the flags with several values or a tie, by flag name.
      drawn: Distributions, as written, of the flags that are drawn, by flag name.
      tuned: Defaults of `jaxrl-po control` when the sweep started, by flag name.
    """

    flags: Json
    swept: dict[str, list[str]]
    drawn: dict[str, str]
    tuned: Values

    def settings(self, domain: Domain[Any], combination: Values) -> Settings[RunConfig[Any]]:
        """Returns the settings of one combination of values or texts."""
        options = settings.options_of(RECORDS[domain.NAME], self.flags)
        initial = domain.initial_model(options)
        sections = settings.sections_of(domain, options, initial)
        for name, drawn in self.drawn.items():
            prefix, _, field = name.rpartition(".")
            default = getattr(sections.get(prefix), field, None)
            if type(default) is int and not drawn.startswith("choice"):
                raise ConfigError(
                    name, f"must be choice(a,b,…), as its values are integers, got {drawn}"
                )
        given = flags.convert(self.flags | as_written(combination), sections)
        # A value of a combination may choose other defaults than the defaults of the sweep.
        whole, own = (
            _defaults(domain, options, values, initial, sections) for values in (self.flags, given)
        )
        kept = {
            name: value for name, value in self.tuned.items() if name in own or name not in whole
        }
        chosen = {name: value for name, value in own.items() if whole.get(name) != value}
        layers = {"given": given, "tuned": kept | chosen}
        records, origins = flags.merge_layers(sections, layers)
        return Settings(domain.CONFIG.of_sections(records, initial), given, {}, origins, {})


def as_written(values: Values) -> Json:
    """Returns the values with each text as the text of a flag, to be converted to a number."""
    return {x: flags.FlagText(y) if isinstance(y, str) else y for x, y in values.items()}


def parse(domain: Domain[Any], given: Values, options: RunOptions) -> SweepSpec:
    """Returns the sweep that the given flags describe."""
    initial = domain.initial_model(options)
    sections = settings.sections_of(domain, options, initial)
    kept, swept, drawn = split_flags(given, settings.fields_of(sections))
    domain.require_known(options, kept, initial)
    fixed = flags.convert(kept, sections)
    tuned = _defaults(domain, options, fixed, initial, sections)
    swept = {
        name: [sources.absolute({name: value}).get(name, value) for value in values]
        for name, values in swept.items()
    }
    return SweepSpec(fixed | sources.absolute(fixed), swept, drawn, tuned)


def _defaults(
    domain: Domain[Any],
    options: RunOptions,
    values: Values,
    initial: InitialModel,
    sections: flags.Sections,
) -> Json:
    """Returns tuned values and presets by flag name, for flags that have such values."""
    of_run = options, values, initial
    return flags.current({**domain.tuned(*of_run), **domain.presets(*of_run)}, sections)


def resumed(domain: Domain[Any], given: Values, stored: Values, out: str) -> SweepSpec:
    """Returns the sweep stored in a folder; given flags must equal the stored flags.

    Args:
      domain: Domain of the experiments.
      given: Text or value of each given flag, by flag name.
      stored: Content of the sweep's `config.json`.
      out: Value of `--out`.

    Raises:
      ConfigError: A flag differs; the error names the first such flag, with both values.
    """
    if stored.get("script") != "sweep" or not set(SweepSpec._fields) <= set(stored):
        raise ConfigError(
            "resume", f"{out} must hold a sweep of this version of jaxrl-po sweep; choose another"
        )
    spec = SweepSpec(**{name: stored[name] for name in SweepSpec._fields})
    code = stored.get("resolved", {}).get(sources.DIGESTS, {})
    if not all(isinstance(field, dict) for field in (*spec, code)):
        raise ConfigError("resume", f"{Path(out) / folder.CONFIG} is damaged; choose another out")
    found = sources.located(spec.flags, code, str(stored.get("out", "")), Path(out))
    record = RECORDS[domain.NAME]
    before = flags.current(spec.flags, {"": record}) | found
    options = settings.options_of(record, given, before)
    sections = settings.sections_of(domain, options)
    spec = SweepSpec(*(flags.current(each, sections) for each in spec))
    spec = spec._replace(flags=spec.flags | found)
    again = parse(domain, given, options)
    # Unlike the length of a run, the length of a sweep may not grow.
    fields = {x: y for x, y in settings.fields_of(sections).items() if y.resume != "grows"}
    now = {**again.flags, **again.swept, **again.drawn}
    before = {**dict.fromkeys(now, "left out"), **spec.flags, **spec.swept, **spec.drawn}
    folder.require_same(now, before | {"resolved": stored.get("resolved", {})}, fields, out)
    return spec._replace(flags=spec.flags | again.flags)


def refuse(options: Sweep, spec: SweepSpec) -> None:
    """Raises ConfigError for flags that a sweep cannot have, or that have no effect in a sweep."""
    for name, field in settings.fields_of({"": type(options)}).items():
        if field.sweep == "absent" and spec.flags.get(name):
            raise ConfigError(
                name, "must be left out: a sweep is one process, which evaluates each run itself"
            )
    if spec.drawn and not options.draws:
        raise ConfigError("draws", "must be at least 1 with a distribution, got 0")
    if options.draws and not spec.drawn:
        raise ConfigError(
            "draws",
            "must be left out without a distribution, e.g. "
            f"config.learning_rate=log_uniform(1e-5,1e-2), got {options.draws}",
        )
    if options.exploit_every and options.draws < 2:
        raise ConfigError("draws", f"must be at least 2 with exploit_every, got {options.draws}")
    if options.exploit_every and options.confirm:
        raise ConfigError(
            "confirm", "must be 0 with exploit_every: settings of the best member change"
        )
    if options.confirm and not (spec.swept or spec.drawn):
        raise ConfigError("confirm", f"must be 0 without a searched flag, got {options.confirm}")
    if not options.total_steps:
        raise ConfigError("total_steps", "must be at least the steps of an iteration, got 0")


def split_flags(
    given: Values, fields: Mapping[str, Setting]
) -> tuple[Json, dict[str, list[str]], dict[str, str]]:
    """Splits flags into flags with one value, flags with the values of a grid, and distributions.

    A tie, such as `@config.gamma`, is a value of the grid.

    Args:
      given: Value of each flag, or text that may describe a search, by flag name.
      fields: Metadata of each flag's field, by flag name; only some fields may vary in a sweep.

    Example:
      >>> fields = {name: Setting("") for name in ("config.gamma", "config.learning_rate")}
      >>> rates = {"config.gamma": "0.9,0.99", "config.learning_rate": "uniform(0,1)"}
      >>> split_flags({"seeds": 2} | {name: flags.FlagText(rates[name]) for name in rates}, fields)
      ({'seeds': 2}, {'config.gamma': ['0.9', '0.99']}, {'config.learning_rate': 'uniform(0,1)'})

    Raises:
      ConfigError: A distribution is unknown; the message suggests the nearest name.
    """
    kept, swept, drawn = Json(), dict[str, list[str]](), dict[str, str]()
    for name, value in given.items():
        text = value if isinstance(value, flags.FlagText) else ""
        found = DRAW.fullmatch(text.strip())
        varies = name in fields and fields[name].sweep == "varies"
        if varies and found:
            if found[1] not in DISTRIBUTIONS:
                close = errors.suggest(found[1], DISTRIBUTIONS)
                close = "; did you mean choice?" if "int" in found[1] else close
                raise ConfigError(name, f"must be a distribution of a sweep, got {value}{close}")
            drawn[name] = text.replace(" ", "")
        elif varies and ("," in text or text.strip().startswith(TIE)):
            swept[name] = [each.strip() if TIE in each else each for each in text.split(",")]
        else:
            kept[name] = value
    return kept, swept, drawn


def combinations(
    spec: SweepSpec, draws: int, seed: int, *, rounded: bool = False
) -> list[Combination]:
    """Returns the distinct combinations of the values of the grid with the draws, without ties.

    Equal combinations repeat as members of a population.

    Args:
      spec: Sweep with the grid and the distributions.
      draws: Number of joint draws of all flags that have a distribution.
      seed: Seed of the draws.
      rounded: Whether draws have four digits and equal draws repeat, as in folders without `EXACT`.

    Raises:
      ConfigError: The bounds of a distribution are invalid, or a tie names no other searched flag.

    Example:
      >>> grid = {"config.gamma": ["0.9", "0.99"], "config.lambda_": ["@config.gamma"]}
      >>> combinations(SweepSpec({}, grid, {}, {}), 0, 0)[0]
      {'config.gamma': '0.9', 'config.lambda_': '0.9'}
    """
    grid = [
        dict(zip(spec.swept, values, strict=True))
        for values in itertools.product(*spec.swept.values())
    ]
    generator = np.random.default_rng(seed)
    columns = {
        name: draw_values(name, written, draws, generator, rounded=rounded)
        for name, written in spec.drawn.items()
    }
    rows: list[Combination] = [{}]
    if columns:
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    every = [untied(each | row) for each in grid for row in rows]
    if rounded or spec.flags.get("exploit_every"):
        return every
    return list({tuple(each.items()): each for each in every}.values())


def untied(combination: Combination) -> Combination:
    """Replaces each tie by the value of the flag that the tie names.

    Raises:
      ConfigError: A tie names a flag that is not searched, or that has a tie itself.
    """
    values = {x: y for x, y in combination.items() if not y.startswith(TIE)}
    for name, value in combination.items():
        if name not in values and value[1:] not in values:
            near = errors.suggest(value[1:], values) if values else ""
            raise ConfigError(name, f"must be @ and another searched flag, got {value}{near}")
    return {x: values[x if x in values else y[1:]] for x, y in combination.items()}


def draw_values(
    name: str, written: str, count: int, generator: np.random.Generator, *, rounded: bool = False
) -> list[str]:
    """Draws values from `uniform(a,b)`, `log_uniform(a,b)` with 0 < a < b, or `choice(a,b,…)`."""
    kind, values = parse_draw(name, written)
    if kind == "choice":
        return [values[i] for i in generator.integers(len(values), size=count)]
    low, high = map(float, values)
    if kind == "uniform":
        drawn = generator.uniform(low, high, count)
    else:
        drawn = np.exp(generator.uniform(np.log(low), np.log(high), count))
    return [f"{value:.4g}" if rounded else repr(float(value)) for value in drawn]


def parse_draw(name: str, written: str) -> tuple[str, list[str]]:
    """Returns the kind of a distribution and its arguments; raises ConfigError for wrong bounds."""
    found = DRAW.fullmatch(written)
    assert found is not None
    kind, values = found[1], found[2].split(",")
    try:
        if kind != "choice":
            low, high = map(float, values)
            if not (0 < high - low < np.inf and (low > 0 or kind == "uniform")):
                raise ValueError
    except ValueError:
        positive = "0 < " * (kind == "log_uniform")
        raise ConfigError(
            name, f"must be {kind}(low,high) with finite {positive}low < high, got {written}"
        ) from None
    return kind, values
