"""The adapter to gymnax: six-value `step`, `final_observation`, auto-reset, spaces and dtypes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.config import ConfigError
from jaxrl_po.types import PyTree

METHODS = ("reset", "step", "action_space", "observation_space")


class Transition(NamedTuple):
    """One step of one environment.

    Attributes:
      observation: float32, of the next state; of a fresh episode where this one ended.
      reward: `[]`, float32.
      terminated: `[]`, bool, whether the episode ended by itself.
      truncated: `[]`, bool, whether the time limit cut it.
      final_observation: float32, the true next observation, before any reset.
    """

    observation: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_observation: jax.Array


class Environment(NamedTuple):
    """A control environment as two pure functions and its sizes.

    Attributes:
      reset: `reset(key) -> (observation, state)`; consumes `key`.
      step: `step(key, state, action) -> (state, Transition)`; consumes `key`, resets by itself
        where an episode ends.
      observation_shape: shape of an observation.
      num_actions: number of discrete actions, or 0 where actions are continuous.
      action_size: components of a continuous action, or 0.
      observe: the environment's observation to the policy's input, float32.
      to_action: the policy's action to the environment's own.
    """

    reset: Callable[[jax.Array], tuple[jax.Array, PyTree]]
    step: Callable[[jax.Array, PyTree, jax.Array], tuple[PyTree, Transition]]
    observation_shape: tuple[int, ...]
    num_actions: int
    action_size: int
    observe: Callable[[Any], jax.Array]
    to_action: Callable[[jax.Array], jax.Array]


def adapt(env: Any, env_params: Any = None) -> Environment:
    """Wraps a gymnax ≥ 1.0 environment, or one of your own with the same interface.

    Discrete observations become one-hot vectors; everything else float32 (float64 where JAX has it
    on). A continuous action is in units of the box's half range around its centre. It is clipped to
    the box here, after the policy: the stored action stays unclipped.

    Args:
      env: has `reset(key, params)`, `step(key, state, action, params)`, `action_space(params)`,
        `observation_space(params)`.
      env_params: its parameters; None takes `env.default_params`.

    Returns:
      The `Environment`.

    Raises:
      ConfigError: for a structured observation, an action space that is neither discrete nor a
        bounded or free box, or an environment that does not speak the interface.

    Example:
      >>> import gymnax
      >>> cart_pole = adapt(gymnax.make("CartPole-v1")[0])
      >>> cart_pole.observation_shape, cart_pole.num_actions, cart_pole.action_size
      ((4,), 2, 0)
    """
    if isinstance(env, tuple):
        raise ConfigError(
            "env must be the environment alone; gymnax.make returns it with its parameters: pass "
            "gymnax.make(name)[0]"
        )
    missing = [name for name in METHODS if not callable(getattr(env, name, None))]
    missing += [] if hasattr(env, "default_params") else ["default_params"]
    if missing:
        raise ConfigError(
            f"env must have the interface of gymnax >= 1.0; {type(env).__name__} lacks "
            f"{', '.join(missing)}"
        )
    params = env.default_params if env_params is None else env_params
    observation_space, action_space = env.observation_space(params), env.action_space(params)
    name = getattr(env, "name", type(env).__name__)

    observation_classes = int(getattr(observation_space, "n", 0))
    if not observation_classes and not hasattr(observation_space, "low"):
        raise ConfigError(
            f"env {name}: observations must be an array (a box or discrete), got "
            f"{type(observation_space).__name__}"
        )
    num_actions = int(getattr(action_space, "n", 0))
    if not num_actions and not hasattr(action_space, "low"):
        raise ConfigError(
            f"env {name}: actions must be discrete or a box, got {type(action_space).__name__}"
        )

    def observe(observation: jax.Array) -> jax.Array:
        if observation_classes:
            return jax.nn.one_hot(observation, observation_classes, dtype=float)
        return jnp.asarray(observation, float)

    if num_actions:
        action_size = 0

        def act(action: jax.Array) -> jax.Array:
            return action
    else:
        shape = action_space.shape
        low, high = (
            jnp.broadcast_to(jnp.asarray(bound, float), shape)
            for bound in (action_space.low, action_space.high)
        )
        bounded = jnp.isfinite(low) & jnp.isfinite(high)
        centre = jnp.where(bounded, 0.5 * (low + high), 0.0)
        half_range = jnp.where(bounded, 0.5 * (high - low), 1.0)
        action_size = int(low.size)

        def act(action: jax.Array) -> jax.Array:
            return jnp.clip(centre + half_range * action.reshape(shape), low, high)

    def reset(key: jax.Array) -> tuple[jax.Array, PyTree]:
        observation, state = env.reset(key, params)
        return observe(observation), _strong(state)

    def step(key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, Transition]:
        results = env.step(key, state, act(action), params)
        if len(results) != 6:
            raise ConfigError(
                f"env {name}: step must return (observation, state, reward, terminated, truncated, "
                f"info) as in gymnax >= 1.0, got {len(results)} values"
            )
        observation, state, reward, terminated, truncated, info = results
        if "final_observation" not in info:
            raise ConfigError(
                f"env {name}: info of step must hold final_observation, the next observation "
                "before any reset: the value of a truncated episode's rest is computed from it"
            )
        final = observe(info["final_observation"])
        if final.shape != observation_shape:
            raise ConfigError(
                f"env {name}: final_observation must have the shape of an observation, "
                f"{list(observation_shape)}, got {list(final.shape)}"
            )
        return _strong(state), Transition(
            observation=observe(observation),
            reward=jnp.asarray(reward, float).reshape(()),
            terminated=jnp.asarray(terminated, bool),
            truncated=jnp.asarray(truncated, bool),
            final_observation=final,
        )

    observation_shape = jax.eval_shape(reset, jax.random.key(0))[0].shape
    return Environment(reset, step, observation_shape, num_actions, action_size, observe, act)


def _strong(tree: PyTree) -> PyTree:
    """Strips weak types: they differ between reset and step, so the second call would recompile."""
    return jax.tree.map(
        lambda x: jax.lax.convert_element_type(jnp.asarray(x), jnp.asarray(x).dtype), tree
    )
