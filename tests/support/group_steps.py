"""Takes the first step of methods with groups, along the plain gradient, on one known batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from probes import tabular_problem

from jaxrl_po.algorithms import grpo

GROUPS, SIZE = 4, 4
PROBLEM = tabular_problem(num_prompts=GROUPS, group_size=SIZE, dense=True)
# The optimizer takes a plain gradient step of size one: parameters change by minus the gradient.
SGD = optax.sgd(1.0)


@functools.cache
def sampled():
    """Returns parameters and the batch that every method's first update receives."""
    learner = grpo.make(grpo.Config(use_reference=False), PROBLEM, SGD)
    state, batch = jax.jit(lambda key: learner.sample(learner.init(key)))(jax.random.key(0))
    return state.params, batch


@functools.cache
def first_step(module, config, problem=PROBLEM, *, with_metrics=True):
    """Returns the gradient and the metrics of the method's first update.

    Without metrics the compiler rounds differently: a gradient of zero is exactly zero.
    """
    learner = module.make(config, problem, SGD)

    @jax.jit
    def change(key, known):
        state = learner.init(key)
        if known is None:
            state, batch = learner.sample(state)
        else:
            params, batch = known
            state = state._replace(params=params)
        after, metrics = learner.update(state, batch)
        gradient = jax.tree.map(jnp.subtract, state.params.policy, after.params.policy)
        return gradient, metrics if with_metrics else None

    return change(jax.random.key(0), sampled() if problem is PROBLEM else None)


def same(one, other, factor=1.0):
    """Asserts that the arrays of one tree are `factor` times those of another."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, factor * b, rtol=1e-4, atol=1e-6)
