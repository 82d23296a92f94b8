"""Turns recorded episodes into demonstrations: behaviour cloning is `algorithms.sft` on them."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxrl_po.config import ConfigError, check_size
from jaxrl_po.control import unroll
from jaxrl_po.control.actor import actor_of
from jaxrl_po.control.environment import adapt
from jaxrl_po.control.problem import ENVIRONMENTS
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Problem, demonstration_batch

RECORDED = ("observation", "action", "terminated", "truncated")


def with_demonstrations(
    problem: Problem, observation: jax.Array, action: jax.Array, *, num_steps: int
) -> Problem:
    """Returns the problem whose `collect` draws from N recorded steps, with replacement.

    Args:
      problem: problem of the same environment, see `control.make_problem`; without memory, and
        without normalised observations.
      observation: `[N, …]`, observations as the policy sees them.
      action: `[N, …]`, actions as the policy returns them.
      num_steps: number T of steps drawn for each of the problem's environments in an iteration.

    Returns:
      `Problem` for `algorithms.sft`, in which `log_prob`, `reward` and `score` are 0.

    Raises:
      ConfigError: the policy has memory, or `num_steps` is not a whole number of at least 1.
    """
    chex.assert_equal_shape_prefix([observation, action], 1)
    if problem.actor is not None:
        raise ConfigError("memory", "must be none: single steps are demonstrated")
    num_steps = check_size("num_steps", num_steps)

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        del params
        envs: Any = collector.sharded[ENVIRONMENTS]
        keys = unroll.row_keys(key, envs.number)
        draw: Any = jax.vmap(lambda key: jax.random.randint(key, (num_steps,), 0, len(action)))
        drawn = draw(keys)
        mask = jnp.ones(drawn.shape, bool)
        return collector, demonstration_batch(observation[drawn], action[drawn], mask)

    return problem._replace(collect=collect)


def make_record(
    env: Any, problem: Problem, *, num_episodes: int, max_steps: int, env_params: Any = None
) -> Callable[[ActorCritic, CollectorState, jax.Array], tuple[dict[str, jax.Array], jax.Array]]:
    """Builds `record(params, collector, key) -> (steps, mask)`, which plays greedy episodes.

    Args:
      env: environment, see `control.make_problem`.
      problem: problem whose policy acts.
      num_episodes: number B of episodes, each in its own environment.
      max_steps: number T of steps after which an episode is cut.
      env_params: parameters of the environment; None stands for its defaults.

    Returns:
      Function `record`, which consumes `key`. The result `steps` has the entries `RECORDED`, `[B,
      T, …]`, and `mask` `[B, T]` is True up to the end of the first episode.

    Raises:
      ConfigError: `num_episodes` or `max_steps` is not a whole number of at least 1.
    """
    environment, actor = adapt(env, env_params), actor_of(problem)
    num_episodes = check_size("num_episodes", num_episodes)
    max_steps = check_size("max_steps", max_steps)

    def record(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        reset_key, step_key = jax.random.split(key)
        index = jnp.arange(num_episodes, dtype=jnp.int32)
        envs = unroll.start(environment, reset_key, index, actor.start(num_episodes))
        _, played = unroll.unroll(
            environment,
            lambda memory, observation: actor.act(params, collector, memory, observation),
            envs,
            step_key,
            num_steps=max_steps,
            greedy=True,
        )
        terminated, truncated = played.transition.terminated, played.transition.truncated
        mask = unroll.until_first(terminated | truncated)
        steps = played.observation, played.action, terminated, truncated
        return dict(zip(RECORDED, steps, strict=True)), mask

    return record
