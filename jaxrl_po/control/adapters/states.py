"""Wraps environments with brax's interface, `reset(rng)` and `step(state, action)`, as `Dynamics`.

Brax and MuJoCo Playground share this interface: one state has physics, observation, reward, done
  and info.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_po.control.adapters.episodes import Dynamics
from jaxrl_po.control.spaces import PRIVILEGED, Observation, box_actions
from jaxrl_po.types import PyTree


def unwrap_dynamics(env: Any, *, action_repeat: int = 1) -> Dynamics:
    """Returns the dynamics of an environment without any of its suite's wrappers.

    Actions are in [-1, 1]; the suite itself scales an action if an actuator has other limits.

    Args:
      env: environment with `reset(rng) -> state`, `step(state, action) -> state`, `action_size`.
      action_repeat: number of steps of `env` in one step, under the same action. Rewards are
        summed; the end of an episode is checked after the last repetition, as in the suites'
        wrapper.
    """

    def reset(key: jax.Array) -> tuple[PyTree, Any]:
        state = env.reset(key)
        return read_observation(state.obs), state

    def step(
        key: jax.Array, state: Any, action: jax.Array
    ) -> tuple[PyTree, Any, jax.Array, jax.Array]:
        # The dictionaries of the state are copied, because some environments write into them.
        state, reward = jax.tree.map(lambda x: x, state), jnp.zeros(())
        if "rng" in state.info:
            # The state holds the key of all later steps. Without a fresh key, episodes that start
            # alike, and all members of a group, would draw the same noise.
            typed = jnp.issubdtype(state.info["rng"].dtype, jax.dtypes.prng_key)
            state.info["rng"] = key if typed else jax.random.key_data(key)
        for _ in range(action_repeat):
            state = env.step(state, action)
            reward = reward + state.reward
        return read_observation(state.obs), state, reward, state.done > 0

    return Dynamics(reset, step, box_actions(type(env).__name__, -1.0, 1.0, (env.action_size,)))


def read_observation(raw: Any) -> PyTree:
    """Returns the observation of a state.

    The critic reads only a `privileged_state`, if there is one.

    In Brax and Playground `privileged_state` includes everything that the policy observes.

    Example:
      >>> read_observation({"state": jnp.zeros(2), "privileged_state": jnp.zeros(3)}).critic.shape
      (3,)
    """
    floats = jax.tree.map(
        lambda x: x if x.dtype == jnp.uint8 and x.ndim > 1 else jnp.asarray(x, float),
        dict(raw) if isinstance(raw, Mapping) else raw,
    )
    if not isinstance(floats, dict):
        return floats
    critic = floats.pop(PRIVILEGED, None)
    policy = floats["state"] if set(floats) == {"state"} else floats
    return policy if critic is None else Observation(policy, critic)
