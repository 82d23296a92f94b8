"""Export of metrics, besides `metrics.jsonl`: to TensorBoard and to Weights & Biases.

Each needs an extra of the package.
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from jaxrl_po.run.loop.runner import Reporter
from jaxrl_po.run.store.folder import WANDB_ID
from jaxrl_po.run.store.metrics import Row, write_atomically


class Exporter(Protocol):
    """A destination for lines of metrics."""

    def write(self, row: Row) -> None:
        """One line of metrics."""

    def close(self) -> None:
        """Returns once everything is on disk, or sent."""


def scalars(row: Row) -> dict[str, float]:
    """The finite numbers of a line by name; a list over seeds becomes `name/seed_0` and so on.

    Example:
      >>> scalars({"step": 8, "kl": [0.5, float("nan")], "kl/mean": 0.5, "note": None})
      {'step': 8.0, 'kl/seed_0': 0.5, 'kl/mean': 0.5}
    """
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= (
            {f"{name}/seed_{i}": number for i, number in enumerate(value)}
            if isinstance(value, list)
            else {name: value}
        )
    return {
        name: float(x)
        for name, x in flat.items()
        if isinstance(x, int | float) and math.isfinite(x)
    }


class TensorBoard:
    """Event files, with the steps of one seed along the x axis.

    A resumed run hides the events that it writes a second time.

    Args:
      folder: of the event files.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: Any = None

    def write(self, row: Row) -> None:
        """One line of metrics."""
        import tensorboardX

        # Opened at the first line, whose step says from where on older events are obsolete.
        if self._writer is None:
            self._writer = tensorboardX.SummaryWriter(str(self._folder), purge_step=row["step"])
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases.

    `WANDB_MODE=offline` keeps it in `folder`, to be sent by `wandb sync` later. A resumed run
    continues under the id stored in its folder.

    Args:
      project: the project's name.
      folder: of the run.
      title: the run's name.
      config: the run's settings.
    """

    def __init__(self, project: str, folder: Path, title: str, config: Mapping[str, Any]):
        self._start = {
            "project": project,
            "dir": str(folder),
            "name": title,
            "config": dict(config),
            "resume": "allow",
        }
        self._id = folder / WANDB_ID
        self._run: Any = None

    def write(self, row: Row) -> None:
        """One line of metrics."""
        if self._run is None:
            self._run = self._begin()
        self._run.log(scalars(row), step=row["step"])

    def _begin(self) -> Any:
        import wandb

        if not self._id.exists():
            write_atomically(self._id, secrets.token_hex(8))
        return wandb.init(**self._start, id=self._id.read_text())

    def close(self) -> None:
        """Waits until everything is sent or saved."""
        if self._run is not None:
            self._run.finish()


class Exporting:
    """A reporter that also passes each line to exporters.

    An exporter that fails is reported once and not used again.

    Args:
      reporter: shows progress.
      exporters: receive every line.
    """

    def __init__(self, reporter: Reporter, exporters: Sequence[Exporter]):
        self._exporters = list(exporters)
        self.report, self.phase, self._show = reporter.report, reporter.phase, reporter.update

    def __enter__(self) -> "Exporting":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._each(lambda exporter: exporter.close())

    def update(self, row: Row, seconds_left: float) -> None:
        """One line of metrics."""
        self._show(row, seconds_left)
        self._each(lambda exporter: exporter.write(row))

    def _each(self, do: Callable[[Exporter], None]) -> None:
        for exporter in tuple(self._exporters):
            try:
                do(exporter)
            # Whatever goes wrong in an exporter must not end the run: `metrics.jsonl` has the line.
            except Exception as error:
                self._exporters.remove(exporter)
                what = f"{type(exporter).__name__} failed with {type(error).__name__}: {error}"
                self.report(
                    f"{what}; the run continues without it, and metrics.jsonl has every line"
                )
