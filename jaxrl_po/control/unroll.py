"""Rollouts of a policy: a fixed number of steps for training, whole episodes for evaluation."""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_po.control import hoisting
from jaxrl_po.control.environment import Environment, Transition
from jaxrl_po.distributions import Distribution
from jaxrl_po.types import PyTree

Policy = Callable[[jax.Array], Distribution]


class EnvState(NamedTuple):
    """State of B environments, leaves `[B, …]`.

    Attributes:
      number: `[B]`, int32, index of the environment over all devices; its random numbers depend on
        it.
      state: the environment's internal state.
      observation: current raw observation.
      episode_return: `[B]`, undiscounted return of the current episode so far.
      episode_length: `[B]`, steps of the current episode so far.
    """

    number: jax.Array
    state: PyTree
    observation: jax.Array
    episode_return: jax.Array
    episode_length: jax.Array


class Trajectory(NamedTuple):
    """T steps of each environment, leaves `[B, T, …]`.

    Attributes:
      observation: raw, what the policy saw.
      distribution: the policy's, at the observation.
      action: as sampled.
      transition: the environment's output.
      episode_return: `[B, T]`, undiscounted return of the episode, this step included.
      episode_length: `[B, T]`, steps of the episode, this one included.
      state: the environment's internal state at the observation, or None where states are not kept.
    """

    observation: jax.Array
    distribution: Distribution
    action: jax.Array
    transition: Transition
    episode_return: jax.Array
    episode_length: jax.Array
    state: PyTree


def row_keys(key: jax.Array, index: jax.Array) -> jax.Array:
    """A key per row, from its index over all devices: the same whatever the number of devices."""
    chex.assert_rank(index, 1)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, index)


def start(environment: Environment, key: jax.Array, index: jax.Array) -> EnvState:
    """Resets one environment per entry of `index` `[B]`; consumes `key`."""
    observation, state = jax.vmap(environment.reset)(row_keys(key, index))
    zeros = jnp.zeros(index.shape)
    return EnvState(index, state, observation, zeros, zeros)


def unroll(
    environment: Environment,
    policy: Policy,
    envs: EnvState,
    key: jax.Array,
    *,
    num_steps: int,
    keep_states: bool = False,
) -> tuple[EnvState, Trajectory]:
    """Runs `num_steps` steps of every environment under `policy`, resetting where episodes end.

    Args:
      environment: see `Environment`.
      policy: observations `[B, …]` to a distribution.
      envs: their state before.
      key: consumed; step t of environment b uses `fold_in(fold_in(key, b), t)`.
      num_steps: T.
      keep_states: keep the internal states in the trajectory, so that one can branch from them.

    Returns:
      The state afterwards, and the trajectory `[B, T, …]`.
    """
    keys = row_keys(key, envs.number)

    def step(envs: EnvState, t: jax.Array) -> tuple[EnvState, Trajectory]:
        step_keys = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, t)))(keys)
        distribution = policy(envs.observation)
        action = jax.vmap(lambda distribution, key: distribution.sample(key))(
            distribution, step_keys[:, 0]
        )
        state, transition = jax.vmap(environment.step)(step_keys[:, 1], envs.state, action)
        episode_return = envs.episode_return + transition.reward
        episode_length = envs.episode_length + 1.0
        running = ~(transition.terminated | transition.truncated)
        next_envs = EnvState(
            number=envs.number,
            state=state,
            observation=transition.observation,
            episode_return=jnp.where(running, episode_return, 0.0),
            episode_length=jnp.where(running, episode_length, 0.0),
        )
        return next_envs, Trajectory(
            envs.observation,
            distribution,
            action,
            transition,
            episode_return,
            episode_length,
            envs.state if keep_states else None,
        )

    # Random numbers and initial states are computed before the loop: drawn in each step, they cost
    # more than the environment itself.
    envs, trajectory = hoisting.scan(step, envs, jnp.arange(num_steps))
    return envs, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), trajectory)


def until_first(ended: jax.Array) -> jax.Array:
    """True up to and including the first True of each row, `[B, T]`.

    Example:
      >>> until_first(jnp.array([[False, True, False, True]])).tolist()
      [[True, True, False, False]]
    """
    return jnp.cumsum(ended, axis=1) - ended == 0


def episodes(
    environment: Environment,
    policy: Policy,
    key: jax.Array,
    *,
    num_episodes: int,
    max_steps: int,
    greedy: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Plays one whole episode in each of `num_episodes` environments.

    Args:
      environment: see `Environment`.
      policy: observations `[B, …]` to a distribution.
      key: consumed; the same key gives the same initial states.
      num_episodes: B.
      max_steps: maximum length; an episode still running then is cut there.
      greedy: take the mode; otherwise sample.

    Returns:
      Undiscounted returns `[B]` and lengths `[B]` in steps.
    """
    reset_key, step_key = jax.random.split(key)
    index = jnp.arange(num_episodes, dtype=jnp.int32)
    envs, keys = start(environment, reset_key, index), row_keys(step_key, index)

    class Playing(NamedTuple):
        t: jax.Array
        state: PyTree
        observation: jax.Array
        alive: jax.Array
        episode_return: jax.Array
        episode_length: jax.Array

    # Environments whose episode has ended keep stepping, with `alive` False, until all have.
    def unfinished(play: Playing) -> jax.Array:
        return play.alive.any() & (play.t < max_steps)

    def step(play: Playing) -> Playing:
        step_keys = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, play.t)))(keys)
        distribution = policy(play.observation)
        if greedy:
            action = distribution.mode()
        else:
            action = jax.vmap(lambda distribution, key: distribution.sample(key))(
                distribution, step_keys[:, 0]
            )
        state, transition = jax.vmap(environment.step)(step_keys[:, 1], play.state, action)
        return Playing(
            t=play.t + 1,
            state=state,
            observation=transition.observation,
            alive=play.alive & ~(transition.terminated | transition.truncated),
            episode_return=play.episode_return + jnp.where(play.alive, transition.reward, 0.0),
            episode_length=play.episode_length + play.alive,
        )

    zeros = jnp.zeros(num_episodes)
    play = Playing(
        jnp.int32(0), envs.state, envs.observation, jnp.ones(num_episodes, bool), zeros, zeros
    )
    play = jax.lax.while_loop(unfinished, step, play)
    return play.episode_return, play.episode_length
