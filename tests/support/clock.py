"""Defines an environment on the host whose observation counts the steps, so that each number is
known."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po import control
from jaxrl_po.algorithms import a2c
from jaxrl_po.run.devices import seeds as seeds_lib
from jaxrl_po.run.host import rollouts
from jaxrl_po.run.host.vector_envs import Pool, PoolStep, Source, wrap_pool_errors

BOX = gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32)
SEEN = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Clock:
    """Environment whose observation is its seed and the time.

    An episode terminates at time 3, or is truncated there if `cut` is set.
    """

    def __init__(self, seeds, cut=False):
        self.seeds, self.cut = np.array(seeds), cut
        self.time = np.zeros(len(seeds), int)
        self.steps, self.played, self.closed = 0, [], False

    def seen(self):
        return np.stack([self.seeds % 97, self.time], axis=1).astype(np.float64)

    def reset(self):
        self.time[:] = 0
        return self.seen()

    def step(self, action):
        self.steps += 1
        self.played.append(np.array(action))
        over = self.time == 3
        self.time = np.where(over, 0, self.time + 1)
        ends = (self.time == 3) & ~over
        reward = np.where(over, 1e6, 1.0 * self.time)  # no sample may use the reward of this step
        return PoolStep(self.seen(), reward, ends & (not self.cut), ends & self.cut)

    def close(self):
        self.closed = True


def source(made=None, **changes):
    spaces = control.spaces.read_spaces("clock", SEEN, BOX)

    def open_pool(seeds):
        clock = Clock(seeds, **changes)
        if made is not None:
            made.append(clock)
        return Pool(clock.reset, clock.step, clock.close)

    return Source("clock", spaces, np.float32, 3, {}, wrap_pool_errors("clock", open_pool))


def problem_of(num_envs, num_steps, made=None, statistics=False, memory="none", **changes):
    where = source(made, **changes)
    settings = control.ControlSettings(
        num_envs=num_envs,
        num_steps=num_steps,
        normalize_observations=statistics,
        scale_rewards=statistics,
    )
    network = control.NetworkSettings(width=8, memory=memory)
    problem = control.recorded_from_settings(where.spaces, settings, network)
    return rollouts.PoolProblem(where, problem, num_envs, num_steps, 2)


def started(hosted, seeds=(0,), algorithm=a2c, config=None):
    learner = algorithm.make(config or algorithm.Config(n_steps=2), hosted.problem)
    stacked = seeds_lib.over_seeds(learner, len(seeds))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.array(seeds))
    return stacked, jax.jit(stacked.init)(keys), rollouts.PoolRollouts(hosted, 5, seeds)


def ignore(line):
    del line
