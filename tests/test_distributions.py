"""Tests distributions against closed forms, enumeration and samples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_po import distributions, divergences
from jaxrl_po.config import ConfigError
from jaxrl_po.distributions import Categorical, DiagonalGaussian, MultiCategorical, TanhGaussian

PROBS = np.array([[0.2, 0.3, 0.5], [0.7, 0.2, 0.1]])
OTHER = np.array([[0.1, 0.6, 0.3], [0.7, 0.2, 0.1]])


def categorical(probs, shift=3.0):
    return Categorical(jnp.asarray(np.log(probs) + shift, jnp.float32))


def test_categorical_by_hand():
    policy = categorical(PROBS)
    assert_allclose(policy.log_prob(jnp.array([2, 0])), np.log([0.5, 0.7]), rtol=1e-5)
    assert_allclose(policy.entropy(), -(PROBS * np.log(PROBS)).sum(1), rtol=1e-5)
    assert policy.mode().tolist() == [2, 0]
    assert policy.mode().dtype == policy.sample(jax.random.key(0)).dtype == jnp.int32


def test_large_logits_stay_finite():
    policy = Categorical(jnp.array([1e4, 0.0, -1e4]))
    other = Categorical(jnp.array([-1e4, 0.0, 1e4]))
    got = [policy.log_prob(jnp.int32(2)), policy.entropy(), policy.kl(other)]
    assert_allclose(got, [-2e4, 0.0, 2e4], rtol=1e-6)
    assert np.isfinite(
        jax.grad(lambda x: Categorical(x).entropy() + Categorical(x).kl(other))(policy.logits)
    ).all()


def test_half_precision_logits_give_float32_log_probs():
    policy = Categorical(jnp.asarray(np.log(PROBS), jnp.bfloat16))
    assert policy.log_prob(jnp.array([0, 1])).dtype == jnp.float32
    assert_allclose(np.exp(policy.log_probs()).sum(-1), 1.0, rtol=1e-5)


# D = 2: m = (0, 1), σ = (1, 2) and m = (1, −1), σ = (2, 3).
GAUSSIAN = DiagonalGaussian(jnp.array([0.0, 1.0]), jnp.log(jnp.array([1.0, 2.0])))
OTHER_GAUSSIAN = DiagonalGaussian(jnp.array([1.0, -1.0]), jnp.log(jnp.array([2.0, 3.0])))


def test_gaussian_by_hand():
    # the log-density at (1, 3) is −½ (1² + 1²) − log 1 − log 2 − log 2π
    log_prob = GAUSSIAN.log_prob(jnp.array([1.0, 3.0]))
    assert float(log_prob) == pytest.approx(-1.0 - np.log(2) - np.log(2 * np.pi), rel=1e-6)
    assert float(GAUSSIAN.entropy()) == pytest.approx(
        np.log(2) + np.log(2 * np.pi * np.e), rel=1e-6
    )
    assert GAUSSIAN.mode().tolist() == [0.0, 1.0]


def test_gaussian_kl_by_hand():
    # Sum over components of log(σ'/σ) + (σ² + (m − m')²) / 2σ'² − ½: (log 2 + 2/8 − ½) + (log 3/2 +
    # 8/18 − ½).
    assert float(GAUSSIAN.kl(OTHER_GAUSSIAN)) == pytest.approx(np.log(3) - 11 / 36, rel=1e-5)
    # In the other direction: (−log 2 + 5/2 − ½) + (−log 3/2 + 13/8 − ½).
    assert float(OTHER_GAUSSIAN.kl(GAUSSIAN)) == pytest.approx(3.125 - np.log(3), rel=1e-5)
    assert float(GAUSSIAN.kl(GAUSSIAN)) == 0.0


def test_gaussian_samples_agree_with_the_density():
    draws = jax.vmap(GAUSSIAN.sample)(jax.random.split(jax.random.key(0), 4000))
    assert_allclose(draws.mean(0), [0.0, 1.0], atol=0.16)
    assert_allclose(draws.std(0), [1.0, 2.0], rtol=0.06)
    log_prob, other = (jax.vmap(policy.log_prob)(draws) for policy in (GAUSSIAN, OTHER_GAUSSIAN))
    assert float(-log_prob.mean()) == pytest.approx(float(GAUSSIAN.entropy()), abs=0.08)
    assert float((log_prob - other).mean()) == pytest.approx(np.log(3) - 11 / 36, abs=0.08)


def test_shapes_must_agree():
    with pytest.raises(AssertionError):
        categorical(PROBS).log_prob(jnp.zeros((2, 1), jnp.int32))
    with pytest.raises(AssertionError):
        categorical(PROBS).kl(categorical(PROBS[:1]))
    with pytest.raises(AssertionError):
        GAUSSIAN.log_prob(jnp.zeros(1))
    with pytest.raises(AssertionError):
        divergences.ratio(jnp.zeros(2), jnp.zeros((2, 1)))


@pytest.mark.parametrize(
    ("difference", "expected"),
    [(np.log(2.0), 2.0), (1e3, np.exp(20.0)), (-1e3, np.exp(-20.0)), (0.0, 1.0)],
)
def test_ratio_is_clamped(difference, expected):
    got, gradient = jax.value_and_grad(lambda x: divergences.ratio(x, jnp.float32(0.0)))(
        jnp.float32(difference)
    )
    assert float(got) == pytest.approx(expected, rel=1e-5)
    assert float(gradient) == pytest.approx(expected if abs(difference) < 20 else 0.0, rel=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_samples_are_scored_as_drawn(dtype):
    """Noise is added in float32: in bfloat16, rare actions would appear half as often as
    recorded."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(64, 8)) * 3.0, dtype)
    key = jax.random.key(1)
    half, full = Categorical(logits), Categorical(logits.astype(jnp.float32))
    assert_array_equal(half.sample(key), full.sample(key))
    mean, log_std = logits, 0.3 * logits
    half, full = (
        DiagonalGaussian(mean, log_std),
        DiagonalGaussian(*(x.astype(jnp.float32) for x in (mean, log_std))),
    )
    action = half.sample(key)
    assert action.dtype == jnp.float32
    assert_array_equal(action, full.sample(key))
    other = DiagonalGaussian(mean + 1, log_std), DiagonalGaussian(full.mean + 1, full.log_std)
    for got, want in (
        (half.log_prob(action), full.log_prob(action)),
        (half.entropy(), full.entropy()),
        (full.kl(other[1]), half.kl(DiagonalGaussian(full.mean + 1, log_std))),
    ):
        assert got.dtype == jnp.float32
        assert_allclose(got, want, rtol=1e-6)


