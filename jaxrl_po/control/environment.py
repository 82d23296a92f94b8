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


class Spaces(NamedTuple):
    """What a policy sees and may do.

    Attributes:
      observation_shape: of one observation.
      num_actions: number of discrete actions, or 0 where actions are continuous.
      action_size: components of a continuous action, or 0.
      observe: the environment's observation to the policy's input, float32.
      to_action: the policy's action to the environment's own.
    """

    observation_shape: tuple[int, ...]
    num_actions: int
    action_size: int
    observe: Callable[[Any], jax.Array]
    to_action: Callable[[jax.Array], jax.Array]


class Environment(NamedTuple):
    """A control environment as two pure functions and its spaces.

    Attributes:
      reset: `reset(key) -> (observation, state)`; consumes `key`.
      step: `step(key, state, action) -> (state, Transition)`; consumes `key`, resets by itself
        where an episode ends.
      spaces: see `Spaces`.
    """

    reset: Callable[[jax.Array], tuple[jax.Array, PyTree]]
    step: Callable[[jax.Array, PyTree, jax.Array], tuple[PyTree, Transition]]
    spaces: Spaces


def is_discrete(space: Any) -> bool:
    """Whether a space of gymnax or gymnasium is one number of finitely many, and no vector."""
    return hasattr(space, "n") and tuple(getattr(space, "shape", None) or ()) == ()


def read_spaces(name: str, observation_space: Any, action_space: Any) -> Spaces:
    """The spaces of an environment, gymnax's or gymnasium's.

    Discrete observations become one-hot vectors; images of bytes stay bytes, which the network
    scales; everything else is float32 (float64 where JAX has it on). A continuous action is in
    units of the box's half range around its centre. It is clipped to the box here, after the
    policy: the stored action stays unclipped.

    Args:
      name: of the environment, for messages.
      observation_space: discrete (`n`, and `start` if not 0) or a box (`low`, `high`, `shape`).
      action_space: likewise.

    Raises:
      ConfigError: for a structured observation, or an action space that is neither discrete nor a
        bounded or free box.
    """
    observation_classes = int(observation_space.n) if is_discrete(observation_space) else 0
    if not observation_classes and not hasattr(observation_space, "low"):
        raise ConfigError(
            f"env {name}: observations must be an array (a box or discrete), got "
            f"{type(observation_space).__name__}"
        )
    num_actions = int(action_space.n) if is_discrete(action_space) else 0
    floats = hasattr(action_space, "low") and jnp.issubdtype(
        getattr(action_space, "dtype", float), jnp.floating
    )
    if not num_actions and not floats:
        raise ConfigError(
            f"env {name}: actions must be discrete or a box of floats, got "
            f"{type(action_space).__name__}"
        )

    first_class, first_action = (
        int(getattr(space, "start", 0)) if is_discrete(space) else 0
        for space in (observation_space, action_space)
    )

    def observe(observation: Any) -> jax.Array:
        if observation_classes:
            return jax.nn.one_hot(observation - first_class, observation_classes, dtype=float)
        array = jnp.asarray(observation)
        return array if array.dtype == jnp.uint8 else array.astype(float)

    shape = (observation_classes,) if observation_classes else tuple(observation_space.shape)
    if num_actions:
        return Spaces(shape, num_actions, 0, observe, lambda action: action + first_action)

    box = action_space.shape
    low, high = (
        jnp.broadcast_to(jnp.asarray(bound, float), box)
        for bound in (action_space.low, action_space.high)
    )
    bounded = jnp.isfinite(low) & jnp.isfinite(high)
    centre = jnp.where(bounded, 0.5 * (low + high), 0.0)
    half_range = jnp.where(bounded, 0.5 * (high - low), 1.0)

    def to_action(action: jax.Array) -> jax.Array:
        return jnp.clip(centre + half_range * action.reshape(box), low, high)

    return Spaces(shape, 0, int(low.size), observe, to_action)


def adapt(env: Any, env_params: Any = None) -> Environment:
    """Wraps a gymnax ≥ 1.0 environment, or one of your own with the same interface.

    Observations and actions are converted as `read_spaces` says.

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
      >>> cart_pole = adapt(gymnax.make("CartPole-v1")[0]).spaces
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
    name = getattr(env, "name", type(env).__name__)
    spaces = read_spaces(name, env.observation_space(params), env.action_space(params))

    def reset(key: jax.Array) -> tuple[jax.Array, PyTree]:
        observation, state = env.reset(key, params)
        return spaces.observe(observation), _strong(state)

    def step(key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, Transition]:
        results = env.step(key, state, spaces.to_action(action), params)
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
        final = spaces.observe(info["final_observation"])
        if final.shape != observation_shape:
            raise ConfigError(
                f"env {name}: final_observation must have the shape of an observation, "
                f"{list(observation_shape)}, got {list(final.shape)}"
            )
        return _strong(state), Transition(
            observation=spaces.observe(observation),
            reward=jnp.asarray(reward, float).reshape(()),
            terminated=jnp.asarray(terminated, bool),
            truncated=jnp.asarray(truncated, bool),
            final_observation=final,
        )

    observation_shape = jax.eval_shape(reset, jax.random.key(0))[0].shape
    return Environment(reset, step, spaces._replace(observation_shape=observation_shape))


def _strong(tree: PyTree) -> PyTree:
    """Strips weak types: they differ between reset and step, so the second call would recompile."""
    return jax.tree.map(
        lambda x: jax.lax.convert_element_type(jnp.asarray(x), jnp.asarray(x).dtype), tree
    )
