"""Every `--algorithm` of both scripts runs to its end: at its defaults, in microbatches, and with the rows over two devices."""

import json

import common
import control
import evaluate
import language
import numpy as np
import pytest
import render
from tiny import MODEL

SHARED = ["--seeds=1", "--log_every=1", "--eval_every=2"]
PATH = ["--problem.num_envs=4", "--problem.num_steps=8", "--problem.width=8", "--total_steps=64"]
GROUPS = [
    "--problem.num_prompts=4",
    "--problem.group_size=4",
    "--problem.num_steps=24",
    "--problem.width=8",
    "--total_steps=768",
]
LANGUAGE = [
    *("--problem.num_prompts=4", "--problem.group_size=4", "--total_steps=32", "--task.num_digits=1", *MODEL),
    *("--eval_prompts=4", "--show=1", "--warm_start.steps=2", "--warm_start.batch_size=4"),
]
FIT = ["--config.value_epochs=1", "--config.value_minibatches=2"]
STEPS = ["--config.num_epochs=1", "--config.num_minibatches=2"]
FEW = {"reinforce": FIT, "npg": [*FIT, "--config.cg_iterations=2"], "trpo": [*FIT, "--config.cg_iterations=2"], "a2c": []}
SCRIPTS = {"control": control, "language": language}
VARIANTS = {"default": [], "microbatches": ["--config.num_microbatches=2"], "devices": ["--mesh=data:2"]}


def run(script, algorithm, variant, out):
    sizes = LANGUAGE if script == "language" else GROUPS if algorithm in common.IN_GROUPS else PATH
    episodes = ["--eval_episodes=2"] if script == "control" else []
    few = FEW.get(algorithm, STEPS)
    return SCRIPTS[script].main(
        [f"--algorithm={algorithm}", f"--out={out}", *SHARED, *sizes, *episodes, *few, *VARIANTS[variant]]
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("algorithm", common.ALGORITHMS)
def test_it_ends_well(algorithm, script, variant, tmp_path):
    assert run(script, algorithm, variant, tmp_path / "run") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert np.isfinite(summary["greedy_return" if script == "control" else "greedy_accuracy"]).all()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["iteration"] == 2
    assert lines[-1]["skipped"] == [0.0]


def test_a_wrapped_problem_is_evaluated_and_rendered_as_it_is(tmp_path):
    """DAPO wraps what it trains on in dynamic sampling, whose surplus is a part of the checkpoint."""
    arguments = [*SHARED, *GROUPS, "--algorithm=dapo", "--config.carry_surplus=true", f"--out={tmp_path / 'run'}"]
    assert control.main([*arguments, "--eval_episodes=2"]) == 0
    assert evaluate.main([f"--run={tmp_path / 'run'}"]) == 0
    assert render.main([f"--run={tmp_path / 'run'}", f"--out={tmp_path / 'episode.gif'}"]) == 0
