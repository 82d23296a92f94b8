"""Tests brax's environments, stepped beside brax itself."""

import functools
import warnings

import adapter_laws as laws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases

from jaxrl_po import control
from jaxrl_po.config import ConfigError
from jaxrl_po.run.experiment import suites

pytestmark = pytest.mark.slow

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ignores warnings of brax and its imports
    envs = pytest.importorskip("brax.envs")
    from jaxrl_po.control.adapters import brax

pytestmark = pytest.mark.filterwarnings("ignore")
NAME = "inverted_pendulum"


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_rank_promotion("allow"):  # brax relies on rank promotion
        yield


def raw():
    return envs.get_environment(NAME, backend="spring")


LIMIT = 20


@functools.cache
def beside():
    """Plays this library's environment and brax's for 20 steps: one is balanced, one is pushed
    until it falls.

    Returns:
      This library's observations at the start; for each step its state, its transition and brax's
      state; the result of brax's reset for the last step of the first environment.
    """
    environment, theirs = brax.make(NAME, max_steps=LIMIT, reset_interval=1), raw()
    # an action of 3.0 is outside the box and is clipped
    balanced = (0.5, -1.0, 3.0, *0.1 * np.sin(np.arange(17)))
    step, own = (
        jax.jit(jax.vmap(f))
        for f in (environment.step, lambda s, a: theirs.step(s, jnp.clip(a, -1.0, 1.0)))
    )
    reset = jax.jit(theirs.reset)
    keys = jax.random.split(jax.random.key(0), 2)
    seen, running = jax.jit(jax.vmap(environment.reset))(keys)
    begun = [reset(jax.random.split(key)[0]) for key in keys]
    state, steps = jax.tree.map(lambda *x: np.stack(x), *begun), []
    for t, action in enumerate(balanced):
        keys = jax.random.split(jax.random.key(t), 2)
        actions = np.array([[action], [1.0]], np.float32)
        running, transition = step(keys, running, actions)
        state = own(state, actions)
        steps.append((running, transition, state))
    stacked = jax.tree.map(lambda *x: np.stack([laws.plain(each) for each in x]), *steps)
    return seen, *stacked, reset(jax.random.split(keys[0])[1])


def test_a_step_is_braxs_own():
    _, _, ours, state, _ = beside()
    assert ours.final_observation.dtype == ours.reward.dtype == np.float32
    fell = int(state.done[:, 1].argmax()) + 1
    for row, last in ((0, LIMIT), (1, fell)):
        # The two programs are compiled separately, and the system doubles an error in 20 steps.
        laws.same(ours.final_observation[:4, row], state.obs[:4, row], atol=1e-6)
        laws.same(ours.final_observation[4:last, row], state.obs[4:last, row], atol=1e-5)
        np.testing.assert_array_equal(ours.reward[:last, row], state.reward[:last, row])
        np.testing.assert_array_equal(ours.terminated[:last, row], state.done[:last, row])


def test_time_limit_truncates_and_reset_starts_next_episode():
    _, running, ours, _, fresh = beside()
    assert not ours.terminated[:, 0].any()
    np.testing.assert_array_equal(ours.truncated[:, 0], np.arange(LIMIT) == LIMIT - 1)
    np.testing.assert_array_equal(running.length[:, 0], [*range(1, LIMIT), 0])
    begun = jax.tree.map(lambda x: x[-1, 0], (ours.observation, running.state))
    # A separate program computes these numbers.
    laws.same(begun, (fresh.obs, fresh), rtol=1e-5, atol=1e-8)


def test_a_fall_terminates():
    start, running, ours, _, _ = beside()
    fell = int(ours.terminated[:, 1].argmax())
    assert 0 < fell < LIMIT - 1
    assert not ours.truncated[: fell + 1, 1].any()
    np.testing.assert_array_equal(ours.terminated, np.abs(ours.final_observation[..., 1]) > 0.2)
    # the length of an episode is counted from one
    assert running.length[fell : fell + 2, 1].tolist() == [0, 1]
    drawn = [*np.asarray(start), ours.observation[fell, 1], ours.observation[-1, 0]]
    assert np.abs(drawn).max() <= 0.01
    assert len(np.unique(drawn, axis=0)) == 4


def test_ppo_trains_and_is_evaluated():
    # In this environment no episode ends by itself.
    _, _, lengths = laws.learns(brax.make("fast", max_steps=7))
    np.testing.assert_array_equal(lengths, 7)


def test_the_critic_sees_what_is_privileged():
    environment = suites.from_suite(
        "brax:fast", '{"asymmetric_obs": true, "obs_mode": "dict_state"}'
    )
    seen = environment.spaces.observation
    assert isinstance(seen, control.Observation)
    assert (seen.policy.shape, seen.critic.shape) == ((2,), (4,))


@cases(
    "name, arguments, message",
    ("hopper", {"backend": "bullet"}, "brax:hopper: backend should be in"),
    ("swimmer", {}, "brax:swimmer: Unsupported backend: spring"),
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
