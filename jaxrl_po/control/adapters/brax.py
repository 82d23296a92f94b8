"""Builds environments of brax, such as `brax:hopper`, from brax's physics without its wrappers."""

from typing import Any

import jax
import jax.numpy as jnp
from brax import envs

from jaxrl_po.config import ConfigError
from jaxrl_po.control.adapters.episodes import with_episodes
from jaxrl_po.control.adapters.states import unwrap_dynamics
from jaxrl_po.control.environment import Environment


def names() -> list[str]:
    """Returns the names of all environments of brax."""
    return list(envs._envs)


def make(
    name: str,
    *,
    backend: str = "spring",
    max_steps: int = 1000,
    reset_interval: int = 16,
    **arguments: Any,
) -> Environment:
    """Builds an environment of brax.

    Args:
      name: name of an environment, one of `names()`.
      backend: name of the physics backend: spring, positional, generalized or mjx; returns of
        different backends are not comparable.
      max_steps: time limit of an episode; brax's environments have no time limit of their own.
      reset_interval: number of steps between resets, see `with_episodes`. A value of 1 costs 8 % of
        the speed of a rollout of inverted_pendulum and a quarter of hopper's (64 environments, two
        cores).
      **arguments: further arguments of the environment's constructor, such as `reset_noise_scale`.

    Raises:
      ConfigError: the environment refuses a value, does not support the backend, or does not run
        with the installed JAX.
      TypeError: the environment does not take an argument.
    """
    try:
        env = envs.get_environment(name, backend=backend, **arguments)
    except ValueError as error:
        raise ConfigError("env", f"brax:{name}: {error}") from None
    try:
        state = jax.eval_shape(env.reset, jax.random.key(0))
        jax.eval_shape(env.step, state, jnp.zeros(env.action_size))
    except TypeError as error:
        raise ConfigError(
            "env", f"brax:{name}: brax's own step fails beside JAX {jax.__version__}: {error}"
        ) from error
    return with_episodes(
        f"brax:{name}", unwrap_dynamics(env), max_steps=max_steps, reset_interval=reset_interval
    )
