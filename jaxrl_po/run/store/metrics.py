"""Metrics: pooled over a chunk, aggregated over seeds, written as one JSON object per line."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jaxrl_po.config import ConfigError, Values
from jaxrl_po.run.store import statistics
from jaxrl_po.types import Metrics, Row

EPISODES = "episode_"  # prefix of metrics whose samples are completed episodes


def label(name: str) -> str:
    """Returns the name of a metric as users see it.

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
    """Returns the unit of a metric, or an empty text.

    Example:
      >>> unit("greedy_return"), unit("episode_length"), unit("updates")
      ('reward units', 'steps', '')
    """
    return UNITS.get(name, UNITS.get(name.rpartition("_")[2], ""))


def axis(name: str) -> str:
    """Returns a metric's name in words, with its unit.

    Example:
      >>> axis("greedy_accuracy")
      'held-out greedy accuracy (share right)'
    """
    return f"{label(name)} ({unit(name)})" if unit(name) else label(name)


def counted(number: int, things: str) -> str:
    """Returns a number followed by a noun; `things` is the plural of the noun.

    Example:
      >>> counted(1, "seeds"), counted(2_000, "seeds")
      ('1 seed', '2,000 seeds')
    """
    return f"{number:,} {things.removesuffix('s') if number == 1 else things}"


def pool(means: Metrics) -> dict[str, npt.NDArray[np.float64]]:
    """Averages metrics over a chunk: totals and counts are summed, then divided once.

    Every sample thus has the same weight, and an iteration without samples has no weight.

    Args:
      means: metrics with leaves `[K, S]` over K iterations and S seeds.

    Returns:
      Arrays `[S]` by name of the metric, NaN if the chunk has no sample.
    """
    pooled = {}
    for name, m in means.items():
        total, count = (np.asarray(leaf, np.float64).sum(axis=0) for leaf in (m.total, m.count))
        pooled[name] = np.where(count > 0, total / np.maximum(count, 1.0), np.nan)
    return pooled


def by_seed(values: Mapping[str, npt.ArrayLike]) -> Row:
    """Returns the entries of a line: `name` (a list over seeds), `name/mean` and `name/iqm`."""
    row: Row = {}
    for name, value in values.items():
        row[name] = np.asarray(value, np.float64).tolist()
        row[f"{name}/mean"] = float(statistics.nan_mean(value))
        row[f"{name}/iqm"] = float(statistics.interquartile_mean(value))
    return row


def strict(value: object) -> object:
    """Returns the value with NaN and infinity, which JSON lacks, replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, list | tuple) else value


def append(path: Path, *rows: Row) -> None:
    """Appends a line per row and waits until the lines are on disk.

    A checkpoint saved afterwards is therefore never newer than the lines of its iteration. A
    missing file is not created, since it is missing only if the folder was moved.
    """
    with path.open("r+", encoding="utf-8") as file:
        file.seek(0, os.SEEK_END)
        file.write("".join(json.dumps(strict(row), allow_nan=False) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def read(path: Path, flag: str = "out") -> list[Row]:
    """Reads the rows of a file of metrics, in order; returns an empty list if the file is missing.

    Ignores an incomplete last line, which remains if the writing process was killed.

    Args:
      path: path of the file of metrics.
      flag: name of the setting that names the file's folder, for messages.

    Raises:
      ConfigError: a line is damaged; the message names that line.
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
    """Drops lines after `iteration`, which a resumed run writes again; returns the other lines."""
    rows = [row for row in read(path) if row["iteration"] <= iteration]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file atomically: a reader sees the old or the new text, even after a kill."""
    temporary = path.with_name(f".{path.name}.tmp")  # same file system, so `replace` is atomic
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def curve(
    rows: Iterable[Row], name: str
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Extracts one metric from the X rows that contain the metric.

    Returns:
      `(step [X], values [S, X])`; a stored null becomes NaN.
    """
    found = [row for row in rows if name in row]
    values = np.array([row[name] for row in found], np.float64)  # None becomes NaN
    return np.array([row["step"] for row in found], np.float64), values.T


def summary(rows: Sequence[Row], settings: Values, *, score: str, initial: str = "") -> Row:
    """Returns the content of `summary.json`.

    `steps` counts the steps of one seed; `steps_per_second` counts the steps of all seeds.

    Args:
      rows: lines of the run, the last with an evaluation; lines before a resume may be missing.
      settings: content of `config.json`.
      score: name of the evaluated score.
      initial: name for the score of the initial policy; empty to leave that score out.
    """
    first, last = rows[0], rows[-1]
    iqm = float(statistics.interquartile_mean(statistics.worst_if_missing(last[score])))
    seconds = sum(row.get("time/seconds", 0.0) for row in rows)
    return {
        **({initial: first[score]} if initial and first["iteration"] == 0 else {}),
        score: last[score],
        f"{score}_iqm": iqm if math.isfinite(iqm) else None,
        "steps": last["step"],
        "steps_per_second": last["step"] * settings["seeds"] / seconds if seconds > 0.0 else None,
        "compile_seconds": last["time/compile_seconds"],
        **{name: settings[name] for name in ("algorithm", "seed", "seeds") if name in settings},
        **{name: settings["resolved"][name] for name in ("placement", "device", "versions")},
    }


def in_words(rows: Sequence[Row], score: str) -> str:
    """Returns the final score, an interquartile mean, and the number of seeds far below this mean.

    A seed counts as far below if it gained less than half as much as the interquartile mean since
    the first line with a score.

    Example:
      >>> rows = [by_seed({"greedy_return": x}) for x in ([9.0] * 4, [500.0] * 3 + [12.0])]
      >>> in_words(rows, "greedy_return")
      'greedy return 500, worst seed 12: 1 of 4 seeds gained less than half as much as the IQM'
    """
    final = statistics.worst_if_missing(rows[-1][score])
    iqm = float(statistics.interquartile_mean(final))
    if not math.isfinite(iqm):
        return f"{label(score)} is a number in {statistics.seeds_with_score(final)} seeds"
    said = f"{label(score)} {iqm:.4g}"
    if len(final) == 1:
        return said
    said += f", worst seed {final.min():.4g}"
    first = next(row for row in rows if score in row)
    start = float(statistics.nan_mean(np.array(first[score], np.float64)))
    behind = int(np.sum(~(final - start >= 0.5 * (iqm - start)))) if iqm > start else 0
    seeds = counted(len(final), "seeds")
    less = f": {behind} of {seeds} gained less than half as much as the IQM"
    return said + (less if behind else "")
