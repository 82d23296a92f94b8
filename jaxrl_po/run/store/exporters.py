"""Export of metrics, besides `metrics.jsonl`: to TensorBoard and to Weights & Biases.

Each needs an extra of the package, and works in a thread of its own, so that no run waits for it.
"""

import math
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxrl_po.run.store.metrics import write_atomically
from jaxrl_po.types import Row

PATIENCE = 60.0  # seconds for one line, and for what is left at the end


class Reporter(Protocol):
    """Shows the progress of a run."""

    def report(self, line: str) -> None:
        """Shows a permanent line."""

    def phase(self, name: str, detail: str = "", left: str = "") -> None:
        """Shows what happens outside the training itself, how far it is, and the time left."""

    def update(self, row: Row, seconds_left: float) -> None:
        """Shows one line of metrics."""


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
    flat = {
        f"{name}/seed_{i}" if isinstance(value, list) else name: x
        for name, value in row.items()
        for i, x in enumerate(value if isinstance(value, list) else [value])
    }
    numbers = {name: float(x) for name, x in flat.items() if isinstance(x, int | float)}
    return {name: x for name, x in numbers.items() if math.isfinite(x)}


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
        # Not a `SummaryWriter`, whose queue is never emptied again after a failed write.
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        # Opened at the first line, whose step says from where on older events are obsolete.
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(self._folder / "events"))
            begun = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(step=row["step"], session_log=begun))
        for name, value in scalars(row).items():
            said = summary.scalar(name, value)
            self._writer.write_event(Event(wall_time=time.time(), step=row["step"], summary=said))
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
      config: the run's settings, read at the first line: some are chosen after the start.
    """

    def __init__(self, project: str, folder: Path, title: str, config: Mapping[str, Any]):
        self._start = {"project": project, "dir": str(folder), "name": title, "resume": "allow"}
        self._config = config
        self._id = folder / "wandb_id"
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
        name = self._id.read_text(encoding="utf-8")
        config = {k: v for k, v in self._config.items() if k not in ("script", "resolved")}
        return wandb.init(**self._start, config=config, id=name)

    def close(self) -> None:
        """Waits until everything is sent or saved."""
        if self._run is not None:
            self._run.finish()


class _Sender(threading.Thread):
    """Passes lines to an exporter, until it is given None or the exporter fails."""

    def __init__(self, exporter: Exporter):
        super().__init__(daemon=True)
        self.name, self.lines = type(exporter).__name__, queue.SimpleQueue[Row | None]()
        self._exporter, self._error, self._begun = exporter, "", math.inf
        self.start()

    def run(self) -> None:
        """The thread."""
        try:
            while (row := self.lines.get()) is not None:
                self._begun = time.monotonic()
                self._exporter.write(row)
                self._begun = math.inf
            self._exporter.close()
        except BaseException as error:  # an exit, too, must not end the run
            self._error = f"failed with {type(error).__name__}: {' '.join(str(error).split())}"

    def trouble(self) -> str:
        """What is the matter, or nothing."""
        late = time.monotonic() - self._begun > PATIENCE
        return self._error or f"has not answered for {PATIENCE:g} s" * late

    def finish(self) -> str:
        """Waits for the exporter to take what is left; returns what is the matter, or nothing."""
        self.lines.put(None)
        self.join(PATIENCE)
        return self._error or f"has not finished within {PATIENCE:g} s" * self.is_alive()


class Exporting:
    """A reporter that also passes each line to exporters, and waits for them at its end only.

    An exporter that fails, or hangs, is reported once and not used again.

    Args:
      reporter: shows progress.
      exporters: receive every line.
    """

    def __init__(self, reporter: Reporter, exporters: Sequence[Exporter]):
        self._senders = [_Sender(exporter) for exporter in exporters]
        self.report, self.phase, self._show = reporter.report, reporter.phase, reporter.update

    def __enter__(self) -> "Exporting":
        return self

    def __exit__(self, *_: object) -> None:
        for sender in self._senders:
            self._is_well(sender, sender.finish())

    def update(self, row: Row, seconds_left: float) -> None:
        """One line of metrics."""
        self._show(row, seconds_left)
        self._senders = [each for each in self._senders if self._is_well(each, each.trouble())]
        for sender in self._senders:
            sender.lines.put(row)

    def _is_well(self, sender: _Sender, trouble: str) -> bool:
        if trouble:
            self.report(
                f"{sender.name} {trouble}; the run continues without it, and metrics.jsonl has "
                "every line"
            )
        return not trouble
