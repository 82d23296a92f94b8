"""Tests that every documented way to act is the policy that `run.load` returns."""

import json
import re

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from names import ROOT

from jaxrl_po import control, run
from jaxrl_po.cli import export
from jaxrl_po.config import ConfigError
from jaxrl_po.control import normalizer
from jaxrl_po.control.acting import Acting
from jaxrl_po.control.recorded import recorded_from_settings
from jaxrl_po.control.spaces import read_spaces
from jaxrl_po.control.statistics import OBSERVATION_STATISTICS
from jaxrl_po.run.devices.seeds import select_seed
from jaxrl_po.types import TrainState

ENV = gymnax.make("Pendulum-v1")[0]
SIZES = {"num_envs": 4, "num_steps": 8, "normalize_observations": True}
NETWORKS = {
    "plain": {"width": 8, "critic_width": 8},
    "memory": {
        **{"width": 8, "critic_width": 8, "tanh_squash": True},
        **{"memory": "gru", "recurrent_networks": "policy"},
    },
}
STEPS = {"config.num_minibatches": 1, "config.num_epochs": 1, "config.learning_rate": 0.03}
# Calls that act in an environment, as a page, a notebook or an example writes them.
ACTS = re.compile(r"(?:[\w.]*\bact|policy\.step|\w+\.mode)\([^`\n]*")
# Pages and their calls.
KNOWN = {
    ("environments.md", "policy.step(memory, observation)"),
    ("environments.md", "policy.act(observation)"),
    ("save_and_load.md", "policy.act(observation)"),
    ("save_and_load.md", "trained.act(observation)"),
    ("08_from_python.ipynb", "policy.act(jnp.zeros((5, 4)), jax.random.key(0))"),
}


