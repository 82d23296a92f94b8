"""Tests the export of lines of metrics to other tools."""

import json
import math
import resource
import struct
import sys
import threading

import pytest
import tiny
from tables import cases
from tensorboardX.proto.event_pb2 import Event, SessionLog
from toy_run import WALK, Silent

from jaxrl_po import run
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.run import errors
from jaxrl_po.run.devices import processes
from jaxrl_po.run.loop import runner
from jaxrl_po.run.store import exporters, folder


def records(path):
    """Yields the events of a file: each event consists of its length, a checksum, content and a
    checksum."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def events(folder):
    """Returns `(step, name, value)` of all event files."""
    for path in sorted(folder.glob("events.*")):
        for event in records(path):
            for value in event.summary.value:
                yield event.step, value.tag, value.simple_value


class Own:
    """Exporter that records its calls and empties its arguments."""

    def __init__(self):
        self.calls = []

    def begin(self, title, settings, folder):
        self.calls.append(("begin", title, dict(settings), folder))
        settings.clear()

    def write(self, row):
        self.calls.append(("write", dict(row)))
        row.clear()

    def close(self):
        self.calls.append(("close",))


ROWS = [
    {"step": step, "kl": [0.5, math.nan], "kl/mean": 0.5 * step, "iteration": step, "what": None}
    for step in (0, 8, 16)
]


def exported(exporter, rows=ROWS, settings=None, folder=None):
    """Returns the reporter of a run that exports rows, two seconds before the run's end."""
    shown = Silent()
    run_of = ("a run", settings or {}, folder)
    with exporters.ExportingReporter(shown, [exporter], run_of) as reporter:
        reporter.phase("compiling")
        for row in rows:
            reporter.update(row, 2.0)
    assert shown.phases == ["compiling"]
    assert shown.seconds_left == [2.0] * len(rows)
    assert [row["step"] for row in shown.rows] == [row["step"] for row in rows]
    return shown


def test_event_files_hold_what_is_finite(tmp_path):
    exported(exporters.TensorBoard(tmp_path))
    told = list(events(tmp_path))
    means = [(step, value) for step, name, value in told if name == "kl/mean"]
    assert means == [(0, 0.0), (8, 4.0), (16, 8.0)]
    assert {name for _, name, _ in told} == {"step", "iteration", "kl/seed_0", "kl/mean"}


def test_a_resumed_run_hides_what_it_writes_again(tmp_path):
    for name, rows in (("first", ROWS), ("second", ROWS[1:])):
        exported(exporters.TensorBoard(tmp_path / name), rows)
    (second,) = (tmp_path / "second").iterdir()
    assert [
        event.step for event in records(second) if event.session_log.status == SessionLog.START
    ] == [8]


class Hanging(Own):
    """Exporter whose service does not answer."""

    def __init__(self, what, until):
        self._what, self._until, self.calls = what, until, []

    def wait(self, what):
        if self._what == what:
            self._until.wait(5)

    def write(self, row):
        self.wait("write")

    def close(self):
        self.wait("close")


@cases("what, said", ("write", "answered for 0.1 s"), ("close", "finished within 0.1 s"))
def test_hanging_exporter_is_reported_and_run_continues(monkeypatch, what, said):
    monkeypatch.setattr(exporters, "PATIENCE", 0.1)
    shown, until = Silent(), threading.Event()
    run_of = ("a run", {}, None)
    with exporters.ExportingReporter(shown, [Hanging(what, until)], run_of) as reporter:
        for row in ROWS:
            reporter.update(row, 2.0)
            until.wait(0.06)
    until.set()
    assert [row["step"] for row in shown.rows] == [0, 8, 16]
    [line] = shown.reported
    assert line.startswith(f"Hanging has not {said}; the run continues without it")


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_full_disk_of_event_files_ends_no_run(tmp_path):
    """The run writes more numbers than a file buffers and a queue of tensorboardX holds."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    many = {"step": 0} | {f"x{i}": float(i) for i in range(500)}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
        [line] = exported(exporters.TensorBoard(), [many] * 3, folder=tmp_path).reported
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert line == (
        "TensorBoard failed with OSError: [Errno 27] File too large; the run continues without it, "
        "and metrics.jsonl has every line"
    )


class FakeBiases:
    """Stand-in for the package wandb: records the runs that are started."""

    def __init__(self):
        self.begun, self.logged = [], []

    def init(self, **settings):
        self.begun.append(settings)
        return self

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.logged.append("finished")


@pytest.fixture
def biases(monkeypatch):
    """Returns `FakeBiases`, which stands in place of the package."""
    fake = FakeBiases()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(errors, "require", lambda *_: None)
    return fake


def test_resumed_run_keeps_its_id_unless_overwritten(tmp_path, biases):
    exporter, settings = exporters.WeightsAndBiases("project"), {"script": "control", "seed": 0}
    for _ in range(2):
        exported(exporter, ROWS[1:2], settings, tmp_path)
    with folder.claim(str(tmp_path), overwrite=True):
        exporter.begin("a run", settings, tmp_path)
    first, resumed, replaced = (begun["id"] for begun in biases.begun)
    assert first == resumed != replaced
    assert [begun["resume"] for begun in biases.begun] == ["allow"] * 3
    assert (biases.begun[0]["name"], biases.begun[0]["config"]) == ("a run", {"seed": 0})
    assert biases.logged[:2] == [
        (8, {"step": 8.0, "kl/seed_0": 0.5, "kl/mean": 4.0, "iteration": 8.0}),
        "finished",
    ]


def test_weights_and_biases_stores_offline_runs(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    shown = exported(exporters.WeightsAndBiases("jaxrl_po"), ROWS, {"seed": 0}, tmp_path)
    assert shown.reported == []
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


OWN = """
import json, pathlib


