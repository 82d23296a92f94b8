"""What a sweep searches: a grid and random draws, what shares a program, and the scores."""

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxrl_po.config import ConfigError, Json, Setting, Values, setting_of
from jaxrl_po.run import errors
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.experiment.control_config import ControlConfig
from jaxrl_po.run.experiment.settings import Settings
from jaxrl_po.run.store import statistics

Combination = dict[str, str]
DRAW = re.compile(r"(\w+) *\((.*)\)")
DISTRIBUTIONS = ("log_uniform", "uniform", "choice")
EXACT = "exact_draws"  # entry of the folder of a sweep whose draws have all digits


class Asked(NamedTuple):
    """What a sweep was asked to do.

    Attributes:
      flags: Name to value, of the flags with one value.
      swept: Name to values, as written, of the flags with several.
      drawn: Name to distribution, as written, of the flags that are drawn.
      tuned: Defaults of `jaxrl-po control` when the sweep began.
    """

    flags: dict[str, Any]
    swept: dict[str, list[str]]
    drawn: dict[str, str]
    tuned: Mapping[str, Any]

    def settings(
        self, combination: Combination, sections: Mapping[str, type]
    ) -> Settings[ControlConfig]:
        """Returns the settings of one combination."""
        for name, drawn in self.drawn.items():
            prefix, _, field = name.rpartition(".")
            default = getattr(sections.get(prefix), field, None)
            if type(default) is int and not drawn.startswith("choice"):
                raise ConfigError(
                    name, f"must be choice(a,b,…), as its values are integers, got {drawn}"
                )
        texts = {name: flags.Text(value) for name, value in combination.items()}
        given = flags.convert(self.flags | texts, sections)
        layers = {"given": given, "tuned": self.tuned}
        records, origins = flags.merge(sections, layers)
        return Settings(ControlConfig.of_sections(records), given, {}, origins, {})


def split(
    given: Values, fields: Mapping[str, Setting]
) -> tuple[Json, dict[str, list[str]], dict[str, str]]:
    """Splits flags into those with one value, the values of a grid, and distributions.

    Args:
      given: Flag name to its text, which may search, or to its value.
      fields: Flag name to the metadata of its field, of which some may vary in a sweep.

    Example:
      >>> fields = {name: Setting("") for name in ("config.gamma", "config.learning_rate")}
      >>> rates = {"config.gamma": "0.9,0.99", "config.learning_rate": "uniform(0,1)"}
      >>> split({"seeds": 2} | {name: flags.Text(rates[name]) for name in rates}, fields)
      ({'seeds': 2}, {'config.gamma': ['0.9', '0.99']}, {'config.learning_rate': 'uniform(0,1)'})

    Raises:
      ConfigError: An unknown distribution; the message suggests the nearest.
    """
    kept, swept, drawn = dict[str, Any](), dict[str, list[str]](), dict[str, str]()
    for name, value in given.items():
        text = value if isinstance(value, flags.Text) else ""
        found = DRAW.fullmatch(text.strip())
        varies = name in fields and fields[name].sweep == "varies"
        if varies and found:
            if found[1] not in DISTRIBUTIONS:
                close = errors.suggest(found[1], DISTRIBUTIONS)
                close = "; did you mean choice?" if "int" in found[1] else close
                raise ConfigError(name, f"must be a distribution of a sweep, got {value}{close}")
            drawn[name] = text.replace(" ", "")
        elif varies and "," in text:
            swept[name] = text.split(",")
        else:
            kept[name] = value
    return kept, swept, drawn


def combinations(
    asked: Asked, draws: int, seed: int, *, rounded: bool = False
) -> list[Combination]:
    """Returns the distinct combinations of the values of the grid with the draws.

    Args:
      asked: `Asked`, the grid and the distributions.
      draws: number of joint draws of all flags that have a distribution.
      seed: seed of the draws.
      rounded: whether draws have four digits and equal ones repeat, as in folders without `EXACT`.

    Raises:
      ConfigError: the bounds of a distribution are invalid.

    Example:
      >>> combinations(Asked({}, {"config.gamma": ["0.9", "0.99"]}, {}, {}), 0, 0)
      [{'config.gamma': '0.9'}, {'config.gamma': '0.99'}]
    """
    grid = [
        dict(zip(asked.swept, values, strict=True))
        for values in itertools.product(*asked.swept.values())
    ]
    generator = np.random.default_rng(seed)
    columns = {
        name: draw(name, written, draws, generator, rounded=rounded)
        for name, written in asked.drawn.items()
    }
    rows: list[Combination] = [{}]
    if columns:
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    every = [each | row for each in grid for row in rows]
    return every if rounded else list({tuple(each.items()): each for each in every}.values())


def draw(
    name: str, written: str, count: int, generator: np.random.Generator, *, rounded: bool = False
) -> list[str]:
    """Draws values from `uniform(a,b)`, `log_uniform(a,b)` with 0 < a < b, or `choice(a,b,…)`."""
    found = DRAW.fullmatch(written)
    assert found is not None
    kind, values = found[1], found[2].split(",")
    if kind == "choice":
        return [values[i] for i in generator.integers(len(values), size=count)]
    try:
        low, high = map(float, values)
        if not (0 < high - low < np.inf and (low > 0 or kind == "uniform")):
            raise ValueError
    except ValueError:
        positive = "0 < " * (kind == "log_uniform")
        raise ConfigError(
            name, f"must be {kind}(low,high) with finite {positive}low < high, got {written}"
        ) from None
    if kind == "uniform":
        drawn = generator.uniform(low, high, count)
    else:
        drawn = np.exp(generator.uniform(np.log(low), np.log(high), count))
    return [f"{value:.4g}" if rounded else repr(float(value)) for value in drawn]


def static_part(config: ControlConfig) -> str:
    """Returns all settings but the numbers of the method; equal ones share a program."""
    numbers = {
        f"config.{field.name}"
        for field in dataclasses.fields(config.method)
        if not setting_of(field).static
    }
    values = flags.flatten(config.sections())
    return json.dumps(
        {name: value for name, value in values.items() if name not in numbers},
        default=str,
        sort_keys=True,
    )


def final(scores: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Returns the score of each seed, `[S]`: the mean of its last three evaluations, or −∞."""
    last = np.asarray(scores, np.float64)[:, -3:].mean(axis=1)
    return statistics.worst_if_missing(last)


def table(rows: Sequence[Values]) -> str:
    """One line per combination, best first: mean, interquartile mean and worst seed."""
    names = sorted({name for row in rows for name in row["flags"]})
    lines = ["  ".join([f"{'mean':>9}", f"{'IQM':>9}", f"{'worst':>9}", f"{'seeds':>8}", *names])]
    for row in rows:
        scores = final(row["scores"])
        numbers = [scores.mean(), float(statistics.interquartile_mean(scores)), scores.min()]
        values = (f"{row['flags'].get(name, ''):>{len(name)}}" for name in names)
        seeds = f"{statistics.seeds_with_score(scores):>8}"
        lines.append("  ".join([*(f"{number:>9.4g}" for number in numbers), seeds, *values]))
    return "\n".join(lines) + "\n"
