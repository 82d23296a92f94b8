"""Runs rollouts of a policy: fixed numbers of steps for training, full episodes for evaluation."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_po import masked
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError
from jaxrl_po.control import hoisting
from jaxrl_po.control.actor import play
from jaxrl_po.control.environment import Environment, Transition, shapes, step_all
from jaxrl_po.types import Distribution, PyTree

# `policy(memory, observation) -> (memory, distribution)`, acts for B rows.
Policy = Callable[[PyTree, PyTree], tuple[PyTree, Distribution]]


class EnvState(NamedTuple):
    """State of B environments, leaves `[B, …]`.

    Attributes:
      number: `[B]`, int32, index of the environment over all devices, on which its random numbers
        depend.
      state: environment's internal state.
      observation: current raw observation of the environment.
      episode_return: `[B]`, undiscounted return of the current episode so far.
      episode_length: `[B]`, steps of the current episode so far.
      memory: policy's memory, zero at an episode's start; () without memory.
    """

    number: jax.Array
    state: PyTree
    observation: PyTree
    episode_return: jax.Array
    episode_length: jax.Array
    memory: PyTree = ()


class EnvTrajectory(NamedTuple):
    """Trajectory of T steps of each environment, leaves `[B, T, …]`.

    Attributes:
      observation: raw observation that the policy received.
      distribution: policy's distribution at the observation.
      action: action of the policy as sampled.
      transition: transition that the environment returned.
      episode_return: `[B, T]`, undiscounted return of the episode, including the current step.
      episode_length: `[B, T]`, steps of the episode, including the current step.
      state: environment's internal state at the observation, or None unless states are stored.
    """

    observation: PyTree
    distribution: Distribution
    action: jax.Array
    transition: Transition
    episode_return: jax.Array
    episode_length: jax.Array
    state: PyTree


def row_keys(key: jax.Array, index: jax.Array) -> jax.Array:
    """Derives a key per row from its index over all devices, for any number of devices."""
    chex.assert_rank(index, 1)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, index)


def start(
    environment: Environment, key: jax.Array, index: jax.Array, memory: PyTree = ()
) -> EnvState:
    """Resets one environment per entry of `index` `[B]`; consumes `key`.

    Raises:
      ConfigError: the observation does not have the shapes of the environment's spaces.
    """
    observation, state = jax.vmap(environment.reset)(row_keys(key, index))
    seen = shapes(jax.tree.map(lambda x: x[0], observation))
    if seen != shapes(environment.spaces.observation):
        raise ConfigError(
            "env",
            f"spaces.observation must have the shapes that reset returns, {seen}, got "
            f"{shapes(environment.spaces.observation)}",
        )
    zeros = jnp.zeros(index.shape)
    return EnvState(index, state, observation, zeros, zeros, memory)


def choose_actions(distribution: Distribution, keys: jax.Array, *, greedy: bool) -> jax.Array:
    """Chooses actions `[B, …]`, modes, or samples with one key (consumed) per row."""
    if greedy:
        return distribution.mode()
    return jax.vmap(lambda one, key: one.sample(key))(distribution, keys)


def forget(memory: PyTree, ended: jax.Array) -> PyTree:
    """Sets memories `[B, …]` to zero where an episode ended."""
    return jax.tree.map(lambda x: masked.zero(x, ~ended), memory)


def unroll(
    environment: Environment,
    policy: Policy,
    envs: EnvState,
    key: jax.Array,
    *,
    num_steps: int,
    target: Target | None = None,
    first: jax.Array | int = 0,
    keep_states: bool = False,
    greedy: bool = False,
) -> tuple[EnvState, EnvTrajectory]:
    """Runs `num_steps` steps of every environment under `policy`, with resets at episode ends.

    Args:
      environment: environment to step, see `Environment`.
      policy: function that acts, see `Policy`; its memory is reset where episodes end.
      envs: state of the environments before the first step.
      key: PRNG key, consumed; step t of environment b uses `fold_in(fold_in(key, b), t)`.
      num_steps: number T of steps.
      target: platform and devices of the program; None takes operations that suit every platform.
      first: index t of the first step, to continue with the same key after an earlier call; other
        than 0 only for an environment without `refresh`.
      keep_states: True to store the internal states in the trajectory, as starts of branches.
      greedy: True to take the mode; False to sample.

    Returns:
      State of the environments after the steps, and the trajectory `[B, T, …]`.
    """
    keys = row_keys(key, envs.number)

    def step(envs: EnvState, t: jax.Array) -> tuple[EnvState, EnvTrajectory]:
        step_keys = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, t)))(keys)
        memory, distribution = policy(envs.memory, envs.observation)
        action = choose_actions(distribution, step_keys[:, 0], greedy=greedy)
        played = play(distribution, action)
        state, transition = step_all(
            environment, step_keys[:, 1], envs.state, envs.observation, played
        )
        episode_return = envs.episode_return + transition.reward
        episode_length = envs.episode_length + 1.0
        running = ~(transition.terminated | transition.truncated)
        next_envs = EnvState(
            number=envs.number,
            state=state,
            observation=transition.observation,
            episode_return=jnp.where(running, episode_return, 0.0),
            episode_length=jnp.where(running, episode_length, 0.0),
            memory=forget(memory, ~running),
        )
        return next_envs, EnvTrajectory(
            envs.observation,
            distribution,
            action,
            transition,
            episode_return,
            episode_length,
            envs.state if keep_states else None,
        )

    # Random numbers and initial states are computed before the loop: drawn in each step, they would
    # cost more than the environment itself.
    at_a_time = 1 if target is None else target.unroll(8)
    run = functools.partial(hoisting.scan, step, unroll=at_a_time)
    if environment.refresh is None or not num_steps:
        envs, trajectory = run(envs, first + jnp.arange(num_steps))
    else:
        assert isinstance(first, int)
        assert first == 0  # a later call would reuse the keys of its steps for starting states
        envs, trajectory = _with_refresh(environment, run, envs, keys, num_steps)
    return envs, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), trajectory)


def _with_refresh(
    environment: Environment,
    run: Callable[[EnvState, jax.Array], tuple[EnvState, EnvTrajectory]],
    envs: EnvState,
    keys: jax.Array,
    num_steps: int,
) -> tuple[EnvState, EnvTrajectory]:
    """Runs windows of `reset_interval` steps; draws new starting states before each window."""
    interval = min(environment.reset_interval, num_steps)
    refresh = environment.refresh
    assert refresh is not None

    def window(envs: EnvState, times: jax.Array) -> tuple[EnvState, EnvTrajectory]:
        # The stream of random numbers differs from the stream of step t, which folds in t itself.
        draw = jax.vmap(lambda key: jax.random.fold_in(key, times[0] + num_steps))(keys)
        return run(envs._replace(state=jax.vmap(refresh)(draw, envs.state)), times)

    whole = num_steps // interval
    windows = jnp.arange(whole * interval).reshape(whole, interval)
    envs, trajectory = jax.lax.scan(window, envs, windows)
    trajectory = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), trajectory)
    if num_steps % interval:
        envs, rest = window(envs, jnp.arange(whole * interval, num_steps))
        trajectory = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), trajectory, rest)
    return envs, trajectory


def until_first(ended: jax.Array) -> jax.Array:
    """Returns True up to and including the first True of each row, `[B, T]`.

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
    memory: PyTree = (),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Plays one complete episode in each of `num_episodes` environments.

    Args:
      environment: environment to step, see `Environment`.
      policy: function that acts, see `Policy`.
      key: PRNG key, consumed; the same key gives the same initial states.
      num_episodes: number B of environments.
      max_steps: largest length; an episode that is still running at this length is cut.
      greedy: True to take the mode; False to sample.
      memory: policy's memory at an episode's start.

    Returns:
      Undiscounted returns `[B]`, lengths `[B]` in steps, and flags `[B]`, True if the episode ended
      by itself, by termination or truncation, within `max_steps`.
    """
    reset_key, step_key = jax.random.split(key)
    index = jnp.arange(num_episodes, dtype=jnp.int32)
    envs, keys = start(environment, reset_key, index), row_keys(step_key, index)

    class Playing(NamedTuple):
        t: jax.Array
        state: PyTree
        observation: PyTree
        memory: PyTree
        alive: jax.Array
        episode_return: jax.Array
        episode_length: jax.Array

    # Environments whose episode has ended continue to step, with `alive` False, until all episodes
    # have ended.
    def unfinished(playing: Playing) -> jax.Array:
        return playing.alive.any() & (playing.t < max_steps)

    def step(playing: Playing) -> Playing:
        step_keys = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, playing.t)))(keys)
        memory, distribution = policy(playing.memory, playing.observation)
        action = choose_actions(distribution, step_keys[:, 0], greedy=greedy)
        played = play(distribution, action)
        state, transition = step_all(
            environment, step_keys[:, 1], playing.state, playing.observation, played
        )
        return Playing(
            t=playing.t + 1,
            state=state,
            observation=transition.observation,
            memory=memory,
            alive=playing.alive & ~(transition.terminated | transition.truncated),
            episode_return=playing.episode_return
            + jnp.where(playing.alive, transition.reward, 0.0),
            episode_length=playing.episode_length + playing.alive,
        )

    zeros = jnp.zeros(num_episodes)
    alive = jnp.ones(num_episodes, bool)
    playing = Playing(jnp.int32(0), envs.state, envs.observation, memory, alive, zeros, zeros)
    playing = jax.lax.while_loop(unfinished, step, playing)
    return playing.episode_return, playing.episode_length, ~playing.alive
