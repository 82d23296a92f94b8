"""Tests runs that are killed, repeated, or stopped by a full disk; all tests are slow.

Short versions of these tests are in `test_interrupts` and `test_faults`.
"""

import json
import math
import random
import signal
import time

import pytest
import tiny
from scripts import everything, finish, lines, start

from jaxrl_po.run.store.metrics import read

LONG = {
    "control": [
        *(
            "--seeds=2",
            "--devices=1",
            "--total_steps=12800",
            "--log_every=2",
            "--eval_every=3",
            "--eval_episodes=2",
        ),
        *("--problem.num_envs=4", "--problem.num_steps=8", "--network.width=8"),
        *("--config.num_minibatches=2", "--config.num_epochs=1"),
    ],
    "language": [
        *(
            "--algorithm=grpo",
            "--seeds=2",
            "--devices=1",
            "--total_steps=1600",
            "--log_every=1",
            "--eval_every=3",
        ),
        *(
            "--eval_prompts=4",
            "--show=2",
            "--task.num_digits=1",
            "--problem.num_prompts=2",
            "--problem.group_size=4",
        ),
        *tiny.MODEL,
        *(
            "--config.num_minibatches=2",
            "--config.num_epochs=1",
            "--warm_start.steps=2",
            "--warm_start.batch_size=4",
        ),
    ],
}
KILLS = 20


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("script", ["control", "language"])
def test_twenty_kills_change_no_bit(tmp_path, script):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert finish(start(script, *LONG[script], "--deterministic", f"--out={whole}"))[0] == 0
    expected = everything(whole)
    total = len(expected[0])
    generator, reached = random.Random(script), [0]
    for number, target in enumerate(sorted(generator.sample(range(1, total - 20), KILLS))):
        with start(
            script, *LONG[script], "--deterministic", "--resume", f"--out={killed}"
        ) as process:
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
    status, output, errors = finish(start(script, "--resume", f"--out={killed}"))
    assert status == 0, errors
    assert "resuming at iteration" in output
    assert everything(killed) == expected


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("script", ["control", "language"])
def test_two_deterministic_runs_are_equal_to_the_bit(tmp_path, script):
    outs = [tmp_path / "a", tmp_path / "b"]
    processes = [start(script, *LONG[script], "--deterministic", f"--out={out}") for out in outs]
    assert [finish(process)[0] for process in processes] == [0, 0]
    first, second = (everything(out) for out in outs)
    assert first == second
    settings = [json.loads((out / "config.json").read_text()) for out in outs]
    assert settings[0]["deterministic"]
    assert settings[0] | {"out": ""} == settings[1] | {"out": ""}
    other = tmp_path / "c"
    assert (
        finish(start(script, *LONG[script], "--seed=1", "--deterministic", f"--out={other}"))[0]
        == 0
    )
    assert lines(other) != first[0]  # the compared lines have entries that could differ


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("script", "limit"), [("control", 20_000), ("language", 20_000)])
def test_a_script_on_a_full_disk(tmp_path, script, limit):
    whole, full = tmp_path / "whole", tmp_path / "full"
    assert finish(start(script, *LONG[script], f"--out={whole}"))[0] == 0
    status, _, errors = finish(start(script, *LONG[script], f"--out={full}", limit=limit))
    assert status == 1
    [line] = errors.splitlines()
    assert "File too large; --resume continues" in line
    assert 0 < len(read(full / "metrics.jsonl")) < len(read(whole / "metrics.jsonl"))
    status, _, errors = finish(start(script, "--resume", f"--out={full}"))
    assert status == 0, errors
    assert everything(full) == everything(whole)
