"""The grid of a sweep: combinations of settings, those that share a program, and their scores."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxrl_po.run.experiment import flags
from jaxrl_po.run.experiment.flags import UsageError
from jaxrl_po.run.store import metrics

Combination = dict[str, str]
OF_A_START = ("resume", "overwrite", "processes")
SWEPT = ("config.", "problem.", "network.")  # flags that may have several values
MAY_DIFFER = ("out", "devices", "mesh", "compilation_cache", "save", *OF_A_START)


class Asked(NamedTuple):
    """What a sweep was asked to do.

    Attributes:
      flags: name to value, of the flags with one value.
      swept: name to values, as written, of the flags with several.
      tuned: the defaults of `jaxrl-po control` when the sweep began; stored, since `--save` changes
        them.
    """

    flags: dict[str, Any]
    swept: dict[str, list[str]]
    tuned: Mapping[str, Any]

    def records(self, combination: Combination, sections: Mapping[str, type]) -> dict[str, Any]:
        """The records of one combination."""
        written = flags.written(self.flags | combination)
        return flags.parse(written, sections, defaults=self.tuned)


def split(argv: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The arguments without the swept flags, and the values of the swept flags.

    Example:
      >>> split(["--seeds=2", "--config.gamma=0.9,0.99"])
      (['--seeds=2'], {'config.gamma': ['0.9', '0.99']})
    """
    swept: dict[str, list[str]] = {}
    kept = []
    for argument in argv:
        name, equals, value = argument.lstrip("-").partition("=")
        if equals and "," in value and name.startswith(SWEPT):
            swept[name] = value.split(",")
        else:
            kept.append(argument)
    return kept, swept


def combinations(swept: Mapping[str, Sequence[str]]) -> list[Combination]:
    """All combinations of the values; a single empty one if nothing is swept.

    Example:
      >>> combinations({"config.gamma": ["0.9", "0.99"]})
      [{'config.gamma': '0.9'}, {'config.gamma': '0.99'}]
    """
    return [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]


def refuse_differences(
    now: Mapping[str, Any], before: Sequence[Mapping[str, Any]], out: str
) -> None:
    """Raises UsageError for flags whose values are not those of the sweep in `out`.

    Args:
      now: flag name to its value, or to a list of its values.
      before: the settings of each combination of the stored sweep.
      out: the value of `--out`.
    """
    different = []
    for name in set(now) - set(MAY_DIFFER):
        values = now[name] if isinstance(now[name], list) else [now[name]]
        expected = list(dict.fromkeys(settings[name] for settings in before))
        if set(values) != set(expected):
            different.append(f"--{name}={flags.shown(values)} must be {flags.shown(expected)}")
    if different:
        raise UsageError(
            f"{', '.join(sorted(different))}, as in the sweep in {out} that is resumed; leave "
            f"{'the flag' if len(different) == 1 else 'them'} out, or choose another --out"
        )


def static_part(records: Mapping[str, Any]) -> str:
    """All settings but the numeric ones of the algorithm; equal ones share a program."""
    values = flags.flatten(records)
    numbers = {
        f"config.{f.name}"
        for f in dataclasses.fields(records["config"])
        if not f.metadata["static"]
    }
    return json.dumps(
        {name: value for name, value in values.items() if name not in numbers},
        default=str,
        sort_keys=True,
    )


def final(scores: Any) -> npt.NDArray[np.float64]:
    """The score of each seed, `[S]`: the mean of its last three evaluations; -inf if not finite."""
    last = np.asarray(scores, np.float64)[:, -3:].mean(axis=1)
    return np.where(np.isfinite(last), last, -np.inf)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per combination, best first: mean, interquartile mean and worst seed."""
    names = sorted({name for row in rows for name in row["flags"]})
    lines = ["  ".join([f"{'mean':>9}", f"{'IQM':>9}", f"{'worst':>9}", *names])]
    for row in rows:
        scores = final(row["scores"])
        numbers = [scores.mean(), float(metrics.interquartile_mean(scores)), scores.min()]
        values = (f"{row['flags'].get(name, ''):>{len(name)}}" for name in names)
        lines.append("  ".join([*(f"{number:>9.4g}" for number in numbers), *values]))
    return "\n".join(lines) + "\n"
