"""Tests standard output and errors that fail, or lack a character: training continues."""

import io
import os
import subprocess
import sys
import threading
import types

import pytest

from jaxrl_po.cli import evaluate, launch
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.loop import signals
from jaxrl_po.run.store import metrics


def print_twice(stream):
    print("first", file=stream, flush=True)
    print("second", file=stream, flush=True)


@pytest.fixture
def closed():
    """Returns a pipe whose reader has closed it."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        yield signals._guarded(stream)


def test_closed_pipe_is_quiet_unless_work_continues(capfd, closed):
    print_twice(closed)
    assert not capfd.readouterr().err
    with signals.ignore_broken_pipe():
        print_twice(closed)
    assert capfd.readouterr().err.count("Broken pipe") == 1


def test_a_pipe_that_does_not_block_gets_all(tmp_path):
    """A program that shares the pipe may have made it non-blocking; Python's own stream raises
    BlockingIOError."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    text, read = "x" * 2**18, []
    with open(reading) as source:
        reader = threading.Thread(target=lambda: read.append(source.read()))
        with open(writing, "w") as stream:
            guarded = signals._guarded(stream)
            threading.Timer(0.1, reader.start).start()
            print(text, end="", file=guarded, flush=True)
        reader.join()
    assert read == [text]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_lacks_is_replaced(tmp_path, encoding):
    with (tmp_path / "out").open("w", encoding=encoding) as stream:
        print("2 − 1 × 1 …\udcff", file=signals._guarded(stream), flush=True)
    assert (tmp_path / "out").read_text(encoding).startswith("2 ? 1 ")


def test_what_is_no_file_of_the_system_stays():
    for stream in (None, io.StringIO(), io.TextIOWrapper(io.BytesIO())):
        assert signals._guarded(stream) is stream


def test_closed_descriptor_is_not_reused_by_files(tmp_path):
    source = f"""import os, runpy
streams = runpy.run_path({signals.__file__!r})
streams["guard"]()
file = open({str(tmp_path / "metrics")!r}, "w")
print(file.fileno(), file=file)
streams["say"]("a message")
"""
    command = [sys.executable, "-c", source]
    subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], check=True, timeout=60
    )
    assert int((tmp_path / "metrics").read_text()) > 2


@pytest.mark.parametrize("command", [launch.control, evaluate.main])
def test_help_ends_well_without_a_reader(monkeypatch, capfd, closed, command):
    monkeypatch.setattr(sys, "stdout", closed)
    monkeypatch.setattr(sys, "argv", ["", "--help"])
    with pytest.raises(SystemExit) as left:
        flags.run_script(command)
    assert left.value.code == 0
    assert not capfd.readouterr().err


def test_an_evaluation_is_written_before_it_is_shown(monkeypatch, tmp_path):
    found = 7, "2 episodes", {"greedy_return": metrics.np.arange(2.0)}
    script = types.SimpleNamespace(title=lambda _: "a run")
    monkeypatch.setattr(evaluate.earlier, "read_any", lambda *_: (script, {}))
    monkeypatch.setattr(evaluate, "evaluate_run", lambda *_: found)
    monkeypatch.setattr(evaluate, "format_scores", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate.main([f"--run={tmp_path}"])
    assert '"iteration": 7' in (tmp_path / "evaluation.json").read_text()
