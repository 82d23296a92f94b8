"""Defines environments as two pure functions, and the adapter to gymnax."""

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.config import ConfigError, check_size, with_field_docs
from jaxrl_po.control.spaces import Observation, Spaces, check_observation, example, read_spaces
from jaxrl_po.types import PyTree

METHODS = ("reset", "step", "action_space", "observation_space")


@with_field_docs
class Transition(NamedTuple):
    """Step of one environment.

    Attributes:
      observation: observation of the next state; of a fresh episode if the step ended its episode.
      reward: `[]`, float32, reward of the step.
      terminated: `[]`, bool, True if the episode ended by itself.
      truncated: `[]`, bool, True if the time limit cut the episode.
      final_observation: true next observation, before any reset.
    """

    observation: PyTree
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_observation: PyTree


@with_field_docs
class Environment(NamedTuple):
    """Control environment as two pure functions and its spaces.

    Attributes:
      reset: `reset(key) -> (observation, state)`, begins an episode; consumes `key`.
      step: `step(key, state, action) -> (state, Transition)`, takes a step and resets by itself
        where an episode ends; consumes `key`.
      spaces: spaces of observations and actions, see `Spaces`.
      max_steps: time limit of an episode in steps; None without a limit.
      refresh: `refresh(key, state) -> state`, stores an unused starting state for the next episode
        in the state; consumes `key`. The field is None if `step` draws a starting state from its
        own key.
      reset_interval: number of steps between two calls of `refresh` in a rollout.
    """

    reset: Callable[[jax.Array], tuple[PyTree, PyTree]]
    step: Callable[[jax.Array, PyTree, jax.Array], tuple[PyTree, Transition]]
    spaces: Spaces
    max_steps: int | None = None
    refresh: Callable[[jax.Array, PyTree], PyTree] | None = None
    reset_interval: int = 1


def adapt(env: Any, env_params: Any = None) -> Environment:
    """Wraps a gymnax ≥ 1.0 environment, or a user's environment with the same interface.

    Observations and actions are converted as `read_spaces` documents. An `Environment` is returned
    unchanged.

    Args:
      env: environment with `reset(key, params)`, `step(key, state, action, params)`,
        `action_space(params)`, `observation_space(params)`.
      env_params: parameters of the environment; None stands for `env.default_params`.

    Returns:
      Wrapped `Environment`.

    Raises:
      ConfigError: `read_spaces` refuses a space, the environment does not have the interface, or a
        step changes the structure, shapes or dtypes of state or observation.

    Example:
      >>> import gymnax
      >>> cart_pole = adapt(gymnax.make("CartPole-v1")[0]).spaces
      >>> cart_pole.observation.shape, cart_pole.num_actions, cart_pole.action_size
      ((4,), 2, 0)
    """
    if isinstance(env, Environment):
        if env_params is not None:
            raise ConfigError("env_params", "must be None for an Environment, which holds its own")
        _require_whole(env)
        return env
    if isinstance(env, tuple):
        raise ConfigError("env", "must be the environment alone, as in gymnax.make(name)[0]")
    if is_gymnasium(env):
        raise ConfigError(
            "env",
            "must be in JAX, got an environment of gymnasium, which runs on the host: train it by "
            "run.Experiment(env=…), with surrogate=… for a loss of your own",
        )
    if isinstance(env, type):
        raise ConfigError("env", f"must be an environment, got a class: give {env.__name__}()")
    missing = [name for name in METHODS if not callable(getattr(env, name, None))]
    missing += [] if hasattr(env, "default_params") else ["default_params"]
    if missing:
        raise ConfigError(
            "env",
            f"must have the interface of gymnax >= 1.0; {type(env).__name__} lacks "
            f"{', '.join(missing)}",
        )
    params = env.default_params if env_params is None else env_params
    name = getattr(env, "name", type(env).__name__)
    adapted = _from_gymnax(name, env, params)

    def both(key: jax.Array) -> None:
        observation, state = adapted.reset(key)
        action = adapted.spaces.action
        results = adapted.step(key, state, jnp.zeros(action.shape, action.dtype))
        _require_alike(name, (state, observation), *results)

    errors: list[ConfigError] = []
    # A state may hold a key of both kinds, typed or raw.
    for make_key in (jax.random.key, jax.random.PRNGKey):
        try:
            jax.eval_shape(both, make_key(0))
            return adapted
        except ConfigError as error:
            errors.append(error)
        except Exception:  # stepping the environment raises the error again
            return adapted
    raise errors[0]


