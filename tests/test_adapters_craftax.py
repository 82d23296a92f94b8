"""Tests Craftax: ends, time limits and observations, on its smaller game where both games would do.

Craftax's programs compile for a minute, so that most of these tests are marked slow.
"""

import functools

import adapter_laws as laws
import jax
import jax.numpy as jnp
import pytest
from tables import cases

craftax = pytest.importorskip("craftax.craftax_env")
adapter = pytest.importorskip("jaxrl_po.control.adapters.craftax")

SMALL = "Craftax-Classic-Symbolic-v1"
NOOP, LEFT = 0, 1
MAKE = functools.partial(adapter.make, SMALL)


@functools.cache
def raw():
    env = craftax.make_craftax_env_from_name(SMALL, auto_reset=False)
    return env, env.default_params


def vector(seen):
    """Returns the suite's own observation, built from the two parts of this library's
    observation."""
    assert seen["map"].dtype == jnp.uint8
    return jnp.concatenate([seen["map"].reshape(-1) / 255.0, seen["player"]])


@pytest.mark.slow
def test_time_limit_truncates_and_reset_starts_next_episode():
    key, (fresh, _) = laws.cuts_by_time(MAKE, LEFT)
    env, params = raw()
    want = jax.jit(env.reset_env)(key, params)[0]
    # Another program computes daylight, which is a cosine.
    laws.same(vector(fresh), want, rtol=1e-6)


def test_observations_match_the_suite_and_death_ends_episodes():
    """Steps from one state beside the suite's own environment; past the suite's time limit; and
    without health."""
    environment, (env, params) = MAKE(max_steps=15_000), raw()
    step_env = jax.jit(env.step_env)

    def own(key, state, action):
        said = step_env(key, state, action, params)
        return said[1], said

    for running, transition, said in laws.follows(environment, own, lambda t, _: jnp.int32(t % 17)):
        observation, state, reward, done, _ = said
        laws.same(vector(transition.observation), observation)
        assert float(transition.reward) == float(reward)
        assert not done
        laws.same(running.state.light_level, state.light_level)
    late = running._replace(state=state.replace(timestep=jnp.int32(params.max_timesteps - 1)))
    assert own(jax.random.key(0), late.state, jnp.int32(NOOP))[1][3]
    _, (transition,) = laws.stepped(environment, late, [NOOP], jax.random.key(0))
    assert not transition.terminated
    assert not transition.truncated
    dead = running._replace(
        state=state.replace(player_health=jnp.zeros_like(state.player_health)),
        length=jnp.int32(14_999),
    )
    laws.ends_by_itself(environment, dead, [NOOP])


@pytest.mark.slow
def test_ppo_learns():
    laws.learns(MAKE(max_steps=4))


@cases("name, seen, size", (SMALL, (7, 9, 21), 22), ("Craftax-Symbolic-v1", (9, 11, 83), 51))
def test_vector_observation_splits_into_map_and_player(name, seen, size):
    observation = adapter.make(name).spaces.observation
    assert observation["map"].shape == seen
    assert observation["player"].shape == (size,)


def test_time_limits_are_the_suites():
    assert MAKE().max_steps == 10_000
    assert adapter.names() == [
        "Craftax-Symbolic-v1",
        "Craftax-Pixels-v1",
        "Craftax-Classic-Symbolic-v1",
        "Craftax-Classic-Pixels-v1",
    ]
