"""Tests means that carry their denominators."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal
from tables import cases

from jaxrl_po import compensated, masked
from jaxrl_po.masked import Mean


def mean_of(total, count):
    return Mean(jnp.float32(total), jnp.float32(count))


def test_empty_mean_is_zero_in_losses_only():
    empty = mean_of(0, 0)
    assert float(empty.value()) == 0.0
    assert np.isnan(empty.metric())
    assert float(mean_of(6, 2).metric()) == 3.0
    assert float(mean_of(6, 1).value()) == float(mean_of(6, 1).metric()) == 6.0
    assert float(mean_of(0, 2).metric()) == 0.0


def test_without_a_mask_all_count():
    assert float(masked.mean(jnp.array([[1.0, 2.0], [3.0, 6.0]]))) == 3.0


def test_half_precision_is_summed_in_float32():
    # bfloat16 counts only up to 256, and 4096 ones would sum to 256 if added one by one
    mean = masked.total(jnp.ones(4096, jnp.bfloat16), jnp.ones(4096, bool))
    assert mean.total.dtype == mean.count.dtype == jnp.float32
    assert (float(mean.total), float(mean.count)) == (4096.0, 4096.0)


def test_shapes_must_agree():
    with pytest.raises(AssertionError):
        masked.total(jnp.ones((2, 3)), jnp.ones(3, bool))


def test_moments_by_hand():
    # The elements 1, 3, 8 have mean 4, deviations −3, −1, 4, and variance 26 / 3 with ddof 0.
    mean, std = masked.moments(jnp.array([1.0, jnp.nan, 3.0, 8.0]), jnp.array([1, 0, 1, 1]))
    assert_allclose((mean, std), (4.0, (26 / 3) ** 0.5), rtol=1e-6)
    assert [float(m) for m in masked.moments(jnp.full(4, jnp.nan), jnp.zeros(4, bool))] == [
        0.0,
        0.0,
    ]


def test_moments_do_not_cancel():
    # E[x²] − E[x]² of 4096 ± 1 in float32 has an ulp of 2: the one-pass formula loses the variance.
    _, std = masked.moments(jnp.array([4095.0, 4097.0, 4095.5, 4096.5]))
    assert float(std) == pytest.approx((2.5 / 4) ** 0.5, rel=1e-6)


def over_devices(function):
    """Runs a function on the leading axis over four devices; returns the first device's results."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    )


CONSTANTS = np.random.default_rng(0).normal(size=50).astype(np.float32)


@cases("garbage", np.nan, -9.0)
def test_equal_elements_have_exact_mean_and_zero_std(garbage):
    """Rounding gives most of the tested constants a mean of another value, and a std that is not
    0."""
    # The last of the four devices has no element.
    x, mask = (np.tile(CONSTANTS[:, None], 8), np.arange(8) < 6)
    pooled = functools.partial(masked.moments, axis_name="data")
    for mean, std in (
        jax.vmap(masked.moments, (0, None))(jnp.where(mask, x, garbage), jnp.asarray(mask)),
        jax.vmap(masked.moments)(x),
        over_devices(jax.vmap(pooled, 1))(
            jnp.where(mask, x, garbage).T, np.tile(mask[:, None], 50)
        ),
    ):
        assert_array_equal(mean, CONSTANTS)
        assert_array_equal(std, np.zeros(50))


def test_moments_over_devices_can_be_differentiated():
    gradient = jax.vmap(
        jax.grad(lambda x: masked.moments(x, axis_name="data")[0]), axis_name="data"
    )(jnp.arange(6.0).reshape(2, 3))
    assert np.isfinite(gradient).all()
    assert (gradient > 0.0).all()


def test_moments_of_integers_and_of_half_precision():
    assert [float(m) for m in masked.moments(jnp.array([0, 1]))] == [0.5, 0.5]
    # 512 − 1 is 512 in bfloat16
    mean, std = masked.moments(jnp.array([1.0, 512.0], jnp.bfloat16))
    assert mean.dtype == std.dtype == jnp.float32
    assert (float(mean), float(std)) == (256.5, 255.5)