def squashed(mean, log_std):
    return TanhGaussian(jnp.asarray(mean, jnp.float32), jnp.asarray(log_std, jnp.float32))


@jax.jit
@functools.partial(jax.value_and_grad, argnums=(0, 1))
def entropy_and_gradient(mean, log_std):
    return squashed(mean, log_std).entropy()[0]


@pytest.mark.parametrize(
    ("mean", "log_std"),
    [(0.0, 0.0), (0.7, -1.0), (-1.5, 0.5), (0.3, -0.01), (1.0, 1.0), (0.0, 2.0), (3.0, 3.0)],
)
def test_entropy_of_squashed_gaussian_has_exact_gradient(mean, log_std):
    z = np.linspace(-12.0, 12.0, 200_001)
    weight = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    u = np.abs(mean + np.exp(log_std) * z)
    slope = 2.0 * (np.log(2.0) - u - np.log1p(np.exp(-2.0 * u)))
    exact = np.trapezoid(weight * slope, z) + log_std + 0.5 * np.log(2 * np.pi * np.e)
    of_u = weight * -2.0 * np.tanh(mean + np.exp(log_std) * z)
    of_mean = np.trapezoid(of_u, z)
    of_log_std = 1.0 + np.trapezoid(of_u * np.exp(log_std) * z, z)
    entropy, gradient = entropy_and_gradient(jnp.array([[mean]]), jnp.array([[log_std]]))
    assert float(entropy) == pytest.approx(exact, abs=1e-3)
    assert_allclose(np.ravel(gradient), [of_mean, of_log_std], atol=2e-3)


