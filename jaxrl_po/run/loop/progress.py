"""Progress of a run for the user: a bar or plain lines, warnings about metrics, and `on_row`."""

import copy
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from jaxrl_po.config import ConfigError
from jaxrl_po.masked import Mean
from jaxrl_po.run import errors
from jaxrl_po.run.store.metrics import by_seed, label
from jaxrl_po.types import Metrics, Row

FLAG = re.compile(r"(?<![\w-])--(?=[a-z])")  # beginning of a flag in a text
EVERY = 5.0  # minimal seconds between two lines about the same phase
SIGNAL, NONFINITE, KL = "signal", "frac_nonfinite", "kl"
# Shares that show that an environment breaks its contract, with the text of the warning.
ENVIRONMENT = {
    "frac_one_step": "all episodes have one step now, as if the environment did not reset itself",
    "frac_out_of_range": "a discrete observation lies outside its space, and is read as zeros",
    "greedy_ended": "no episode of the evaluation ends within the environment's own time limit",
}
LEARNED = 0.05  # training accuracy above which success is not chance
LARGE_KL = 1.0  # nats; an update of stable training stays below 0.1
OnRow = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""Receives a line of metrics, and may return numbers to add to the line."""


class Stop(Exception):
    """Raised in `on_row`, ends the run, saved, after the line; `summary.json` has the message."""


class Progress:
    """Shows phase, step, watched metrics (interquartile mean over seeds), speed and time left.

    Args:
      title: title of the run.
      total_steps: number of steps of each seed at the end of the run.
      unit: plural name of a step, e.g. `steps` or `completions`.
      watch: names of metrics to show if a line contains them, the score first.
      num_seeds: number of seeds that train side by side; steps and speed are shown per seed.
      quiet: whether to show nothing.
      flags: whether texts name settings as flags (`--resume`), else as arguments (`resume`).
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
        flags: bool = True,
    ):
        self._title, self._total, self._unit = title, total_steps, unit
        self._watch = list(dict.fromkeys(watch))
        self._num_seeds = num_seeds
        self._shown: dict[str, float] = {}
        self._phase = "", 0.0  # name of the last phase that was reported, and its time
        self._flags = flags
        self._console = Console(quiet=quiet, force_jupyter=False)
        # A notebook keeps each printed line: a line about progress is an output that is updated.
        kernel = type(self._console.file).__module__.startswith("ipykernel")
        self._in_place, self._output = kernel and not quiet, None
        # `isatty` instead of `is_terminal`, which is true for a file if FORCE_COLOR is set.
        self._live = self._console.file.isatty() and not self._console.is_dumb_terminal
        # On a narrow terminal the title and the text are cut off; the first metric, the bar and the
        # time left remain.
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

    def report(self, line: str, *, stays: bool = True) -> None:
        """Prints a line that stays on the screen, or in a notebook until the next line."""
        if not self._flags:
            line = FLAG.sub("", line)
        if self._in_place and not stays:
            self._update_output({"text/plain": line})
            return
        shown = errors.wrapped(line) if self._live else line
        self._console.print(shown, markup=False, highlight=False, soft_wrap=True)

    def _update_output(self, shown: Mapping[str, str]) -> None:
        from IPython.display import display

        if self._output is None:
            self._output = display(shown, raw=True, display_id=True)
        else:
            self._output.update(shown, raw=True)

    def phase(self, name: str, detail: str = "", left: str = "") -> None:
        """Shows a phase outside the training itself, e.g. `compiling`.

        Without a terminal, the details of one phase are printed at least `EVERY` seconds apart.

        Args:
          name: name of the phase.
          detail: progress within the phase, in words.
          left: remaining time of the phase, in words.
        """
        if self._live:
            self._bar.update(
                self._task, description=f"{name} · {self._title}", first=detail, text="", left=left
            )
        elif not detail or name != self._phase[0] or time.monotonic() - self._phase[1] >= EVERY:
            self._phase = name, time.monotonic()
            line = f"{self._title}: {', '.join(filter(None, [name, detail, left]))}"
            self.report(line, stays=False)

    def update(self, row: Row, seconds_left: float) -> None:
        """Shows one line of metrics, and the time left."""
        measured = {name: row.get(f"{name}/iqm", math.nan) for name in self._watch}
        measured = {name: value for name, value in measured.items() if not math.isnan(value)}
        # A bar keeps showing the last numbers; a plain line shows only numbers of its iterations.
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
            line = f"{self._title}: {'  '.join(filter(None, [first, text, left]))}"
            self.report(line, stays=False)


