"""`run.train` and `run.load`: from Python what the commands do from flags."""

import json

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_po import control, run
from jaxrl_po.algorithms import ppo
from jaxrl_po.config import ConfigError
from jaxrl_po.run import metrics
from jaxrl_po.run.commands import control as control_command
from jaxrl_po.run.commands import language as language_command

ENV = gymnax.make("CartPole-v1")[0]
PROBLEM = control.make_problem(ENV, num_envs=4, num_steps=8)
LEARNER = ppo.make(ppo.Config(num_minibatches=2, num_epochs=1), PROBLEM)
EVALUATE = control.make_evaluate(ENV, PROBLEM, num_episodes=2)


def train(iterations, **options):
    return run.train(LEARNER, iterations, seeds=2, steps_per_iteration=32, **options)


def test_a_learner_of_ones_own_leaves_what_a_command_leaves(tmp_path, capsys):
    trained = train(
        3, evaluate=EVALUATE, score="return", watch=("entropy",), out=tmp_path / "run", log_every=1
    )
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"metrics.jsonl", "config.json", "checkpoints", "curves.png"} <= left
    assert trained.rows == metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in trained.rows] == [0, 32, 64, 96]
    assert len(trained.rows[-1]["return"]) == 2
    assert trained.state.step.tolist() == [3, 3]
    assert not trained.interrupted
    assert "IQM of 2 seeds: entropy" in capsys.readouterr().out


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    whole = train(4, out=tmp_path / "whole", log_every=2)
    train(2, out=tmp_path / "cut", log_every=2)
    resumed = train(4, out=tmp_path / "cut", log_every=2, resume=True)
    jax.tree.map(np.testing.assert_array_equal, whole.state.params, resumed.state.params)
    with pytest.raises(ConfigError, match=r"^out=\S+ already holds files; add resume"):
        train(4, out=tmp_path / "cut", log_every=2)
    with pytest.raises(ConfigError, match=r"^seeds=3 must be 2, as in the run"):
        run.train(LEARNER, 4, seeds=3, steps_per_iteration=32, out=tmp_path / "cut", resume=True)
    with pytest.raises(ConfigError, match=r"^iterations must be at least 4, those of .* got 1: "):
        train(1, out=tmp_path / "cut", log_every=2, resume=True)


@pytest.mark.parametrize(
    ("config", "options", "why"),
    [
        ({"learning_rate": 1e-3}, {}, "the program of an iteration is another"),
        ({"num_epochs": 2}, {}, "the program of an iteration is another"),
        ({}, {"normalize_observations": True}, r"the checkpoint holds nothing for .collector\S+, "),
    ],
)
def test_a_run_is_not_resumed_with_another_learner(tmp_path, config, options, why):
    train(2, out=tmp_path / "run", log_every=2)
    problem = control.make_problem(ENV, num_envs=4, num_steps=8, **options)
    other = ppo.make(ppo.Config(**{"num_minibatches": 2, "num_epochs": 1, **config}), problem)
    with pytest.raises(
        ConfigError, match=r"^learner must be that of the run in out=\S+ that.*" + why
    ):
        run.train(other, 4, seeds=2, steps_per_iteration=32, out=tmp_path / "run", resume=True)
    again = ppo.make(ppo.Config(num_minibatches=2, num_epochs=1), PROBLEM)
    resumed = run.train(
        again, 4, seeds=2, steps_per_iteration=32, out=tmp_path / "run", resume=True
    )
    assert resumed.state.step.tolist() == [4, 4]


