"""Tests signals: saved files and messages of interrupted runs."""

import os
import signal
import threading

import pytest
from scripts import lines
from toy_run import Silent, job, run, toy

from jaxrl_po.run.loop import runner, signals
from jaxrl_po.run.loop.signals import SIGNALS
from jaxrl_po.run.store.checkpoint import Store

LEFT = "interrupted before the first iteration: nothing new to save"


@pytest.fixture(autouse=True)
def hangups_are_heard():
    """Sets the handler of SIGHUP, also where the tests run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_what_nohup_ignores_stays_so(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        outcome = run(tmp_path, Silent(lambda row: signal.raise_signal(signal.SIGHUP)))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not outcome.interrupted


@pytest.mark.parametrize("number", SIGNALS)
def test_resumed_command_reports_it_and_keeps_devices(tmp_path, monkeypatch, capfd, number):
    computing, ended = threading.Event(), threading.Event()

    def compute():
        computing.set()
        assert ended.wait(60)

    def leave(status):
        ended.set()
        raise Left(status)

    def interrupt():
        assert computing.wait(60)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(os, "_exit", leave)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Left) as left, signals.resumable_on_signal(tmp_path):
        signals.in_thread(compute)
    thread.join()
    assert left.value.args == (128 + number,)
    assert f"continue with --out={tmp_path} --resume" in capfd.readouterr().err


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGHUP, signal.SIGHUP]])
@pytest.mark.parametrize("leave_early", [True, False])
def test_interrupt_finishes_the_iteration_saves_and_says_so(tmp_path, capfd, signals, leave_early):
    """A terminal that closes may send its signal twice: by its shell and by the system."""

    def interrupt(row):
        if row["iteration"] == 5:
            for each in signals:
                # A default handler would end the tests.
                assert signal.getsignal(each) is not signal.SIG_DFL
                signal.raise_signal(each)
            # A second interrupt ends a command at once, by the default handler.
            assert (signal.getsignal(signal.SIGINT) is signal.SIG_DFL) == leave_early

    stopped = runner.run(job(), tmp_path, Silent(interrupt), leave_early=leave_early)
    assert "interrupt again to quit without saving" in capfd.readouterr().err
    assert stopped.interrupted
    with Store(tmp_path / "checkpoints" / "latest") as latest:
        assert latest.iterations()[-1] == stopped.iteration == lines(tmp_path)[-1]["iteration"] == 5


class Left(BaseException):
    """Raised in place of the end of the process."""


def test_interrupt_ends_a_compilation(tmp_path, monkeypatch, capfd):
    compiling, ended = threading.Event(), threading.Event()

    def leave(status):
        assert not ended.is_set()
        ended.set()
        raise Left(status)

    def init(keys):
        compiling.set()
        assert ended.wait(60)
        return toy().init(keys)

    def interrupt():
        assert compiling.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(os, "_exit", leave)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Left) as left:
        runner.run(job(learner=toy()._replace(init=init)), tmp_path, Silent(), leave_early=True)
    thread.join()
    assert left.value.args == (128 + signal.SIGINT,)
    assert capfd.readouterr().err.strip() == LEFT
