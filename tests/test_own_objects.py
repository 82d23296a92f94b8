"""Tests environments, networks, tasks and rewards as Python objects: storing and passing them."""

import json
import re
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes
from probes import CueReward, MatchCueContinuous
from reward_functions import exact

from jaxrl_po import language, run
from jaxrl_po.cli import evaluate
from jaxrl_po.config import ConfigError
from jaxrl_po.distributions import DiagonalGaussian
from jaxrl_po.run.experiment import user_code
from jaxrl_po.run.store import sources
from jaxrl_po.run.store.metrics import read

CONTROL = {"problem.num_envs": 4, "problem.num_steps": 8, "network.width": 8}
SIZES = {"problem.num_prompts": 2, "problem.group_size": 4, "task.num_digits": 1}
SIZES |= {"model.width": 8, "model.layers": 1, "model.heads": 2, "model.kv_heads": 1}
SIZES |= {"model.mlp_width": 8, "warm_start.steps": 0}


class Mean(nn.Module):
    """Policy whose mean is `scale` times the cue."""

    scale: float

    @nn.compact
    def __call__(self, x):
        mean = self.scale * x + self.param("bias", nn.initializers.zeros, ())
        return DiagonalGaussian(mean, jnp.zeros_like(mean))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a run, traced only, with an environment that can be imported and a network that
    cannot."""
    out = tmp_path_factory.mktemp("runs") / "own"
    with pytest.MonkeyPatch.context() as patch:
        shapes.trace_only(patch)
        experiment = run.Experiment(
            env=MatchCueContinuous,
            policy=Mean(0.5),
            algorithm="a2c",
            seeds=2,
            total_steps=64,
            eval_episodes=2,
            out=out,
            over=CONTROL,
        )
        run.train(experiment)
    return out


def test_load_names_seed_index_for_seed(tmp_path):
    with pytest.raises(ConfigError, match=r"^seed: is not an argument of load: .* seed_index,"):
        run.load(tmp_path, seed=1)


def test_objects_given_in_python_are_reported_and_required(trained, tmp_path, monkeypatch):
    stored = json.loads((trained / "config.json").read_text())
    assert re.fullmatch(r"/\S+/probes.py:MatchCueContinuous", stored["env"])
    assert re.fullmatch(r"[0-9a-f]{16}:MatchCueContinuous", stored["resolved"]["code"]["env"])
    assert stored["policy"] == "python:Mean"
    with pytest.raises(
        ConfigError, match=r"policy: python:Mean was given in Python and .*policy=…"
    ):
        run.load(trained)
    with pytest.raises(ConfigError, match=r"^run: \S+ policy: python:Mean was given in Python"):
        evaluate.main([f"--run={trained}"])
    with pytest.raises(
        ConfigError, match=r"^rate: is not an argument of load: checkpoint, seed_index, "
    ):
        run.load(trained, rate=3)
    policy = run.load(trained, policy=Mean(0.5), seed_index=1)
    cues = jnp.array([[1.0], [-1.0], [0.5]])
    # All parameters are zero and no statistics normalise the observation yet.
    each = [policy.act(cue) for cue in cues]
    np.testing.assert_allclose(policy.act(cues), each)
    assert len({float(action[0]) for action in each}) == 3
    drawn = policy.act(jnp.zeros((64, 1)), jax.random.key(0))
    assert drawn.shape == (64, 1)
    assert len(np.unique(drawn)) > 32  # all other draws are at the bounds
    with pytest.raises(ConfigError, match=r"^observation: must have the shape \[1\] of one .*got"):
        policy.act(jnp.zeros((2, 3, 1)))
    again = shutil.copytree(trained, tmp_path / "again")
    shapes.trace_only(monkeypatch)
    with pytest.raises(ConfigError, match="policy: python:Mean was given in Python"):
        run.resume(again, total_steps=128)
    assert run.resume(again, total_steps=128, policy=Mean(0.5)).rows[-1]["step"] == 128


def test_importable_objects_are_named_by_file():
    exact_here = sources.name_object("reward", exact)
    assert type(exact_here) is str
    assert exact_here.endswith("tests/support/reward_functions.py:exact")
    assert sources.name_object("reward", json.loads) == "json:loads"
    probe = sources.name_object("env", CueReward)
    assert probe.endswith("tests/support/probes.py:CueReward")
    # the class does not come from a second import
    assert user_code.make("env", probe).__class__ is CueReward
    one = CueReward()
    assert user_code.make("env", sources.name_object("env", one)) is one
    with pytest.raises(ConfigError, match=r"^reward: must be a function or class that can be"):
        sources.name_object("reward", 1j)
    with pytest.raises(ConfigError, match=r"^tools: must be a function or class that can"):
        sources.name_object("tools", lambda: None)


@pytest.mark.slow
def test_python_reward_scores_run_but_is_not_stored(tmp_path, capsys):
    calls = []

    def reward(completions, answer, **_):
        calls.append((list(completions), list(answer)))
        scores = [float(len(text)) for text in completions]
        completions.clear()  # the function may change its arguments
        return scores

    out = tmp_path / "run"
    experiment = run.Experiment(
        task="addition",
        algorithm="grpo",
        reward=reward,
        seeds=1,
        total_steps=16,
        show=0,
        eval_prompts=2,
        out=out,
        over={**SIZES, "config.decay_iterations": 0},
    )
    rows = run.train(experiment).rows
    lines = capsys.readouterr().out
    assert "reward=python:reward cannot be imported: give it to run.resume again" in lines
    assert len(calls) == 2  # iterations
    lengths = np.mean([len(text) for completions, _ in calls for text in completions])
    assert all(len(text) == 2 for _, answers in calls for text in answers)
    (pooled,) = [row for row in rows if row["iteration"] == 2]
    logged = np.mean([row["reward/reward"][0] for row in rows[1:]])
    assert logged == pytest.approx(lengths)
    assert pooled == read(out / "metrics.jsonl")[-1]
    assert run.load(out).params is not None  # loading does not need the reward
    with pytest.raises(ConfigError, match=r"^reward: python:reward was given in Python and cannot"):
        run.resume(out, total_steps=24)
    run.resume(out, total_steps=24, reward=reward)
    assert len(calls) == 3


def test_an_error_of_a_reward_names_its_line(tmp_path):
    experiment = run.Experiment(
        task="addition",
        algorithm="grpo",
        reward=lambda completions, **_: [1 / 0 for _ in completions],
        seeds=1,
        total_steps=8,
        show=0,
        eval_prompts=2,
        out=tmp_path / "run",
        over=SIZES,
    )
    with pytest.raises(
        Exception,
        match=r"^reward function python:lambda raised ZeroDivisionError: .*test_own_objects.py",
    ):
        run.train(experiment)


def test_script_that_trains_on_import_is_refused(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import gymnax\n"
        "from jaxrl_po import run\n\n"
        "class Mine(type(gymnax.make('CartPole-v1')[0])):\n    pass\n\n"
        f"run.train(run.Experiment(env=Mine, total_steps=0, out={str(tmp_path / 'run')!r}))\n",
        encoding="utf-8",
    )
    trains = r"^env: \S+:Mine: UsageError: \S+mine\.py trains when it is imported, .*__main__"
    with pytest.raises(ConfigError, match=trains):
        run.train(run.Experiment(env=f"{script}:Mine", out=tmp_path / "other"))
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "other").exists()


def test_task_is_an_object_and_not_a_tuple():
    experiment = run.Experiment(task=language.tasks.addition(1))
    assert experiment.script == "language"
    assert experiment.settings["task"] == "python:Task"
