"""Compares Fisher products with dense matrices, and tests the complete update of a trust region."""

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from policies import OBSERVATIONS, PARAMS, VECTOR, categorical, gaussian, mean_kl, rng
from tables import cases

from jaxrl_po import losses, masked, natural_updates, trust_region
from jaxrl_po.algorithms import npg
from jaxrl_po.distributions import Categorical
from jaxrl_po.types import Samples


def dense_fisher(policy):
    """Computes `E[∇log π ∇log πᵀ]`, by enumeration for a categorical, in closed form for a
    Gaussian."""
    flat, unravel = ravel_pytree(PARAMS)
    if policy is categorical:
        jacobian = jax.jacobian(lambda x: categorical(unravel(x)).log_probs())(flat)
        probs = jnp.exp(categorical(PARAMS).log_probs())
        return jnp.einsum("sa,sai,saj->ij", probs, jacobian, jacobian) / len(OBSERVATIONS)
    mean_jacobian = jax.jacobian(lambda x: gaussian(unravel(x)).mean)(flat)
    log_std_jacobian = jax.jacobian(lambda x: gaussian(unravel(x)).log_std)(flat)
    precision = jnp.exp(-2.0 * gaussian(PARAMS).log_std)
    # The Fisher matrix of N(m, σ²) is 1/σ² for m and 2 for log σ.
    of_mean = jnp.einsum("sd,sdi,sdj->ij", precision, mean_jacobian, mean_jacobian)
    return (of_mean + 2.0 * jnp.einsum("sdi,sdj->ij", log_std_jacobian, log_std_jacobian)) / len(
        OBSERVATIONS
    )


@cases("policy", categorical, gaussian)
def test_fisher_product_equals_the_dense_fisher(policy):
    product = jax.jit(
        lambda vector: trust_region.fisher_vector_product(
            mean_kl(policy), PARAMS, vector, damping=0.1
        )
    )(VECTOR)
    flat_vector = np.asarray(ravel_pytree(VECTOR)[0])
    fisher = np.asarray(jax.jit(lambda: dense_fisher(policy))())
    expected = fisher @ flat_vector + 0.1 * flat_vector
    chex.assert_trees_all_equal_shapes_and_dtypes(product, VECTOR)
    np.testing.assert_allclose(ravel_pytree(product)[0], expected, rtol=2e-4, atol=1e-5)


@cases("policy", categorical, gaussian)
def test_kl_and_gradient_vanish_at_old_parameters(policy):
    kl, gradient = jax.jit(jax.value_and_grad(mean_kl(policy)))(PARAMS)
    assert abs(float(kl)) < 1e-7
    chex.assert_trees_all_close(gradient, jax.tree.map(jnp.zeros_like, PARAMS), atol=1e-7)


def test_damping_may_be_traced():
    def product(damping):
        return trust_region.fisher_vector_product(
            mean_kl(categorical), PARAMS, VECTOR, damping=damping
        )["b"]

    zero, half = jax.vmap(product)(jnp.array([0.0, 0.5]))
    np.testing.assert_allclose(half - zero, 0.5 * VECTOR["b"], rtol=1e-3, atol=1e-6)