def is_gymnasium(env: object) -> bool:
    """Returns whether an object is a gymnasium environment, or a class of such environments."""
    kind: Any = getattr(sys.modules.get("gymnasium"), "Env", ())  # gymnasium is not imported here
    return isinstance(env, kind) or (isinstance(env, type) and issubclass(env, kind))


def _from_gymnax(name: str, env: Any, params: Any) -> Environment:
    """Builds the `Environment`, whose functions raise ConfigError for results of the wrong form."""
    space = env.observation_space(params)
    spaces = read_spaces(name, space, env.action_space(params))

    def unpack(method: str, results: Any, names: str) -> Any:
        if hasattr(results, "__iter__") and not hasattr(results, "dtype"):
            results = tuple(results)
        count = len(results) if isinstance(results, tuple) else 1
        if count != len(names.split(", ")):
            raise ConfigError(
                "env",
                f"{name}: {method} must return ({names}) as in gymnax >= 1.0, got {count} values",
            )
        return results

    def convert(function: Callable[[Any], PyTree], field: str, given: Any, valid: Any) -> PyTree:
        try:
            return function(given)
        except (TypeError, ValueError, LookupError) as error:
            got = _describe(given)
            raise ConfigError("env", f"{name}: {field} must be {valid}, got {got}") from error

    def observe(field: str, given: Any) -> PyTree:
        valid = f"{_describe(example(space))}, see its observation_space"
        return convert(spaces.observe, field, given, valid)

    def arrays(field: str, given: Any) -> PyTree:
        return convert(strong, field, given, "a pytree of arrays")

    def scalar(field: str, given: Any, kind: type) -> jax.Array:
        return convert(lambda x: jnp.asarray(x, kind), field, given, kind.__name__)

    def reset(key: jax.Array) -> tuple[PyTree, PyTree]:
        observation, state = unpack("reset", env.reset(key, params), "observation, state")
        return observe("observation of reset", observation), arrays("state of reset", state)

    def step(key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, Transition]:
        results = env.step(key, state, spaces.to_action(action), params)
        observation, state, reward, terminated, truncated, info = unpack(
            "step", results, "observation, state, reward, terminated, truncated, info"
        )
        if not hasattr(info, "__contains__") or "final_observation" not in info:
            raise ConfigError(
                "env",
                f"{name}: info of step must hold final_observation, the next observation before "
                "any reset: the value of a truncated episode's rest is computed from it",
            )
        paid = scalar("reward", reward, float)
        return arrays("state of step", state), Transition(
            observe("observation of step", observation),
            paid.reshape(()) if paid.size == 1 else paid,
            scalar("terminated", terminated, bool),
            scalar("truncated", truncated, bool),
            observe("final_observation", info["final_observation"]),
        )

    # The result of `reset`, not the space, determines the shapes.
    seen = jax.eval_shape(reset, jax.random.key(0))[0]
    check_observation(name, seen, spaces)
    return Environment(reset, step, spaces._replace(observation=seen), read_limit(name, params))


def step_all(
    environment: Environment, keys: jax.Array, state: PyTree, observation: PyTree, action: jax.Array
) -> tuple[PyTree, Transition]:
    """Steps B environments, leaves `[B, …]`, each with its own key, which is consumed.

    Raises:
      ConfigError: a result has another structure, shape or dtype than `state`, `observation` or the
        fields of a `Transition`.
    """

    def step(
        key: jax.Array, state: PyTree, observation: PyTree, action: jax.Array
    ) -> tuple[PyTree, Transition]:
        results = environment.step(key, state, action)
        _require_alike("Environment", (state, observation), *results)
        return results

    return jax.vmap(step)(keys, state, observation, action)


