"""Brax's environments, stepped beside brax itself."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import begins_afresh, distinct, follows, is_constant, learns, lengths, play, starts

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
    actions = [jnp.array([x]) for x in (0.5, -1.0, 3.0, *0.1 * np.sin(np.arange(17)))]
    steps = list(follows(brax.make(NAME, reset_interval=1), raw(), actions))
    assert len(steps) == 20
    assert not steps[-1][0].truncated
    for ours, theirs, reward in steps:
        assert ours.final_observation.dtype == ours.reward.dtype == jnp.float32
        # Two programs, compiled apart, of a system that doubles an error in 20 steps.
        np.testing.assert_allclose(ours.final_observation, theirs.obs, atol=1e-5)
        assert float(ours.reward) == reward
        assert bool(ours.terminated) == bool(theirs.done)


def test_the_time_limit_truncates():
    *before, (ours, theirs, _) = follows(
        brax.make(NAME, max_steps=4, reset_interval=1), raw(), [jnp.array([0.5])] * 4
    )
    assert not any(ours.truncated or ours.terminated for ours, _, _ in before)
    assert ours.truncated
    assert not ours.terminated
    np.testing.assert_allclose(ours.final_observation, theirs.obs, atol=1e-6)
    # Four pushes give a speed; a starting state has at most 0.01.
    assert abs(ours.final_observation[2]) > 0.1
    assert abs(ours.observation).max() <= 0.01


def test_a_fall_terminates():
    trajectory = play(brax.make(NAME), jax.random.key(0), num_envs=3, num_steps=48, size=1.0)
    over = trajectory.transition.terminated
    assert over.any(axis=1).all()
    assert not trajectory.transition.truncated.any()
    np.testing.assert_array_equal(over, abs(trajectory.transition.final_observation[..., 1]) > 0.2)
    assert abs(trajectory.transition.observation[over]).max() <= 0.01
    # The next episode counts from one again.
    first = np.argmax(over, axis=1)
    np.testing.assert_array_equal(trajectory.episode_length[np.arange(3), first + 1], 1)


def test_an_episode_begins_at_a_draw_of_reset():
    environment = brax.make(NAME, max_steps=1, reset_interval=1)
    _, running = jax.jit(environment.reset)(jax.random.key(0))
    assert begins_afresh(environment, raw(), running, jnp.array([0.0]), jax.random.key(7))


@pytest.mark.parametrize(("interval", "different"), [(1, 6), (3, 2)])
def test_starting_states_change_with_the_interval(interval, different):
    drawn = starts(brax.make(NAME, max_steps=1, reset_interval=interval), 2, 6)
    assert [distinct(rows) for rows in drawn] == [different] * 2
    assert distinct(drawn.reshape(12, -1)) == 2 * different
    for rows in drawn:
        changes = (rows[1:] != rows[:-1]).any(axis=1)
        np.testing.assert_array_equal(changes, np.arange(1, 6) % interval == 0)


def test_ppo_trains_and_is_evaluated():
    learns(brax.make(NAME))
    endless = brax.make("fast", max_steps=7)
    np.testing.assert_array_equal(lengths(endless, *learns(endless)), 7)


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
    assert is_constant(brax.make(name, backend=backend, reset_interval=1))


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
        ("hopper", {"max_steps": 0}, "brax:hopper: max_steps must lie in"),
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
