"""Signals: what a run saves and says when it is interrupted or killed."""

import json
import random
import signal
import subprocess
import sys
import time

import jax
import toy_run
from toy_run import bits, job, lines, run, toy

from jaxrl_po.run.checkpoint import Store
from jaxrl_po.run.metrics import read


def test_handlers_are_put_back(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run(tmp_path, iterations=5)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def start(path, *flags):
    command = [sys.executable, toy_run.__file__, str(path), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def final(path):
    rows = lines(path)
    with Store(path / "checkpoints" / "latest") as latest:
        iteration, state = latest.load(jax.eval_shape(toy().init, job().keys))
    return rows, iteration, bits(state)


def test_kill_at_any_moment_then_resume_equals_the_uninterrupted_run(tmp_path):
    with start(tmp_path / "whole") as process:
        assert process.wait(240) == 0
    expected = final(tmp_path / "whole")
    assert expected[1] == 400
    generator, path, kills = random.Random(0), tmp_path / "killed", 0
    while True:
        with start(path, "--resume") as process:
            lines_wanted = len(read(path / "metrics.jsonl")) + generator.randint(6, 20)
            while process.poll() is None and len(read(path / "metrics.jsonl")) < lines_wanted:
                time.sleep(0.002)
            if process.poll() is None:
                time.sleep(generator.random() * 0.05)
                process.kill()
                kills += 1
            elif process.wait() == 0:
                break
    assert kills >= 2
    assert final(path) == expected


def test_interrupt_finishes_the_chunk_saves_and_says_so(tmp_path):
    with start(tmp_path, "--slow") as process:
        while process.poll() is None and len(read(tmp_path / "metrics.jsonl")) < 2:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=240)
    assert process.returncode == 0
    assert "interrupt again to quit without saving" in errors
    stopped = json.loads(output.splitlines()[-1])
    assert stopped["interrupted"]
    with Store(tmp_path / "checkpoints" / "latest") as latest:
        assert latest.iterations()[-1] == stopped["iteration"] == lines(tmp_path)[-1]["iteration"]


def test_a_second_interrupt_leaves_at_once(tmp_path):
    with start(tmp_path, "--slow") as process:
        while process.poll() is None and len(read(tmp_path / "metrics.jsonl")) < 2:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.stderr.readline()
        process.stderr.readline()  # the message is out, so the handler has run
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT


def test_an_interrupt_while_compiling_is_heard_at_once(tmp_path):
    with start(tmp_path, "--stuck") as process:
        while process.poll() is None and "compiling" not in process.stdout.readline():
            pass
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert time.monotonic() - begun < 5.0
    assert process.returncode == 128 + signal.SIGINT
    assert errors.strip() == "interrupted before the first iteration: nothing new to save"
    assert "Traceback" not in errors