def _require_alike(
    name: str, before: tuple[PyTree, PyTree], state: PyTree, transition: Transition
) -> None:
    """Raises ConfigError if a step changes types, or reward and flags are not scalars.

    Args:
      name: name of the environment, for messages.
      before: state and observation before the step.
      state: state after the step.
      transition: result of the step.
    """

    def require(field: str, holds: bool, valid: Any, got: Any) -> None:
        if not holds:
            raise ConfigError("env", f"{name}: {field} of step must be {valid}, got {got}")

    # Only the critic reads the final observation, which may lack the mask of legal actions.
    last, first = (
        x.seen_by_critic() if isinstance(x, Observation) else x
        for x in (transition.final_observation, before[1])
    )
    final = "final_observation", last, first
    seen = "observation", transition.observation, before[1]
    for field, given, valid in (("state", state, before[0]), seen, final):
        old, new = (
            {jax.tree_util.keystr(path): jax.typeof(x) for path, x in leaves}
            for leaves in map(jax.tree_util.tree_leaves_with_path, (valid, given))
        )
        for path in old | new:
            x: Any = old.get(path)
            y: Any = new.get(path)
            alike = x is not None and y is not None and x.shape == y.shape
            # A loop converts weak types in its initial carry.
            alike = alike and (x.dtype == y.dtype or x.weak_type or _may_convert(field, x, y))
            require(field + path, alike, f"{_describe(x)}, as from reset", _describe(y))
        old, new = jax.tree.structure(valid), jax.tree.structure(given)
        require(field, old == new, f"{old}, as from reset", new)
    for field in ("reward", "terminated", "truncated"):
        shape = list(jnp.shape(getattr(transition, field)))
        require(field, not shape, "of shape []", shape)


def _may_convert(field: str, x: Any, y: Any) -> bool:
    """Returns whether another dtype is merely converted.

    An image of bytes would be rescaled instead.
    """
    return field == "final_observation" and jnp.uint8 not in (x.dtype, y.dtype)


def _describe(tree: Any) -> Any:
    """Returns the dtype and shape of each array in a tree, and the type of any other leaf."""
    if tree is None:
        return "nothing"
    return jax.tree.map(
        lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__, tree
    )


def read_limit(name: str, params: Any) -> int | None:
    """Reads `max_steps_in_episode`; returns None if the limit is missing or infinite.

    Raises:
      ConfigError: the limit is not a whole number of at least 1, such as 100 or 100.0.
    """
    limit: Any = getattr(params, "max_steps_in_episode", None)
    known = limit is not None and not isinstance(limit, jax.core.Tracer)
    if known and limit != math.inf:
        whole = int(limit) if limit % 1 == 0 else limit
        limit = check_size("env", whole, part=f"{name}: max_steps_in_episode")
    return None if known and limit == math.inf else limit


def _require_whole(env: Environment) -> None:
    """Raises ConfigError if the spaces of an `Environment` lack a field."""
    spaces = env.spaces
    kinds = bool(spaces.num_actions) + bool(spaces.action_size) + bool(spaces.choices)
    if kinds != 1:
        raise ConfigError(
            "env",
            "spaces must have one of num_actions, action_size and choices, got "
            f"{(spaces.num_actions, spaces.action_size, spaces.choices)}",
        )
    if not jax.tree.leaves(spaces.observation):
        raise ConfigError(
            "env", "spaces.observation must be the shapes and dtypes of one observation"
        )
    check_observation("Environment", spaces.observation, spaces)
    for count in (*spaces.choices, spaces.num_actions or spaces.action_size or 1):
        check_size("env", count, part="counts of actions")
    if env.max_steps is not None and not isinstance(env.max_steps, jax.core.Tracer):
        check_size("env", env.max_steps, part="max_steps")


def shapes(tree: PyTree) -> Any:
    """Returns the shapes of a tree's leaves, each as a list of sizes.

    Example:
      >>> shapes(jnp.zeros((2, 3))), shapes({"a": jnp.zeros(4)})
      ([2, 3], {'a': [4]})
    """
    return jax.tree.map(lambda x: list(x.shape), tree)


def strong(tree: PyTree) -> PyTree:
    """Strips weak types, which differ between reset and step: the second call would recompile."""
    return jax.tree.map(
        lambda x: jax.lax.convert_element_type(jnp.asarray(x), jnp.asarray(x).dtype), tree
    )
