"""What every adapted environment with a time limit does, whatever its suite."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po import control
from jaxrl_po.algorithms import ppo
from jaxrl_po.control import unroll
from jaxrl_po.distributions import DiagonalGaussian


def same(left, right, **tolerance):
    """Whether two trees of arrays hold the same numbers."""
    chex.assert_trees_all_equal_structs(left, right)
    pairs = zip(
        map(numbers, jax.tree.leaves(left)), map(numbers, jax.tree.leaves(right)), strict=True
    )
    return all(np.allclose(x, y, **tolerance) for x, y in pairs)


def numbers(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def idle(environment, size=0.0):
    """A policy that always does the same; samples of it are its mode."""

    def policy(memory, observation):
        rows = jax.tree.leaves(observation)[0].shape[0]
        mean = jnp.full((rows, environment.spaces.action_size), size)
        return memory, DiagonalGaussian(mean, jnp.full_like(mean, -20.0))

    return policy


@functools.partial(jax.jit, static_argnames=("environment", "num_envs", "num_steps", "size"))
def play(environment, key, *, num_envs, num_steps, size=0.0):
    """A trajectory under one constant action."""
    start_key, key = jax.random.split(key)
    envs = unroll.start(environment, start_key, jnp.arange(num_envs))
    return unroll.unroll(
        environment, idle(environment, size), envs, key, num_steps=num_steps, greedy=True
    )[1]


def is_constant(environment):
    """Whether a state has the same structure, shapes and types before a step and after it."""
    state = jax.eval_shape(environment.reset, jax.random.key(0))[1]
    action = environment.spaces.action
    after, transition = jax.eval_shape(environment.step, jax.random.key(1), state, action)
    assert transition.observation == transition.final_observation == environment.spaces.observation
    # By leaves: fields outside the tree are arrays of numpy in places, which `==` refuses.
    assert jax.tree.structure(state) == jax.tree.structure(after)
    return [*map(describe, jax.tree.leaves(state))] == [*map(describe, jax.tree.leaves(after))]


def describe(leaf):
    return leaf.shape, leaf.dtype, leaf.weak_type


def follows(environment, raw, actions, *, repeat=1):
    """Steps our environment and the suite's own side by side; yields what each says of a step."""
    now, _ = jax.random.split(jax.random.key(0))
    _, running = jax.jit(environment.reset)(jax.random.key(0))
    theirs = jax.jit(raw.reset)(now)
    step, raw_step = jax.jit(environment.step), jax.jit(raw.step)
    for t, action in enumerate(actions):
        running, ours = step(jax.random.key(t), running, action)
        reward = 0.0
        for _ in range(repeat):
            theirs = raw_step(theirs, jnp.clip(action, -1.0, 1.0))
            reward += float(theirs.reward)
        yield ours, theirs, reward


def begins_afresh(environment, raw, running, action, key):
    """Whether the step, which must end the episode, goes on at the suite's own starting state."""
    following, transition = jax.jit(environment.step)(key, running, action)
    assert bool(transition.terminated | transition.truncated)
    assert int(following.length) == 0
    fresh = jax.jit(raw.reset)(jax.random.split(key)[1])
    return same(following.state, fresh) and same(transition.observation, fresh.obs)


def starts(environment, num_envs, num_steps):
    """Starting observations of episodes that all last one step, `[num_envs, num_steps, …]`."""
    trajectory = play(environment, jax.random.key(3), num_envs=num_envs, num_steps=num_steps)
    assert trajectory.transition.truncated.all()
    return np.asarray(jax.tree.leaves(trajectory.transition.observation)[0])


def distinct(rows):
    return len(np.unique(rows, axis=0))


def learns(environment):
    """Two iterations of PPO: finite, compiled once."""
    problem = control.make_problem(environment, num_envs=4, num_steps=4)
    learner = ppo.make(ppo.Config(num_minibatches=2, num_epochs=1), problem)
    state = jax.jit(learner.init)(jax.random.key(0))
    step = jax.jit(learner.step)
    for _ in range(2):
        state, metrics = step(state)
        for mean in jax.tree.leaves(metrics):
            assert np.isfinite(mean).all()
    assert step._cache_size() == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    return problem, state


def lengths(environment, problem, state):
    """Lengths of whole episodes under a learner's policy."""
    evaluate = jax.jit(control.make_evaluate(environment, problem, num_episodes=4))
    return np.asarray(evaluate(state.params, state.collector, jax.random.key(5))["length"])
