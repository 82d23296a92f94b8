"""`on_row`: a function of the user's own that gets each line of metrics of a run."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrl_po.config import ConfigError
from jaxrl_po.run.store import metrics
from jaxrl_po.types import Row

OnRow = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""Gets a line, and may return numbers to add to it."""


class Stop(Exception):
    """Raised in `on_row`, ends the run after this line, saved; its text goes to `summary.json`."""


def fields(on_row: OnRow, row: Row, num_seeds: int, score: str = "") -> Row:
    """What `on_row` adds to a line.

    Args:
      on_row: gets a copy of the line; returns None, or name to a number or to one for each seed.
      row: the line.
      num_seeds: S.
      score: the name that selects the best checkpoint, also where the line has none.

    Raises:
      ConfigError: it returned something else, or a name that the line has.

    Example:
      >>> fields(lambda row: {"twice": 2 * row["step"]}, {"step": 8}, num_seeds=2)
      {'twice': [16.0, 16.0], 'twice/mean': 16.0, 'twice/iqm': 16.0}
    """
    added = on_row(copy.deepcopy(row))
    if added is None:
        return {}
    if not isinstance(added, Mapping):
        raise ConfigError("on_row", f"must return a dict of numbers or None, got {added!r}")
    try:
        each = {
            name: np.broadcast_to(np.asarray(value, np.float64), (num_seeds,))
            for name, value in added.items()
        }
    except (TypeError, ValueError):
        raise ConfigError(
            "on_row",
            f"must return one number or {num_seeds}, one per seed, for each name, got {added!r}",
        ) from None
    new = metrics.by_seed(each)
    for name in new.keys() & {*row, score}:
        raise ConfigError("on_row", f"must return new names, got {name!r}, which the line has")
    return new
