"""Tests processes that exchange JSON: they end, with their children, if they are late or die."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import reward_functions

from jaxrl_po.run.data import guard, scoring_worker, workers

pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


def serve(pipe):
    """Follows instructions, and returns the number of followed instructions."""
    for count in range(9):
        told = workers.receive(pipe)
        time.sleep(told.get("sleep", 0.0))
        if "die" in told:
            os._exit(told["die"])
        started = subprocess.Popen(["sleep", "60"]).pid if "start" in told else None
        workers.send(pipe, [count, started])


def ended(pid):
    """Returns whether a process ends within 10 s; an orphan may have to wait until it is reaped."""
    deadline, stat = time.monotonic() + 10.0, Path(f"/proc/{pid}/stat")
    while stat.exists() and stat.read_text(encoding="utf-8").split()[2] != "Z":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_process_ends_with_what_it_started():
    process = workers.fork(serve, [])
    process.send({})
    assert process.receive() == [0, None]
    process.send({"start": True}, 30.0)
    count, started = process.receive()
    assert count == 1
    process.close()
    assert ended(process.pid)
    assert ended(started)


def test_late_answer_does_not_answer_the_next_message():
    process = workers.fork(serve, [])
    process.send({"sleep": 0.3}, 0.05, "was late")
    with pytest.raises(workers.ProcessEnded, match=r"^was late$"):
        process.receive()
    time.sleep(0.4)
    process.send({})
    with pytest.raises(workers.ProcessEnded):
        process.receive()
    assert ended(process.pid)


def test_a_process_that_dies_says_how():
    process = workers.fork(serve, [])
    process.send({"die": 3}, 30.0)
    with pytest.raises(workers.ProcessEnded, match=r"^ended its process, with status 3$"):
        process.receive()


def test_a_process_that_nobody_need_wait_for_ends():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = workers.fork(serve, [])
        assert process.close() is None
        assert ended(process.pid)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_process_ends_with_its_owner():
    process = workers.fork(serve, [])
    pid = process.pid
    del process
    assert ended(pid)


def test_call_that_hangs_ends_though_unkillable():
    """The run was killed; `timeout` leaves the watchdog half a second."""

    def hang(completions):
        time.sleep(60.0)

    limit = 0.5 - scoring_worker.GRACE
    start = {"source": "own.py:hang", "arguments": {}, "timeout": limit}
    process = workers.fork(lambda pipe: scoring_worker.serve(pipe, hang, start), [])
    assert process.receive() == {}
    process.send({"completions": [""]})
    assert ended(process.pid)


def test_error_names_the_line_of_users_file():
    called = {}  # the function `call` is in the file of the audit hook
    exec(compile("def call(run):\n    return run()", guard.__file__, "exec"), called)
    with pytest.raises(ZeroDivisionError) as caught:
        called["call"](lambda: reward_functions.raises([]))
    said = f"ZeroDivisionError: no reward today ({reward_functions.__file__}, line 29)"
    assert workers.describe_error(caught.value) == said
