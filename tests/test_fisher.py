"""Compares Fisher products with dense matrices, and tests the complete update of a trust region."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tables import cases

from jaxrl_po import losses, natural_updates, trust_region
from jaxrl_po.distributions import Categorical, DiagonalGaussian
from jaxrl_po.types import Samples

rng = np.random.default_rng(0)
OBSERVATIONS = jnp.asarray(rng.normal(size=(16, 3)), jnp.float32)
PARAMS, VECTOR = (
    {
        "w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=(4,)), jnp.float32),
    }
    for _ in range(2)
)
UNEVEN = jnp.arange(16.0) / 120.0


def categorical(params, observations=OBSERVATIONS):
    bias = jnp.broadcast_to(params["b"], (len(observations), 4))
    return Categorical(observations @ params["w"] + bias)


def gaussian(params):
    mean = OBSERVATIONS @ params["w"]
    return DiagonalGaussian(mean, jnp.broadcast_to(0.1 * params["b"], mean.shape))


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


def test_products_over_devices_add_the_damping_once():
    """Shards have uneven weights: local products are summed, and then damped."""

    def products(observations, weight, old, axis_name):
        policy = functools.partial(categorical, observations=observations)
        options = {"damping": 0.1, "axis_name": axis_name}

        def kl(params):
            return jnp.sum(weight * Categorical(old).kl(policy(params)))

        through = trust_region.fisher(policy, PARAMS, weight, **options)(VECTOR)
        return through, trust_region.fisher_vector_product(kl, PARAMS, VECTOR, **options)

    rows = OBSERVATIONS, UNEVEN, categorical(PARAMS).logits
    sharded = jax.shard_map(
        lambda *rows: jax.tree.map(lambda x: x[None], products(*rows, "data")),
        mesh=Mesh(np.array(jax.devices()[:4]), ("data",)),
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    alone = jax.jit(products, static_argnums=3)(*rows, None)
    on_devices = jax.jit(sharded)(*rows)
    for device in range(4):
        chex.assert_trees_all_close(
            jax.tree.map(lambda x, d=device: x[d], on_devices), alone, rtol=1e-4, atol=1e-6
        )


# Shares of four devices and of four microbatches have three rows, one row, four rows and no row.
ROWS = Samples(
    OBSERVATIONS,
    jnp.asarray(rng.integers(4, size=16), jnp.int32),
    jnp.zeros(16),
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


def update_of_rows(**options):
    """Builds an update on `ROWS` that takes two iterations of conjugate gradients by default."""
    defaults = {"max_kl": 0.01, "damping": 0.1, "iterations": 2}
    return natural_updates.trust_region_update(
        lambda distribution, rows: losses.token_mean(
            -distribution.log_prob(rows.action) * rows.advantage, rows.mask
        ),
        lambda params, rows: categorical(params, rows.inputs),
        search=trust_region.full_step,
        **defaults | options,
    )


@cases(
    "devices, num_microbatches, stride",
    (1, 1, 1),
    (4, 4, 1),
    (1, 1, 3),
    (2, 2, 3),
    pytest.param(1, 4, 1, marks=pytest.mark.slow),
    pytest.param(4, 1, 1, marks=pytest.mark.slow),
)
def test_whole_update_equals_that_of_dense_matrix(devices, num_microbatches, stride):
    def step(damping, max_kl, rows):
        update = update_of_rows(
            max_kl=max_kl,
            damping=damping,
            iterations=40,
            tolerance=1e-7,
            fisher_stride=stride,
            num_microbatches=num_microbatches,
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
        return categorical(params, rows.inputs)

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
