"""Environments with gymnax's older interface, whose `step` returns five results.

    from jaxrl_po.control.adapters import older_gymnax

    def make():
        return older_gymnax.make(MyEnvironment(), max_steps=500)

in `mine.py` is `--env=mine.py:make`.
"""

from typing import Any

import jax

from jaxrl_po.config import ConfigError
from jaxrl_po.control.adapters.episodes import Dynamics, with_episodes
from jaxrl_po.control.environment import Environment
from jaxrl_po.control.spaces import Spaces, read_spaces
from jaxrl_po.types import PyTree

NEVER = 2**31 - 1


def make(
    env: Any, env_params: Any = None, *, max_steps: int | None = None, reset_interval: int = 1
) -> Environment:
    """The environment of an object with `reset_env`, `step_env` and the two spaces.

    These do not reset by themselves, so that the true final observation is seen. The object's own
    time limit, `max_steps_in_episode`, ends an episode as if it had ended by itself; it is moved
    out of reach, and ours is counted.

    Args:
      env: gymnax's, before version 1.0, or one of your own with the same interface.
      env_params: its parameters; None takes `env.default_params`.
      max_steps: time limit; None takes `max_steps_in_episode`.
      reset_interval: see `with_episodes`.

    Raises:
      ConfigError: a count below 1, no time limit, or a space that `read_spaces` refuses.
    """
    params = env.default_params if env_params is None else env_params
    limit = getattr(params, "max_steps_in_episode", None)
    name = getattr(env, "name", type(env).__name__)
    if limit is not None:
        params = params.replace(max_steps_in_episode=NEVER)
    if max_steps is not None:
        limit = max_steps
    if limit is None:
        raise ConfigError(f"env {name}: max_steps must be given, for its parameters hold no limit")
    spaces = read_spaces(name, env.observation_space(params), env.action_space(params))
    return with_episodes(
        name,
        dynamics_of(env, params, spaces),
        max_steps=int(limit),
        reset_interval=reset_interval,
    )


def dynamics_of(env: Any, params: Any, spaces: Spaces) -> Dynamics:
    """The dynamics of such an object, whose own time limit is out of reach in `params`."""

    def reset(key: jax.Array) -> tuple[PyTree, PyTree]:
        observation, state = env.reset_env(key, params)
        return spaces.observe(observation), state

    def step(
        key: jax.Array, state: PyTree, action: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array, jax.Array]:
        observation, state, reward, done, _ = env.step_env(key, state, action, params)
        return spaces.observe(observation), state, reward, done

    return Dynamics(reset, step, spaces)
