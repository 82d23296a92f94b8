"""Evaluates a control policy on complete episodes, with frozen observation statistics."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_po.config import ConfigError, check_size, static_value
from jaxrl_po.control import unroll
from jaxrl_po.control.actor import actor_of
from jaxrl_po.control.environment import adapt
from jaxrl_po.types import ActorCritic, CollectorState, Problem

Evaluate = Callable[[ActorCritic, CollectorState, jax.Array], dict[str, jax.Array]]


def make_evaluate(
    env: Any,
    problem: Problem,
    *,
    num_episodes: int = 32,
    greedy: bool = True,
    env_params: Any = None,
    max_steps: int | None = None,
) -> Evaluate:
    """Builds `evaluate(params, collector, key) -> {"return", "length", "ended"}`.

    Args:
      env: environment, see `make_problem`; it may differ from the environment used for training.
      problem: problem whose policy acts.
      num_episodes: number of episodes; each runs in its own environment, in parallel.
      greedy: True to take the mode of the policy; False to sample.
      env_params: parameters of the environment; None stands for its defaults.
      max_steps: bound on an episode's length; None stands for the environment's limit,
        `max_steps_in_episode` of a gymnax environment's parameters.

    Returns:
      Function `evaluate`. Each entry of its result is `[num_episodes]`: undiscounted return, length
      in steps, and 1 if the episode ended by itself, 0 if the bound cut it. For an environment
      whose `step` never returns terminated or truncated, `ended` is 0 everywhere. The function uses
      the observation statistics in `collector`, also if the problem is wrapped, and does not update
      them; the same key gives the same episodes.

    Raises:
      ConfigError: `num_episodes` or `max_steps` is not a whole number of at least 1, or neither
        `max_steps` nor the environment bounds the length of an episode.
    """
    num_episodes = check_size("num_episodes", num_episodes)
    greedy = static_value("greedy", greedy, bool)
    environment = adapt(env, env_params)
    bound = environment.max_steps if max_steps is None else check_size("max_steps", max_steps)
    if bound is None:
        raise ConfigError(
            "env",
            "must bound its episodes: add max_steps_in_episode to its default_params, or give "
            "max_steps",
        )

    actor = actor_of(problem)

    def evaluate(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> dict[str, jax.Array]:
        episode_return, length, ended = unroll.episodes(
            environment,
            functools.partial(actor.act, params, collector),
            key,
            num_episodes=num_episodes,
            max_steps=bound,
            greedy=greedy,
            memory=actor.start(num_episodes),
        )
        return {"return": episode_return, "length": length, "ended": ended.astype(float)}

    return evaluate
