"""Compares conjugate gradients with JAX's; tests natural steps, and line searches that respect
their bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from tables import cases

from jaxrl_po import trust_region


def random_system(size=8, seed=1):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(size, size))
    return jnp.asarray(root @ root.T / size + 0.5 * np.eye(size), jnp.float32), jnp.asarray(
        rng.normal(size=size), jnp.float32
    )


@cases("iterations", 1, 3, 12)
def test_conjugate_gradient_equals_jax_scipy(iterations):
    matrix, b = random_system()
    x, residual = trust_region.conjugate_gradient(lambda v: matrix @ v, b, iterations=iterations)
    expected, _ = jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, b, tol=0.0, maxiter=iterations)
    assert_allclose(x, expected, rtol=1e-4, atol=1e-5)
    assert_allclose(residual, jnp.linalg.norm(b - matrix @ x), rtol=1e-3, atol=1e-5)
    if iterations == 12:
        assert_allclose(x, np.linalg.solve(np.float64(matrix), np.float64(b)), rtol=1e-3, atol=1e-4)


def test_conjugate_gradient_keeps_half_precision():
    x, _ = trust_region.conjugate_gradient(
        lambda v: 2.0 * v, jnp.array([1.0, 3.0], jnp.bfloat16), iterations=2
    )
    assert x.dtype == jnp.bfloat16
    assert_array_equal(x.astype(jnp.float32), [0.5, 1.5])


@cases(
    "diagonal, b, solution, residual",
    ([1.0, 4.0], [0.0, 0.0], [0.0, 0.0], 0.0),  # the right-hand side is zero
    # The residual reaches 0 exactly after one product.
    ([2.0, 2.0], [1.0, 3.0], [0.5, 1.5], 0.0),
    ([0.0, 0.0], [1.0, 2.0], [0.0, 0.0], 5.0**0.5),  # without curvature no step is taken
    ([-1.0, -1.0], [3.0, 4.0], [0.0, 0.0], 5.0),  # the curvature is negative
    ([np.nan, 1.0], [3.0, 4.0], [0.0, 0.0], 5.0),
    # The residual is 5e19, whose square overflows.
    ([2e-38, 200.0], [1.0, 1e-20], [0.0, 0.0], 1.0),
    ([1e-45, 1e-45], [1e-30, 0.0], [0.0, 0.0], 0.0),  # all squares underflow
)
def test_conjugate_gradient_never_divides_by_zero(diagonal, b, solution, residual):
    diagonal, b = jnp.array(diagonal), jnp.array(b)
    solve = jax.jit(
        lambda b: trust_region.conjugate_gradient(lambda v: diagonal * v, b, iterations=10)
    )
    x, norm = solve(b)
    assert_allclose(x, solution, rtol=1e-6)
    assert_allclose(norm, residual, rtol=1e-6, atol=1e-6)


def test_natural_step_keeps_half_precision():
    step = trust_region.natural_step({"a": jnp.ones(2, jnp.bfloat16)}, lambda v: v, max_kl=1.0)
    assert step["a"].dtype == jnp.bfloat16
    assert_array_equal(step["a"].astype(jnp.float32), [1.0, 1.0])


@cases("curvature", 0.0, -1.0, np.nan, np.inf)
def test_natural_step_is_zero_without_curvature(curvature):
    step = trust_region.natural_step(
        {"a": jnp.ones(2)}, lambda v: {"a": curvature * v["a"]}, max_kl=0.01
    )
    assert_array_equal(step["a"], [0.0, 0.0])


def test_natural_step_of_a_broken_direction_is_zero():
    step = trust_region.natural_step(jnp.array([jnp.nan, 1.0]), lambda v: v, max_kl=0.01)
    assert_array_equal(step, [0.0, 0.0])


def search(evaluate, start=0.0, step=1.0, **options):
    return jax.jit(lambda p, s: trust_region.line_search(evaluate, p, s, **options))(
        jnp.float32(start), jnp.float32(step)
    )


def test_full_step_when_it_fits():
    x, info = search(lambda x: (x, x**2), max_kl=1.0)
    assert (float(x), bool(info.accepted), int(info.steps)) == (1.0, True, 0)
    assert (float(info.kl), float(info.gain)) == (1.0, 1.0)


def test_backtracks_until_the_kl_fits():
    # The steps give 0.8² = 0.64, 0.8⁴ = 0.4096, 0.8⁶ = 0.262: the third candidate has the KL
    # 0.4096.
    x, info = search(lambda x: (x, x**2), max_kl=0.5)
    assert_allclose((x, info.kl, info.gain), (0.64, 0.4096, 0.64), rtol=1e-6)
    assert (bool(info.accepted), int(info.steps)) == (True, 2)


def test_backtracks_until_there_is_a_gain():
    # The surrogate x(1 − 2x) is −1, −.48·…; at 0.5 it is 0, at 0.25 it is 0.125.
    x, info = search(lambda x: (x * (1.0 - 2.0 * x), 0.0 * x), max_kl=1.0, backtrack=0.5)
    assert (float(x), float(info.gain), int(info.steps)) == (0.25, 0.125, 2)


def test_gain_is_relative_to_start_not_zero():
    x, info = search(lambda x: (x - 10.0, 0.0 * x), max_kl=1.0)
    assert bool(info.accepted)
    assert float(info.gain) == 1.0
    x, info = search(lambda x: (10.0 - x, 0.0 * x), max_kl=1.0)
    assert not bool(info.accepted)
    assert float(x) == 0.0


REFUSED = {
    "no gain": lambda x: (-x, 0.0 * x),
    "equal surrogate": lambda x: (0.0 * x, 0.0 * x),
    "kl": lambda x: (x, 1.0 + 0.0 * x),
    "nan surrogate": lambda x: (jnp.where(x > 0.1, jnp.nan, 0.1), 0.0 * x),
    "infinite surrogate": lambda x: (jnp.where(x > 0.1, jnp.inf, 0.1), 0.0 * x),
    "nan kl": lambda x: (x, jnp.where(x > 0.1, jnp.nan, 0.0)),
    "minus infinite kl": lambda x: (x, jnp.where(x > 0.1, -jnp.inf, 0.0)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusal_returns_the_parameters_bit_exactly(reason):
    x, info = search(REFUSED[reason], start=0.1, max_kl=0.5, iterations=6)
    assert np.asarray(x).tobytes() == np.float32(0.1).tobytes()
    assert (bool(info.accepted), float(info.gain), int(info.steps)) == (False, 0.0, 6)


def test_refusal_reports_start_kl_and_number_of_trials():
    _, info = search(lambda x: (-x, 0.25 + x**2), max_kl=1.0)
    assert (float(info.kl), int(info.steps)) == (0.25, 10)
    _, info = search(lambda x: (x, 2.0 + x), max_kl=1.0, iterations=1)
    assert (float(info.kl), int(info.steps)) == (2.0, 1)


def leap(evaluate, start, step):
    return jax.jit(lambda p, s: trust_region.full_step(evaluate, p, s))(
        jnp.float32(start), jnp.float32(step)
    )


def test_full_step_asks_no_gain_or_bound():
    x, info = leap(lambda x: (10.0 - x, 3.0 * x), 1.0, 2.0)
    assert (float(x), float(info.kl), float(info.gain), int(info.steps)) == (3.0, 9.0, -2.0, 0)
    assert bool(info.accepted)


@cases("reason", "nan surrogate", "infinite surrogate", "nan kl", "minus infinite kl", "no step")
def test_a_full_step_that_breaks_is_refused(reason):
    evaluate = REFUSED.get(reason, lambda x: (x, x))
    x, info = leap(evaluate, 0.1, 0.0 if reason == "no step" else 1.0)
    assert np.asarray(x).tobytes() == np.float32(0.1).tobytes()
    assert (bool(info.accepted), float(info.gain), int(info.steps)) == (False, 0.0, 1)
    assert float(info.kl) == float(evaluate(jnp.float32(0.1))[1])


def test_bad_counts():
    with pytest.raises(ValueError, match="iterations must be at least 1"):
        trust_region.conjugate_gradient(lambda v: v, jnp.ones(2), iterations=0)
    with pytest.raises(ValueError, match="iterations must be at least 1"):
        search(lambda x: (x, x), max_kl=1.0, iterations=0)


def test_shapes_must_agree():
    with pytest.raises(AssertionError):
        trust_region.fisher_vector_product(lambda x: jnp.sum(x**2), jnp.ones(2), jnp.ones(3))
    with pytest.raises(AssertionError):
        trust_region.line_search(
            lambda x: (jnp.sum(x), jnp.sum(x)), jnp.ones(2), jnp.ones(1), max_kl=1.0
        )