def _shrinks(ratio: int) -> Column:
    return Column(no_wrap=True, overflow="ellipsis", ratio=ratio)


def clock(seconds: float) -> str:
    """Formats seconds as minutes and seconds.

    Example:
      >>> clock(3725.2)
      '62:05'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def added_fields(on_row: OnRow, row: Row, num_seeds: int, score: str = "") -> Row:
    """Returns the fields that `on_row` adds to a line of metrics.

    Args:
      on_row: `(row) -> fields`, receives a copy of the line; returns None, or a dict of names with
        one number or one number per seed.
      row: Line of metrics.
      num_seeds: Number S of seeds.
      score: Name of the metric that selects the best checkpoint, which a line may lack.

    Raises:
      ConfigError: The result of `on_row` is something else, or has a name that the line has.

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


class MetricWarnings:
    """Warnings about metrics, each reported once in a run.

    Args:
      smaller_steps: Advice on making updates smaller, see `Display`; empty if unknown.
    """

    def __init__(self, smaller_steps: str = "") -> None:
        self._smaller_steps = smaller_steps or "take smaller steps"
        self._said = set[str | int]()
        self._longer: Any = False  # `[S]`, true if an episode of the seed had several steps

    def about(self, iteration: int, means: Metrics, row: Row) -> Iterator[str]:
        """Yields a line for each warning that was not reported before.

        Args:
          iteration: iteration before the first iteration of `means`.
          means: metrics of n iterations and S seeds, leaves `[n, S]`.
          row: line of metrics of the same iterations.
        """
        spoiled = first_above(means.get(NONFINITE), 0.0)
        if spoiled is not None and self._is_new(spoiled[1]):
            yield (
                f"seed {spoiled[1]}: a reward or observation of iteration "
                f"{iteration + spoiled[0] + 1} is not finite; minibatches that it spoils are "
                f"skipped, and such steps are counted in {NONFINITE}"
            )
        signal = means.get(SIGNAL)
        taught = np.ones(1) if signal is None else np.any(np.asarray(signal.total) > 0, axis=1)
        if not taught.all() and self._is_new(SIGNAL):
            yield (
                f"iteration {iteration + int(taught.argmin()) + 1} taught nothing: all members of "
                "a group scored alike, in every group of every seed; metrics.jsonl counts in "
                f"{SIGNAL} what teaches, and this is reported once"
            )
        large = first_above(means.get(KL), LARGE_KL)
        if large is not None and self._is_new(KL):
            yield (
                f"seed {large[1]}: the update of iteration {iteration + large[0] + 1} has a "
                f"{KL} of {means[KL].total[large] / means[KL].count[large]:.2g} nats, by which a "
                f"policy can lose all that it learned: {self._smaller_steps}; this is reported once"
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
        yield from self._about_environment(iteration, row)

    def _about_environment(self, iteration: int, row: Row) -> Iterator[str]:
        """Yields lines about an environment that breaks its contract; see `about` for arguments."""
        share = {name: np.array(row.get(name, []), np.float64) for name in ENVIRONMENT}
        # A bandit's episodes have one step by design, hence one step from the first line on.
        single = share["frac_one_step"] == 1.0
        found = (
            single & self._longer,
            share["frac_out_of_range"] > 0.0,
            share["greedy_ended"] == 0.0,
        )
        self._longer = self._longer | ~single
        for (name, what), seeds in zip(ENVIRONMENT.items(), found, strict=True):
            if seeds.any() and self._is_new(name):
                yield (
                    f"seed {seeds.argmax()}, after iteration {iteration}: {what}; {name} is the "
                    "share, and this is reported once"
                )

    def _is_new(self, what: str | int) -> bool:
        new = what not in self._said
        self._said.add(what)
        return new


def first_above(metric: Mean | None, limit: float) -> tuple[int, int] | None:
    """Finds where a metric `[n, S]` first exceeds a limit: `(index of the iteration, seed)`.

    The result is None if the metric nowhere exceeds the limit; an empty mean or NaN does not.

    Example:
      >>> first_above(Mean(np.array([[4.0, 8.0], [0.0, 9.0]]), np.full((2, 2), 8.0)), 1.0)
      (1, 1)
    """
    if metric is None or not (found := np.argwhere(metric.total > limit * metric.count)).size:
        return None
    return int(found[0][0]), int(found[0][1])
