"""What holds for the environments of every suite."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po import control
from jaxrl_po.algorithms import ppo
from jaxrl_po.config import as_arrays
from jaxrl_po.control import unroll
from jaxrl_po.control.spaces import Observation
from jaxrl_po.distributions import Categorical


def plain(x):
    """An array as NumPy's, also one of random keys."""
    keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if keys else x)


def same(x, y):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(plain(a), plain(b)), x, y)


def differ(x, y):
    return any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), x, y)))


def begun(environment, key):
    """A state in which an episode begins."""
    return jax.jit(environment.reset)(key)[1]


def stepped(environment, running, actions, key):
    """The states before each step, and the transitions."""
    step, states, transitions = jax.jit(environment.step), [], []
    for i, action in enumerate(actions):
        states.append(running)
        running, transition = step(jax.random.fold_in(key, i), running, jnp.int32(action))
        transitions.append(transition)
    return states, transitions


def cuts_by_time(make, action, part=lambda observation: observation):
    """An episode of 3 steps is truncated; it ends as a longer one goes on, and a new one begins.

    `make` takes `max_steps` and `reset_interval`; `action` ends no episode within 3 steps; `part`
    of an observation does not depend on the time limit.
    """
    short, long = make(max_steps=3, reset_interval=2), make(max_steps=30, reset_interval=2)
    key = jax.random.key(0)
    running = jax.jit(short.refresh)(jax.random.key(7), begun(short, key))
    states, cut = stepped(short, running, [action] * 4, key)  # one more, to see where it begins
    _, whole = stepped(long, running, [action] * 3, key)
    assert [bool(t.truncated) for t in cut] == [False, False, True, False]
    assert not any(bool(t.terminated) for t in cut[:3] + whole)
    assert not any(bool(t.truncated) for t in whole)
    for ours, theirs in zip(cut, whole, strict=False):
        same(part(ours.final_observation), part(theirs.observation))
        assert float(ours.reward) == float(theirs.reward)
    fresh, state = states[0].start
    same(cut[2].observation, fresh)
    same(states[3].state, state)
    assert int(states[3].length) == 0
    assert differ(cut[2].observation, cut[2].final_observation)
    return fresh


def begins_alike_within_an_interval(make):
    """Episodes of one step, a new starting state every 4: the same in between, others after."""
    environment = make(max_steps=1, reset_interval=4)
    actions = environment.spaces.num_actions

    def policy(memory, observation):
        rows = jax.tree.leaves(observation)[0].shape[0]
        return memory, Categorical(jnp.zeros((rows, actions)))

    @jax.jit
    def run(key):
        envs = unroll.start(environment, key, jnp.arange(3))
        trajectory = unroll.unroll(environment, policy, envs, key, num_steps=12)[1]
        return trajectory.transition.observation

    seen = jax.tree.map(lambda x: np.asarray(x).reshape(3, 3, 4, -1), run(jax.random.key(3)))
    same(seen, jax.tree.map(lambda x: np.broadcast_to(x[:, :, :1], x.shape), seen))
    first = jax.tree.map(lambda x: x[:, :, 0], seen)
    for i in range(3):
        assert differ(*(jax.tree.map(lambda x, i=i, j=j: x[i, j], first) for j in (0, 1)))


def learns(environment, **options):
    """Two iterations of PPO are finite and compiled once; an evaluation ends within the limit."""
    problem = control.make_problem(environment, **({"num_envs": 2, "num_steps": 8} | options))
    learner = ppo.make(as_arrays(ppo.Config(num_epochs=1, num_minibatches=1)), problem)
    state = jax.jit(learner.init)(jax.random.key(0))
    step = jax.jit(learner.step)
    before = state.params
    for _ in range(2):
        state, _ = step(state)
    assert step._cache_size() == 1
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state.params))
    assert differ(before, state.params)
    evaluate = jax.jit(control.make_evaluate(environment, problem, num_episodes=3))
    result = evaluate(state.params, state.collector, jax.random.key(1))
    assert (result["length"] >= 1).all()
    assert (result["length"] <= environment.max_steps).all()
    assert jnp.isfinite(result["return"]).all()
    return problem, state


def samples_legal_actions(problem, state, legal_of):
    """Every sampled action is legal, and some are not; `legal_of(mask, action)` says which."""
    batch = jax.jit(problem.collect)(state.params, state.collector, jax.random.key(2))[1]
    assert isinstance(batch.inputs, Observation)
    allowed = jax.vmap(jax.vmap(functools.partial(legal_of)))(batch.inputs.legal, batch.action)
    assert allowed.all()
    assert not batch.inputs.legal.all()
