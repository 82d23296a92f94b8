"""Warnings about misleading metrics, each reported once per run."""

from collections.abc import Iterator

import numpy as np

from jaxrl_po.masked import Mean
from jaxrl_po.types import Metrics, Row

SIGNAL, NONFINITE = "signal", "frac_nonfinite"
LEARNED = 0.05  # a training accuracy above it is not chance


class Doubts:
    """Remembers what was said."""

    def __init__(self) -> None:
        self._said = set[str | int]()

    def about(self, iteration: int, means: Metrics, row: Row) -> Iterator[str]:
        """A line for each doubt that was not said before.

        Args:
          iteration: the last one before those of `means`.
          means: leaves `[n, S]`: n iterations, S seeds.
          row: their line of metrics.
        """
        spoiled = first_above_zero(means.get(NONFINITE))
        if spoiled is not None and self._is_new(spoiled[1]):
            yield (
                f"seed {spoiled[1]}: a reward or observation of iteration "
                f"{iteration + spoiled[0] + 1} is not finite; minibatches that it spoils are "
                f"skipped, and such steps are counted in {NONFINITE}"
            )
        silent = first_without_signal(means.get(SIGNAL))
        if silent is not None and self._is_new(SIGNAL):
            yield (
                f"iteration {iteration + silent + 1} taught nothing: all members of a group scored "
                f"alike, in every group of every seed; metrics.jsonl counts in {SIGNAL} what "
                "teaches, and this is reported once"
            )
        held_out, seen = (
            np.array(row.get(name, []), np.float64) for name in ("greedy_accuracy", "accuracy")
        )
        if held_out.shape == seen.shape:
            lost = np.flatnonzero((held_out == 0.0) & (seen > LEARNED))
            if lost.size and self._is_new("greedy_accuracy"):
                yield (
                    f"seed {lost[0]}: held-out greedy accuracy 0, though {seen[lost[0]]:.2g} in "
                    "training: held-out prompts may be of another kind, or --reward scores what "
                    "the task's answers do not; samples.jsonl has what is written, and this is "
                    "reported once"
                )

    def _is_new(self, what: str | int) -> bool:
        new = what not in self._said
        self._said.add(what)
        return new


def first_above_zero(share: Mean | None) -> tuple[int, int] | None:
    """`(index of the iteration, seed)` where a metric `[n, S]` is first above 0, or None.

    Example:
      >>> first_above_zero(Mean(np.array([[0.0, 0.0], [0.0, 2.0]]), np.full((2, 2), 8.0)))
      (1, 1)
    """
    if share is None or not (found := np.argwhere(np.asarray(share.total) > 0)).size:
        return None
    return int(found[0][0]), int(found[0][1])


def first_without_signal(signal: Mean | None) -> int | None:
    """Index of the first iteration in which a metric `[n, S]` is 0 in every seed, or None.

    Example:
      >>> first_without_signal(Mean(np.array([[0.0, 2.0], [0.0, 0.0]]), np.full((2, 2), 8.0)))
      1
    """
    if signal is None:
        return None
    silent = np.flatnonzero(~np.any(np.asarray(signal.total) > 0, axis=1))
    return int(silent[0]) if silent.size else None
