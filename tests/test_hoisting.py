"""Tests that computations which depend only on keys are hoisted out of the loop; nothing else
changes."""

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traced import equations

from jaxrl_po.control import adapt, hoisting, unroll
from jaxrl_po.distributions import Categorical


def hashes_in_loops(function, *args):
    """Returns the number of operations that draw random bits in the bodies of a program's scans."""
    scans = [e for e in jax.make_jaxpr(function)(*args).jaxpr.eqns if e.primitive.name == "scan"]
    assert scans
    inside = (each for e in scans for each in equations(e.params["jaxpr"].jaxpr))
    return sum("random" in each.primitive.name for each in inside)


@jax.jit
def noisy(place, key):
    """Moves each walk by its own random part."""
    first, second = jax.random.split(key)
    return place * jax.random.uniform(first) + jax.random.normal(second, place.shape)


def everything(carry, x):
    """Performs a step with calls, branches, loops, constants, and results of every level."""
    place, count = carry
    key, number = x
    place = jax.nn.relu(noisy(place, key)) + number
    place = jax.lax.cond(
        place.sum() > 1.0, lambda p: p - jax.random.normal(key, p.shape), lambda p: p + 1.0, place
    )
    place = jax.lax.while_loop(lambda p: p.max() > 3.0, lambda p: 0.5 * p, place)
    ahead = jax.random.randint(key, (2,), 0, 9)
    return (place, count + ahead[0]), {
        "place": place,
        "ahead": ahead,
        "x": number,
        "constant": jnp.arange(3),
    }


CARRY = jnp.array([0.5, -1.0]), jnp.int32(0)
KEYS = jax.random.split(jax.random.key(0), 20)
XS = KEYS, jnp.linspace(-1.0, 1.0, 20)


def same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_is_a_scan_under_jit_vmap_and_grad():
    @jax.jit
    @jax.vmap
    def both(place):
        return [scan(everything, (place, CARRY[1]), XS) for scan in (hoisting.scan, jax.lax.scan)]

    same(*both(jnp.arange(6.0).reshape(3, 2)))

    def last(scan, place):
        return scan(lambda p, key: (noisy(p, key), p), place, KEYS)[0].sum()

    same(
        *(
            jax.jit(jax.grad(last, argnums=1), static_argnums=0)(scan, CARRY[0])
            for scan in (hoisting.scan, jax.lax.scan)
        )
    )


def test_environment_step_draws_no_random_number():
    env = adapt(gymnax.make("CartPole-v1")[0])

    def rollout(key):
        envs = unroll.start(env, key, jnp.arange(3))
        return unroll.unroll(
            env, lambda memory, seen: (memory, Categorical(seen[:, :2])), envs, key, num_steps=8
        )

    assert hashes_in_loops(rollout, jax.random.key(0)) == 0


@pytest.mark.parametrize(("size", "hoisted"), [(8, True), (9, False)])
def test_large_values_stay_in_the_loop(size, hoisted):
    """The memory threshold is four times the two numbers that a step returns."""

    def step(carry, key):
        return carry + jax.random.normal(key, (size,)).sum() * carry, jnp.stack([carry, carry])

    # the sum is computed late, so that the loop would have to store all numbers
    def body(carry, key):
        return carry + (jax.random.normal(key, (size,)) * carry).sum(), jnp.stack([carry, carry])

    assert hashes_in_loops(lambda keys: hoisting.scan(step, 0.0, keys), KEYS) == 0
    assert (hashes_in_loops(lambda keys: hoisting.scan(body, 1.0, keys), KEYS) == 0) == hoisted
    same(hoisting.scan(body, 1.0, KEYS), jax.lax.scan(body, 1.0, KEYS))


@pytest.mark.parametrize(("dtype", "hoisted"), [("float32", True), ("float16", False)])
def test_memory_is_counted_in_bytes(dtype, hoisted):
    """Eight random numbers of four bytes exceed four times two numbers of two bytes."""

    def body(carry, key):
        number = (jax.random.normal(key, (8,)) * carry).sum()
        return carry + number, jnp.stack([carry, carry]).astype(dtype)

    assert (hashes_in_loops(lambda keys: hoisting.scan(body, 1.0, keys), KEYS) == 0) == hoisted


def test_effects_keep_their_order():
    seen = []

    def step(carry, x):
        for number in (carry, x):
            jax.debug.callback(lambda number: seen.append(int(number)), number, ordered=True)
        return carry + x, carry

    hoisting.scan(step, 10, jnp.arange(3))[0].block_until_ready()
    jax.effects_barrier()
    assert seen == [10, 0, 10, 1, 11, 2]
