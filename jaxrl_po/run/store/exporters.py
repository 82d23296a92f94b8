"""Exporters: destinations for the metrics of a run besides `metrics.jsonl`.

Each exporter works in its own thread, so that training never waits for an exporter.
"""

import copy
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxrl_po.config import ConfigError
from jaxrl_po.run import errors
from jaxrl_po.run.store.metrics import write_atomically
from jaxrl_po.types import Row

Start = tuple[str, Mapping[str, Any], Path | None]
PATIENCE = 60.0  # seconds allowed for one call of an exporter, and for pending calls at the end


class Reporter(Protocol):
    """Display of the progress of a run."""

    def report(self, line: str) -> None:
        """Prints a line that stays on the screen."""

    def phase(self, name: str, detail: str = "", left: str = "") -> None:
        """Shows a phase outside the training itself, with the phase's progress and time left."""

    def update(self, row: Row, seconds_left: float) -> None:
        """Shows one line of metrics and the seconds left until the end of training."""


@runtime_checkable
class Exporter(Protocol):
    """Destination for the lines of metrics of a run.

    All calls come from one thread: `begin` before the first line, `write` for each line, `close`
    at the end of the run, even if the run fails or is interrupted. A resumed run calls `begin`
    again, and after a kill repeats the lines that follow its last checkpoint. With several
    processes, only the first process exports. If a call raises or hangs, the failure is reported
    and the exporter is not called again.
    """

    def begin(self, title: str, settings: Mapping[str, Any], folder: Path | None) -> None:
        """Starts the export.

        Args:
          title: Title of the run.
          settings: Content of `config.json`, by flag name.
          folder: Folder of the run; None for a run without a folder.
        """

    def write(self, row: Row) -> None:
        """Exports one line of metrics; `scalars` flattens such a line."""

    def close(self) -> None:
        """Returns once all lines of metrics are on disk or sent."""


def require_exporters(field: str, exporters: Sequence[Exporter]) -> None:
    """Raises ConfigError unless the value is a list of objects with the methods of `Exporter`."""
    listed = isinstance(exporters, list | tuple)
    if not listed or any(isinstance(x, type) or not isinstance(x, Exporter) for x in exporters):
        given = exporters if listed else [exporters]
        names = ", ".join(x.__name__ if isinstance(x, type) else type(x).__name__ for x in given)
        raise ConfigError(
            field, f"must list objects with the methods begin, write and close, got {names}"
        )


def scalars(row: Row) -> dict[str, float]:
    """Returns a line's finite numbers by name; a list over seeds becomes `name/seed_0` and so on.

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
    """Event files of TensorBoard, with the steps of a single seed along the x axis.

    A resumed run hides earlier events that it writes a second time.

    Args:
      folder: Folder of the event files; None for `tensorboard` in the run's folder.

    Raises:
      ConfigError: The package tensorboardX is missing.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None):
        errors.require("tensorboard", "tensorboardX", "tensorboard")
        self._folder = folder
        self._writer: Any = None

    def begin(self, title: str, settings: Mapping[str, Any], folder: Path | None) -> None:
        """Chooses the folder of the event files; raises ConfigError if no folder is known."""
        place = folder / "tensorboard" if self._folder is None and folder else self._folder
        if place is None:
            raise ConfigError("out", "must be given, or a folder to run.TensorBoard")
        self._place, self._writer = Path(place), None

    def write(self, row: Row) -> None:
        """Writes the numbers of one line of metrics."""
        # A `SummaryWriter` is not used, since its queue stays full after a failed write.
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        # The step of the first line marks the point after which older events are obsolete.
        if self._writer is None:
            self._place.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(self._place / "events"))
            begun = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(step=row["step"], session_log=begun))
        for name, value in scalars(row).items():
            scalar = summary.scalar(name, value)
            self._writer.write_event(Event(wall_time=time.time(), step=row["step"], summary=scalar))
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """Run of Weights & Biases.

    `WANDB_MODE=offline` stores the data in the run's folder; `wandb sync` sends the data later. A
    resumed run continues under the id that its folder stores.

    Args:
      project: Name of the project.

    Raises:
      ConfigError: The package wandb is missing.
    """

    def __init__(self, project: str):
        errors.require("wandb", "wandb", "wandb")
        self._project = project
        self._run: Any = None

    def begin(self, title: str, settings: Mapping[str, Any], folder: Path | None) -> None:
        """Starts the run, or continues the run whose id the folder stores."""
        import wandb

        place = {}
        if folder is not None:
            stored = folder / "wandb_id"
            if not stored.exists():
                write_atomically(stored, secrets.token_hex(8))
            place = {"dir": str(folder), "id": stored.read_text(encoding="utf-8")}
        config = {k: v for k, v in settings.items() if k not in ("script", "resolved")}
        self._run = wandb.init(
            project=self._project, name=title, resume="allow", config=config, **place
        )

    def write(self, row: Row) -> None:
        """Sends the numbers of one line of metrics."""
        self._run.log(scalars(row), step=row["step"])

    def close(self) -> None:
        """Waits until all lines of metrics are sent or saved."""
        self._run.finish()