@pytest.mark.parametrize("log_std", [-60.0, -44.0, 0.0, 60.0, 80.0])
def test_squashed_gaussian_entropy_has_gradient_at_any_width(log_std):
    _, (_, gradient) = entropy_and_gradient(jnp.array([[0.5]]), jnp.array([[log_std]]))
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-1.5, 0.5)])
def test_density_of_a_squashed_gaussian_integrates_to_one(mean, log_std):
    # The density over actions a = tanh(u) is integrated: ∫ p(a) da, with da = (1 − a²) du.
    u = np.linspace(-12.0, 12.0, 20001)
    policy = squashed(np.full((u.size, 1), mean), np.full((u.size, 1), log_std))
    log_density = np.asarray(policy.log_prob(jnp.asarray(u[:, None], jnp.float32)), np.float64)
    # The expected value uses the other form of 1 − tanh²(u), which does not cancel.
    slope = 1.0 / np.cosh(u) ** 2
    weight = np.exp(log_density) * slope
    assert np.trapezoid(weight, u) == pytest.approx(1.0, abs=2e-3)
    entropy = -np.trapezoid(weight * log_density, u)
    assert float(policy.entropy()[0]) == pytest.approx(entropy, abs=5e-3)


def test_squashed_gaussian_keeps_digits_far_from_zero():
    policy = squashed([[30.0]], [[0.0]])
    # Far from 0, 1 − tanh²(u) = 4 exp(−2u), although tanh(30) is 1 in float32.
    expected = -0.5 * np.log(2 * np.pi) + 60.0 - np.log(4.0)
    assert float(policy.log_prob(jnp.array([[30.0]]))[0]) == pytest.approx(expected, rel=1e-6)
    _, (gradient, _) = entropy_and_gradient(policy.mean, policy.log_std)
    assert np.isfinite(gradient).all()


def test_squashing_leaves_the_kl_and_the_ratio():
    first, second = squashed([[0.3, -1.0]], [[0.2, -0.5]]), squashed([[0.1, 0.4]], [[-0.1, 0.3]])
    assert_array_equal(first.kl(second), first.gaussian().kl(second.gaussian()))
    assert float(first.kl(second)[0]) != pytest.approx(float(second.kl(first)[0]), rel=1e-2)
    u = jnp.array([[0.5, -2.0]])
    ratio = second.log_prob(u) - first.log_prob(u)
    gaussian = second.gaussian().log_prob(u) - first.gaussian().log_prob(u)
    assert_allclose(ratio, gaussian, rtol=1e-5)


def test_several_choices_are_the_product_of_their_distributions():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5)), jnp.float32)
    other = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5)), jnp.float32)

    def joint(x):
        # The distribution equals a single choice among 2 · 3 options.
        return Categorical((x[:, :2, None] + x[:, None, 2:]).reshape(2, 6))

    both, its = MultiCategorical(logits, (2, 3)), MultiCategorical(other, (2, 3))
    action, number = np.array([[1, 2], [0, 1]]), np.array([3, 1])

    @jax.jit
    def seen(one, other, action):
        return one.log_prob(action), one.entropy(), one.kl(other), one.mode()

    *got, mode = seen(both, its, action)
    *want, joint_mode = seen(joint(logits), joint(other), action @ number)
    for x, y, rtol in zip(got, want, (1e-5, 1e-5, 1e-4), strict=True):
        assert_allclose(x, y, rtol=rtol)
    assert_array_equal(np.asarray(mode) @ number, joint_mode)
    draws = np.asarray(jax.jit(jax.vmap(both.sample))(jax.random.split(jax.random.key(0), 4000)))
    assert draws.shape == (4000, 2, 2)
    pairs = np.bincount(draws[:, 0] @ number, minlength=6) / 4000
    assert_allclose(pairs, jax.nn.softmax(joint(logits).logits[0]), atol=0.04)


