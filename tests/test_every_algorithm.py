"""Every `--algorithm` of both scripts finishes, in microbatches and on two devices."""

import json

import chex
import numpy as np
import pytest
from tiny import MODEL

from jaxrl_po.run import methods
from jaxrl_po.run.checkpoint import Store
from jaxrl_po.run.commands import control, evaluate, language, render

# Distillation needs one: test_distillation.
WITHOUT_TEACHER = [name for name in methods.ALGORITHMS if name != "distillation"]
SHARED = ["--seeds=1", "--log_every=1", "--eval_every=2"]
PATH = ["--problem.num_envs=4", "--problem.num_steps=8", "--network.width=8", "--total_steps=64"]
GROUPS = [
    "--problem.num_prompts=4",
    "--problem.group_size=4",
    "--problem.num_steps=24",
    "--network.width=8",
    "--total_steps=768",
]
LANGUAGE = [
    *(
        "--problem.num_prompts=4",
        "--problem.group_size=4",
        "--total_steps=32",
        "--task.num_digits=1",
        *MODEL,
    ),
    *("--eval_prompts=4", "--show=0", "--warm_start.steps=0"),
]
FIT = ["--config.value_epochs=1", "--config.value_minibatches=2"]
STEPS = ["--config.num_epochs=1", "--config.num_minibatches=2"]
FEW = {
    "reinforce": FIT,
    "npg": [*FIT, "--config.cg_iterations=2"],
    "trpo": [*FIT, "--config.cg_iterations=2"],
    "a2c": [],
}
SCRIPTS = {"control": control, "language": language}
MICROBATCHES, DEVICES = "--config.num_microbatches=2", "--mesh=data:2"
VARIANTS = {
    "both": [MICROBATCHES, DEVICES],
    "neither": [],
    "microbatches": [MICROBATCHES],
    "devices": [DEVICES],
}
ALONE = [pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name != "both"]


def arguments(script, algorithm, out):
    sizes = LANGUAGE if script == "language" else GROUPS if algorithm in methods.IN_GROUPS else PATH
    episodes = ["--eval_episodes=2"] if script == "control" else []
    return [
        f"--algorithm={algorithm}",
        f"--out={out}",
        *SHARED,
        *sizes,
        *episodes,
        *FEW.get(algorithm, STEPS),
    ]


@pytest.mark.parametrize("variant", ["both", *ALONE])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("algorithm", WITHOUT_TEACHER)
def test_it_ends_well(algorithm, script, variant, tmp_path):
    """In microbatches, and with the rows over two devices."""
    argv = [*arguments(script, algorithm, tmp_path / "run"), *VARIANTS[variant]]
    assert SCRIPTS[script].main(argv) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert np.isfinite(summary["greedy_return" if script == "control" else "greedy_accuracy"]).all()
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[-1]["iteration"] == 2
    assert lines[-1]["skipped"] == [0.0]
    with Store(tmp_path / "run" / "checkpoints" / "latest") as store:
        state = store.read(2)
    trained = {name: x for name, x in state.items() if name.startswith((".params", ".opt_state"))}
    assert trained
    chex.assert_tree_all_finite(trained)


def test_a_wrapped_problem_is_evaluated_and_rendered_as_it_is(tmp_path):
    """DAPO wraps its problem in dynamic sampling, whose surplus is part of the checkpoint."""
    assert (
        control.main(
            [*arguments("control", "dapo", tmp_path / "run"), "--config.carry_surplus=true"]
        )
        == 0
    )
    assert evaluate.main([f"--run={tmp_path / 'run'}"]) == 0
    assert render.main([f"--run={tmp_path / 'run'}", f"--out={tmp_path / 'episode.gif'}"]) == 0