class Own:
    def begin(self, title, settings, folder):
        self.calls = [["begin", title, settings, str(folder)]]

    def write(self, row):
        self.calls.append(["write", row["step"]])
        row.clear()

    def close(self):
        path = pathlib.Path(__file__).with_suffix(".json")
        path.write_text(json.dumps([*self.calls, ["close"]]))
"""


def train(iterations=3, **options):
    return run.train(WALK, iterations, seeds=2, log_every=1, **options)


def test_own_exporter_gets_settings_every_row_and_end(tmp_path):
    own, other = Own(), Own()
    trained = train(out=tmp_path / "run", title="a walk", exporters=[own, other])
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    begin, *rows, end = own.calls
    assert begin[:2] == ("begin", "a walk")
    assert begin[2].items() <= stored.items()
    assert begin[2]["seeds"] == 2
    assert begin[3] == tmp_path / "run"
    assert [row for _, row in rows] == trained.rows
    assert end == ("close",)
    assert other.calls == own.calls
    train(4, out=tmp_path / "run", resume=True, exporters=[own])
    assert [call[0] for call in own.calls[5:]] == ["close", "begin", "write", "close"]


def test_tensorboard_and_weights_and_biases_export_a_learner(tmp_path, biases, capsys):
    board = run.TensorBoard()
    train(1, title="a walk", exporters=[board, run.TensorBoard(tmp_path / "board")])
    said = "TensorBoard failed with ConfigError: out: must be given, or a folder to run.TensorB"
    assert said in capsys.readouterr().out
    assert {step for step, _, _ in events(tmp_path / "board")} == {0, 1}
    train(1, title="a walk", exporters=[run.WeightsAndBiases("project")])
    assert biases.begun[0].keys() == {"project", "name", "resume", "config"}
    train(2, out=tmp_path / "run", exporters=[board, run.WeightsAndBiases("project")])
    assert {step for step, _, _ in events(tmp_path / "run" / "tensorboard")} == {0, 1, 2}
    assert [step for step, _ in biases.logged[3:-1]] == [0, 1, 2]
    assert biases.begun[1]["dir"] == str(tmp_path / "run")


@cases("error", RuntimeError, KeyboardInterrupt)
def test_own_exporter_closes_if_the_run_ends_early(error):
    def on_row(row):
        if row["iteration"] == 1:
            raise error

    own = Own()
    with pytest.raises((RuntimeError, run.Interrupted)):
        train(exporters=[own], on_row=on_row)
    assert [call[0] for call in own.calls] == ["begin", "write", "write", "close"]


@cases("given", Own(), [Own], [object()], "Own")
def test_only_objects_with_the_methods_are_exporters(given):
    with pytest.raises(
        ConfigError, match=r"^exporters: must list objects with the methods begin, "
    ):
        train(exporters=given)


@pytest.fixture
def two_lines(monkeypatch):
    """Returns runs of experiments that do not train and have two lines."""

    def run_lines(job, out, reporter, **_):
        for step in (0, 8):
            reporter.update({"step": step, "iteration": step}, 1.0)
        raise runner.Diverged("after two lines")

    monkeypatch.setattr(runner, "run", run_lines)


CONTROL = [*tiny.CONTROL, "--total_steps=32"]


@pytest.mark.usefixtures("two_lines")
def test_flag_and_list_export_an_experiment(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert launch.control([*CONTROL, "--exporter=own.py:Own", "--out=run"]) == 1
    calls = json.loads((tmp_path / "own.json").read_text())
    assert [call[0] for call in calls] == ["begin", "write", "write", "close"]
    assert calls[0][1] == "ppo on CartPole-v1, 2 seeds"
    assert calls[0][2]["exporter"] == f"{tmp_path}/own.py:Own"
    (tmp_path / "own.json").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "run").rename(tmp_path / "elsewhere" / "run")
    (tmp_path / "own.py").rename(tmp_path / "elsewhere" / "own.py")
    own = Own()
    with pytest.raises(runner.Diverged):
        run.resume("run", exporters=[own])
    assert [call[0] for call in own.calls] == ["begin", "write", "write", "close"]
    assert (tmp_path / "elsewhere" / "own.json").exists()
    given = [*CONTROL, "--exporter=own.py:json", "--out=other"]
    with pytest.raises(ConfigError, match=r"^exporter: must list objects .* got module$"):
        launch.control(given)
    monkeypatch.setattr(processes, "is_writer", lambda: False)
    own = Own()
    with pytest.raises(runner.Diverged):
        run.resume("run", exporters=[own], exporter="")
    assert own.calls == []
