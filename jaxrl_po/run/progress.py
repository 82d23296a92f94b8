"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from jaxrl_po.run.metrics import Row


class Progress:
    """Shows phase, step, watched metrics (interquartile mean over seeds), speed and time left.

    Args:
      title: of the run.
      total_steps: steps of each seed at the end.
      unit: what a step is, e.g. `steps` or `completions`.
      watch: names of metrics to show, where a line holds them.
      quiet: show nothing.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        *,
        unit: str = "steps",
        watch: Sequence[str] = (),
        quiet: bool = False,
    ):
        self._title, self._total, self._unit, self._watch = title, total_steps, unit, watch
        self._shown: dict[str, float] = {}
        self._console = Console()
        self._console.quiet = quiet
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=total_steps, text="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def tell(self, line: str) -> None:
        """Prints a permanent line."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def phase(self, name: str) -> None:
        """Shows what happens outside the training itself, e.g. `compiling`."""
        if self._console.is_terminal:
            self._bar.update(self._task, description=f"{self._title} · {name}")
        else:
            self.tell(f"{self._title}: {name}")

    def update(self, row: Row, seconds_left: float) -> None:
        """Shows one line of metrics."""
        for name in self._watch:
            value = row.get(f"{name}/iqm", math.nan)
            if not math.isnan(value):
                self._shown[name] = value
        numbers = [
            f"{name.replace('_', ' ')} {self._shown[name]:.4g}"
            for name in self._watch
            if name in self._shown
        ]
        rate = row.get("time/steps_per_second", math.nan)
        speed = [f"{rate:,.0f} {self._unit}/s"] if math.isfinite(rate) else []
        left = [f"{clock(seconds_left)} left"] if math.isfinite(seconds_left) else []
        text = "  ".join([f"{row['step']:,}/{self._total:,} {self._unit}", *numbers, *speed, *left])
        if self._console.is_terminal:
            self._bar.update(self._task, description=self._title, completed=row["step"], text=text)
        else:
            self.tell(f"{self._title}: {text}")


def clock(seconds: float) -> str:
    """Minutes and seconds.

    Example:
      >>> clock(3725.2)
      '62:05'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