def test_several_choices_have_any_batch_axes():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 4, 5))
    batch, rows = (
        [MultiCategorical(x.reshape(*axes, 5), (2, 3)) for x in logits] for axes in ((3, 4), (12,))
    )
    action = jnp.arange(24).reshape(12, 2) % 2
    found = batch[0].log_prob(action.reshape(3, 4, 2)), batch[0].entropy(), batch[0].kl(batch[1])
    wanted = rows[0].log_prob(action), rows[0].entropy(), rows[0].kl(rows[1])
    for x, y in zip(found, wanted, strict=True):
        assert_allclose(x, y.reshape(3, 4), rtol=1e-6)


def test_an_illegal_action_has_probability_zero_everywhere():
    legal = jnp.array([[True, False, True], [False, True, True]])
    policy, other = (distributions.allow(categorical(p), legal) for p in (PROBS, OTHER))
    kept, its = (np.where(legal, p, 0.0) for p in (PROBS, OTHER))
    kept, its = (p / p.sum(1, keepdims=True) for p in (kept, its))
    assert_allclose(jnp.exp(policy.log_probs()), kept, rtol=1e-5, atol=1e-7)
    assert float(policy.log_prob(jnp.array([1, 0])).max()) == -np.inf
    mine, theirs = (np.log(np.where(legal, p, 1.0)) for p in (kept, its))
    assert_allclose(policy.kl(other), (kept * (mine - theirs)).sum(1), rtol=1e-4)
    assert_allclose(policy.entropy(), -(kept * mine).sum(1), rtol=1e-5)
    draws = np.asarray(jax.jit(jax.vmap(policy.sample))(jax.random.split(jax.random.key(0), 500)))
    assert set(np.unique(draws[:, 0])) == {0, 2}
    assert set(np.unique(draws[:, 1])) == {1, 2}

    @jax.jit
    @jax.grad
    def total(logits):
        mine = distributions.allow(Categorical(logits), legal)
        return (mine.kl(other) + mine.entropy() + mine.log_prob(jnp.array([0, 1]))).sum()

    gradient = np.asarray(total(categorical(PROBS).logits))
    assert np.isfinite(gradient).all()
    assert not gradient[~np.asarray(legal)].any()
    assert gradient[np.asarray(legal)].any()


def test_action_too_unlikely_for_float_counts_nothing():
    kl = Categorical(jnp.array([0.0, -200.0])).kl(Categorical(jnp.array([0.0, -jnp.inf])))
    assert float(kl) == 0.0


def test_where_nothing_is_legal_the_distribution_stays_whole():
    none = jnp.array([[False] * 3, [True, True, False]])
    policy = distributions.allow(categorical(PROBS), none)
    assert_allclose(jnp.exp(policy.log_probs())[0], PROBS[0], rtol=1e-5)
    assert np.isfinite(policy.entropy()).all()
    # One of two choices has no legal option: only this choice keeps all of its options.
    both = distributions.allow(
        MultiCategorical(jnp.zeros((1, 4)), (2, 2)), jnp.array([[False, False, True, False]])
    )
    assert_allclose(both.entropy(), [np.log(2)], rtol=1e-6)


def test_masks_are_for_discrete_actions():
    with pytest.raises(ConfigError, match="policy: must return a Categorical or a Multi"):
        distributions.allow(DiagonalGaussian(jnp.zeros(2), jnp.zeros(2)), jnp.ones(2, bool))
