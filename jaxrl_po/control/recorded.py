"""Builds a control problem whose environments run on the host: its rollouts are recordings.

The host calls the compiled `act` once per step and puts the recording of an iteration into the
collector's state. The function `collect` builds the batch from the recording.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po import backend, masked
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError, check
from jaxrl_po.control import unroll
from jaxrl_po.control.actor import (
    StepRows,
    actor_of,
    as_problem,
    build_networks,
    play,
    require_fit,
)
from jaxrl_po.control.modules import NetworkSettings, choose_modules
from jaxrl_po.control.problem import (
    CRITIC_MEMORY,
    ControlSettings,
    frac_broken,
    mark_nonfinite,
    with_critic_memory,
)
from jaxrl_po.control.spaces import Spaces
from jaxrl_po.control.statistics import Statistics, normalize
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Problem, PyTree, TrainState

RECORDING = "recording"  # entry of the collector's sharded state that holds the `StepRecording`


class StepRecording(NamedTuple):
    """Recording of T steps of each of B environments, and the observation after them.

    After an episode's end the environment takes one step that ignores its action and returns the
    first observation of the next episode. The observation after a step is therefore always the true
    next observation, also if the step ended an episode, and the step that ignores its action is
    masked.

    Attributes:
      observation: `[B, T + 1, …]`, raw observations; entry t is the policy's observation at step t.
      action: `[B, T, …]`, actions as sampled.
      reward: `[B, T]`, rewards, 0 where masked.
      terminated: `[B, T]`, bool, True if the episode ended by itself.
      truncated: `[B, T]`, bool, True if the time limit cut the episode.
      mask: `[B, T]`, bool, False where the environment ignored the action.
      episode_return: `[B, T]`, undiscounted return of the episode, including the current step.
      episode_length: `[B, T]`, steps of the episode, including the current step.
      memory: policy's memory before the first step; () without memory.
    """

    observation: jax.Array
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    mask: jax.Array
    episode_return: jax.Array
    episode_length: jax.Array
    memory: PyTree = ()


def with_recording(state: TrainState, recording: StepRecording) -> TrainState:
    """Stores the recording in the state, from which the next `collect` builds its batch."""
    return state._replace(collector=state.collector.add(sharded={RECORDING: recording}))


def recorded_from_settings(
    spaces: Spaces,
    settings: ControlSettings,
    network: NetworkSettings | None = None,
    *,
    axis_name: str | None = None,
    policy: Any = None,
    critic: Any = None,
    actor_critic: Any = None,
    target: Target | None = None,
) -> Problem:
    """Builds a problem that takes its rollouts from the state of `with_recording`.

    Args:
      spaces: spaces of the environment.
      settings: statistics to maintain; sizes follow from the recording.
      network: sizes and kinds of the networks.
      axis_name: device axis that environments are sharded over, or None.
      policy: Flax module that replaces the policy described by `network`, or None.
      critic: Flax module that replaces the critic described by `network`, or None.
      actor_critic: Flax module that replaces policy and critic, as in `make_problem`.
      target: platform and devices of the compiled program; None stands for `backend.here()`.

    Returns:
      `Problem` with the metrics of `make_problem`.

    Raises:
      ConfigError: a setting is out of its range or has no effect.
    """
    check(settings)
    target = target or backend.here()
    kept = settings.normalize_observations, settings.scale_rewards, settings.reward_discount
    statistics = Statistics(*kept, target, axis_name)
    modules = choose_modules(spaces, policy, critic, actor_critic, network, target=target)
    nets = build_networks(modules, spaces)
    require_fit(nets, spaces)

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        seen = spaces.observation
        _, critic_memory = nets.start(settings.num_envs)
        collector = with_critic_memory(statistics.init(seen, settings.num_envs), critic_memory)
        return nets.init(key, jnp.zeros(seen.shape, seen.dtype)), collector

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        recording: Any = collector.sharded.get(RECORDING)
        if recording is None:
            raise ConfigError(
                "recording",
                "must be put into the state before each iteration: the environments of this "
                "problem run outside the program",
            )
        critic_memory = collector.sharded.get(CRITIC_MEMORY, ())
        collector = collector.remove(RECORDING, CRITIC_MEMORY)
        observation = spaces.observe(recording.observation)
        seen = normalize(collector, observation)
        mask, ended = recording.mask, recording.terminated | recording.truncated
        # A masked slot holds the final observation of an episode, on which the policy never acts.
        inputs = masked.zero(seen[:, :-1], mask)
        # An episode begins after a masked slot; before the first episode, the memories are zero.
        begins = jnp.pad(~mask[:, :-1], ((0, 0), (1, 0)))
        steps = StepRows(seen, begins, recording.memory, critic_memory)
        after, value, next_value = nets.values(params, steps, None)
        replayed = nets.inputs(steps._replace(observation=inputs))
        reward, frac_nonfinite = mark_nonfinite(
            observation[:, 1:], recording.reward, recording.terminated, mask
        )
        collector, reward = statistics.update(collector, observation[:, :-1], reward, ended, mask)
        batch = Batch(
            inputs=replayed,
            action=recording.action,
            log_prob=nets.apply(params, replayed)[0].log_prob(recording.action),
            reward=reward,
            value=value,
            next_value=next_value,
            terminated=recording.terminated,
            truncated=recording.truncated,
            mask=mask,
            score=recording.reward.sum(axis=1, keepdims=True),
            metrics={
                "episode_return": masked.total(recording.episode_return, ended),
                "episode_length": masked.total(recording.episode_length, ended),
                "frac_one_step": masked.total(ended & (recording.episode_length == 1.0), mask),
                "frac_nonfinite": frac_nonfinite,
                **frac_broken(spaces, observation[:, :-1], mask),
            },
        )
        after = unroll.forget(after, ~mask[:, -1])
        return with_critic_memory(collector, after), batch

    steps = settings.num_envs * settings.num_steps
    return as_problem(nets, init, collect, target, spaces=spaces, steps=steps)


def act(
    problem: Problem,
    spaces: Spaces,
    state: TrainState,
    memory: PyTree,
    observation: jax.Array,
    begins: jax.Array,
    t: jax.Array,
    *,
    greedy: bool = False,
) -> tuple[PyTree, jax.Array, jax.Array]:
    """Computes the policy's actions, in the recorded form and in the form that environments take.

    Args:
      problem: problem whose policy acts.
      spaces: spaces of the environment.
      state: state with the policy's parameters, the observation statistics and the key. The key is
        split as `Learner.sample` splits it; step t of environment b uses `fold_in(fold_in(key, b),
        t)`.
      memory: policy's memory, leaves `[B, …]`.
      observation: `[B, …]`, raw observations.
      begins: `[B]`, bool, True if an episode begins, which resets the memory.
      t: `[]`, int32, step of the iteration.
      greedy: True to take the mode, which does not use a key.

    Returns:
      Next memory, actions `[B, …]` as sampled, and actions in the units of the environment.
    """
    memory, distribution = actor_of(problem).act(
        state.params, state.collector, unroll.forget(memory, begins), spaces.observe(observation)
    )
    _, key = jax.random.split(state.key)
    keys = unroll.row_keys(key, jnp.arange(observation.shape[0], dtype=jnp.int32))
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, t)
    action = unroll.choose_actions(distribution, keys, greedy=greedy)
    return memory, action, jax.vmap(spaces.to_action)(play(distribution, action))
