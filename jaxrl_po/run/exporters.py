"""Metrics as other tools read them, beside `metrics.jsonl`: TensorBoard and Weights & Biases, each an extra of the package."""

import importlib.util
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from jaxrl_po.run.flags import UsageError
from jaxrl_po.run.folder import WANDB_ID
from jaxrl_po.run.metrics import Row, write_atomically
from jaxrl_po.run.runner import Reporter


class Exporter(Protocol):
    """Where lines go."""

    def write(self, row: Row) -> None:
        """One line of metrics."""

    def close(self) -> None:
        """Everything is on disk, or sent, afterwards."""


def require(flag: str, package: str, extra: str) -> None:
    """Raises UsageError where a package that a flag needs is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"--{flag} needs the package {package}: pip install 'jaxrl_po[{extra}]'")


def scalars(row: Row) -> dict[str, float]:
    """Name to number of everything finite in a line; what is told for each seed is `name/seed_0` and so on.

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
    """Event files in `folder`, steps of one seed along the axis; a resumed run hides what it writes again.

    Args:
      folder: of the event files.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: Any = None

    def write(self, row: Row) -> None:
        """One line of metrics."""
        import tensorboardX

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
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it in `folder`, to be sent by `wandb sync` later.

    A resumed run goes on under the id that lies in its folder.

    Args:
      project: its project.
      folder: of the run.
      title: its name.
      config: its settings.
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
    """A reporter that hands each line to exporters as well; one that fails is told and left out from then on.

    Args:
      reporter: shows progress.
      exporters: get every line.
    """

    def __init__(self, reporter: Reporter, exporters: Sequence[Exporter]):
        self._exporters = list(exporters)
        self.tell, self.phase, self._show = reporter.tell, reporter.phase, reporter.update

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
            # whatever happens in there, `metrics.jsonl` holds the line and the run is worth more
            except Exception as error:
                self._exporters.remove(exporter)
                what = f"{type(exporter).__name__} failed with {type(error).__name__}: {error}"
                self.tell(f"{what}; the run goes on without it, and metrics.jsonl has every line")
