"""Builds environments of Jumanji.

Jumanji's environments report a time limit as a termination, so their own limit is set to `max_steps
+ 1`, which is never reached. The reward of SearchAndRescue depends on its own time limit.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import jumanji
from jumanji import specs

from jaxrl_po.config import ConfigError
from jaxrl_po.control.adapters.episodes import Dynamics, with_episodes
from jaxrl_po.control.environment import Environment
from jaxrl_po.control.spaces import LEGAL, Observation, Spaces, box_actions
from jaxrl_po.types import PyTree

# Time limit for an environment without a limit; only Game2048 has episodes of such a length.
MAX_STEPS = 10_000
STEPS = ("step_count", "step")


def names() -> list[str]:
    """Returns the names of the environments. Sokoban downloads its levels at the first use."""
    return sorted(jumanji.registered_environments())


def make(
    name: str,
    *,
    max_steps: int | None = None,
    reset_interval: int = 16,
    mask: bool = True,
    **arguments: Any,
) -> Environment:
    """Builds the environment with a name.

    The policy sees a dictionary of floats without the mask of legal actions. A bounded integer (a
    position, a city) is one-hot, the number of steps a share of `max_steps`; boards keep their
    numbers, in Game2048 exponents of 2. Dependent choices (BinPack: a space and an item) become one
    choice among all pairs; with several agents there is a choice for each agent. If no action is
    legal, all actions are allowed: the suite then ends the episode or ignores the action. Rewards
    of several agents are summed.

    Args:
      name: name of an environment, one of `names()`.
      max_steps: time limit of an episode; None stands for the suite's `time_limit`, or for 10,000
        if the environment has none.
      reset_interval: number of steps between resets, see `with_episodes`.
      mask: True restricts the policy to legal actions. If `mask` is False, illegal actions are
        played; most suites then end the episode.
      arguments: arguments of the environment's constructor, such as `num_rows`.

    Raises:
      ConfigError: a count is below 1, or levels cannot be downloaded.
      TypeError: the constructor does not take an argument.
    """
    label = f"jumanji:{name}"
    try:
        env = jumanji.make(name, **arguments)
    except OSError as error:
        raise ConfigError("env", f"{label}: its levels cannot be read: {error}") from None
    own = getattr(env, "time_limit", None)
    limit = (own or MAX_STEPS) if max_steps is None else max_steps
    if own:
        env = jumanji.make(name, **(arguments | {"time_limit": limit + 1}))
    spec = env.observation_spec  # computed outside tracing: the suite would store the tracers

    def observe(raw: Any) -> Observation:
        legal = getattr(raw, LEGAL, None) if mask else None
        if legal is not None:
            # If no action is legal, for example when a snake is enclosed, any action ends the
            # episode.
            legal = jnp.asarray(legal, bool).reshape(groups, -1)
            legal = (legal | ~legal.any(axis=1, keepdims=True)).reshape(-1)
        return Observation(_read("", spec, raw, limit), None, legal)

    def reset(key: jax.Array) -> tuple[Observation, PyTree]:
        state, timestep = env.reset(key)
        return observe(timestep.observation), state

    def step(
        key: jax.Array, state: Any, action: jax.Array
    ) -> tuple[Observation, PyTree, jax.Array, jax.Array]:
        # The state of the suite holds one key for all later steps. Without a fresh key, all
        # branches from one state, and episodes with equal starts, would have the same random
        # numbers.
        state, timestep = env.step(state.replace(key=key), action)
        ended = (timestep.discount == 0).all()
        return observe(timestep.observation), state, timestep.reward.sum(), ended

    seen = jax.eval_shape(env.reset, jax.random.key(0))[1].observation
    actions = _read_actions(label, env.action_spec, getattr(seen, LEGAL, None))
    groups = len(actions.choices) or 1
    return with_episodes(
        label, Dynamics(reset, step, actions), max_steps=limit, reset_interval=reset_interval
    )


def _read(key: str, spec: Any, value: Any, max_steps: int) -> PyTree:
    if hasattr(value, "_asdict"):
        parts = value._asdict().items()
        return {key: _read(key, spec[key], x, max_steps) for key, x in parts if key != LEGAL}
    if key in STEPS:
        return jnp.asarray(value, float) / max_steps
    bounded = isinstance(spec, specs.BoundedArray) and spec.shape == ()
    if bounded and jnp.issubdtype(spec.dtype, jnp.integer):
        low, high = int(spec.minimum), int(spec.maximum)
        return jax.nn.one_hot(value - low, high - low + 1)
    return jax.tree.map(lambda x: jnp.asarray(x, float), value)


def _read_actions(label: str, spec: Any, mask: Any) -> Spaces:
    if isinstance(spec, specs.DiscreteArray):
        return Spaces(None, num_actions=int(spec.num_values))
    if jnp.issubdtype(spec.dtype, jnp.floating):
        return box_actions(label, spec.minimum, spec.maximum, spec.shape)
    if isinstance(spec, specs.MultiDiscreteArray):
        choices = tuple(int(n) for n in spec.num_values)
    else:  # the bound of MultiCVRP's space is too high by one
        choices = (mask.shape[1],) * mask.shape[0]
    if mask is not None and mask.shape == choices:
        return Spaces(
            None,
            num_actions=math.prod(choices),
            to_action=lambda action: jnp.stack(jnp.unravel_index(action, choices)),
        )
    return Spaces(None, choices=choices, to_action=lambda action: action.astype(spec.dtype))
