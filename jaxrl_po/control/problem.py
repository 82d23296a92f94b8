"""Defines control as a `Problem`: vectorised environments, an unroll, and the critic after it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_po import backend, distributions, masked
from jaxrl_po.backend import Target
from jaxrl_po.config import COUNT, UNIT, check, common, record, static
from jaxrl_po.control import unroll
from jaxrl_po.control.actor import (
    Networks,
    StepRows,
    act_normalized,
    as_problem,
    build_networks,
    require_fit,
)
from jaxrl_po.control.environment import adapt
from jaxrl_po.control.modules import NetworkSettings, choose_modules
from jaxrl_po.control.spaces import Observation, Spaces
from jaxrl_po.control.statistics import Statistics, normalize
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Metrics, Problem, PyTree


@record
class ControlSettings:
    """Sizes and switches of a control problem, as a record for command lines and logs."""

    num_envs: int = common.static(
        64, "environments that run side by side, over all devices", within=COUNT
    )
    num_steps: int = common.static(
        128, "steps of each environment in one iteration", unit="steps", within=COUNT
    )
    normalize_observations: bool = common.static(
        False, "normalise observations by running mean and std, clip ±10"
    )
    scale_rewards: bool = common.static(
        False, "divide rewards by the running std of the rolling discounted return"
    )
    reward_discount: float = static(
        0.99,
        "γ of the rolling return that scales rewards",
        within=UNIT,
        when=("scale_rewards", True),
    )


# Entries of the collector's sharded state: `EnvState`, and the memory of a critic with memory.
ENVIRONMENTS, CRITIC_MEMORY = "environments", "critic_memory"


def make_problem(
    env: Any,
    *,
    num_envs: int = 64,
    num_steps: int = 128,
    env_params: Any = None,
    policy: Any = None,
    critic: Any = None,
    actor_critic: Any = None,
    network: NetworkSettings | None = None,
    normalize_observations: bool = False,
    scale_rewards: bool = False,
    reward_discount: float = 0.99,
    axis_name: str | None = None,
    target: Target | None = None,
) -> Problem:
    """Builds a control problem with `num_envs` environments; episodes continue across iterations.

    Args:
      env: gymnax ≥ 1.0 environment or an environment with the same interface.
      num_envs: number B of environments over all devices.
      num_steps: number T of steps of each environment in one iteration.
      env_params: parameters of the environment; None stands for its defaults.
      policy: Flax module, observation `[E*, …]` to a distribution; None builds the module from
        `network` for the action space. With a `networks.Recurrent` as policy or critic, rows remain
        complete sequences in minibatches.
      critic: Flax module, observation `[E*, …]` to a value `[E*]`; None builds the module from
        `network`.
      actor_critic: Flax module, observation `[E*, …]` to `(distribution, value)`, which replaces
        policy and critic, for a shared torso.
      network: sizes and kinds of the networks that are built; None stands for 64 × 64 tanh
        perceptrons.
      normalize_observations: True to subtract the running mean and divide by the running std (clip
        ±10). The observation statistics are those before the iteration, so that all log-probs of a
        batch belong to the same policy.
      scale_rewards: True to divide rewards by the running std of the rolling discounted return,
        this iteration included, or by a tenth of the return's |mean| if that is more, see
        `advantages.scale_of`.
      reward_discount: discount γ of the rolling return that scales rewards, in [0, 1].
      axis_name: device axis that environments are sharded over, or None.
      target: platform and devices of the compiled program; None stands for `backend.here()`.

    Returns:
      `Problem` of vectorised environments. The metrics `episode_return` (raw reward units) and
      `episode_length` (steps) are means over the episodes that ended in the iteration, with count 0
      if no episode ended. The metric `frac_nonfinite` is the share of steps whose reward or next
      observation is not finite. The metric `frac_one_step` is the share of steps that are a
      complete episode: if `frac_one_step` becomes 1, the environment does not reset itself. The
      function `frac_broken` documents the metrics of steps that violate the spaces.

    Raises:
      ConfigError: a count is below 1, a discount is outside [0, 1], the adapter refuses a space, or
        `actor_critic` is given together with `policy` or `critic`.

    Example:
      >>> import gymnax
      >>> problem = make_problem(gymnax.make("CartPole-v1")[0], num_envs=2, num_steps=3)
      >>> params, collector = problem.init(jax.random.key(0))
      >>> collector, batch = jax.jit(problem.collect)(params, collector, jax.random.key(1))
      >>> batch.inputs.shape, batch.reward.shape
      ((2, 3, 4), (2, 3))
    """
    settings = ControlSettings(
        num_envs=num_envs,
        num_steps=num_steps,
        normalize_observations=normalize_observations,
        scale_rewards=scale_rewards,
        reward_discount=reward_discount,
    )
    check(settings)
    num_envs, num_steps = settings.num_envs, settings.num_steps
    target = target or backend.here()
    kept = settings.normalize_observations, settings.scale_rewards, settings.reward_discount
    statistics = Statistics(*kept, target, axis_name)
    environment = adapt(env, env_params)
    spaces = environment.spaces
    modules = choose_modules(spaces, policy, critic, actor_critic, network, target=target)
    nets = build_networks(modules, spaces)
    require_fit(nets, spaces)

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        network_key, env_key = jax.random.split(key)
        memory, critic_memory = nets.start(num_envs)
        index = jnp.arange(num_envs, dtype=jnp.int32)
        envs = unroll.start(environment, env_key, index, memory)
        collector = statistics.init(spaces.observation, num_envs)
        collector = collector.add(sharded={ENVIRONMENTS: envs})
        first = jax.tree.map(lambda x: x[0], envs.observation)
        return nets.init(network_key, first), with_critic_memory(collector, critic_memory)

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        act = functools.partial(act_normalized, nets, params, collector)
        before: Any = collector.sharded[ENVIRONMENTS]
        envs, trajectory = unroll.unroll(
            environment, act, before, key, num_steps=num_steps, target=target
        )
        collector, batch = rollout_batch(nets, statistics, spaces, params, collector, trajectory)
        return collector.add(sharded={ENVIRONMENTS: envs}), batch

    return as_problem(nets, init, collect, target, spaces=spaces, steps=num_envs * num_steps)


def rollout_batch(
    nets: Networks,
    statistics: Statistics,
    spaces: Spaces,
    params: ActorCritic,
    collector: CollectorState,
    trajectory: unroll.EnvTrajectory,
) -> tuple[CollectorState, Batch]:
    """Computes the batch of a trajectory, with values of the critic and updated running statistics.

    The argument `collector` is the state before the trajectory; the returned state excludes the
    environments.
    """
    transition = trajectory.transition
    ended = transition.terminated | transition.truncated
    seen = normalize(collector, trajectory.observation)
    final = normalize(collector, transition.final_observation)
    # If an episode begins at the first step, the memories before the step are already zero.
    begins = jnp.pad(ended[:, :-1], ((0, 0), (1, 0)))
    before: Any = collector.sharded[ENVIRONMENTS]
    critic_memory = collector.sharded.get(CRITIC_MEMORY, ())
    steps = StepRows(seen, begins, before.memory, critic_memory)
    after, value, next_value = nets.values(params, steps, final)
    reward, frac_nonfinite = mark_nonfinite(
        transition.final_observation, transition.reward, transition.terminated
    )
    collector, reward = statistics.update(
        collector.remove(ENVIRONMENTS, CRITIC_MEMORY), trajectory.observation, reward, ended
    )
    batch = Batch(
        inputs=nets.inputs(steps),
        action=trajectory.action,
        log_prob=trajectory.distribution.log_prob(trajectory.action),
        reward=reward,
        value=value,
        next_value=next_value,
        terminated=transition.terminated,
        truncated=transition.truncated,
        mask=jnp.ones(reward.shape, bool),
        score=transition.reward.sum(axis=1, keepdims=True),
        metrics={
            "episode_return": masked.total(trajectory.episode_return, ended),
            "episode_length": masked.total(trajectory.episode_length, ended),
            "frac_one_step": masked.total(ended & (trajectory.episode_length == 1.0)),
            "frac_nonfinite": frac_nonfinite,
            **frac_broken(spaces, trajectory.observation),
        },
    )
    after = unroll.forget(after, ended[:, -1])
    return with_critic_memory(collector, after), batch


def with_critic_memory(collector: CollectorState, memory: PyTree) -> CollectorState:
    """Adds the critic's memory to the collector's state, if the critic has one."""
    if not jax.tree.leaves(memory):
        return collector
    return collector.add(sharded={CRITIC_MEMORY: memory})


def mark_nonfinite(
    final_observation: PyTree,
    reward: jax.Array,
    terminated: jax.Array,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, Mean]:
    """Returns rewards `[B, T]`, NaN before a non-finite observation, and the share of such steps.

    The NaN makes the learner skip the update; without it normalisation would clip the observation
    to a finite number. Observations of terminal states, which are not used, and masked steps are
    ignored. The share also counts rewards that are not finite.
    """
    seen = jnp.ones(reward.shape, bool)
    for leaf in jax.tree.leaves(final_observation):
        seen &= jnp.isfinite(leaf).reshape(*reward.shape, -1).all(axis=-1)
    used = ~terminated if mask is None else ~terminated & mask
    share = masked.total(~(seen & jnp.isfinite(reward)), mask)
    return jnp.where(seen | ~used, reward, jnp.nan), share


def frac_broken(spaces: Spaces, observation: PyTree, mask: jax.Array | None = None) -> Metrics:
    """Computes the shares of steps whose observation violates the spaces.

    Args:
      spaces: spaces of the environment, see `Spaces`.
      observation: raw observations, leaves `[B, T, …]`.
      mask: `[B, T]`, bool, True for steps that count; None for all steps.

    Returns:
      Metric `frac_no_action`, steps without a legal action, if the environment has an action mask;
      `frac_out_of_range`, steps with a discrete observation outside its range, which becomes zeros,
      if the environment has discrete observations.
    """
    metrics: Metrics = {}
    if isinstance(observation, Observation) and observation.legal is not None:
        sizes = spaces.choices or (spaces.num_actions,)
        some = distributions.possible(observation.legal, sizes).all(axis=-1)
        metrics["frac_no_action"] = masked.total(~some, mask)
    if classes := spaces.classes(observation):
        steps = classes[0].shape[:2]
        known = (x.any(axis=-1).reshape(*steps, -1).all(axis=-1) for x in classes)
        metrics["frac_out_of_range"] = masked.total(~functools.reduce(jnp.logical_and, known), mask)
    return metrics
