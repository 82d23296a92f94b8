"""Brax's environments, stepped beside brax itself."""

import functools
import warnings

import adapter_laws as laws
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_po import control
from jaxrl_po.config import ConfigError
from jaxrl_po.run import suites
from jaxrl_po.run.flags import UsageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of brax and what it imports
    envs = pytest.importorskip("brax.envs")
    from jaxrl_po.control.adapters import brax

pytestmark = pytest.mark.filterwarnings("ignore")
NAME = "inverted_pendulum"


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_rank_promotion("allow"):  # brax relies on it
        yield


def raw():
    return envs.get_environment(NAME, backend="spring")


def test_a_step_is_braxs_own():
    # 3.0 is outside the box, and is clipped.
    actions = (0.5, -1.0, 3.0, *0.1 * np.sin(np.arange(17)))
    environment, theirs = brax.make(NAME, reset_interval=1), raw()
    step = jax.jit(theirs.step)

    def own(_, state, action):
        return (step(state, jnp.clip(action, -1.0, 1.0)),) * 2

    steps = laws.follows(
        environment, own, lambda t, _: jnp.array([actions[t]]), jax.jit(theirs.reset)
    )
    for t, (_, ours, state) in enumerate(steps):
        assert not ours.truncated
        assert ours.final_observation.dtype == ours.reward.dtype == jnp.float32
        # Two programs, compiled apart, of a system that doubles an error in 20 steps.
        laws.same(ours.final_observation, state.obs, atol=1e-6 if t < 4 else 1e-5)
        assert float(ours.reward) == float(state.reward)
        assert bool(ours.terminated) == bool(state.done)


@pytest.mark.parametrize("interval", [1, 2])
def test_an_episode_cut_by_time_is_truncated_and_the_next_is_a_draw_of_reset(interval):
    make = functools.partial(brax.make, NAME)
    key, fresh = laws.cuts_by_time(make, 0.5, reset_interval=interval, atol=1e-6)
    theirs = jax.jit(raw().reset)(key)
    laws.same(fresh, (theirs.obs, theirs), rtol=1e-5, atol=1e-8)  # another program


def test_a_fall_terminates():
    trajectory = laws.play(brax.make(NAME), jax.random.key(0), 1.0, num_envs=3, num_steps=48)
    over = trajectory.transition.terminated
    assert over.any(axis=1).all()
    assert not trajectory.transition.truncated.any()
    np.testing.assert_array_equal(over, abs(trajectory.transition.final_observation[..., 1]) > 0.2)
    assert abs(trajectory.transition.observation[over]).max() <= 0.01
    # The next episode counts from one again.
    first = np.argmax(over, axis=1)
    np.testing.assert_array_equal(trajectory.episode_length[np.arange(3), first + 1], 1)


def test_no_two_episodes_begin_alike():
    laws.begins_never_twice_alike(functools.partial(brax.make, NAME), 0.0)


def test_ppo_trains_and_is_evaluated():
    laws.learns(brax.make(NAME))
    _, _, lengths = laws.learns(brax.make("fast", max_steps=7))  # it never ends by itself
    np.testing.assert_array_equal(lengths, 7)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("fast", "spring"),
        ("reacher", "spring"),
        ("inverted_pendulum", "generalized"),
        ("inverted_pendulum", "mjx"),
    ],
)
def test_a_state_keeps_its_structure(name, backend):
    laws.keeps_its_structure(brax.make(name, backend=backend, reset_interval=1))


def test_the_critic_sees_what_is_privileged():
    environment = suites.make("brax:fast", '{"asymmetric_obs": true, "obs_mode": "dict_state"}')
    seen = environment.spaces.observation
    assert isinstance(seen, control.Observation)
    assert (seen.policy.shape, seen.critic.shape) == ((2,), (4,))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("hopper", {"backend": "bullet"}, "brax:hopper: backend should be in"),
        ("swimmer", {}, "brax:swimmer: Unsupported backend: spring"),
        ("hopper", {"max_steps": 0}, "brax:hopper: max_steps must be a whole number"),
    ],
)
def test_refusals_name_the_environment(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        brax.make(name, **arguments)


def test_an_environment_that_jax_breaks_is_refused(monkeypatch):
    class Old(envs.hopper.Hopper):
        def step(self, state, action):
            return jnp.clip(action, a_min=0.0)

    monkeypatch.setitem(envs._envs, "old", Old)
    assert "old" in brax.names()
    with pytest.raises(ConfigError, match="brax:old: brax's own step fails beside JAX"):
        brax.make("old")


def test_an_unknown_argument_is_a_usage_error():
    with pytest.raises(UsageError, match=r"--env_params for brax:hopper: .*'friction'"):
        suites.make("brax:hopper", '{"friction": 2}')
