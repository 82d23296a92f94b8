"""Tests every `--algorithm` of both scripts, in microbatches and with its rows over two devices.

Runs of the four algorithms from which the other algorithms are made are complete; those of the
others are complete in slow tests. All are traced without compiling, from the flags to files,
loading and evaluation.
"""

import json

import chex
import numpy as np
import pytest
from tables import cases, slow
from tiny import MODEL

from jaxrl_po.algorithms import critic_fit, ppo
from jaxrl_po.cli import evaluate, launch, render
from jaxrl_po.config import record
from jaxrl_po.run.experiment import language, presets, registry, settings
from jaxrl_po.run.store.checkpoint import Store

# Distillation needs a teacher, see test_distillation; sft needs demonstrations, see test_sft.
WITHOUT_TEACHER = [name for name in registry.METHODS if name not in ("distillation", "sft")]
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
    *("--eval_prompts=4", "--show=1", "--warm_start.steps=0"),
]
FIT = ["--config.value_epochs=1", "--config.value_minibatches=2"]
STEPS = ["--config.num_epochs=1", "--config.num_minibatches=2"]
FEW = {
    "reinforce": FIT,
    "npg": [*FIT, "--config.cg_iterations=2"],
    "trpo": [*FIT, "--config.cg_iterations=2"],
    "a2c": [],
}
SCRIPTS = {"control": launch.control, "language": launch.language}
BOTH = ["--config.num_microbatches=2", "--mesh=data:2"]
# The test `test_wrapped_problem_is_evaluated_and_rendered` runs DAPO on control.
TO_THE_END = [("ppo", "control"), ("trpo", "control"), ("grpo", "language")]
OTHERS = [
    slow(name, "language" if registry.METHODS[name].compares_groups else "control")
    for name in WITHOUT_TEACHER
    if name not in ("ppo", "trpo", "grpo")
]


def arguments(script, algorithm, out):
    in_groups = registry.METHODS[algorithm].compares_groups
    sizes = LANGUAGE if script == "language" else GROUPS if in_groups else PATH
    episodes = ["--eval_episodes=2"] if script == "control" else []
    return [
        f"--algorithm={algorithm}",
        f"--out={out}",
        *SHARED,
        *sizes,
        *episodes,
        *FEW.get(algorithm, STEPS),
    ]


@cases("algorithm, script", *TO_THE_END, *OTHERS)
def test_it_ends_well(algorithm, script, tmp_path):
    """Each algorithm runs in microbatches, and with its rows over two devices."""
    argv = [*arguments(script, algorithm, tmp_path / "run"), *BOTH]
    assert SCRIPTS[script](argv) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert np.isfinite(summary["greedy_return" if script == "control" else "greedy_accuracy"]).all()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["iteration"] == 2
    assert lines[-1]["skipped"] == [0.0]
    with Store(tmp_path / "run" / "checkpoints" / "latest") as store:
        state = store.read(2)
    trained = {name: x for name, x in state.items() if name.startswith((".params", ".opt_state"))}
    assert trained
    chex.assert_tree_all_finite(trained)


@pytest.mark.usefixtures("trace_only")
def test_another_method_with_a_critic_is_one_entry(tmp_path, monkeypatch):
    """The defaults of a new entry follow from the fields of its Config."""

    @record
    class Config(ppo.Config, critic_fit.CriticFit):
        """Hyperparameters of the new method."""

    entry = registry.MethodEntry(Config, ppo.make, has_critic=True)
    monkeypatch.setitem(registry.METHODS, "own", entry)
    argv = arguments("language", "own", tmp_path)
    assert launch.language([flag for flag in argv if "warm_start" not in flag]) == 0
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["warm_start.steps"] == presets.PRESETS[presets.NEW, "", ""]["warm_start.steps"]
    assert stored["reference.enabled"] is False
    assert [stored[f"config.{name}"] for name in ("gamma", "lambda_")] == [1.0, 1.0]
    assert [stored[f"config.{name}"] for name in ("value_epochs", "num_epochs")] == [4, 1]
    judged = settings.parse_settings(language, ["--algorithm=own", "--reward=model"]).config
    of_critic = presets.PRESETS["", "", presets.WITH_CRITIC]
    assert judged.reference.enabled
    assert judged.problem.num_prompts == of_critic["problem.num_prompts"]
    assert judged.method.num_epochs == 2


@pytest.mark.slow
@pytest.mark.usefixtures("trace_only")
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("algorithm", WITHOUT_TEACHER)
def test_its_run_can_be_written_read_and_shown(algorithm, script, tmp_path):
    out = tmp_path / "run"
    assert SCRIPTS[script]([*arguments(script, algorithm, out), *BOTH]) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["iteration"] == 2
    assert {"kl", "entropy", "skipped"} <= set(lines[-1])
    assert json.loads((out / "summary.json").read_text())["steps"] == lines[-1]["step"]
    assert evaluate.main([f"--run={out}", "--checkpoint=latest"]) == 0
    if script == "language":
        assert render.main([f"--run={out}"]) == 0


@pytest.mark.slow
def test_wrapped_problem_is_evaluated_and_rendered(tmp_path):
    """DAPO wraps its problem in dynamic sampling, whose surplus is part of the checkpoint."""
    given = [*arguments("control", "dapo", tmp_path / "run"), *BOTH, "--config.carry_surplus=true"]
    assert launch.control(given) == 0
    assert evaluate.main([f"--run={tmp_path / 'run'}"]) == 0
    assert render.main([f"--run={tmp_path / 'run'}", f"--out={tmp_path / 'episode.gif'}"]) == 0
