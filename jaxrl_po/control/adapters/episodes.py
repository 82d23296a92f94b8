"""From the dynamics of a suite to an `Environment`: time limits and new episodes, the same for all.

A suite's own time limit is switched off, so that an episode's end by itself and one by the limit
are never confused.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.config import COUNT, ConfigError
from jaxrl_po.control.environment import Environment, Transition, strong
from jaxrl_po.control.spaces import Spaces, require_mask
from jaxrl_po.types import PyTree


class Dynamics(NamedTuple):
    """A suite's environment without time limit and without new episodes.

    Attributes:
      reset: `reset(key) -> (observation, state)`; consumes `key`.
      step: `step(key, state, action) -> (observation, state, reward, terminated)` with an action of
        the environment's own; consumes `key`.
      actions: what `spaces.read_action_space` or `spaces.box_actions` returned.
    """

    reset: Callable[[jax.Array], tuple[PyTree, PyTree]]
    step: Callable[[jax.Array, PyTree, Any], tuple[PyTree, PyTree, jax.Array, jax.Array]]
    actions: Spaces


def where_ended(
    ended: jax.Array, new: Callable[[jax.Array], PyTree], key: jax.Array, old: PyTree
) -> PyTree:
    """`new(key)` where the episode ended, else `old`, as a loop of at most one round.

    Vmapped over environments, it computes and copies only in steps in which one of them has ended,
    where `cond` and `where` would in every step. The loop carries the key and changes it: else the
    compiler would see that no round alters `new(key)`, and compute it before the loop, always.
    """

    def renew(carry: tuple[jax.Array, jax.Array, PyTree]) -> tuple[jax.Array, jax.Array, PyTree]:
        _, key, _ = carry
        return jnp.bool_(False), jax.random.fold_in(key, 1), new(key)

    return jax.lax.while_loop(lambda carry: carry[0], renew, (ended, key, old))[2]


class Running(NamedTuple):
    """The state of one environment.

    Attributes:
      state: the suite's own.
      length: `[]`, int32, steps of the episode so far.
      start: observation and state with which the next episode begins; () where each step draws
        its own.
      used: `[]`, bool, whether an episode has begun with it.
    """

    state: PyTree
    length: jax.Array
    start: PyTree
    used: jax.Array


def with_episodes(
    name: str, dynamics: Dynamics, *, max_steps: int, reset_interval: int
) -> Environment:
    """The environment whose episodes end by themselves or after `max_steps` steps.

    Args:
      name: of the environment, for messages.
      dynamics: see `Dynamics`.
      max_steps: time limit; an episode that reaches it without ending is truncated.
      reset_interval: 1 draws a starting state in every step, needed or not. n > 1 draws one for
        each environment every n steps of a rollout and holds it ready. No episode begins with one
        that another began with: where an environment needs a second one within n steps, all
        environments draw one in that step, which costs as much as n = 1 does.

    Raises:
      ConfigError: a count below 1, or legal actions that do not fit the actions.
    """
    for field, value in (("max_steps", max_steps), ("reset_interval", reset_interval)):
        if not isinstance(value, int) or isinstance(value, bool) or value not in COUNT:
            raise ConfigError(
                f"env {name}: {field} must be a whole number in {COUNT}, got {value!r}"
            )
    held = reset_interval > 1

    def begin(key: jax.Array) -> tuple[PyTree, PyTree]:
        return strong(dynamics.reset(key))

    def reset(key: jax.Array) -> tuple[PyTree, Running]:
        now, later = jax.random.split(key)
        observation, state = begin(now)
        start = begin(later) if held else ()
        return observation, Running(state, jnp.int32(0), start, jnp.bool_(False))

    def step(key: jax.Array, running: Running, action: jax.Array) -> tuple[Running, Transition]:
        step_key, reset_key = jax.random.split(key)
        final, state, reward, terminated = strong(
            dynamics.step(step_key, running.state, dynamics.actions.to_action(action))
        )
        length = running.length + 1
        terminated = jnp.asarray(terminated, bool).reshape(())
        truncated = (length >= max_steps) & ~terminated
        ended = terminated | truncated
        if held:
            observation, state = where_ended(
                ended, lambda key: held_start(key, running, ended), reset_key, (final, state)
            )
        else:
            observation, state = jax.tree.map(
                lambda new, old: jnp.where(ended, new, old), begin(reset_key), (final, state)
            )
        used = running.used | ended if held else running.used
        following = Running(state, jnp.where(ended, 0, length), running.start, used)
        reward = jnp.asarray(reward, float).reshape(())
        return following, Transition(observation, reward, terminated, truncated, final)

    def held_start(key: jax.Array, running: Running, ended: jax.Array) -> PyTree:
        """The start held ready; a new one where an episode needs it and it was used."""
        return where_ended(ended & running.used, begin, key, running.start)

    def refresh(key: jax.Array, running: Running) -> Running:
        return running._replace(start=begin(key), used=jnp.bool_(False))

    seen = jax.eval_shape(begin, jax.random.key(0))[0]
    require_mask(name, seen, dynamics.actions)
    return Environment(
        reset,
        step,
        dynamics.actions._replace(observation=seen),
        max_steps,
        refresh if held else None,
        reset_interval,
    )