class _Sender(threading.Thread):
    """Thread that calls an exporter's methods in turn, until one call fails or None is queued."""

    def __init__(self, exporter: Exporter):
        super().__init__(daemon=True)
        self.name, self._exporter = type(exporter).__name__, exporter
        self._calls = queue.SimpleQueue[tuple[Any, ...] | None]()
        self._exports, self._error, self._since = False, "", math.inf
        self.start()

    def run(self) -> None:
        """Calls the queued methods of the exporter; `run` is the body of the thread."""
        try:
            for method, *arguments in iter(self._calls.get, None):
                self._since = time.monotonic()
                method(*arguments)
                self._since = math.inf
        except BaseException as error:  # not even SystemExit in an exporter may end the run
            self._error = f"failed with {type(error).__name__}: {' '.join(str(error).split())}"

    def export(self, row: Row, start: Start) -> None:
        """Queues a copy of a line; before the first line also queues the arguments of `begin`."""
        if not self._exports:
            self._calls.put((self._exporter.begin, *copy.deepcopy(start)))
        self._exports = True
        self._calls.put((self._exporter.write, copy.deepcopy(row)))

    def trouble(self) -> str:
        """Returns why the exporter was dropped; returns an empty text if the exporter works."""
        late = time.monotonic() - self._since > PATIENCE
        return self._error or f"has not answered for {PATIENCE:g} s" * late

    def finish(self) -> str:
        """Waits until the exporter is closed; returns why closing failed, or an empty text."""
        for call in ((self._exporter.close,), None) if self._exports else (None,):
            self._calls.put(call)
        self.join(PATIENCE)
        return self._error or f"has not finished within {PATIENCE:g} s" * self.is_alive()


class ExportingReporter:
    """Reporter that also passes each line to exporters, and waits for exporters only at the end.

    An exporter that fails or hangs is reported once and not used again.

    Args:
      reporter: Reporter that shows progress.
      exporters: Exporters that receive every line.
      start: Arguments of `begin`, read at the first line: some settings are chosen after the start
        of the run.
    """

    def __init__(self, reporter: Reporter, exporters: Sequence[Exporter], start: Start):
        self._senders, self._start = [_Sender(exporter) for exporter in exporters], start
        self.report, self.phase, self._show = reporter.report, reporter.phase, reporter.update

    def __enter__(self) -> "ExportingReporter":
        return self

    def __exit__(self, *_: object) -> None:
        for sender in self._senders:
            self._is_well(sender, sender.finish())

    def update(self, row: Row, seconds_left: float) -> None:
        """Shows one line of metrics and exports it."""
        self._show(row, seconds_left)
        self._senders = [each for each in self._senders if self._is_well(each, each.trouble())]
        for sender in self._senders:
            sender.export(row, self._start)

    def _is_well(self, sender: _Sender, trouble: str) -> bool:
        if trouble:
            stored = ", and metrics.jsonl has every line" * (self._start[2] is not None)
            self.report(f"{sender.name} {trouble}; the run continues without it{stored}")
        return not trouble
