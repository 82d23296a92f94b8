"""Turns a suite's dynamics into an `Environment` with a time limit and automatic resets.

A suite's own time limit is switched off, so that a termination and a truncation are never confused.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxrl_po.config import check_size
from jaxrl_po.control.environment import Environment, Transition, strong
from jaxrl_po.control.spaces import Spaces, check_observation
from jaxrl_po.types import PyTree


class Dynamics(NamedTuple):
    """Suite's environment without a time limit and without automatic resets.

    Attributes:
      reset: `reset(key) -> (observation, state)`, begins an episode; consumes `key`.
      step: `step(key, state, action) -> (observation, state, reward, terminated)`, takes an action
        in the environment's units; consumes `key`.
      actions: spaces with the actions, from `spaces.read_action_space` or `spaces.box_actions`.
    """

    reset: Callable[[jax.Array], tuple[PyTree, PyTree]]
    step: Callable[[jax.Array, PyTree, Any], tuple[PyTree, PyTree, jax.Array, jax.Array]]
    actions: Spaces


def where(asked: jax.Array, new: Callable[..., PyTree], arguments: PyTree, old: PyTree) -> PyTree:
    """Computes `new(*arguments)` where `asked` is True, otherwise `old`.

    Under `vmap` over environments, `new` runs for an eighth of the environments at a time, until
    every environment whose `asked` is True has its result: usually zero or one round in a step.
    Some suites take many times as long to draw a starting state as to take a step.
    """

    @custom_vmap
    def one(asked: jax.Array, arguments: PyTree, old: PyTree) -> PyTree:
        return jax.lax.cond(asked, lambda: new(*arguments), lambda: old)

    @one.def_vmap
    def many(
        size: int, mapped: PyTree, asked: jax.Array, arguments: PyTree, old: PyTree
    ) -> tuple[PyTree, PyTree]:
        def spread(x: jax.Array, mapped: bool) -> jax.Array:
            return x if mapped else jnp.broadcast_to(x, (size, *jnp.shape(x)))

        asked, arguments, old = jax.tree.map(spread, (asked, arguments, old), tuple(mapped))
        at_once = math.ceil(size / 8)

        def unfinished(carry: tuple[jax.Array, PyTree]) -> jax.Array:
            return carry[0].any()

        def renew(carry: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
            asked, states = carry
            # Surplus rows have an index out of bounds: their results equal the last row's, and are
            # dropped.
            rows = jnp.nonzero(asked, size=at_once, fill_value=size)[0]
            drawn = jax.vmap(new)(
                *jax.tree.map(lambda x: x[jnp.minimum(rows, size - 1)], arguments)
            )
            asked, states = jax.tree.map(
                lambda x, y: x.at[rows].set(y, mode="drop"),
                (asked, states),
                (jnp.zeros(at_once, bool), drawn),
            )
            return asked, states

        states = jax.lax.while_loop(unfinished, renew, (asked, old))[1]
        return states, jax.tree.map(lambda _: True, states)

    return one(asked, arguments, old)


class EpisodeState(NamedTuple):
    """State of one environment.

    Attributes:
      state: state of the suite's environment.
      length: `[]`, int32, number of steps of the episode so far.
      start: observation and state that start the next episode; () if each step draws a new start.
      used: `[]`, bool, True if an episode has begun with `start`.
    """

    state: PyTree
    length: jax.Array
    start: PyTree
    used: jax.Array


def with_episodes(
    name: str, dynamics: Dynamics, *, max_steps: int, reset_interval: int
) -> Environment:
    """Returns an environment whose episodes end by themselves or after `max_steps` steps.

    Args:
      name: name of the environment, for messages.
      dynamics: environment without time limit and resets, see `Dynamics`.
      max_steps: time limit; an episode that reaches the limit without ending is truncated.
      reset_interval: number of steps between resets; 1 draws a starting state in every step, needed
        or not. With n > 1 each environment has a starting state ready, and used states are replaced
        every n steps of a rollout. An environment that needs a second starting state within n steps
        draws it in that step, so that no two episodes share a draw.

    Raises:
      ConfigError: a count is below 1, or legal actions do not fit the actions.
    """
    max_steps = check_size("env", max_steps, part=f"{name}: max_steps")
    reset_interval = check_size("env", reset_interval, part=f"{name}: reset_interval")
    held = reset_interval > 1

    def begin(key: jax.Array) -> tuple[PyTree, PyTree]:
        return strong(dynamics.reset(key))

    def reset(key: jax.Array) -> tuple[PyTree, EpisodeState]:
        now, later = jax.random.split(key)
        observation, state = begin(now)
        start = begin(later) if held else ()
        return observation, EpisodeState(state, jnp.int32(0), start, jnp.bool_(False))

    def step(
        key: jax.Array, running: EpisodeState, action: jax.Array
    ) -> tuple[EpisodeState, Transition]:
        step_key, reset_key = jax.random.split(key)
        final, state, reward, terminated = strong(
            dynamics.step(step_key, running.state, dynamics.actions.to_action(action))
        )
        length = running.length + 1
        terminated = jnp.asarray(terminated, bool).reshape(())
        truncated = (length >= max_steps) & ~terminated
        ended = terminated | truncated
        if held:
            observation, state = where(
                ended, held_start, (reset_key, running.start, running.used), (final, state)
            )
        else:
            observation, state = jax.tree.map(
                lambda new, old: jnp.where(ended, new, old), begin(reset_key), (final, state)
            )
        used = running.used | ended if held else running.used
        following = EpisodeState(state, jnp.where(ended, 0, length), running.start, used)
        reward = jnp.asarray(reward, float).reshape(())
        return following, Transition(observation, reward, terminated, truncated, final)

    def held_start(key: jax.Array, start: PyTree, used: jax.Array) -> PyTree:
        """Returns the start that was drawn ahead, or a new start if that one was used."""
        return where(used, begin, (key,), start)

    def refresh(key: jax.Array, running: EpisodeState) -> EpisodeState:
        start = held_start(key, running.start, running.used)
        return running._replace(start=start, used=jnp.bool_(False))

    seen = jax.eval_shape(begin, jax.random.key(0))[0]
    check_observation(name, seen, dynamics.actions)
    return Environment(
        reset,
        step,
        dynamics.actions._replace(observation=seen),
        max_steps,
        refresh if held else None,
        reset_interval,
    )
