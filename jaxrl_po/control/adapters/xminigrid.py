"""Builds environments of XLand-MiniGrid and its ports of MiniGrid tasks."""

from typing import Any

import jax
import jax.numpy as jnp
import xminigrid
from xminigrid.benchmarks import Benchmark, load_benchmark_from_path
from xminigrid.core.constants import NUM_COLORS, NUM_TILES

from jaxrl_po.config import ConfigError
from jaxrl_po.control.adapters.episodes import Dynamics, with_episodes
from jaxrl_po.control.environment import Environment
from jaxrl_po.control.spaces import Spaces
from jaxrl_po.types import PyTree

# The number exceeds every number in the code of a goal or rule: kinds (at most 14), tiles, colours.
CODES = 16


def names() -> list[str]:
    """Returns the names of the environments."""
    return list(xminigrid.registered_environments())


def make(
    name: str,
    *,
    max_steps: int | None = None,
    reset_interval: int = 16,
    view_size: int | None = None,
    benchmark: str = "",
    **arguments: Any,
) -> Environment:
    """Builds the environment with a name.

    The policy observes `image` `[view_size, view_size, tiles + colours]`, both one-hot, and the
    agent's `direction` `[4]`; in XLand also `goal` and `rules`, the suite's codes, one-hot. The
    object that the agent carries is hidden, as in the suite.

    Args:
      name: name of an environment, one of `names()`.
      max_steps: time limit of an episode; None stands for the suite's limit. The reward at a goal
        falls to 0.1 at the time limit.
      reset_interval: number of steps between resets, see `with_episodes`.
      view_size: side of the square that the agent observes, odd, at least 3; None stands for the
        suite's size.
      benchmark: set of goals and rules, for XLand; each episode draws one goal with its rules. The
        benchmark is the name of a benchmark of the suite, downloaded at its first use, or a path to
        a benchmark file.
      arguments: values for fields of the environment's parameters, such as `height`.

    Raises:
      ConfigError: a count is below 1, a view has another size, or a benchmark is missing, cannot be
        read or is given for MiniGrid.
      TypeError: an argument is not a field of the environment's parameters.
    """
    label, xland = f"xminigrid:{name}", name.startswith("XLand")
    if view_size is not None:
        if view_size < 3 or view_size % 2 == 0:
            raise ConfigError(
                "env", f"{label}: view_size must be odd and at least 3, got {view_size}"
            )
        arguments["view_size"] = view_size
    if xland != bool(benchmark):
        known = ", ".join(xminigrid.registered_benchmarks())
        wrong = f"must be given, {known} or a file" if xland else "must be empty: its goal is fixed"
        raise ConfigError("env", f"{label}: benchmark {wrong}")
    env, params = xminigrid.make(name, **arguments)
    # The suite's reward at a goal depends on the suite's time limit, which is set to `max_steps`
    # too.
    if max_steps is not None:
        params = params.replace(max_steps=max_steps)
    assert params.max_steps is not None
    tasks = _read_benchmark(label, benchmark) if xland else None

    def observe(timestep: Any) -> dict[str, jax.Array]:
        state, tile, colour = timestep.state, *jnp.moveaxis(timestep.observation, -1, 0)
        seen = {
            "image": jnp.concatenate(
                [jax.nn.one_hot(tile, NUM_TILES), jax.nn.one_hot(colour, NUM_COLORS)], -1
            ),
            "direction": jax.nn.one_hot(state.agent.direction, 4),
        }
        if tasks is None:
            return seen
        codes = {"goal": state.goal_encoding, "rules": state.rule_encoding}
        return seen | {key: jax.nn.one_hot(x, CODES).reshape(-1) for key, x in codes.items()}

    def reset(key: jax.Array) -> tuple[PyTree, PyTree]:
        if tasks is None:
            timestep = env.reset(params, key)
        else:
            key, task_key = jax.random.split(key)
            timestep = env.reset(params.replace(ruleset=tasks.sample_ruleset(task_key)), key)
        return observe(timestep), timestep

    def step(
        key: jax.Array, timestep: Any, action: jax.Array
    ) -> tuple[PyTree, PyTree, jax.Array, jax.Array]:
        timestep = env.step(params, timestep, action)
        # A last step at the time limit has a discount of 1.
        return observe(timestep), timestep, timestep.reward, timestep.discount == 0

    return with_episodes(
        label,
        Dynamics(reset, step, Spaces(None, num_actions=env.num_actions(params))),
        max_steps=params.max_steps,
        reset_interval=reset_interval,
    )


def _read_benchmark(label: str, benchmark: str) -> Benchmark:
    try:
        if benchmark in xminigrid.registered_benchmarks():
            return xminigrid.load_benchmark(benchmark)
        return load_benchmark_from_path(benchmark)
    except OSError as error:
        raise ConfigError(
            "env", f"{label}: benchmark={benchmark} cannot be read: {error}"
        ) from None
