"""Rollouts in host environments: a loop around one compiled `act` for all seeds at once."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.control import recorded
from jaxrl_po.control.actor import actor_of
from jaxrl_po.control.problem import CRITIC_MEMORY
from jaxrl_po.control.recorded import StepRecording
from jaxrl_po.control.statistics import ROLLING_RETURN
from jaxrl_po.run.devices.seeds import STATE_AXES, typed_shape
from jaxrl_po.run.host.vector_envs import Array, Pool, Source
from jaxrl_po.types import Metrics, Problem, PyTree, TrainState

# Replacements of a seed's index for episodes of evaluations during and after the run.
EVALUATION, LATER = 2**31, 2**31 + 1


class PoolProblem(NamedTuple):
    """A control problem of a single seed, with environments on the host.

    Attributes:
      source: source of the seed's environments.
      problem: problem that learns from recordings, see `control.recorded_from_settings`.
      num_envs: number B of environments per seed.
      num_steps: number T of steps of each environment in one iteration.
      num_episodes: number of greedy episodes per seed in an evaluation.
    """

    source: Source
    problem: Problem
    num_envs: int
    num_steps: int
    num_episodes: int

    def open(self, base_seed: int, seeds: Sequence[int]) -> "PoolRollouts":
        """Returns the `PoolRollouts` that record iterations of this problem."""
        return PoolRollouts(self, base_seed, seeds)


class Episodes(NamedTuple):
    """Running episodes, `[S, B, …]`.

    Attributes:
      observation: current raw observation.
      was_over: bool, whether the last step ended an episode, so that the next step ignores its
        action.
      begins: bool, whether the last step ignored its action, so that the next begins an episode.
      memory: memory of the policy, leaves `[S, B, …]`.
      total: undiscounted return of the episode so far.
      length: number of steps of the episode so far.
    """

    observation: Array
    was_over: Array
    begins: Array
    memory: Any
    total: Array
    length: Array


class PoolRollouts:
    """Records iterations and plays evaluation episodes, for all seeds in one pool.

    The environments draw their own random numbers from the base seed, the index of the seed, the
    index of the environment and the iteration at which the pool was opened. The states of the
    environments cannot be saved: a resumed run starts new episodes.

    Args:
      host: problem of a single seed with its environments, see `PoolProblem`.
      base_seed: seed of the run.
      seeds: seed index of each row of the stacked training state.
    """

    def __init__(self, host: PoolProblem, base_seed: int, seeds: Sequence[int]):
        self._host, self._base, self._seeds = host, base_seed, list(seeds)
        self._pool: Pool | None = None
        self._episodes: Episodes | None = None
        self._act, self._act_greedily = (_compiled_act(host, greedy) for greedy in (False, True))

    def close(self) -> None:
        """Closes the pool of environments."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    @property
    def examples(self) -> None:
        """Returns None, since control problems have no readable examples."""
        return None

    def metrics(self, seconds: float) -> Metrics:
        """Returns an empty dict, since `collect` computes all metrics."""
        del seconds
        return {}

    def with_recording(self, state: TrainState, recording: StepRecording) -> TrainState:
        """Adds a recording to the training state with `recorded.with_recording`."""
        return recorded.with_recording(state, recording)

    def recording(self) -> StepRecording:
        """Returns the shapes and dtypes of a recording of steps, `[S, B, …]`."""
        host, spaces = self._host, self._host.source.spaces
        rows = len(self._seeds), host.num_envs
        steps = *rows, host.num_steps
        seen = () if np.dtype(host.source.dtype).kind == "i" else spaces.observation.shape
        number, flag = typed_shape(steps, np.float32), typed_shape(steps, np.bool_)
        return StepRecording(
            observation=typed_shape((*rows, host.num_steps + 1, *seen), host.source.dtype),
            action=typed_shape((*steps, *spaces.action.shape), spaces.action.dtype),
            reward=number,
            terminated=flag,
            truncated=flag,
            mask=flag,
            episode_return=number,
            episode_length=number,
            memory=jax.eval_shape(lambda: self._start(host.num_envs)),
        )

    def compile(self, like: TrainState) -> None:
        """Compiles the acting programs by calls on zeros; `like` has the shapes of the state."""
        keys = jax.random.split(jax.random.key(0), len(self._seeds))
        zeros: TrainState = jax.tree.map(
            lambda x: keys if x.dtype == keys.dtype else jnp.zeros(x.shape, x.dtype), like
        )
        policy = self._policy(zeros)
        seen = self.recording().observation
        shape = seen.shape[:2] + seen.shape[3:]
        for act, envs in (self._act, shape[1]), (self._act_greedily, self._host.num_episodes):
            observation = np.zeros((shape[0], envs, *shape[2:]), seen.dtype)
            begins = np.zeros((shape[0], envs), bool)
            jax.block_until_ready(act(policy, self._start(envs), observation, begins, np.int32(0)))

    def record(
        self, state: TrainState, report: Callable[[str], None]
    ) -> tuple[TrainState, StepRecording]:
        """Plays the steps of one iteration in all environments.

        Args:
          state: training state stacked over seeds.
          report: `(line) -> None`, called with lines for the user.

        Returns:
          The training state and the recording. If this call opened the pool, the state's rolling
          returns start from 0.

        Raises:
          PoolError: an environment raised an error or died.
        """
        if self._pool is None:
            state = self._begin(state, report)
        assert self._pool is not None
        assert self._episodes is not None
        # The recording gets new arrays: on the CPU, the last program may still read the old arrays.
        made: StepRecording = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.recording())
        policy, rows = self._policy(state), made.reward.shape[:2]
        seen, was_over, begins, memory, total, length = self._episodes
        memory = jax.tree.map(lambda x: _zero(x, begins), memory)
        made = made._replace(memory=jax.tree.map(np.asarray, memory))
        made.observation[:, :, 0] = seen
        for t in range(made.reward.shape[2]):
            memory, action, played = self._act(policy, memory, seen, begins, np.int32(t))
            stepped = self._pool.step(_to_play(played))
            seen = self._by_seed(stepped.observation)
            reward, terminated, truncated = (x.reshape(rows) for x in stepped[1:])
            mask = ~was_over
            total, length = total + np.where(mask, reward, 0.0), length + mask
            made.action[:, :, t] = action
            made.observation[:, :, t + 1] = seen
            made.reward[:, :, t] = np.where(mask, reward, 0.0)
            made.terminated[:, :, t] = terminated & mask
            made.truncated[:, :, t] = truncated & ~terminated & mask
            made.mask[:, :, t] = mask
            made.episode_return[:, :, t], made.episode_length[:, :, t] = total, length
            begins, was_over = ~mask, (terminated | truncated) & mask
            total, length = np.where(was_over, 0.0, total), np.where(was_over, 0.0, length)
        self._episodes = Episodes(seen, was_over, begins, memory, total, length)
        return state, made

    def evaluate(self, state: TrainState, later_seed: int | None = None) -> dict[str, Array]:
        """Plays greedy episodes, each in a separate environment; returns and lengths are `[S, E]`.

        Args:
          state: training state stacked over seeds.
          later_seed: random seed of the episodes of an evaluation after the run; None for the
            evaluations of the run itself. All seeds of the run play the same episodes.

        Raises:
          PoolError: an environment raised an error or died.
        """
        drawn = (self._base, EVALUATION) if later_seed is None else (later_seed, LATER)
        rows = len(self._seeds), self._host.num_episodes
        of_episodes = [seed_of(*drawn, episode) for episode in range(rows[1])]
        pool = self._host.source.open(of_episodes * rows[0])
        policy = self._policy(state)
        total, length, alive = np.zeros(rows), np.zeros(rows), np.ones(rows, bool)
        memory, begins = self._start(rows[1]), np.zeros(rows, bool)
        try:
            seen = pool.reset()
            while alive.any():
                memory, _, played = self._act_greedily(
                    policy, memory, self._by_seed(seen), begins, np.int32(0)
                )
                seen, reward, terminated, truncated = pool.step(_to_play(played))
                total += np.where(alive, reward.reshape(rows), 0.0)
                length += alive
                alive &= ~(terminated | truncated).reshape(rows)
                alive &= length < (self._host.source.max_steps or np.inf)
        finally:
            pool.close()
        return {"greedy_return": total, "greedy_length": length}

    def _begin(self, state: TrainState, report: Callable[[str], None]) -> TrainState:
        """Opens the pool and clears rolling returns and critic memory: all episodes start anew."""
        iteration, num_envs = int(np.max(state.step)), self._host.num_envs
        rows = len(self._seeds), num_envs
        if iteration:
            report("environments begin new episodes, since their states cannot be saved")
        self._pool = self._host.source.open(
            [
                seed_of(self._base, seed, env, iteration)
                for seed in self._seeds
                for env in range(num_envs)
            ]
        )
        seen = self._by_seed(self._pool.reset())
        no, zeros = np.zeros(rows, bool), np.zeros(rows)
        self._episodes = Episodes(seen, no, no, self._start(num_envs), zeros, zeros)
        sharded = dict(state.collector.sharded)
        for name in {ROLLING_RETURN, CRITIC_MEMORY} & set(sharded):
            sharded[name] = jax.tree.map(jnp.zeros_like, sharded[name])
        return state._replace(collector=state.collector._replace(sharded=sharded))

    def _start(self, rows: int) -> PyTree:
        """Returns the memory of the policy at an episode's start, leaves `[S, rows, …]`."""
        seeds = len(self._seeds)
        memory = actor_of(self._host.problem).start(rows)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (seeds, *x.shape)), memory)

    def _by_seed(self, seen: Array) -> Array:
        """Reshapes a pool's observations `[S·B, …]` to `[S, B, …]`, in the recorded dtype."""
        seeds = len(self._seeds)
        return seen.reshape(seeds, -1, *seen.shape[1:]).astype(self._host.source.dtype, copy=False)

    def _policy(self, state: TrainState) -> TrainState:
        """Puts the part of the state that acts on one device, so that calls of `act` are short."""
        part = state._replace(
            params=state.params._replace(value=None, frozen=None),
            opt_state=None,
            reference_params=None,
            collector=state.collector._replace(sharded={}),
        )
        moved: TrainState = jax.device_put(part, jax.devices()[0])
        return moved


def _compiled_act(host: PoolProblem, greedy: bool) -> Callable[..., PyTree]:
    of_seed = functools.partial(recorded.act, host.problem, host.source.spaces, greedy=greedy)
    return jax.jit(jax.vmap(of_seed, in_axes=(STATE_AXES, 0, 0, 0, None)))


def _zero(memory: jax.Array, begins: Array) -> Array:
    """Returns a memory `[S, B, …]` with zeros for environments that begin an episode."""
    return np.where(begins.reshape(begins.shape + (1,) * (memory.ndim - 2)), 0.0, memory)


def _to_play(action: jax.Array) -> Array:
    """Reshapes actions to `[S·B, …]`, as the environments accept them; 0 replaces NaN."""
    array = np.asarray(action)
    array = array.reshape(-1, *array.shape[2:])
    return array if array.dtype.kind == "i" else np.nan_to_num(array)


def seed_of(*entropy: int) -> int:
    """Derives the seed of an environment, below 2³¹, from several numbers."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)
