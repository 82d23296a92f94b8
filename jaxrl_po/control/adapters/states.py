"""Environments with brax's interface, `reset(rng)` and `step(state, action)`, as `Dynamics`.

Brax and MuJoCo Playground share it: one state has physics, observation, reward, done and info.
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

    Actions are in [-1, 1]; a suite scales them itself if an actuator has other limits.

    Args:
      env: environment with `reset(rng) -> state`, `step(state, action) -> state`, `action_size`.
      action_repeat: steps of `env` in one step, under the same action. Rewards are summed; whether
        the episode has ended is read after the last, as in the suites' wrapper.
    """

    def reset(key: jax.Array) -> tuple[PyTree, Any]:
        state = env.reset(key)
        return read_observation(state.obs), state

    def step(
        key: jax.Array, state: Any, action: jax.Array
    ) -> tuple[PyTree, Any, jax.Array, jax.Array]:
        # Copies its dictionaries, because some environments write into them.
        state, reward = jax.tree.map(lambda x: x, state), jnp.zeros(())
        if "rng" in state.info:
            # The state holds the key of all later steps. Then episodes that start alike, and all
            # members of a group, would draw the same noise.
            typed = jnp.issubdtype(state.info["rng"].dtype, jax.dtypes.prng_key)
            state.info["rng"] = key if typed else jax.random.key_data(key)
        for _ in range(action_repeat):
            state = env.step(state, action)
            reward = reward + state.reward
        return read_observation(state.obs), state, reward, state.done > 0

    return Dynamics(reset, step, box_actions(type(env).__name__, -1.0, 1.0, (env.action_size,)))


def read_observation(raw: Any) -> PyTree:
    """Returns the observation of a state; a `privileged_state` is all that the critic reads.

    In these suites `privileged_state` includes everything that the policy sees.

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
