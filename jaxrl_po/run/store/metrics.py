"""Metrics: pooled over a chunk, aggregated over seeds, written as one JSON object per line.

The statistics are those of Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the
Statistical Precipice" (https://arxiv.org/abs/2108.13264): the interquartile mean over seeds and a
bootstrap interval around it.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_po.config import ConfigError
from jaxrl_po.types import Metrics, Row

Statistic = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
EPISODES = "episode_"  # beginning of the names of metrics whose samples are completed episodes
TAILS = (2.5, 97.5)  # percentiles between which a 95 % interval lies


def mean(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Mean over the leading axis, ignoring NaN; NaN where all are NaN.

    Args:
      values: `[S, …]`, one entry per seed.
    """
    x = np.asarray(values, np.float64)
    present = ~np.isnan(x)
    count = present.sum(axis=0)
    total = np.where(present, x, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def interquartile_mean(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Mean over the leading axis after dropping the ⌊n/4⌋ lowest and highest of n values.

    NaN is dropped first and does not count towards n.

    Args:
      values: `[S, …]`, one entry per seed.

    Returns:
      `[…]`; NaN where no seed has a value.

    Example:
      >>> float(interquartile_mean([0.0, 1.0, 3.0, 100.0]))
      2.0
    """
    x = np.sort(np.asarray(values, np.float64), axis=0)  # NaN is sorted to the end
    count = (~np.isnan(x)).sum(axis=0)
    rank = np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1))
    kept = (rank >= count // 4) & (rank < count - count // 4)
    total = np.where(kept, x, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(kept.sum(axis=0), 1), np.nan)


def worst_if_missing(scores: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Returns final scores in which NaN and infinity are −∞: a seed that diverged is the worst.

    Example:
      >>> worst_if_missing([500.0, None, 71.0]).tolist()
      [500.0, -inf, 71.0]
    """
    x = np.asarray(scores, np.float64)
    return np.where(np.isfinite(x), x, -np.inf)


def seeds_with_score(scores: npt.ArrayLike) -> str:
    """Returns the number of seeds, and how many of them have a score unless all do.

    Example:
      >>> seeds_with_score([1.0, -np.inf, 3.0]), seeds_with_score([1.0, 2.0])
      ('2 of 3', '2')
    """
    present = np.isfinite(np.asarray(scores, np.float64))
    return f"{present.size}" if present.all() else f"{present.sum()} of {present.size}"


def carried(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Returns curves in which NaN repeats the last number of its seed.

    An interval in which no episode of a seed ended has no return: long, good episodes do that.

    Args:
      values: `[S, X]`, one curve per seed; NaN before the first number stays.

    Example:
      >>> carried([[np.nan, 1.0, np.nan, 3.0]]).tolist()
      [[nan, 1.0, 1.0, 3.0]]
    """
    x = np.asarray(values, np.float64)
    last = np.maximum.accumulate(np.where(np.isnan(x), 0, np.arange(x.shape[1])), axis=1)
    return np.take_along_axis(x, last, axis=1)


def label(name: str) -> str:
    """A metric's name as shown to people.

    Example:
      >>> label("episode_return"), label("greedy_accuracy")
      ('episode return', 'held-out greedy accuracy')
    """
    return f"{'held-out ' if name == 'greedy_accuracy' else ''}{name.replace('_', ' ')}"


UNITS = {
    **{"return": "reward units", "accuracy": "share right", "entropy": "nats", "kl": "nats"},
    **{"episode_length": "steps", "response_length": "tokens"},
}


def unit(name: str) -> str:
    """The unit of a metric, or empty.

    Example:
      >>> unit("greedy_return"), unit("episode_length"), unit("updates")
      ('reward units', 'steps', '')
    """
    return UNITS.get(name, UNITS.get(name.rpartition("_")[2], ""))


def axis(name: str) -> str:
    """A metric in words, with its unit.

    Example:
      >>> axis("greedy_accuracy")
      'held-out greedy accuracy (share right)'
    """
    return f"{label(name)} ({unit(name)})" if unit(name) else label(name)


def counted(number: int, things: str) -> str:
    """A number of things, whose name is plural.

    Example:
      >>> counted(1, "seeds"), counted(2_000, "seeds")
      ('1 seed', '2,000 seeds')
    """
    return f"{number:,} {things.removesuffix('s') if number == 1 else things}"


def bootstrap_interval(
    values: npt.ArrayLike, *, statistic: Statistic = interquartile_mean, replicates: int = 2000
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """95 % interval by a percentile bootstrap over seeds; the same values give the same interval.

    Args:
      values: `[S, …]`, seeds leading; trailing axes are points of a curve, and a resampled seed
        contributes its whole curve.
      statistic: maps `[S, R]` to `[R]` over the leading axis.
      replicates: number R of resamples.

    Returns:
      `(low, high)`, each `[…]`; resamples whose statistic is NaN are dropped, and both are NaN if
      none is left.

    Example:
      >>> low, high = bootstrap_interval([1.0, 2.0, 3.0, 4.0], statistic=mean)
      >>> bool(1.0 <= low < 2.5 < high <= 4.0)
      True
    """
    x = np.asarray(values, np.float64)
    draws = np.random.default_rng(0).integers(len(x), size=(len(x), replicates))
    # Point by point: all resamples of a curve are large.
    bounds = [tails(statistic(each[draws])) for each in x.reshape(len(x), -1).T]
    low, high = np.array(bounds).T.reshape(2, *x.shape[1:])
    return low, high


def with_interval(scores: npt.ArrayLike) -> str:
    """The interquartile mean of seeds `[S]` with its 95 % interval."""
    ends = interquartile_mean(scores), *bootstrap_interval(scores)
    return "{:.4g} [{:.4g}, {:.4g}]".format(*map(float, ends))


def tails(estimates: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The ends of the 95 % interval of resampled estimates without NaN; NaN if none is left."""
    known = estimates[~np.isnan(estimates)]
    if not known.size:
        return math.nan, math.nan
    # Between −∞ and a number there is nothing to interpolate.
    finite = bool(np.isfinite(known).all())
    low, high = np.percentile(known, TAILS, method="linear" if finite else "inverted_cdf")
    return float(low), float(high)


def probability_of_improvement(x: npt.ArrayLike, y: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Probability of improvement, P(X > Y) + ½ P(X = Y): the Mann–Whitney statistic over S·S'.

    Args:
      x: `[S, …]`, scores of X.
      y: `[S', …]`, scores of Y.

    Returns:
      `[…]`, in [0, 1], above ½ where X is better; pairs with a NaN are ignored; NaN without pairs.

    Example:
      >>> float(probability_of_improvement([1.0, 3.0], [2.0, 3.0]))
      0.375
    """
    x, y = np.asarray(x, np.float64)[:, None], np.asarray(y, np.float64)[None, :]
    wins = np.where(np.isnan(x) | np.isnan(y), np.nan, (x > y) + 0.5 * (x == y))
    return mean(wins.reshape(-1, *wins.shape[2:]))


def improvement_interval(
    x: npt.ArrayLike, y: npt.ArrayLike, *, replicates: int = 2000
) -> tuple[float, float]:
    """95 % interval of `probability_of_improvement`, resampling both `x [S]` and `y [S']`.

    NaN where either has no score.
    """
    generator = np.random.default_rng(0)
    scores = [np.asarray(values, np.float64) for values in (x, y)]
    draws = [
        values[generator.integers(len(values), size=(len(values), replicates))] for values in scores
    ]
    return tails(probability_of_improvement(*draws))


def performance_profile(
    values: npt.ArrayLike, thresholds: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """Share of the runs whose score is strictly above each threshold, `[X]` or `[X, R]`.

    Args:
      values: `[S]`, or `[S, R]` of R resamples; a NaN is above nothing.
      thresholds: `[X]`.

    Example:
      >>> performance_profile([1.0, 2.0, 4.0, 8.0], [0.0, 3.0, 8.0]).tolist()
      [1.0, 0.5, 0.0]
    """
    levels = np.asarray(thresholds, np.float64)
    return np.stack([np.mean(np.asarray(values, np.float64) > level, axis=0) for level in levels])


def pool(means: Metrics) -> dict[str, npt.NDArray[np.float64]]:
    """Means over a chunk: totals and counts are summed, then divided once.

    So every sample weighs the same, and an iteration without samples nothing.

    Args:
      means: leaves `[K, S]`: K iterations, S seeds.

    Returns:
      `[S]` each, NaN where the whole chunk had no sample.
    """
    pooled = {}
    for name, m in means.items():
        total, count = (np.asarray(leaf, np.float64).sum(axis=0) for leaf in (m.total, m.count))
        pooled[name] = np.where(count > 0, total / np.maximum(count, 1.0), np.nan)
    return pooled


def by_seed(values: Mapping[str, npt.ArrayLike]) -> Row:
    """Fields of one line: `name` (a list over seeds), `name/mean` and `name/iqm`."""
    row: Row = {}
    for name, value in values.items():
        row[name] = np.asarray(value, np.float64).tolist()
        row[f"{name}/mean"] = float(mean(value))
        row[f"{name}/iqm"] = float(interquartile_mean(value))
    return row


def strict(value: Any) -> Any:
    """The same value with NaN and infinity, which JSON lacks, replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, list | tuple) else value


def append(path: Path, *rows: Row) -> None:
    """Appends a line per row and waits until they are on disk.

    So a checkpoint that is saved afterwards is never newer than its lines. The file is not made: it
    is gone if the folder was moved.
    """
    with path.open("r+", encoding="utf-8") as file:
        file.seek(0, os.SEEK_END)
        file.write("".join(json.dumps(strict(row), allow_nan=False) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def read(path: Path, flag: str = "out") -> list[Row]:
    """Reads the rows of a file, in order; empty if the file is missing.

    An incomplete last line, cut off when its writer was killed, is ignored.

    Args:
      path: path of the file.
      flag: setting that names its folder, for messages.

    Raises:
      ConfigError: names a line that is damaged.
    """
    if not path.exists():
        return []
    if not path.is_file():
        raise ConfigError(flag, f"{path} must be a file, but is a folder")
    *lines, _ = path.read_bytes().split(b"\n")
    return [_row(line, f"{path} line {number}", flag) for number, line in enumerate(lines, 1)]


def _row(line: bytes, place: str, flag: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ConfigError(flag, f"{place} is damaged: repair or remove that line")
    return row


def truncate(path: Path, iteration: int) -> list[Row]:
    """Drops the lines after `iteration`, which a resumed run writes again; returns the others."""
    rows = [row for row in read(path) if row["iteration"] <= iteration]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file atomically: whoever reads it, even after a kill, sees the old or new text."""
    temporary = path.with_name(f".{path.name}.tmp")  # same file system, so `replace` is atomic
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def curve(
    rows: Iterable[Row], name: str
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """One metric over the X lines that have it.

    Returns:
      `(step [X], values [S, X])`; null becomes NaN.
    """
    found = [row for row in rows if name in row]
    values = np.array([row[name] for row in found], np.float64)  # None becomes NaN
    return np.array([row["step"] for row in found], np.float64), values.T


def summary(
    rows: Sequence[Row], options: Any, resolved: Mapping[str, Any], *, score: str, initial: str = ""
) -> Row:
    """The content of `summary.json`; `steps` counts one seed, `steps_per_second` all of them.

    Args:
      rows: the lines of the run, of which the last holds an evaluation; those before a resume may
        have been removed.
      options: of the run as a whole.
      resolved: what the flags left open, such as the placement; see `plan.Plan`.
      score: name of the evaluated score.
      initial: name for the score of the initial policy; empty to leave it out.
    """
    first, last = rows[0], rows[-1]
    iqm = float(interquartile_mean(worst_if_missing(last[score])))
    seconds = sum(row.get("time/seconds", 0.0) for row in rows)
    return {
        **({initial: first[score]} if initial and first["iteration"] == 0 else {}),
        score: last[score],
        f"{score}_iqm": iqm if math.isfinite(iqm) else None,
        "steps": last["step"],
        "steps_per_second": last["step"] * options.seeds / seconds if seconds > 0.0 else None,
        "compile_seconds": last["time/compile_seconds"],
        "algorithm": options.algorithm,
        "seed": options.seed,
        "seeds": options.seeds,
        **{name: resolved[name] for name in ("placement", "device", "versions")},
    }


def in_words(rows: Sequence[Row], score: str) -> str:
    """Returns the final score, an interquartile mean, and names the seeds that it hides.

    A seed stayed behind if it gained less than half of what that mean did since the first line with
    a score.

    Example:
      >>> rows = [by_seed({"greedy_return": x}) for x in ([9.0] * 4, [500.0] * 3 + [12.0])]
      >>> in_words(rows, "greedy_return")
      'greedy return 500, worst seed 12: 1 of 4 seeds gained less than half as much'
    """
    final = worst_if_missing(rows[-1][score])
    iqm = float(interquartile_mean(final))
    if not math.isfinite(iqm):
        return f"{label(score)} is a number in {seeds_with_score(final)} seeds"
    said = f"{label(score)} {iqm:.4g}"
    if len(final) == 1:
        return said
    said += f", worst seed {final.min():.4g}"
    first = next(row for row in rows if score in row)
    start = float(mean(np.array(first[score], np.float64)))
    behind = int(np.sum(~(final - start >= 0.5 * (iqm - start)))) if iqm > start else 0
    seeds = counted(len(final), "seeds")
    return said + (f": {behind} of {seeds} gained less than half as much" if behind else "")
