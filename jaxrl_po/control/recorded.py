"""A control problem whose environments run outside the program: its rollouts are recordings.

`act` is compiled alone and called once a step; the recording of an iteration is then put into the
collector's state, from which `collect` makes the batch.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po import masked
from jaxrl_po.config import ConfigError
from jaxrl_po.control import unroll
from jaxrl_po.control.environment import Spaces
from jaxrl_po.control.modules import build_networks, default_modules
from jaxrl_po.control.problem import Settings, merge_time
from jaxrl_po.control.statistics import Statistics, normalize
from jaxrl_po.distributions import Distribution
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Problem, TrainState

RECORDING = "recording"  # entry of the collector's sharded state: `Recording`


class Recording(NamedTuple):
    """T steps of each of B environments, and the observation after them.

    After an episode's end the environment takes one step that ignores its action and returns the
    first observation of the next episode. So the observation after a step is always the true one,
    also where it ended an episode, and the step that ignores its action is masked.

    Attributes:
      observation: `[B, T + 1, …]`, raw; entry t is what the policy saw at step t.
      action: `[B, T, …]`, as sampled.
      reward: `[B, T]`, 0 where masked.
      terminated: `[B, T]`, bool, whether the episode ended by itself.
      truncated: `[B, T]`, bool, whether the time limit cut it.
      mask: `[B, T]`, bool, False where the environment ignored the action.
      episode_return: `[B, T]`, undiscounted return of the episode, this step included.
      episode_length: `[B, T]`, steps of the episode, this one included.
    """

    observation: jax.Array
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    mask: jax.Array
    episode_return: jax.Array
    episode_length: jax.Array


def with_recording(state: TrainState, recording: Recording) -> TrainState:
    """The state with what the next `collect` takes its batch from."""
    return state._replace(collector=state.collector.add(sharded={RECORDING: recording}))


def recorded_from_settings(
    spaces: Spaces, settings: Settings, *, axis_name: str | None = None
) -> Problem:
    """A problem that reads its rollouts from `with_recording`.

    Args:
      spaces: of the environment.
      settings: networks and statistics; the sizes are those of the recording.
      axis_name: device axis over which environments are sharded, or None.

    Returns:
      The `Problem`. Its metrics are those of `make_problem`, and `frac_nonfinite`: the share of the
      steps whose reward or next observation is not finite.

    Raises:
      ConfigError: for a setting out of its range or without effect.
    """
    settings.validate()
    statistics = Statistics(
        settings.normalize_observations, settings.scale_rewards, settings.reward_discount, axis_name
    )
    nets = build_networks(
        default_modules(spaces, settings, shared_torso=settings.shared_torso),
        len(spaces.observation_shape),
    )

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        params = nets.init(key, jnp.zeros(spaces.observation_shape))
        return params, statistics.init(spaces.observation_shape, settings.num_envs)

    def apply(params: ActorCritic, inputs: jax.Array) -> tuple[Distribution, jax.Array]:
        return nets.policy(params, inputs), nets.value(params, inputs)

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        recording: Any = collector.sharded.get(RECORDING)
        if recording is None:
            raise ConfigError(
                "recording must be put into the state before each iteration: the environments of "
                "this problem run outside the program"
            )
        collector = collector.remove(RECORDING)
        observation = spaces.observe(recording.observation)
        seen = normalize(collector, observation)
        value = nets.value(params, seen)
        mask, ended = recording.mask, recording.terminated | recording.truncated
        # A masked slot shows the final observation of an episode, which the policy never acts on.
        inputs = masked.zero(seen[:, :-1], mask)
        finite = jnp.isfinite(observation[:, 1:]).reshape(*mask.shape, -1).all(axis=-1)
        # An observation that is not finite spoils its update, though normalising would clip it;
        # not that of a terminal state, whose value is not used.
        reward = jnp.where(finite | recording.terminated | ~mask, recording.reward, jnp.nan)
        collector, reward = statistics.update(collector, observation[:, :-1], reward, ended, mask)
        batch = Batch(
            inputs=inputs,
            action=recording.action,
            log_prob=nets.policy(params, inputs).log_prob(recording.action),
            reward=reward,
            value=value[:, :-1],
            next_value=value[:, 1:],
            terminated=recording.terminated,
            truncated=recording.truncated,
            mask=mask,
            score=recording.reward.sum(axis=1, keepdims=True),
            metrics={
                "episode_return": masked.total(recording.episode_return, ended),
                "episode_length": masked.total(recording.episode_length, ended),
                "frac_nonfinite": masked.total(
                    ~(finite & jnp.isfinite(recording.reward)) * 1.0, mask
                ),
            },
        )
        return collector, batch

    return Problem(init, collect, apply, merge_time, truncated_is_overlong=False)


def act(
    problem: Problem,
    spaces: Spaces,
    state: TrainState,
    observation: jax.Array,
    t: jax.Array,
    *,
    greedy: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The policy's actions, to be recorded, and those that the environments play.

    Args:
      problem: its `apply` is the policy.
      spaces: of the environment.
      state: of which the policy, the observation statistics and the key are read. The key is split
        as `Learner.sample` splits it; step t of environment b uses `fold_in(fold_in(key, b), t)`.
      observation: `[B, …]`, raw.
      t: `[]`, int32, step of the iteration.
      greedy: take the mode; no key is used.

    Returns:
      Actions `[B, …]` as sampled, and in the units of the environment.
    """
    inputs = normalize(state.collector, spaces.observe(observation))
    distribution, _ = problem.apply(state.params._replace(value=None), inputs)
    if greedy:
        action = distribution.mode()
    else:
        _, key = jax.random.split(state.key)
        keys = unroll.row_keys(key, jnp.arange(observation.shape[0], dtype=jnp.int32))
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, t)
        action = jax.vmap(lambda one, key: one.sample(key))(distribution, keys)
    return action, jax.vmap(spaces.to_action)(action)
