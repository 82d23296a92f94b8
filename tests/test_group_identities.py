"""Tests exact identities of groups in float64: leave-one-out, the group's mean, standardisation."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_po import advantages, group_advantages, losses, token_weights
from jaxrl_po.distributions import Categorical

EXACT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


LOGITS = np.array([0.3, -0.5, 0.8])


def expected_gradient(estimator, reward, size):
    """Computes the mean over all groups of draws from 3 actions, weighted by probability."""
    groups = np.array(list(itertools.product(range(3), repeat=size)))
    probability = np.prod(np.asarray(jax.nn.softmax(LOGITS))[groups], axis=1)

    @jax.jit
    @jax.grad
    def gradient(logits):
        weights = jax.vmap(estimator)(reward[groups])
        log_prob = Categorical(jnp.broadcast_to(logits, (*groups.shape, 3))).log_prob(
            jnp.asarray(groups)
        )
        return -probability @ losses.policy_gradient(log_prob, weights).mean(1)

    return gradient(LOGITS)


# 12
def test_leave_one_out_is_unbiased_and_mean_shrinks():
    reward = jnp.array([1.0, 0.0, 2.5])
    true = jax.grad(lambda x: jax.nn.softmax(x) @ reward)(LOGITS)
    unbiased = expected_gradient(advantages.leave_one_out, reward, 3)
    np.testing.assert_allclose(unbiased, true, **EXACT)
    centred = functools.partial(advantages.group_relative, scale="none")
    np.testing.assert_allclose(expected_gradient(centred, reward, 3), (1 - 1 / 3) * true, **EXACT)


@pytest.mark.parametrize(("k", "size"), [(2, 2), (2, 4), (3, 4), (4, 4)])
@pytest.mark.parametrize("reward", [(0.0, 1.0, 0.0), (1.0, -0.5, 2.5)], ids=["pass", "max"])
def test_pass_at_k_has_unbiased_gradient_of_best(k, size, reward):
    """The gradient equals autodiff of `Σ_v v (P(all ≤ v) − P(all < v))`, Walder and Karkhanis
    2025."""
    reward = jnp.array(reward)

    @jax.jit
    @jax.grad
    def best_of_k(logits):
        at_most = (reward[None, :] <= reward[:, None]) @ jax.nn.softmax(logits)
        below = (reward[None, :] < reward[:, None]) @ jax.nn.softmax(logits)
        ties = (reward[None, :] == reward[:, None]).sum(axis=1)
        return (reward * (at_most**k - below**k) / ties).sum()

    got = expected_gradient(functools.partial(group_advantages.pass_at_k, k=k), reward, size)
    np.testing.assert_allclose(got, best_of_k(LOGITS), **EXACT)


@pytest.mark.parametrize("right", range(7))
@pytest.mark.parametrize("k", [2, 4, 6])
def test_pass_at_k_subtracts_maximum_of_the_others(right, k):
    """For n = 6 with c right responses, a right response has k/n, a wrong response (k/n) ρ(n − 1,
    c, k − 1)."""
    n, reward = 6, jnp.array([1.0] * right + [0.0] * (6 - right))

    def rho(size, c, k):
        return 1 - math.comb(size - c, k) / math.comb(size, k)

    got = group_advantages.pass_at_k(reward, k)
    for i in range(n):
        weight = k / n if i < right else k / n * rho(n - 1, right, k - 1)
        baseline = k / n * rho(n - 1, right - (i < right), k - 1)
        np.testing.assert_allclose(got[i], n * (weight - baseline), **EXACT)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_maximum_likelihood_has_fewer_terms_than_group_members(size):
    """The series is `log p = −Σ_k (1 − p)^k / k`; the group's mean as a baseline removes the last
    of G terms."""
    reward = jnp.array([0.0, 1.0, 0.0])

    @jax.jit
    @jax.grad
    def series(logits):
        p = jax.nn.softmax(logits)[1]
        return -sum((1 - p) ** k / k for k in range(1, size))

    got = expected_gradient(advantages.maximum_likelihood, reward, size)
    np.testing.assert_allclose(got, series(LOGITS), **EXACT)


def test_a_negative_reward_has_no_likelihood():
    assert np.isnan(advantages.maximum_likelihood(jnp.array([1.0, -1.0, 0.0]))).all()
    np.testing.assert_array_equal(advantages.maximum_likelihood(jnp.zeros(3)), np.zeros(3))


@pytest.mark.parametrize("k", [1, 5])
def test_k_ranges_from_two_to_group_size(k):
    with pytest.raises(ValueError, match=rf"k must lie in \[2, 4\], .* got {k}"):
        group_advantages.pass_at_k(jnp.zeros(4), k)


def test_leave_one_out_is_the_scaled_group_mean():
    reward = jnp.array([0.3, -1.2, 0.7, 2.5, 0.1])
    centred = advantages.group_relative(reward, scale="none")
    np.testing.assert_allclose(advantages.leave_one_out(reward), 5 / 4 * centred, **EXACT)


# 13
@pytest.mark.parametrize("wins", range(1, 8))
def test_binary_group_advantage(wins):
    got = advantages.group_relative(jnp.array([1.0] * wins + [0.0] * (8 - wins)), epsilon=0.0)
    share = wins / 8
    expected = [math.sqrt((1 - share) / share)] * wins + [-math.sqrt(share / (1 - share))] * (
        8 - wins
    )
    np.testing.assert_allclose(got, expected, **EXACT)


# 14
@pytest.mark.parametrize(("size", "golden"), [(8, 0.337), (16, 0.560), (64, 0.962)])
def test_share_of_informative_groups(size, golden):
    p, informative = 0.05, 0.0
    for wins in range(size + 1):
        reward = (jnp.arange(size) < wins).astype(jnp.float64)
        if jnp.any(advantages.group_relative(reward) != 0.0):
            informative += math.comb(size, wins) * p**wins * (1 - p) ** (size - wins)
    assert informative == pytest.approx(1 - p**size - (1 - p) ** size, abs=1e-12)
    assert informative == pytest.approx(golden, abs=5e-4)


# 15
def standardised_gain(size, p):
    """Computes c_G(p) in E[GRPO gradient] = c_G(p) ∇p for binary rewards.

    The score ∇log π is ∇p / p on a win and −∇p / (1 − p) on a loss.
    """
    expected = 0.0
    for wins in range(size + 1):
        reward = (jnp.arange(size) < wins).astype(jnp.float64)
        score = jnp.where(reward > 0, 1 / p, -1 / (1 - p))
        weight = math.comb(size, wins) * p**wins * (1 - p) ** (size - wins)
        expected += weight * float(
            jnp.mean(advantages.group_relative(reward, epsilon=1e-12) * score)
        )
    return expected


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_standardised_group_gradient(p):
    assert standardised_gain(2, p) == pytest.approx(1.0, rel=1e-9)
    limit = 1 / math.sqrt(p * (1 - p))
    gains = [standardised_gain(size, p) for size in (2, 8, 64)]
    assert gains == sorted(gains)
    assert gains[-1] == pytest.approx(limit, rel=0.08)
    assert gains[-1] < limit


def test_signs_of_zero_rewards_change_no_advantage():
    reward = np.random.default_rng(0).choice([-0.0, 0.0, 1.0], (40, 6))
    reward[0] = [-0.0] * 3 + [0.0] * 3
    unsigned = np.where(reward == 0, 0.0, reward)
    estimators = [
        advantages.leave_one_out,
        advantages.group_relative,
        functools.partial(group_advantages.pass_at_k, k=3),
    ]
    for estimator in [*map(jax.vmap, estimators), advantages.informative]:
        np.testing.assert_array_equal(*map(jax.jit(estimator), (reward, unsigned)))
    # All products of the covariance are zeros, of both signs: the first half is selected.
    log_prob, mask = reward[:1] - 1.0, np.ones((1, 6), bool)
    for advantage in (-0.0 * log_prob, 0.0 * log_prob, 0.0 * reward[:1] - 0.0):
        chosen = token_weights.top_covariance(log_prob, advantage, mask, 0.5)
        assert chosen.tolist() == [[True] * 3 + [False] * 3]


def test_top_covariance_is_taken_over_all_devices():
    """Rows of the second device have another mean and fewer tokens."""
    log_prob, advantage = np.random.default_rng(0).normal(size=(2, 2, 5))
    rows = log_prob - [[0.0], [9.0]], advantage - [[0.0], [-4.0]], np.arange(5) < [[5], [2]]
    select = functools.partial(token_weights.top_covariance, share=0.5)
    shared = jax.vmap(functools.partial(select, axis_name="data"), axis_name="data")
    np.testing.assert_array_equal(shared(*(x[:, None] for x in rows))[:, 0], select(*rows))
