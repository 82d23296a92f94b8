"""Tests KL estimators sample by sample, and controllers of the coefficient.

The module test_identities tests the estimators' expectations.
"""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_po import divergences

ESTIMATORS = [divergences.k1, divergences.k2, divergences.k3]


# With π = .5 and π_ref = .25: log 2; ½ log² 2; ½ − 1 + log 2. The second case exchanges π and
# π_ref.
@pytest.mark.parametrize(
    ("prob", "reference", "expected"),
    [
        (0.5, 0.25, [0.693147, 0.240227, 0.193147]),
        (0.25, 0.5, [-0.693147, 0.240227, 0.306853]),
        (0.3, 0.3, [0.0, 0.0, 0.0]),
    ],
)
def test_estimates_by_hand(prob, reference, expected):
    got = [k(jnp.log(prob), jnp.log(reference)) for k in ESTIMATORS]
    np.testing.assert_allclose(got, expected, atol=1e-6)


def excess(x):
    """Computes `eˣ − 1 − x` by its series in rational numbers, up to |x| = 20."""
    x, terms = Fraction(float(x)), [Fraction(1)]
    for n in range(1, 120):
        terms.append(terms[-1] * x / n)
    return float(sum(terms[2:]))


# The series is used below `limit`. The truncated series omits x⁴ / 360 of its value, 1.7e-8 and
# 2.8e-15 at the limit; the difference cancels a few ulp of x, 1e-5 and 5e-13.
@pytest.mark.parametrize(
    ("dtype", "limit", "series", "direct"),
    [(np.float32, 0.05, 2e-7, 2e-5), (np.float64, 1e-3, 6e-15, 1e-12)],
)
def test_excess_equals_exact_sums(dtype, limit, series, direct):
    shares = np.array([1e-9, 1e-3, 0.02, 0.04, 0.1, 0.3, 0.7, 0.95, 0.999, 1, 1.001, 1.5, 7, 19.9])
    with jax.enable_x64(True):
        x = (np.concatenate([shares, -shares]) * limit).astype(dtype)
        x = np.append(x, np.array([0.3, 1, 2, 20, -0.3, -1, -2, -20], dtype))
        got = divergences.exp_excess(jnp.asarray(x))
        slopes = jax.vmap(jax.grad(divergences.exp_excess))(jnp.asarray(x))
    assert got.dtype == dtype
    error = np.abs(np.asarray(got, float) / [excess(each) for each in x] - 1)
    inside = np.abs(x) < limit
    assert error[inside].max() < series
    assert error[~inside].max() < direct
    np.testing.assert_allclose(slopes, np.expm1(np.float64(x)), rtol=direct)


def test_excess_has_a_slope_everywhere():
    # The branch that is not selected must not overflow: its gradient would be 0 · ∞.
    assert float(jax.grad(divergences.exp_excess)(jnp.float32(-1e20))) == -1.0
    assert float(divergences.exp_excess(jnp.float32(0.0))) == 0.0


@pytest.mark.parametrize("log_ratio", [19.0, 19.99, 20.0, 20.01, 20.9, 50.0, 1e3])
def test_log_ratios_are_clamped_at_20(log_ratio):
    for x in (log_ratio, -log_ratio):
        c = np.clip(x, -20, 20)
        wanted = {
            divergences.ratio: (np.exp(c), np.exp(c)),
            divergences.k1: (c, 1.0),
            divergences.k2: (c**2 / 2, c),
            divergences.k3: (np.exp(-c) - 1 + c, 1 - np.exp(-c)),
        }
        for function, (value, slope) in wanted.items():
            got = jax.value_and_grad(function)(jnp.float32(x), jnp.float32(0.0))
            np.testing.assert_allclose(got[0], value, rtol=2e-5)
            if abs(x) != 20:  # at ±20 the slopes of both sides are correct
                np.testing.assert_allclose(got[1], slope * (abs(x) < 20), rtol=2e-5)


def test_log_ratios_are_float32_at_least():
    # Both log-probabilities have 8 bits, whereas their difference has 9 bits.
    for one, other in itertools.product((jnp.bfloat16, jnp.float32), repeat=2):
        got = divergences.log_ratio(jnp.asarray(-1.0078125, one), jnp.asarray(-3.015625, other))
        assert got.dtype == jnp.float32
        assert float(got) == 2.0078125


@pytest.mark.parametrize("k", ESTIMATORS)
def test_shapes_must_agree(k):
    with pytest.raises(AssertionError):
        k(jnp.zeros(3), jnp.zeros((3, 1)))


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.016, 2.0),  # above 1.5 × .01
        (0.0149, 1.0),
        (0.01, 1.0),
        (0.0067, 1.0),  # .01 / 1.5 = .00667
        (0.0066, 0.5),
        (0.0, 0.5),
        (np.nan, 1.0),
        (np.inf, 1.0),
        (-np.inf, 1.0),
    ],
)
def test_adapt_coefficient(kl, expected):
    assert float(divergences.adapt_coefficient(jnp.float32(1.0), jnp.float32(kl), 0.01)) == expected


def test_adapt_coefficient_takes_its_own_tolerance_and_factor():
    def adapt(kl):
        return float(
            divergences.adapt_coefficient(
                jnp.float32(1.0), jnp.float32(kl), 0.01, tolerance=3.0, factor=4.0
            )
        )

    assert [adapt(kl) for kl in (0.031, 0.029, 0.0034, 0.0033)] == [4.0, 1.0, 1.0, 0.25]


def test_the_edges_of_the_interval_leave_the_coefficient():
    for kl in (0.02, 0.005):
        one, kl = jnp.float32(1.0), jnp.float32(kl)
        assert float(divergences.adapt_coefficient(one, kl, 0.01, tolerance=2.0)) == 1.0


@pytest.mark.parametrize("adapt", [divergences.adapt_coefficient, divergences.adapt_proportionally])
def test_the_coefficient_stays_within_its_bounds(adapt):
    for bound, kl in ((1e-8, 0.0), (1e8, 1.0)):
        assert float(adapt(jnp.float32(bound), jnp.float32(kl), 0.01)) == np.float32(bound)
    assert np.isnan(adapt(jnp.float32(np.nan), jnp.float32(0.01), 0.01))


# The factor is 1 + 0.1 · clip((kl − .01) / .01, ±0.2).
@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.01, 1.0), (0.011, 1.01), (0.5, 1.02), (0.009, 0.99), (-1.0, 0.98), (jnp.nan, 1.0)],
)
def test_proportional_controller(kl, expected):
    assert float(
        divergences.adapt_proportionally(jnp.float32(1.0), jnp.float32(kl), 0.01)
    ) == pytest.approx(expected)


def test_proportional_controller_takes_its_own_gain_and_limit():
    def adapt(kl):
        return float(
            divergences.adapt_proportionally(
                jnp.float32(3.0), jnp.float32(kl), 0.01, gain=0.5, limit=0.4
            )
        )

    assert [adapt(kl) for kl in (0.013, 1.0)] == pytest.approx([3.0 * 1.15, 3.0 * 1.2])
