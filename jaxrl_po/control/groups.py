"""Control in groups, as in language: a prompt is an initial state, a completion is an episode."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_po import backend, masked
from jaxrl_po.advantages import informative
from jaxrl_po.backend import Target
from jaxrl_po.config import COUNT, check, common, record
from jaxrl_po.control import unroll
from jaxrl_po.control.actor import Networks, StepRows, as_problem, build_networks, require_fit
from jaxrl_po.control.environment import adapt
from jaxrl_po.control.modules import NetworkSettings, policy_module
from jaxrl_po.control.problem import frac_broken
from jaxrl_po.control.spaces import Spaces
from jaxrl_po.group_advantages import outcomes
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Problem, PyTree

# Sharded entry of the collector's state: `[P]`, int32, the prompt's index over all devices.
PROMPT_NUMBER = "prompt_number"


@record
class GroupSettings:
    """Sizes of a control problem in groups."""

    num_prompts: int = common.static(
        16, "initial states per iteration, over all devices", within=COUNT
    )
    group_size: int = common.static(8, "episodes from each initial state", within=COUNT)
    num_steps: int = common.static(500, "maximum steps of an episode", unit="steps", within=COUNT)


def make_groups(
    env: Any,
    *,
    num_prompts: int = 16,
    group_size: int = 8,
    num_steps: int = 500,
    env_params: Any = None,
    policy: Any = None,
    critic: Any = None,
    network: NetworkSettings | None = None,
    target: Target | None = None,
) -> Problem:
    """Builds a control problem in groups: P fresh initial states per iteration, G episodes each.

    Args:
      env: gymnax ≥ 1.0 environment or an environment with the same interface.
      num_prompts: number P of initial states over all devices.
      group_size: number G of episodes from each initial state.
      num_steps: time limit T; longer episodes are truncated.
      env_params: parameters of the environment; None stands for its defaults.
      policy: Flax module, observation to a distribution; None builds the module from `network`. The
        policy may be a `networks.Recurrent`.
      critic: Flax module, observation to a value, or None for a problem without critic, whose
        values are zeros.
      network: size and kind of the policy that is built; None stands for a 64 × 64 tanh perceptron.
      target: platform and devices of the compiled program; None stands for `backend.here()`.

    Returns:
      `Problem` of episodes in groups. The field `score` `[P, G]` is the undiscounted return of each
      episode; slots after an episode's end are masked. Metric `dead_groups` is the share of groups
      whose scores are all equal.

    Raises:
      ConfigError: an argument is invalid; the message names the argument.

    Example:
      >>> import gymnax
      >>> env, _ = gymnax.make("CartPole-v1")
      >>> problem = make_groups(env, num_prompts=2, group_size=3, num_steps=20)
      >>> _, batch = jax.jit(problem.collect)(*problem.init(jax.random.key(0)), jax.random.key(1))
      >>> batch.inputs.shape, batch.score.shape
      ((6, 20, 4), (2, 3))
      >>> bool((batch.score == batch.mask.sum(1).reshape(2, 3)).all())  # a reward of 1 per step
      True
    """
    sizes = GroupSettings(num_prompts=num_prompts, group_size=group_size, num_steps=num_steps)
    check(sizes)
    num_prompts, group_size, num_steps = sizes.num_prompts, sizes.group_size, sizes.num_steps
    environment = adapt(env, env_params)
    target = target or backend.here()
    policy = policy_module(environment.spaces, network, policy, target=target)
    nets = build_networks({"policy": policy, "critic": critic}, environment.spaces)
    require_fit(nets, environment.spaces)

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        network_key, env_key = jax.random.split(key)
        observation, _ = environment.reset(env_key)
        return nets.init(network_key, observation), CollectorState(
            {PROMPT_NUMBER: jnp.arange(num_prompts, dtype=jnp.int32)}
        )

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        reset_key, step_key = jax.random.split(key)
        prompt_number = collector.sharded[PROMPT_NUMBER]
        prompts = unroll.start(environment, reset_key, prompt_number)
        members = jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), prompts)
        # Members of a group share only the initial state: each member has another index, and
        # therefore other noise.
        index = members.number * group_size + jnp.tile(
            jnp.arange(group_size, dtype=jnp.int32), prompt_number.shape[0]
        )
        memories = nets.start(index.shape[0])
        _, trajectory = unroll.unroll(
            environment,
            functools.partial(nets.act, params),
            members._replace(number=index, memory=memories[0]),
            step_key,
            num_steps=num_steps,
            target=target,
        )
        batch = group_batch(nets, environment.spaces, params, trajectory, memories, group_size)
        return collector, batch

    steps = num_prompts * group_size * num_steps
    return as_problem(nets, init, collect, target, spaces=environment.spaces, steps=steps)


def group_batch(
    nets: Networks,
    spaces: Spaces,
    params: ActorCritic,
    trajectory: unroll.EnvTrajectory,
    memories: tuple[PyTree, PyTree],
    group_size: int,
) -> Batch:
    """Returns the first episode of each row, with the score of its group.

    Args:
      nets: actor and critic as functions.
      spaces: spaces of the environment.
      params: parameters that the trajectory was sampled with.
      trajectory: steps of environments, which continue after their first episode; the mask excludes
        later episodes.
      memories: memories of actor and critic before the first step.
      group_size: number G of rows per group.
    """
    transition = trajectory.transition
    ended = transition.terminated | transition.truncated
    mask = unroll.until_first(ended)
    num_steps = mask.shape[1]
    paid = masked.zero(transition.reward, mask).reshape(-1, group_size, num_steps)
    score = jax.vmap(outcomes)(paid)
    is_last = jnp.arange(num_steps)[None, :] == num_steps - 1
    truncated = transition.truncated | (is_last & ~transition.terminated)
    metrics = {
        "episode_return": masked.total(score),
        "episode_length": masked.total(mask.sum(1)),
        "truncated": masked.total(jnp.any(truncated & mask, axis=1)),
        **frac_broken(spaces, trajectory.observation, mask),
    }
    if group_size > 1:
        metrics["dead_groups"] = masked.total(~informative(score))
    # Slots after a row's end are masked, so no episode begins within a row.
    steps = StepRows(trajectory.observation, jnp.zeros(mask.shape, bool), *memories)
    _, value, next_value = nets.values(params, steps, transition.final_observation)
    shown = jax.tree.map(lambda x: masked.zero(x, mask), trajectory.observation)
    return Batch(
        inputs=nets.inputs(steps._replace(observation=shown)),
        action=trajectory.action,
        log_prob=trajectory.distribution.log_prob(trajectory.action),
        reward=transition.reward,
        value=value,
        next_value=next_value,
        terminated=transition.terminated,
        truncated=truncated,
        mask=mask,
        score=score,
        metrics=metrics,
    )
