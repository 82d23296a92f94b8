"""Tests the networks of memory alone: equality with a loop and with their papers."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import memory_reference
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from memory_reference import SIZES
from tables import cases

from jaxrl_po.control import memory, recurrence


def looped(params, memory, features, begins):
    """Runs `nn.GRUCell` step by step; JAX differentiates the loop."""
    cell, memories = nn.GRUCell(memory.shape[-1]), []
    for x, begin in zip(features, begins, strict=True):
        memory, _ = cell.apply({"params": params}, jnp.where(begin[:, None], 0.0, memory), x)
        memories.append(memory)
    return jnp.stack(memories)


@functools.cache
def drawn():
    """Returns parameters, memory and features; the steps at which episodes begin; a direction."""
    keys = jax.random.split(jax.random.key(0), 5)
    features = jax.random.normal(keys[0], (5, 3, 2))
    begins = jax.random.bernoulli(keys[1], 0.3, (5, 3))
    assert begins.any(axis=1).sum() >= 3
    memory = jax.random.normal(keys[2], (3, 4))
    params = jax.jit(nn.GRUCell(4).init)(keys[3], memory, features[0])["params"]
    inputs = jax.tree.map(lambda x: 2.0 * x + 0.1, (params, memory, features))
    flat, unravel = ravel_pytree(inputs)
    return flat, unravel, begins, jax.random.normal(keys[4], flat.shape)


@cases("derivative", "value", "jvp", "grad", pytest.param("hessian", marks=pytest.mark.slow))
def test_unit_and_its_derivatives_equal_a_loop(derivative):
    flat, unravel, begins, direction = drawn()

    def of(unit):
        def memories(x):
            return unit(*unravel(x), begins)

        def loss(x):
            return (memories(x) ** 3).sum()

        asked = {
            "value": memories,
            "jvp": lambda x: jax.jvp(memories, (x,), (direction,))[1],
            "grad": jax.grad(loss),
            "hessian": lambda x: jax.jvp(jax.grad(loss), (x,), (direction,))[1],
        }
        return jax.jit(asked[derivative])(flat)

    ours, wanted = of(recurrence.run_gru), of(looped)
    assert float(jnp.abs(wanted).max()) > 0.1
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=2e-5)


class Remembering(nn.Module):
    """Module with a memory of 4 units."""

    memory: str

    @nn.compact
    def __call__(self, before, features, begins, final=None):
        return self.of().run(before, features, begins, final)

    def of(self):
        sizes = {"layers": 2, "heads": 2, "window": 3} if self.memory == "transformer" else {}
        return getattr(memory, self.memory)(4, lambda scale: nn.initializers.zeros, **sizes)


@pytest.mark.parametrize("name", SIZES)
def test_memories_equal_their_papers(name):
    """The test is in float64, step by step and in segments; every parameter is drawn, including
    biases."""
    rng, steps, rows = np.random.default_rng(0), 14, 3
    features, final = rng.normal(size=(2, steps, rows, 2))
    begins = rng.random((steps, rows)) < [0.0, 0.3, 0.5]
    assert begins[1:].sum(axis=0)[1:].min() >= 2
    module = Remembering(name)
    with jax.enable_x64(True):
        start, run = module.of().start(rows), jax.jit(module.apply)
        shapes_of = jax.eval_shape(module.init, jax.random.key(0), start, features, begins, final)
        params = jax.tree.map(lambda x: rng.normal(size=x.shape), shapes_of)
        wanted = memory_reference.outputs(
            getattr(memory_reference, name), params["params"], features, begins, final, window=3
        )
        for cuts in ([1] * steps, [steps], [2, 3, 9], [9, 3, 2]):
            remembered, found = start, []
            for one in np.split(np.arange(steps), np.cumsum(cuts)[:-1]):
                after = () if len(one) == 1 else (final[one],)  # acting does not look a step ahead
                remembered, *now = run(params, remembered, features[one], begins[one], *after)
                found.append([x for x in now if x is not None])
            for each, want in zip(zip(*found, strict=True), wanted, strict=False):
                np.testing.assert_allclose(np.concatenate(each), want, rtol=0, atol=1e-12)
