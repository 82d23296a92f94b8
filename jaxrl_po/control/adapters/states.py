"""Environments with brax's interface, `reset(rng)` and `step(state, action)`, as `Dynamics`.

Brax and MuJoCo Playground share it: one state holds physics, observation, reward, done and info.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_po.control.adapters.episodes import Dynamics
from jaxrl_po.control.spaces import PRIVILEGED, Observation, box_actions
from jaxrl_po.types import PyTree


def dynamics_of(env: Any, *, action_repeat: int = 1) -> Dynamics:
    """The dynamics of an environment without any of its suite's wrappers.

    Actions are in [-1, 1]; the suites scale them themselves where an actuator has other limits.

    Args:
      env: has `reset(rng) -> state`, `step(state, action) -> state` and `action_size`.
      action_repeat: steps of `env` in one step, under the same action. Rewards are summed; whether
        the episode has ended is read after the last, as in the suites' own wrapper.
    """

    def reset(key: jax.Array) -> tuple[PyTree, Any]:
        state = env.reset(key)
        return observe(state.obs), state

    def step(
        key: jax.Array, state: Any, action: jax.Array
    ) -> tuple[PyTree, Any, jax.Array, jax.Array]:
        # A copy of its dictionaries, which some environments write into.
        state, reward = jax.tree.map(lambda x: x, state), jnp.zeros(())
        if "rng" in state.info:
            # Its state holds the key of all steps to come, with which episodes that begin alike,
            # and all members of a group, would draw the same noise.
            typed = jnp.issubdtype(state.info["rng"].dtype, jax.dtypes.prng_key)
            state.info["rng"] = key if typed else jax.random.key_data(key)
        for _ in range(action_repeat):
            state = env.step(state, action)
            reward = reward + state.reward
        return observe(state.obs), state, reward, state.done > 0

    return Dynamics(reset, step, box_actions(type(env).__name__, -1.0, 1.0, (env.action_size,)))


def observe(raw: Any) -> PyTree:
    """The observation of a state; with a `privileged_state`, the critic reads that alone.

    The suites put whatever the policy sees into `privileged_state` too.

    Example:
      >>> observe({"state": jnp.zeros(2), "privileged_state": jnp.zeros(3)}).critic.shape
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