def text_of(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def written():
    """Returns a pair (page, call) for each place that acts."""
    paths = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    paths += [*sorted(ROOT.glob("notebooks/*.ipynb")), *sorted(ROOT.glob("examples/*.py"))]
    return [(path.name, call) for path in paths for call in ACTS.findall(text_of(path))]


def test_every_documented_call_that_acts_is_known():
    calls = {(page, call.partition("  #")[0]) for page, call in written()}
    assert {(page, call.replace(")))", "))")) for page, call in calls} == KNOWN


@pytest.fixture(scope="module", params=NETWORKS)
def trained(request, tmp_path_factory):
    """Returns folder and state of a run with observation statistics and bounded actions."""
    network, out = NETWORKS[request.param], tmp_path_factory.mktemp("runs") / "pendulum"
    over = {f"problem.{name}": value for name, value in SIZES.items()}
    over |= {f"network.{name}": value for name, value in network.items()}
    options = {"total_steps": 64, "seeds": 2, "devices": "1", "eval_episodes": 1}
    state = run.train(
        run.Experiment(env="Pendulum-v1", out=str(out), over=over | STEPS, **options)
    ).state
    problem = control.make_problem(ENV, **SIZES, network=control.NetworkSettings(**network))
    return problem, out, select_seed(state, 1)


def test_run_and_problem_policies_act_alike(trained, tmp_path):
    """Compares both over an episode that the run's policy plays, each with its own memory, with the
    networks applied directly and with the arrays of `save`."""
    problem, out, state = trained
    policy = run.load(out, checkpoint="latest", seed_index=1)
    acting = Acting(problem, state)
    observation, env_state = ENV.reset(jax.random.key(0))
    ours, theirs = acting.start, policy.start
    seen, actions = [], []
    for key in jax.random.split(jax.random.key(1), 8):
        seen.append(observation)
        ours, action = acting.step(ours, observation)
        theirs, expected = policy.step(theirs, observation)
        np.testing.assert_allclose(action, expected, rtol=1e-5)
        actions.append(expected)
        observation, env_state, *_ = ENV.step(key, env_state, expected)
    if problem.actor is not None:
        return
    np.testing.assert_allclose([policy.act(each) for each in seen], actions, rtol=1e-5)
    np.testing.assert_allclose(policy.act(jnp.stack(seen)), actions, rtol=1e-5)
    statistics = state.collector.replicated[OBSERVATION_STATISTICS]
    mean, std = np.asarray(statistics.mean), np.asarray(statistics.std())
    scaled = np.clip((np.stack(seen) - mean) / (std + 1e-4), -10.0, 10.0)
    mode = problem.apply(state.params, scaled)[0].mode()
    np.testing.assert_allclose(np.clip(2.0 * mode, -2.0, 2.0), actions, rtol=5e-3)
    policy.save(tmp_path / "policy.npz")
    flags = [f"--run={out}", f"--out={tmp_path}/exported", "--checkpoint=latest", "--seed_index=1"]
    assert export.main(flags) == 0
    for path in (tmp_path / "policy.npz", tmp_path / "exported" / "policy.npz"):
        np.testing.assert_allclose(by_numpy(path, np.stack(seen)), actions, rtol=5e-3)


def by_numpy(path, observation):
    """Returns the actions of a saved policy with two hidden layers."""
    saved = np.load(path)
    assert json.loads(str(saved["settings"]))["network.activation"] == "tanh"
    mean, std, low, high = (
        saved[name] for name in ("observation/mean", "observation/std", "action/low", "action/high")
    )
    x = np.clip((observation - mean) / std, -10.0, 10.0)
    for layer in ("torso/Dense_0", "torso/Dense_1", "head/Dense_0"):
        x = x @ saved[f"policy/params/{layer}/kernel"] + saved[f"policy/params/{layer}/bias"]
        x = x if layer.startswith("head") else np.tanh(x)
    return low + (high - low) * (np.clip(x, -1.0, 1.0) + 1.0) / 2.0


def test_policy_is_saved_as_npz_alone(trained, tmp_path):
    with pytest.raises(ConfigError, match=r"^path: must end in .npz, got .*policy.pkl$"):
        Acting(trained[0], trained[2]).save(tmp_path / "policy.pkl")


def acting_in(action_space):
    """Returns the policy of an untrained problem with two observed numbers, the first constant."""
    spaces = read_spaces("mine", gymnasium.spaces.Box(-9.0, 9.0, (2,)), action_space)
    settings = control.ControlSettings(num_envs=2, num_steps=2, normalize_observations=True)
    problem = recorded_from_settings(spaces, settings, control.NetworkSettings())
    params, collector = problem.init(jax.random.key(0))
    seen = normalizer.merge_batch(normalizer.empty((2,)), jnp.array([[3.0, 1.0], [3.0, 2.0]]))
    collector = collector._replace(replicated={OBSERVATION_STATISTICS: seen})
    state = TrainState(
        params, None, None, jnp.float32(0.0), collector, jax.random.key(0), jnp.int32(0)
    )
    return Acting(problem, state)


def test_saved_policy_knows_bounds_and_first_actions():
    box = gymnasium.spaces.Box(np.float32([-2.0, 0.0]), np.float32([6.0, np.inf]))
    saved = acting_in(box).arrays()
    np.testing.assert_allclose(saved["observation/std"], [1e-4, 0.5001], rtol=1e-6)
    assert saved["action/low"].tolist() == [-2.0, 0.0]
    assert saved["action/high"].tolist() == [6.0, np.inf]
    several = gymnasium.spaces.MultiDiscrete([3, 4], start=[2, 7])
    assert acting_in(several).arrays()["action/first"].tolist() == [2, 7]


def test_lists_of_observations_are_batches():
    policy, seen = acting_in(gymnasium.spaces.Box(-2.0, 6.0, (2,))), [[3.0, 1.0], [2.0, -1.0]]
    expected = np.stack([policy.act(np.float32(each)) for each in seen])
    np.testing.assert_allclose(policy.act([np.array(each) for each in seen]), expected, rtol=1e-5)
    np.testing.assert_allclose(policy.act(seen[1]), expected[1], rtol=1e-5)