def test_device_sums_keep_arrays_and_merge_small_ones():
    """The program has one all-reduce for all float32, one for all int32, and one for each large
    array."""
    tree = {
        "matrix": jnp.arange(6.0).reshape(3, 2),
        "count": jnp.int32(7),
        "scalar": jnp.float32(0.5),
        "largest": jnp.ones(masked.SMALL),
        "large": (jnp.full(masked.SMALL + 1, 2.0), jnp.full(masked.SMALL + 1, 3.0)),
    }
    devices = jax.tree.map(lambda x: jnp.stack([x, 2 * x, 3 * x]), tree)
    sums = jax.vmap(lambda local: masked.psum(local, "devices"), axis_name="devices")(devices)
    jax.tree.map(lambda got, x: assert_array_equal(got, jnp.stack(3 * [6 * x])), sums, tree)
    assert jax.tree.map(lambda x: x.dtype, sums) == jax.tree.map(lambda x: x.dtype, tree)
    program = jax.make_jaxpr(
        lambda local: masked.psum(local, "devices"), axis_env=[("devices", 3)]
    )(tree)
    assert sorted(e.outvars[0].aval.size for e in program.eqns if e.primitive.name == "psum") == [
        1,
        masked.SMALL + 1,
        masked.SMALL + 1,
        masked.SMALL + 7,
    ]


def test_over_devices_pools_before_dividing():
    x = jnp.arange(8.0)
    mask = jnp.array([True, False, False, False, True, True, True, True])
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def statistics(x, mask):
        mean, std = masked.moments(x, mask, axis_name="data")
        return jnp.stack([masked.mean(x, mask, axis_name="data"), mean, std])[None]

    sharded = jax.shard_map(
        statistics, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"), check_vma=False
    )
    # The elements 0, 4, 5, 6, 7 have mean 4.4 and variance 25.2 − 19.36; the mean of device means
    # is 11 / 4.
    assert_allclose(jax.jit(sharded)(x, mask), np.tile([4.4, 4.4, 5.84**0.5], (4, 1)), rtol=1e-5)
    assert masked.psum({"a": 1}, None) == {"a": 1}


@jax.jit
def statistics(x, mask):
    value, gradient = jax.value_and_grad(lambda x: masked.mean(x, mask))(x)
    return value, gradient, *masked.moments(x, mask)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.booleans()), min_size=8, max_size=8))
def test_equal_to_numpy_under_any_mask(rows):
    x, mask = (np.array(column) for column in zip(*rows, strict=True))
    x = x.astype(np.float32)
    value, gradient, mean, std = statistics(np.where(mask, x, np.nan).astype(np.float32), mask)
    chosen = x[mask].astype(np.float64) if mask.any() else np.zeros(1)
    assert_allclose(
        (value, mean, std), (chosen.mean(), chosen.mean(), chosen.std()), rtol=1e-4, atol=1e-3
    )
    assert_allclose(gradient, mask / max(mask.sum(), 1), rtol=1e-6)


def test_sums_to_go_show_whether_two_are_equal():
    sums = compensated.sums_to_go(jnp.array([[1.5, 0.0, -2.0, 4.0]]))
    assert sums.value.tolist() == [[3.5, 2.0, 2.0, 4.0]]
    assert sums.error.tolist() == [[0.0] * 4]
    assert sums.size.tolist() == [[7.5, 6.0, 6.0, 4.0]]
    assert sums.terms.tolist() == [[3, 2, 2, 1]]


@cases(
    "values, valid, differ",
    ([2.0, 2.0, 9.0], [True, True, False], False),
    ([-9.0, 2.0, 2.0], [False, True, True], False),
    ([2.0, 2.0, 9.0], [True, True, True], True),
    # The results differ by no more than the error bound of sums of their size.
    ([1e-3, 1e-3 + 1e-7, 0.0], [True, True, False], True),
    ([1e-3, 1e-3 + 1e-10, 0.0], [True, True, False], False),
)
def test_sums_differ_among_the_members_that_there_are(values, valid, differ):
    x = jnp.array(values)
    sums = compensated.Sums(x, jnp.zeros(3), jnp.abs(x), jnp.full(3, 2))
    assert bool(compensated.sums_differ(sums, 2, jnp.array(valid))) == differ


def test_single_terms_differ_by_their_last_bit():
    sums = compensated.sums_to_go(jnp.array([[1.0, 0.0], [0.0, 1.0 + 2.0**-23]]))
    differ = compensated.sums_differ(jax.tree.map(lambda x: x[:, 0], sums), 2)
    assert bool(differ)
    assert not bool(compensated.sums_differ(jax.tree.map(lambda x: x[:1, 0], sums), 2))