def test_without_steps_iterations_are_shown(tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr("jaxrl_po.run.plotting.save", lambda panels, path: drawn.extend(panels))
    run.train(LEARNER, 1, out=tmp_path / "run")
    assert "training: 1/1 iterations" in capsys.readouterr().out
    assert drawn[0].x_label == "iterations, each seed"


def test_what_cannot_run_loses_nothing(tmp_path):
    train(1, out=tmp_path / "run", log_every=1)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    unfit = ppo.make(ppo.Config(num_minibatches=5), PROBLEM)
    with pytest.raises(ConfigError, match="num_minibatches"):
        run.train(unfit, 1, out=tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    with pytest.raises(ConfigError, match=r"^log_every=2 must be 1, as in the run"):
        train(2, out=tmp_path / "run", log_every=2, resume=True)


def test_where_no_metric_is_named_the_return_is_drawn(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("jaxrl_po.run.plotting.save", lambda panels, path: drawn.extend(panels))
    train(1, out=tmp_path / "run")
    assert [series.metric for series in drawn[0].series] == ["episode_return"]


def test_without_a_folder_nothing_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    trained = train(1)
    assert trained.folder is None
    assert trained.rows[-1]["iteration"] == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"iterations": -1}, "iterations must lie in"),
        ({"seeds": 0}, "seeds must lie in"),
        ({"log_every": -1}, "log_every must lie in"),
        ({"steps_per_iteration": 0}, "steps_per_iteration must lie in"),
        ({"score": "return"}, "evaluate must be given where score='return'"),
        ({"score": "retrun", "evaluate": EVALUATE}, "score must be one of length, return"),
        ({"watch": ("entrpy",)}, "watch must name metrics of the learner"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        run.train(LEARNER, **{"iterations": 1, **arguments})


def test_the_policy_of_a_control_run_acts_as_it_was_evaluated(tmp_path):
    out = tmp_path / "run"
    flags = [*tiny.CONTROL, "--total_steps=640", "--problem.normalize_observations=true"]
    assert control_command.main([*flags, f"--out={out}"]) == 0
    policy = run.load(out, checkpoint="latest", seed=1)
    assert policy.settings["env"] == "CartPole-v1"
    observation, state = ENV.reset(jax.random.key(3), ENV.default_params)
    total = 0.0
    for i in range(500):
        action = policy.act(observation)
        key = jax.random.key(i)
        observation, state, reward, terminated, truncated, _ = ENV.step(
            key, state, action, ENV.default_params
        )
        total += float(reward)
        if terminated or truncated:
            break
    # The same initial states, by the run's own evaluation of the same parameters.
    built = control_command.build_problem({**records(out)}, None)
    problem = built.problem
    evaluated = control.make_evaluate(built.env, problem, num_episodes=64)
    stacked = stacked_state(out)
    one = jax.tree.map(lambda x: x[1], stacked)
    spread = evaluated(one.params, one.collector, jax.random.key(0))["return"]
    assert float(spread.min()) <= total <= float(spread.max())
    jax.tree.map(np.testing.assert_array_equal, policy.params, one.params)
    distribution = problem.apply(
        one.params, control.statistics.normalize(one.collector, observation)[None]
    )[0]
    assert int(policy.act(observation)) == int(distribution.mode()[0])
    raw = problem.apply(one.params, observation[None])[0].logits
    seen = problem.apply(
        one.params, control.statistics.normalize(one.collector, observation)[None]
    )[0].logits
    assert np.abs(np.asarray(raw - seen)).max() > 1e-3  # or the comparison above shows nothing
    drawn = {int(policy.act(jnp.zeros(4), jax.random.key(i))) for i in range(64)}
    assert drawn == {0, 1}
    with pytest.raises(
        ConfigError, match=r"^observation must have the shape \[4\] .* CartPole-v1, got \[3\]; jax"
    ):
        policy.act(jnp.zeros(3))
    with pytest.raises(ConfigError, match=r"^observation must have .* got \[8, 4\]; jax.vmap"):
        policy.act(jnp.zeros((8, 4)))
    assert jax.vmap(policy.act)(jnp.zeros((8, 4))).shape == (8,)
    with pytest.raises(ConfigError, match=r"^seed=2 must be below 2, the seeds of folder="):
        run.load(out, seed=2)
    with pytest.raises(ConfigError, match=r"^checkpoint must be one of best, latest"):
        run.load(out, checkpoint="worst")
    with pytest.raises(ConfigError, match=r"^folder=\S+ must be the folder of a run"):
        run.load(tmp_path)


def records(out):
    from jaxrl_po.run import earlier

    return earlier.read(control_command.SCRIPT, "run", str(out))


def stacked_state(out):
    from jaxrl_po.run import earlier

    return earlier.state(control_command.SCRIPT, records(out), "run", str(out), "latest")[2]


@pytest.mark.parametrize("algorithm", ["ppo", "dapo"])  # dapo leaves room around an answer
def test_the_policy_of_a_language_run_answers_texts(tmp_path, algorithm):
    out = tmp_path / "run"
    # An untrained policy writes up to its budget.
    flags = [flag for flag in tiny.LANGUAGE if not flag.startswith("--warm_start.")]
    flags += ["--warm_start.steps=0", f"--algorithm={algorithm}", f"--out={out}"]
    assert language_command.main(flags) == 0
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        total = sum(map(int, row["prompt"][:-1].split("+")))
        assert row["expected"] == f"{total:02d}"[::-1]
    policy = run.load(out, checkpoint="latest")
    last = [
        r for r in rows if r["iteration"] == rows[-1]["iteration"] and r["decoding"] == "greedy"
    ]
    texts = policy.generate([r["prompt"] for r in last])
    for text, row in zip(texts, last, strict=True):
        assert text == row["completion"].removesuffix("$")[: len(text)]
        assert len(text) == row["length"] - row["ended"]
    sampled = policy.generate(["1+2="] * 64, jax.random.key(0))
    assert len(set(sampled)) > 1
    assert max(map(len, sampled)) == {"ppo": 3, "dapo": 4}[algorithm]
    with pytest.raises(ConfigError, match="prompts must be a list of texts"):
        policy.generate("1+2=")
    with pytest.raises(ConfigError, match="prompts must have at most 4 tokens"):
        policy.generate(["1+2+3="])
