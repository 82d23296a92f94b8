"""Control as a `Problem`: vectorised environments, an unroll, and the critic after it."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_po import masked
from jaxrl_po.config import COUNT, UNIT, check, record, require_effect, static
from jaxrl_po.control import unroll
from jaxrl_po.control.environment import adapt
from jaxrl_po.control.modules import (
    NetworkSettings,
    build_networks,
    choose_modules,
    default_modules,
)
from jaxrl_po.control.statistics import Statistics, normalize
from jaxrl_po.distributions import Distribution
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Problem, Samples


@record
class Settings(NetworkSettings):
    """Sizes and switches of a control problem, as a record for command lines and logs."""

    num_envs: int = static(64, "environments that run side by side, over all devices", within=COUNT)
    num_steps: int = static(
        128, "steps of each environment in one iteration", unit="steps", within=COUNT
    )
    shared_torso: bool = static(
        False,
        "actor and critic are heads on one body, which rules out a trust region on the policy",
    )
    normalize_observations: bool = static(
        False, "normalise observations by running mean and std, clip ±10"
    )
    scale_rewards: bool = static(
        False, "divide rewards by the running std of the rolling discounted return"
    )
    reward_discount: float = static(
        0.99, "γ of the rolling return that scales rewards", within=UNIT
    )

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range or without effect."""
        super().validate()
        require_effect(self, "reward_discount", self.scale_rewards, "scale_rewards is on")


ENVIRONMENTS = "environments"  # entry of the collector's sharded state: `EnvState`


def from_settings(env: Any, settings: Settings, *, axis_name: str | None = None) -> Problem:
    """`make_problem` with its arguments taken from a settings record."""
    settings.validate()
    sizes = settings.sizes()
    shared_torso = sizes.pop("shared_torso")  # the one field that shapes the networks
    modules = default_modules(adapt(env).spaces, settings, shared_torso=shared_torso)
    return make_problem(env, **sizes, **modules, axis_name=axis_name)


def make_problem(
    env: Any,
    *,
    num_envs: int = 64,
    num_steps: int = 128,
    env_params: Any = None,
    policy: Any = None,
    critic: Any = None,
    actor_critic: Any = None,
    normalize_observations: bool = False,
    scale_rewards: bool = False,
    reward_discount: float = 0.99,
    axis_name: str | None = None,
) -> Problem:
    """A control problem: `num_envs` environments whose episodes continue across iterations.

    Args:
      env: a gymnax ≥ 1.0 environment or one with the same interface.
      num_envs: B, environments over all devices.
      num_steps: T, steps of each environment in one iteration.
      env_params: parameters of the environment; None takes its defaults.
      policy: Flax module, observation `[E*, …]` to a distribution; None builds a 64 × 64 tanh
        perceptron for the action space.
      critic: Flax module, observation `[E*, …]` to a value `[E*]`; None builds a 64 × 64 tanh
        perceptron.
      actor_critic: Flax module, observation `[E*, …]` to `(distribution, value)`, in place of both,
        for a shared torso.
      normalize_observations: subtract the running mean and divide by the running std (clip ±10).
        The statistics are those before the iteration, so that every log-prob of a batch is of the
        same policy.
      scale_rewards: divide rewards by the running std of the rolling discounted return, this
        iteration's included, or by a tenth of its |mean| where that is more, see
        `advantages.scale_of`.
      reward_discount: γ of that rolling return, in [0, 1].
      axis_name: device axis over which environments are sharded, or None.

    Returns:
      The `Problem`. Its metrics `episode_return` (raw reward units) and `episode_length` (steps)
      are means over the episodes that ended in the iteration, with count 0 when none did.

    Raises:
      ConfigError: counts below 1, a discount outside [0, 1], spaces that the adapter refuses, or
        `actor_critic` together with `policy` or `critic`.

    Example:
      >>> import gymnax
      >>> problem = make_problem(gymnax.make("CartPole-v1")[0], num_envs=2, num_steps=3)
      >>> params, collector = problem.init(jax.random.key(0))
      >>> collector, batch = jax.jit(problem.collect)(params, collector, jax.random.key(1))
      >>> batch.inputs.shape, batch.reward.shape
      ((2, 3, 4), (2, 3))
    """
    check(Settings(num_envs=num_envs, num_steps=num_steps, reward_discount=reward_discount))
    statistics = Statistics(normalize_observations, scale_rewards, reward_discount, axis_name)
    environment = adapt(env, env_params)
    spaces = environment.spaces
    nets = build_networks(
        choose_modules(spaces, policy, critic, actor_critic), len(spaces.observation_shape)
    )

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        network_key, env_key = jax.random.split(key)
        envs = unroll.start(environment, env_key, jnp.arange(num_envs, dtype=jnp.int32))
        collector = statistics.init(spaces.observation_shape, num_envs)
        collector = collector.add(sharded={ENVIRONMENTS: envs})
        return nets.init(network_key, envs.observation[0]), collector

    def apply(params: ActorCritic, inputs: jax.Array) -> tuple[Distribution, jax.Array]:
        return nets.policy(params, inputs), nets.value(params, inputs)

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        def act(observation: jax.Array) -> Distribution:
            return nets.policy(params, normalize(collector, observation))

        envs, trajectory = unroll.unroll(
            environment, act, collector.sharded[ENVIRONMENTS], key, num_steps=num_steps
        )
        transition = trajectory.transition
        ended = transition.terminated | transition.truncated
        inputs = normalize(collector, trajectory.observation)
        final_inputs = normalize(collector, transition.final_observation)
        collector, reward = statistics.update(
            collector.remove(ENVIRONMENTS), trajectory.observation, transition.reward, ended
        )

        batch = Batch(
            inputs=inputs,
            action=trajectory.action,
            log_prob=trajectory.distribution.log_prob(trajectory.action),
            reward=reward,
            value=nets.value(params, inputs),
            next_value=nets.value(params, final_inputs),
            terminated=transition.terminated,
            truncated=transition.truncated,
            mask=jnp.ones(reward.shape, bool),
            score=transition.reward.sum(axis=1, keepdims=True),
            metrics={
                "episode_return": masked.total(trajectory.episode_return, ended),
                "episode_length": masked.total(trajectory.episode_length, ended),
            },
        )
        return collector.add(sharded={ENVIRONMENTS: envs}), batch

    return Problem(init, collect, apply, merge_time, truncated_is_overlong=False)


def merge_time(samples: Samples) -> Samples:
    """Leaves `[B, T, …]` to `[B·T, …]`: a control policy does not mix steps."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)
