"""Tests a run that is killed again and again; `test_runner` has the states that a kill leaves."""

import math
import random
import signal
import time

import pytest
import tiny
from scripts import everything, finish, start

from jaxrl_po.run.store.metrics import read

LONG = [
    *(*tiny.LANGUAGE, "--algorithm=grpo", "--total_steps=3200", "--deterministic"),
    *("--log_every=2", "--eval_every=3"),
]
KILLS = 20


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_twenty_kills_change_no_bit(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert finish(start("language", *LONG, f"--out={whole}"))[0] == 0
    expected = everything(whole)
    total = len(expected[0])
    generator, reached = random.Random(0), [0]
    for number, target in enumerate(sorted(generator.sample(range(1, total - 20), KILLS))):
        with start("language", *LONG, "--resume", f"--out={killed}") as process:
            # every fifth kill may arrive while the run starts
            latest = time.monotonic() + (
                generator.uniform(0.2, 5.0) if number % 5 == 4 else math.inf
            )
            wanted = max(target, reached[-1] + 1)
            while (
                process.poll() is None
                and time.monotonic() < latest
                and len(read(killed / "metrics.jsonl")) < wanted
            ):
                time.sleep(0.002)
            time.sleep(generator.uniform(0.0, 0.1))
            assert process.poll() is None, process.stderr.read()
            process.send_signal(signal.SIGKILL)
        reached.append(len(read(killed / "metrics.jsonl")))
    assert len(set(reached)) > KILLS // 2  # most kills arrived while the run was training
    assert reached[-1] < total
    status, output, errors = finish(start("language", "--resume", f"--out={killed}"))
    assert status == 0, errors
    assert "resuming at iteration" in output
    assert everything(killed) == expected
