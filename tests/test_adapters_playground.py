"""Tests MuJoCo Playground's environments, stepped beside Playground itself."""

import functools
import subprocess
import warnings

import adapter_laws as laws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases

from jaxrl_po.config import ConfigError
from jaxrl_po.run.experiment import suites

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ignores warnings of Playground's imports
    registry = pytest.importorskip("mujoco_playground").registry
    from mujoco_playground._src import mjx_env

    from jaxrl_po.control.adapters import playground

pytestmark = pytest.mark.filterwarnings("ignore")
NAME = "CartpoleBalance"
SMALLEST = "PointMass"


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_rank_promotion("allow"):  # MJX relies on rank promotion
        yield


def raw(name=NAME):
    return registry.load(name, config_overrides={"impl": "jax"})


@cases("repeat", 1, 2)
def test_a_step_is_playgrounds_own(repeat):
    environment = playground.make(NAME, action_repeat=repeat, reset_interval=1)
    assert environment.max_steps == 1000 // repeat
    # an action of 3.0 is outside the box and is clipped
    actions = (0.5, -1.0, 3.0, *0.1 * np.sin(np.arange(17)))
    step = jax.jit(raw().step)

    def own(_, state, action):
        reward = 0.0
        for _ in range(repeat):
            state = step(state, jnp.clip(action, -1.0, 1.0))
            reward += float(state.reward)
        return state, (state.obs, reward)

    steps = laws.follows(
        environment, own, lambda t, _: jnp.array([actions[t]]), jax.jit(raw().reset)
    )
    for t, (_, ours, (observation, reward)) in enumerate(steps):
        assert ours.final_observation.dtype == ours.reward.dtype == jnp.float32
        # The two programs are compiled separately, so that rounding differs.
        laws.same(ours.final_observation, observation, atol=1e-6 if t < 4 else 1e-5)
        np.testing.assert_allclose(ours.reward, reward, atol=1e-6)
        assert not ours.terminated
        assert not ours.truncated


def test_time_limit_truncates_and_reset_starts_next_episode():
    key, fresh = laws.cuts_by_time(functools.partial(playground.make, NAME), 1.0, atol=1e-6)
    theirs = jax.jit(raw().reset)(key)
    # A separate program computes these numbers.
    laws.same(fresh, (theirs.obs, theirs), rtol=1e-5, atol=1e-8)


def test_what_the_physics_cannot_go_on_from_terminates():
    environment = playground.make(NAME)
    running = laws.begun(environment, jax.random.key(0))
    broken = running.state.data.replace(qpos=jnp.full_like(running.state.data.qpos, jnp.nan))
    running = running._replace(state=running.state.replace(data=broken))
    (_, following), (transition,) = laws.ends_by_itself(environment, running, [0.0])
    assert np.isnan(transition.final_observation).any()
    assert all(np.isfinite(laws.plain(x)).all() for x in jax.tree.leaves(following.state.data))


def test_ppo_trains_and_is_evaluated():
    _, _, lengths = laws.learns(playground.make(SMALLEST, max_steps=7))
    np.testing.assert_array_equal(lengths, 7)


def test_missing_robots_are_one_line(monkeypatch):
    def fail():
        raise subprocess.CalledProcessError(128, ["git", "clone"])

    monkeypatch.setattr(mjx_env, "ensure_menagerie_exists", fail)
    with pytest.raises(ConfigError, match="Go1Getup needs robots of MuJoCo Menagerie") as refusal:
        suites.from_suite("playground:Go1Getup")
    assert "\n" not in str(refusal.value)


@cases(
    "arguments, message",
    ('{"gravity": 2}', "its config has no gravity, only action_repeat, ctrl_dt"),
    ('{"ctrl_dt": "slow"}', "^env_params: playground:.* 'ctrl_dt'"),
    ('{"impl": "bullet"}', "'bullet' is not a valid"),
    ('{"action_repeat": 0}', "action_repeat must lie in"),
)
def test_refusals_name_the_argument(arguments, message):
    with pytest.raises(ConfigError, match=message):
        suites.from_suite(f"playground:{NAME}", arguments)


def test_all_names_are_known_to_the_registry():
    assert set(registry.ALL_ENVS) <= set(playground.names())
