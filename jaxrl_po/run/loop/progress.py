"""Lines of metrics on their way to the user: a bar or plain lines, and `on_row`."""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from jaxrl_po.config import ConfigError
from jaxrl_po.run import errors
from jaxrl_po.run.store.metrics import by_seed, label
from jaxrl_po.types import Row

EVERY = 5.0  # seconds between two lines of one phase
OnRow = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""Gets a line, and may return numbers to add to it."""


class Stop(Exception):
    """Raised in `on_row`, ends the run after this line, saved; `summary.json` has its text."""


class Progress:
    """Shows phase, step, watched metrics (interquartile mean over seeds), speed and time left.

    Args:
      title: of the run.
      total_steps: steps of each seed at the end.
      unit: what a step is, e.g. `steps` or `completions`.
      watch: names of metrics to show, where a line holds them, the score first.
      num_seeds: seeds side by side; steps and steps per second are those of each.
      quiet: show nothing.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        *,
        unit: str = "steps",
        watch: Sequence[str] = (),
        num_seeds: int = 1,
        quiet: bool = False,
    ):
        self._title, self._total, self._unit = title, total_steps, unit
        self._watch = list(dict.fromkeys(watch))
        self._num_seeds = num_seeds
        self._shown: dict[str, float] = {}
        self._phase = "", 0.0  # the last one reported, and when
        self._console = Console(quiet=quiet)
        # Not `is_terminal`, which FORCE_COLOR makes of a file.
        self._live = self._console.file.isatty() and not self._console.is_dumb_terminal
        # On a narrow terminal the title and the text are cut off; what stands first, the bar and
        # the time left stay.
        self._bar = Bar(
            TextColumn("{task.fields[first]}", markup=False),
            TextColumn("{task.description}", markup=False, table_column=_shrinks(1)),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[left]}", markup=False),
            TextColumn("{task.fields[text]}", markup=False, table_column=_shrinks(1)),
            console=self._console,
            disable=quiet or not self._live,
            expand=True,
        )
        self._task = self._bar.add_task(title, total=total_steps, first="", text="", left="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def report(self, line: str) -> None:
        """Prints a permanent line."""
        shown = errors.wrapped(line) if self._live else line
        self._console.print(shown, markup=False, highlight=False, soft_wrap=True)

    def phase(self, name: str, detail: str = "", left: str = "") -> None:
        """Shows what happens outside the training itself, e.g. `compiling`.

        Where there is no terminal, the details of one phase are lines `EVERY` seconds apart.

        Args:
          name: of the phase.
          detail: how far it is.
          left: the time left, in words.
        """
        if self._live:
            self._bar.update(
                self._task, description=f"{name} · {self._title}", first=detail, text="", left=left
            )
        elif not detail or name != self._phase[0] or time.monotonic() - self._phase[1] >= EVERY:
            self._phase = name, time.monotonic()
            self.report(f"{self._title}: {', '.join(filter(None, [name, detail, left]))}")

    def update(self, row: Row, seconds_left: float) -> None:
        """Shows one line of metrics."""
        measured = {name: row.get(f"{name}/iqm", math.nan) for name in self._watch}
        measured = {name: value for name, value in measured.items() if not math.isnan(value)}
        # A bar, which is one line, keeps its last numbers; a line has those of its iterations.
        self._shown = self._shown | measured if self._live else measured
        numbers = [
            f"{label(name)} {self._shown[name]:.4g}" for name in self._watch if name in self._shown
        ]
        score, others = numbers[:1], numbers[1:]
        if score and self._num_seeds > 1:
            score = [f"{score[0]} (IQM)"]
        rate = row.get("time/steps_per_second", math.nan) / self._num_seeds
        speed = [f"{rate:,.0f}/s"] if math.isfinite(rate) else []
        steps = " ".join([f"{row['step']:,}/{self._total:,} {self._unit}", *speed])
        if self._num_seeds > 1:
            steps += f" × {self._num_seeds} seeds"
        first, text = "".join(score), "  ".join([*others, steps])
        left = f"{clock(seconds_left)} left" if math.isfinite(seconds_left) else ""
        if self._live:
            self._bar.update(
                self._task,
                description=self._title,
                completed=row["step"],
                first=first,
                text=text,
                left=left,
            )
        else:
            self.report(f"{self._title}: {'  '.join(filter(None, [first, text, left]))}")


def _shrinks(ratio: int) -> Column:
    return Column(no_wrap=True, overflow="ellipsis", ratio=ratio)


def clock(seconds: float) -> str:
    """Minutes and seconds.

    Example:
      >>> clock(3725.2)
      '62:05'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def added_fields(on_row: OnRow, row: Row, num_seeds: int, score: str = "") -> Row:
    """Returns the fields that `on_row` adds to a line.

    Args:
      on_row: Gets a copy of the line; returns None, or name to a number or to one per seed.
      row: Line of metrics.
      num_seeds: S.
      score: Name of the metric that selects the best checkpoint, which a line may lack.

    Raises:
      ConfigError: The result is something else, or has a name of the line.

    Example:
      >>> added_fields(lambda row: {"twice": 2 * row["step"]}, {"step": 8}, num_seeds=2)
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
    new = by_seed(each)
    for name in new.keys() & {*row, score}:
        raise ConfigError("on_row", f"must return new names, got {name!r}, which the line has")
    return new
