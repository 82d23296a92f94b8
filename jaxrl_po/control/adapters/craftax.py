"""Craftax 1.6.

The suite's time limit is set out of reach, since the suite's `done` does not distinguish a time
limit from another end. Observations of Pixels environments are floats in [0, 1]; the first use of
such an environment draws textures, which takes a minute, and writes them into the folder of the
installed package.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from craftax.craftax.envs import craftax_symbolic_env as full
from craftax.craftax_classic.envs import craftax_symbolic_env as classic
from craftax.craftax_env import make_craftax_env_from_name

from jaxrl_po.control.adapters.episodes import Dynamics, with_episodes
from jaxrl_po.control.environment import Environment
from jaxrl_po.control.spaces import Spaces, read_spaces
from jaxrl_po.types import PyTree

NEVER = 2**31 - 1
# Height, width and kinds of the map, which is the first part of a Symbolic environment's vector.
MAPS = {
    "Craftax-Symbolic-v1": full.get_map_obs_shape(),
    "Craftax-Classic-Symbolic-v1": classic.get_map_obs_shape(),
}


def names() -> list[str]:
    """Returns the names of the environments."""
    games = ("Craftax", "Craftax-Classic")
    return [f"{game}-{seen}-v1" for game in games for seen in ("Symbolic", "Pixels")]


def make(
    name: str, *, max_steps: int | None = None, reset_interval: int = 16, **arguments: Any
) -> Environment:
    """Builds the environment of the given name.

    The vector of a Symbolic environment is split into two observations: `map` `[H, W, kinds]`,
    bytes, 255 for each kind that a cell is or holds, and `player`, its inventory and condition.

    Args:
      name: name of an environment, one of `names()`.
      max_steps: time limit of an episode; None stands for the suite's limit, 100,000, or 10,000 for
        Craftax-Classic.
      reset_interval: number of steps between resets, see `with_episodes`. A value of 1 costs nine
        tenths of the speed of a rollout (64 environments, two cores).
      arguments: values for fields of the environment's `EnvParams`, such as `day_length`.

    Raises:
      ConfigError: a count is below 1.
      TypeError: `EnvParams` does not have an argument.
    """
    env = make_craftax_env_from_name(name, auto_reset=False)
    limit = env.default_params.max_timesteps if max_steps is None else max_steps
    params = env.default_params.replace(max_timesteps=NEVER, **arguments)

    label = f"craftax:{name}"
    spaces = read_spaces(label, env.observation_space(params), env.action_space(params))
    if name in MAPS:
        shape = MAPS[name]
        size = math.prod(shape)

        def observe(vector: jax.Array) -> dict[str, jax.Array]:
            image = (255 * vector[:size]).astype(jnp.uint8).reshape(shape)
            return {"map": image, "player": vector[size:].astype(float)}

        seen = jax.eval_shape(observe, spaces.observation)
        spaces = spaces._replace(observation=seen, observe=observe)
    return with_episodes(
        label, make_dynamics(env, params, spaces), max_steps=limit, reset_interval=reset_interval
    )


def make_dynamics(env: Any, params: Any, spaces: Spaces) -> Dynamics:
    """Returns the dynamics of the suite's object, whose time limit in `params` is out of reach."""

    def reset(key: jax.Array) -> tuple[PyTree, PyTree]:
        observation, state = env.reset_env(key, params)
        return spaces.observe(observation), state

    def step(
        key: jax.Array, state: PyTree, action: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array, jax.Array]:
        observation, state, reward, done, _ = env.step_env(key, state, action, params)
        return spaces.observe(observation), state, reward, done

    return Dynamics(reset, step, spaces)