def test_fisher_product_over_devices_adds_the_damping_once():
    """Shards are uneven: local totals are divided by the global count, summed, and then damped."""
    mask = jnp.asarray(rng.random(16) < 0.6)
    old = categorical(PARAMS).logits

    def product(params, vector, observations, old, mask, axis_name):
        count = masked.psum(mask.sum().astype(jnp.float32), axis_name)

        def kl(params):
            return (
                masked.total(Categorical(old).kl(categorical(params, observations)), mask).total
                / count
            )

        return trust_region.fisher_vector_product(
            kl, params, vector, damping=0.1, axis_name=axis_name
        )

    alone = jax.jit(product, static_argnums=5)(PARAMS, VECTOR, OBSERVATIONS, old, mask, None)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    sharded = jax.shard_map(
        lambda *args: jax.tree.map(lambda x: x[None], product(*args, "data")),
        mesh=mesh,
        in_specs=(P(), P(), P("data"), P("data"), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    on_devices = jax.jit(sharded)(PARAMS, VECTOR, OBSERVATIONS, old, mask)
    for device in range(4):
        chex.assert_trees_all_close(
            jax.tree.map(lambda x, d=device: x[d], on_devices), alone, rtol=1e-4, atol=1e-6
        )
        np.testing.assert_array_equal(on_devices["w"][device], on_devices["w"][0])


UNEVEN = jnp.arange(16.0) / 120.0


@cases("policy", categorical, gaussian)
def test_product_through_distribution_weighs_rows_like_mean_kl(policy):
    old = policy(PARAMS)
    through, direct = jax.jit(
        lambda vector: (
            trust_region.fisher(policy, PARAMS, UNEVEN, damping=0.1)(vector),
            trust_region.fisher_vector_product(
                lambda params: jnp.sum(UNEVEN * old.kl(policy(params))), PARAMS, vector, damping=0.1
            ),
        )
    )(VECTOR)
    chex.assert_trees_all_close(through, direct, rtol=2e-4, atol=1e-5)


def test_the_product_through_the_distribution_over_devices():
    def product(observations, weight, axis_name):
        policy = functools.partial(categorical, observations=observations)
        return trust_region.fisher(policy, PARAMS, weight, damping=0.1, axis_name=axis_name)(VECTOR)

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    on_devices = functools.partial(product, axis_name="data")
    sharded = jax.shard_map(
        on_devices, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P(), check_vma=False
    )
    alone = jax.jit(product, static_argnums=2)(OBSERVATIONS, UNEVEN, None)
    chex.assert_trees_all_close(jax.jit(sharded)(OBSERVATIONS, UNEVEN), alone, rtol=1e-4, atol=1e-6)


STRIDED = jnp.asarray(rng.normal(size=(40, 3)), jnp.float32)


def test_fisher_stride_counts_rows_over_devices_and_parts():
    """A stride that restarts in each part, if it does not divide the part, uses other rows.

    With other rows the natural step would be different.
    """
    mask = jnp.asarray(rng.random(40) < 0.8)
    advantage, action = (
        jnp.asarray(rng.normal(size=40), jnp.float32),
        jnp.asarray(rng.integers(0, 4, 40)),
    )
    log_prob = categorical(PARAMS, STRIDED).log_prob(action)
    samples = Samples(STRIDED, action, log_prob, advantage, mask)

    def update(axis_name=None, num_microbatches=1):
        return natural_updates.trust_region_update(
            npg.policy_surrogate,
            lambda params, samples: categorical(params, samples.inputs),
            max_kl=0.01,
            damping=0.1,
            iterations=20,
            fisher_stride=3,
            num_microbatches=num_microbatches,
            search=trust_region.full_step,
            axis_name=axis_name,
        )

    @jax.jit
    def wanted():
        every_third = jax.tree.map(lambda x: x[::3], samples)
        old = categorical(PARAMS, every_third.inputs)

        def kl(params):
            return masked.mean(old.kl(categorical(params, every_third.inputs)), every_third.mask)

        def matvec(vector):
            return trust_region.fisher_vector_product(kl, PARAMS, vector, damping=0.1)

        uphill = jax.grad(
            lambda params: -npg.policy_surrogate(categorical(params, STRIDED), samples).value()
        )(PARAMS)
        direction, _ = trust_region.conjugate_gradient(matvec, uphill, iterations=20)
        step = trust_region.natural_step(direction, matvec, max_kl=0.01)
        return jax.tree.map(jnp.add, PARAMS, step)

    alone = jax.jit(update())(PARAMS, samples)[0]
    chex.assert_trees_all_close(alone, wanted(), rtol=1e-3, atol=1e-5)

    parts = jax.jit(update(num_microbatches=4))(PARAMS, samples)[0]
    chex.assert_trees_all_close(parts, alone, rtol=1e-3, atol=1e-5)
    sharded = jax.shard_map(
        lambda params, samples: update("data", 2)(params, samples)[0],
        mesh=Mesh(np.array(jax.devices()[:4]), ("data",)),
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    chex.assert_trees_all_close(jax.jit(sharded)(PARAMS, samples), alone, rtol=1e-3, atol=1e-5)


class Rows(NamedTuple):
    observation: jax.Array
    action: jax.Array
    advantage: jax.Array
    mask: jax.Array


# Shares of four devices and of four microbatches have three rows, one row, four rows and no row.
ROWS = Rows(
    OBSERVATIONS,
    jnp.asarray(rng.integers(4, size=16), jnp.int32),
    jnp.asarray(rng.normal(size=16), jnp.float32),
    jnp.array([1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0], bool),
)


def dense_step(stride, damping, max_kl):
    """Computes `√(2δ / xᵀ(F + λI)x) x`, `x = (F + λI)⁻¹ g`, in float64; F averages over every n-th
    row."""
    flat, unravel = ravel_pytree(PARAMS)

    def log_probs(x):
        return categorical(unravel(x)).log_probs()

    def gain(x):
        taken = jnp.take_along_axis(log_probs(x), ROWS.action[:, None], 1)[:, 0]
        return jnp.sum(ROWS.mask * taken * ROWS.advantage) / ROWS.mask.sum()

    jacobian, probs = (
        np.asarray(x, np.float64) for x in (jax.jacobian(log_probs)(flat), jnp.exp(log_probs(flat)))
    )
    weight = np.float64(ROWS.mask) * (np.arange(16) % stride == 0)
    fisher = np.einsum("s,sa,sai,saj->ij", weight / weight.sum(), probs, jacobian, jacobian)
    damped, uphill = (
        fisher + damping * np.eye(len(flat)),
        np.asarray(jax.grad(gain)(flat), np.float64),
    )
    x = np.linalg.solve(damped, uphill)
    return np.sqrt(2 * max_kl / (x @ damped @ x)) * x


@cases(
    "devices, num_microbatches, stride",
    (1, 1, 1),
    (4, 4, 1),
    (1, 1, 3),
    (2, 2, 2),
    pytest.param(1, 4, 1, marks=pytest.mark.slow),
    pytest.param(4, 1, 1, marks=pytest.mark.slow),
)
def test_whole_update_equals_that_of_dense_matrix(devices, num_microbatches, stride):
    def surrogate(distribution, rows):
        log_prob = distribution.log_prob(rows.action)
        return losses.token_mean(losses.policy_gradient(log_prob, rows.advantage), rows.mask)

    def step(damping, max_kl, rows):
        update = natural_updates.trust_region_update(
            surrogate,
            lambda params, rows: categorical(params, rows.observation),
            max_kl=max_kl,
            damping=damping,
            iterations=40,
            tolerance=1e-7,
            fisher_stride=stride,
            num_microbatches=num_microbatches,
            search=trust_region.full_step,
            axis_name="data",
        )
        params, metrics = update(PARAMS, rows)
        return jax.tree.map(lambda x: x[None], (params, metrics))

    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    specs = (P(), P(), P("data"))
    sharded = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)
    )
    for damping, max_kl in ((0.1, 0.01), (0.3, 0.01), (0.1, 0.04)):
        params, metrics = sharded(jnp.float32(damping), jnp.float32(max_kl), ROWS)
        want = dense_step(stride, damping, max_kl)
        for device in range(devices):
            got = (
                ravel_pytree(jax.tree.map(lambda x, d=device: x[d], params))[0]
                - ravel_pytree(PARAMS)[0]
            )
            np.testing.assert_allclose(got, want, atol=2e-3 * np.abs(want).max())
        np.testing.assert_allclose(metrics["step_size"].value()[0], np.linalg.norm(want), rtol=1e-3)


def update_of_rows(**options):
    """Builds an update on `ROWS` that takes two iterations of conjugate gradients."""
    return natural_updates.trust_region_update(
        lambda distribution, rows: losses.token_mean(
            -distribution.log_prob(rows.action) * rows.advantage, rows.mask
        ),
        lambda params, rows: categorical(params, rows.observation),
        **{"max_kl": 0.01, "damping": 0.1, "iterations": 2, "search": trust_region.full_step},
        **options,
    )


def test_residual_is_relative_to_the_gradient():
    update = jax.jit(update_of_rows())

    def residual(scale):
        rows = ROWS._replace(advantage=scale * ROWS.advantage)
        return float(update(PARAMS, rows)[1]["residual"].metric())

    assert 0.0 < residual(1.0) < 1.0
    assert residual(1e-2) == pytest.approx(residual(1.0), rel=1e-2)
    assert residual(0.0) == 0.0


@cases("stride, calls", (1, 0), (2, 1), (3, 1))
def test_a_stride_reads_subsets_of_rows(stride, calls):
    seen = []

    def of_some(params, rows):
        seen.append(rows.mask.shape)
        return categorical(params, rows.observation)

    jax.eval_shape(update_of_rows(of_some=of_some, fisher_stride=stride), PARAMS, ROWS)
    assert seen == [(-(-16 // stride),)] * calls


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chosen:
    """Distribution that reads its logits in an order of integers."""

    logits: jax.Array
    order: jax.Array

    def kl(self, other):
        mine, its = (Categorical(x.logits[x.order]) for x in (self, other))
        return mine.kl(its)


def test_distributions_may_have_integer_leaves():
    order = jnp.arange(16)[::-1]

    def chosen(params):
        return Chosen(categorical(params).logits, order)

    got = trust_region.fisher(chosen, PARAMS, UNEVEN[::-1])(VECTOR)
    chex.assert_trees_all_close(got, trust_region.fisher(categorical, PARAMS, UNEVEN)(VECTOR))


def test_a_stride_selects_rows_of_several_slots():
    """Every third of eight rows, in two parts: rows 0 and 3, then row 6 and an empty place."""
    number = jnp.broadcast_to(jnp.arange(8).reshape(2, 4, 1), (2, 4, 5))
    rows = Samples(None, number, number, number, number >= 0)
    subset, mask = natural_updates.every(3, rows, None)
    assert subset.action[..., 0].tolist() == [[0, 3], [6, 7]]
    np.testing.assert_array_equal(mask, np.repeat([[[True], [True]], [[True], [False]]], 5, 2))
