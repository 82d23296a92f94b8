"""Lines of metrics on their way to other tools."""

import math
import resource
import struct
import sys
import threading

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jaxrl_po.config import ConfigError
from jaxrl_po.run import errors
from jaxrl_po.run.store import exporters, folder


def records(path):
    """The events of a file: each is its length, a checksum, content and a checksum."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def events(folder):
    """`(step, name, value)` of all event files."""
    for path in sorted(folder.glob("events.*")):
        for event in records(path):
            for value in event.summary.value:
                yield event.step, value.tag, value.simple_value


class Shown:
    """A reporter that keeps what it is given."""

    def __init__(self):
        self.lines, self.rows = [], []

    def report(self, line):
        self.lines.append(line)

    def phase(self, name):
        self.lines.append(name)

    def update(self, row, seconds_left):
        self.rows.append((row["step"], seconds_left))


class Broken:
    """An exporter whose disk is full after one line."""

    def __init__(self):
        self.written = 0

    def write(self, row):
        if self.written:
            raise OSError("no space left on device")
        self.written += 1

    def close(self):
        raise AssertionError("it was left out before")


ROWS = [
    {"step": step, "kl": [0.5, math.nan], "kl/mean": 0.5 * step, "iteration": step, "what": None}
    for step in (0, 8, 16)
]


def test_event_files_hold_what_is_finite(tmp_path):
    with exporters.Exporting(Shown(), [exporters.TensorBoard(tmp_path)]) as reporter:
        for row in ROWS:
            reporter.update(row, 1.0)
    told = list(events(tmp_path))
    assert [each for each in told if each[1] == "kl/mean"] == [
        (0, "kl/mean", 0.0),
        (8, "kl/mean", 4.0),
        (16, "kl/mean", 8.0),
    ]
    assert {name for _, name, _ in told} == {"step", "iteration", "kl/seed_0", "kl/mean"}


def test_a_resumed_run_hides_what_it_writes_again(tmp_path):
    for name, rows in (("first", ROWS), ("second", ROWS[1:])):
        exporter = exporters.TensorBoard(tmp_path / name)
        for row in rows:
            exporter.write(row)
        exporter.close()
    (second,) = (tmp_path / "second").iterdir()
    assert [
        event.step for event in records(second) if event.session_log.status == SessionLog.START
    ] == [8]


def test_an_exporter_that_fails_is_told_and_the_run_goes_on():
    shown, broken = Shown(), Broken()
    with exporters.Exporting(shown, [broken]) as reporter:
        reporter.phase("compiling")
        for row in ROWS:
            reporter.update(row, 2.0)
    assert shown.rows == [(0, 2.0), (8, 2.0), (16, 2.0)]
    assert shown.lines == [
        "compiling",
        (
            "Broken failed with OSError: no space left on device; the run continues without it, "
            "and metrics.jsonl has every line"
        ),
    ]


class Hanging:
    """An exporter whose service does not answer."""

    def __init__(self, what, until):
        self._what, self._until = what, until

    def write(self, row):
        if self._what == "write":
            self._until.wait(5)

    def close(self):
        if self._what == "close":
            self._until.wait(5)


@pytest.mark.parametrize(
    ("what", "said"), [("write", "answered for 0.1 s"), ("close", "finished within 0.1 s")]
)
def test_an_exporter_that_hangs_is_told_and_the_run_goes_on(monkeypatch, what, said):
    monkeypatch.setattr(exporters, "PATIENCE", 0.1)
    shown, until = Shown(), threading.Event()
    with exporters.Exporting(shown, [Hanging(what, until)]) as reporter:
        for row in ROWS:
            reporter.update(row, 2.0)
            until.wait(0.06)
    until.set()
    assert [step for step, _ in shown.rows] == [0, 8, 16]
    [line] = shown.lines
    assert line.startswith(f"Hanging has not {said}; the run continues without it")


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_event_files_on_a_full_disk_end_no_run(tmp_path):
    """More numbers than a file is buffered for, and a queue of tensorboardX holds."""
    before, shown = resource.getrlimit(resource.RLIMIT_FSIZE), Shown()
    many = {"step": 0} | {f"x{i}": float(i) for i in range(500)}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
        with exporters.Exporting(shown, [exporters.TensorBoard(tmp_path)]) as reporter:
            for _ in range(3):
                reporter.update(many, 2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(shown.rows) == 3
    [line] = shown.lines
    assert line.startswith("TensorBoard failed with OSError: [Errno 27] File too large; the run")


def test_a_missing_package_is_named_before_anything_starts():
    errors.require("tensorboard", "tensorboardX", "tensorboard")
    with pytest.raises(
        ConfigError, match=r"wandb: needs the package absent: pip install 'jaxrl_po\[wandb\]'"
    ):
        errors.require("wandb", "absent", "wandb")


class FakeBiases:
    """Stands in for the package: records the runs that are started, or refuses to start one."""

    def __init__(self, error=None):
        self.begun, self.logged, self._error = [], [], error

    def init(self, **settings):
        if self._error:
            raise self._error
        self.begun.append(settings)
        return self

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.logged.append("finished")


def test_a_resumed_run_goes_on_under_its_id_and_a_replaced_one_does_not(tmp_path, monkeypatch):
    fake = FakeBiases()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        with exporters.Exporting(
            Shown(), [exporters.WeightsAndBiases("project", tmp_path, "a run", {"seed": 0})]
        ) as reporter:
            reporter.update(ROWS[1], 1.0)
    with folder.claim(str(tmp_path), overwrite=True):
        exporters.WeightsAndBiases("project", tmp_path, "a run", {"seed": 0}).write(ROWS[0])
    first, resumed, replaced = (begun["id"] for begun in fake.begun)
    assert first == resumed != replaced
    assert [begun["resume"] for begun in fake.begun] == ["allow"] * 3
    assert fake.logged[:2] == [
        (8, {"step": 8.0, "kl/seed_0": 0.5, "kl/mean": 4.0, "iteration": 8.0}),
        "finished",
    ]


def test_a_service_that_does_not_answer_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeBiases(ConnectionError("no route to host")))
    shown = Shown()
    with exporters.Exporting(
        shown, [exporters.WeightsAndBiases("project", tmp_path, "a run", {})]
    ) as reporter:
        for row in ROWS:
            reporter.update(row, 1.0)
    assert [step for step, _ in shown.rows] == [0, 8, 16]
    assert len(shown.lines) == 1
    assert shown.lines[0].startswith(
        "WeightsAndBiases failed with ConnectionError: no route to host; the run continues"
    )


def test_weights_and_biases_keeps_a_run_that_is_sent_later(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    exporter = exporters.WeightsAndBiases("jaxrl_po", tmp_path, "a run", {"seed": 0})
    for row in ROWS:
        exporter.write(row)
    exporter.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
