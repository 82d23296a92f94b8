"""Craftax: ends, time limits and observations, on its smaller game where either will do.

Its programs compile for a minute, so that most are among the slow tests.
"""

import functools

import adapter_laws as laws
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_po.config import ConfigError

craftax = pytest.importorskip("craftax.craftax_env")
adapter = pytest.importorskip("jaxrl_po.control.adapters.craftax")

SMALL = "Craftax-Classic-Symbolic-v1"
NOOP, LEFT = 0, 1
MAKE = functools.partial(adapter.make, SMALL)


@functools.cache
def raw():
    env = craftax.make_craftax_env_from_name(SMALL, auto_reset=False)
    return env, env.default_params


@pytest.mark.slow
def test_an_episode_cut_by_time_is_truncated_and_the_next_is_a_draw_of_reset():
    fresh = laws.cuts_by_time(MAKE, LEFT)
    env, params = raw()
    want = jax.jit(env.reset_env)(jax.random.key(7), params)[0]
    np.testing.assert_allclose(fresh, want, rtol=1e-6)  # another program, and daylight is a cosine


@pytest.mark.slow
def test_starting_states_change_every_reset_interval():
    laws.begins_alike_within_an_interval(MAKE)


def test_observations_are_the_suites_and_only_the_player_ends_an_episode():
    """From one state beside the suite's own; past its time limit; and without health."""
    environment, (env, params) = MAKE(max_steps=15_000), raw()
    running = laws.begun(environment, jax.random.key(0))
    step, own = jax.jit(environment.step), jax.jit(env.step_env)
    state, reward = running.state, 0.0
    for i in range(20):
        key, action = jax.random.key(i), jnp.int32(i % 17)
        observation, state, reward, done, _ = own(jax.random.split(key)[0], state, action, params)
        running, transition = step(key, running, action)
        laws.same(transition.observation, observation)
        assert float(transition.reward) == float(reward)
        assert not done
        laws.same(running.state.light_level, state.light_level)
    late = running._replace(state=state.replace(timestep=jnp.int32(params.max_timesteps - 1)))
    assert own(jax.random.key(0), late.state, jnp.int32(NOOP), params)[3]
    transition = step(jax.random.key(0), late, jnp.int32(NOOP))[1]
    assert not transition.terminated
    assert not transition.truncated
    dead = running._replace(
        state=state.replace(player_health=jnp.zeros_like(state.player_health)),
        length=jnp.int32(14_999),
    )
    after, transition = step(jax.random.key(0), dead, jnp.int32(NOOP))
    assert transition.terminated
    assert not transition.truncated
    laws.same((transition.observation, after.state), dead.start)


@pytest.mark.slow
def test_ppo_learns():
    laws.learns(MAKE(max_steps=4), num_steps=4)


def test_time_limits_are_the_suites():
    assert MAKE().max_steps == 10_000
    assert adapter.names() == [
        "Craftax-Symbolic-v1",
        "Craftax-Pixels-v1",
        "Craftax-Classic-Symbolic-v1",
        "Craftax-Classic-Pixels-v1",
    ]


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="max_steps must lie"):
        MAKE(max_steps=0)
    with pytest.raises(TypeError, match="colour"):
        MAKE(colour=1)
