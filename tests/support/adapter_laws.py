"""Asserts laws that hold for the environments of every suite, and plays these environments."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose

from jaxrl_po import control
from jaxrl_po.algorithms import ppo


def plain(x):
    """Returns an array as a NumPy array; random keys become their raw data."""
    keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if keys else x)


def same(ours, theirs, *, rtol=0.0, atol=0.0):
    """Asserts that two trees have one structure and hold the same numbers without NaN."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert_allclose(plain(x), plain(y), rtol=rtol, atol=atol, equal_nan=False, strict=True)


def differ(x, y):
    """Returns whether two trees of arrays differ in at least one number."""
    return any(
        (plain(a) != plain(b)).any()
        for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    )


def begun(environment, key):
    """Returns an environment's state at the start of an episode."""
    return jax.jit(environment.reset)(key)[1]


def stepped(environment, running, actions, key):
    """Steps an environment; returns the states before each step and after the last step, and the
    transitions."""
    step, states, transitions = jax.jit(environment.step), [running], []
    like = environment.spaces.action
    for i, action in enumerate(actions):
        action = jnp.broadcast_to(jnp.asarray(action, like.dtype), like.shape)
        running, transition = step(jax.random.fold_in(key, i), running, action)
        states.append(running)
        transitions.append(transition)
    return states, transitions


def follows(environment, own, choose, reset=None):
    """Steps this library's environment and the suite's own environment side by side, 20 times.

    Args:
      environment: Environment of this library.
      own: The suite's step function, `own(key, state, action) -> (state, results)`.
      choose: `choose(t, running) -> action`, chooses the action of step t.
      reset: The suite's `reset(key) -> state`; without it, the suite's state begins as a copy of
        this library's state.

    Yields:
      This library's state after each step, its transition, and the results of `own`.
    """
    running = begun(environment, jax.random.key(0))
    theirs = running.state if reset is None else reset(jax.random.split(jax.random.key(0))[0])
    step = jax.jit(environment.step)
    for t in range(20):
        key, action = jax.random.key(t), choose(t, running)
        running, transition = step(key, running, action)
        theirs, said = own(jax.random.split(key)[0], theirs, action)
        yield running, transition, said


def ends_by_itself(environment, running, actions):
    """Asserts that the last action, not the limit, ends the episode, and that the next episode
    begins."""
    states, transitions = stepped(environment, running, actions, jax.random.key(1))
    last = len(actions) - 1
    assert [bool(t.terminated) for t in transitions] == [i == last for i in range(len(actions))]
    assert not any(bool(t.truncated) for t in transitions)
    assert int(states[-1].length) == 0
    same((transitions[-1].observation, states[-1].state), states[-2].start)
    return states, transitions


def cuts_by_time(make, action, part=lambda seen: seen, *, atol=0.0):
    """Asserts that a limit of 3 steps ends an episode and does not change the steps before.

    The next episode begins from a new starting state.

    Args:
      make: `(max_steps, reset_interval) -> environment`.
      action: Action that does not end an episode within 3 steps.
      part: `(observation) -> part`, returns the part that does not depend on the time limit.
      atol: Absolute tolerance of the comparison with the longer episode.

    Returns:
      The key that draws the start of the next episode, and the next episode's observation and
      state.
    """
    short, long = (make(max_steps=n, reset_interval=2) for n in (3, 30))
    key, drawn = jax.random.key(0), jax.random.key(7)
    used = begun(short, key)._replace(used=jnp.bool_(True))
    running = jax.jit(short.refresh)(drawn, used)
    states, cut = stepped(short, running, [action] * 3, key)
    _, whole = stepped(long, running, [action] * 3, key)
    assert [bool(t.truncated) for t in cut] == [False, False, True]
    assert not any(bool(t.terminated) for t in cut + whole)
    assert not any(bool(t.truncated) for t in whole)
    for ours, theirs in zip(cut, whole, strict=True):
        same(part(ours.final_observation), part(theirs.observation), atol=atol)
        same(ours.reward, theirs.reward, atol=atol)
    fresh = cut[2].observation, states[3].state
    same(fresh, states[0].start)
    assert int(states[3].length) == 0
    assert differ(cut[2].observation, cut[2].final_observation)
    return drawn, fresh


def learns(environment):
    """Asserts that two iterations of PPO are finite and compile once, and that an evaluation ends.

    Returns:
      The problem, the last batch, and the lengths of the evaluation's episodes.
    """
    problem = control.make_problem(environment, num_envs=4, num_steps=4)
    learner = ppo.make(ppo.Config(num_epochs=1, num_minibatches=2), problem)
    state = jax.jit(learner.init)(jax.random.key(0))
    sample, update = jax.jit(learner.sample), jax.jit(learner.update)
    before = state.params
    for _ in range(2):
        state, batch = sample(state)
        state, metrics = update(state, batch)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(metrics))
    assert sample._cache_size() == update._cache_size() == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    assert differ(before, state.params)
    evaluate = jax.jit(control.make_evaluate(environment, problem, num_episodes=4))
    result = evaluate(state.params, state.collector, jax.random.key(5))
    assert (result["length"] >= 1).all()
    assert (result["length"] <= environment.max_steps).all()
    assert np.isfinite(result["return"]).all()
    return problem, batch, result["length"]
