"""Tests loaded policies in another process."""

import multiprocessing
import pickle
import shutil

import gymnax
import jax
import numpy as np
import pytest
from probes import MatchCueContinuous

from jaxrl_po import control, run
from jaxrl_po.algorithms import a2c
from jaxrl_po.config import ConfigError

pytestmark = pytest.mark.slow

OBSERVATIONS = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
PROMPTS = ["1+2=", "3+4=", "9+9="]


def answer(data):
    """Returns the answer of a pickled policy in another process."""
    policy = pickle.loads(data)
    key = jax.random.key(1)
    if hasattr(policy, "act"):
        return np.asarray(policy.act(OBSERVATIONS, key)).tolist()
    return policy.generate(PROMPTS, key)


def test_policies_act_the_same_in_another_process(finished, tmp_path):
    data = []
    for kind in ("control", "language"):
        out = finished(kind, tmp_path / kind)
        data.append(pickle.dumps(run.load(out, checkpoint="latest", seed_index=1)))
        shutil.rmtree(out)  # the policy does not need the folder of its run
    expected = [answer(each) for each in data]
    assert len(set(expected[0])) == 2
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(answer, data) == expected


@pytest.mark.parametrize("kind", ["pretrained", "host"])
def test_policy_with_base_or_host_environment_pickles(finished, tmp_path, kind):
    policy = run.load(finished(kind, tmp_path / "run"), checkpoint="latest")
    again = pickle.loads(pickle.dumps(policy))
    assert repr(again) == repr(policy)
    jax.tree.map(np.testing.assert_array_equal, again.params, policy.params)
    if kind == "host":
        assert again.act(OBSERVATIONS).tolist() == policy.act(OBSERVATIONS).tolist()
    else:
        assert again.generate(["1 "]) == policy.generate(["1 "])


@pytest.mark.usefixtures("trace_only")
@pytest.mark.parametrize("memory", ["none", "gru"])
def test_policy_with_a_python_environment_pickles(tmp_path, memory):
    experiment = run.Experiment(
        env=MatchCueContinuous(),
        algorithm="a2c",
        total_steps=32,
        out=tmp_path / "run",
        over={"problem.num_envs": 4, "problem.num_steps": 8, "network.width": 8}
        | ({} if memory == "none" else {"network.memory": memory}),
    )
    run.train(pickle.loads(pickle.dumps(experiment)))
    policy = run.load(tmp_path / "run", env=MatchCueContinuous(), checkpoint="latest")
    again = pickle.loads(pickle.dumps(policy))
    assert again.settings["env"] == "python:MatchCueContinuous"
    shape = again.step(again.start, np.zeros(1))[1].shape
    assert shape == policy.step(policy.start, np.zeros(1))[1].shape == (1,)


@pytest.mark.usefixtures("trace_only")
def test_state_of_a_learner_pickles(tmp_path):
    problem = control.make_problem(gymnax.make("CartPole-v1")[0], num_envs=4, num_steps=8)
    learner = a2c.make(a2c.Config(), problem)
    trained = run.train(learner, 1, out=tmp_path / "run")
    loaded = run.load(tmp_path / "run", learner=learner, checkpoint="latest")
    for record in (trained, loaded):
        again = pickle.loads(pickle.dumps(record))
        assert repr(again) == repr(record)
        with pytest.raises(ConfigError, match=r"^act: needs the environment, which only"):
            again.act(np.zeros(4))
        assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), again.state, record.state))
