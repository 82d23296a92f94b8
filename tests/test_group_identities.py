"""Exact identities of groups in float64: leave-one-out, the group's mean, standardisation."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_po import advantages, losses
from jaxrl_po.distributions import Categorical

EXACT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


# 12
def test_leave_one_out_is_unbiased_and_the_group_mean_shrinks():
    """Every group of G = 3 draws from 3 actions, with its probability."""
    logits, reward = jnp.array([0.3, -0.5, 0.8]), jnp.array([1.0, 0.0, 2.5])
    groups = np.array(list(itertools.product(range(3), repeat=3)))
    probability = np.prod(np.asarray(jax.nn.softmax(logits))[groups], axis=1)

    def expected_gradient(estimator):
        weights = jax.vmap(estimator)(reward[groups])

        def loss(logits):
            log_prob = Categorical(jnp.broadcast_to(logits, (*groups.shape, 3))).log_prob(
                jnp.asarray(groups)
            )
            return -probability @ losses.policy_gradient(log_prob, weights).mean(1)

        return jax.grad(loss)(logits)

    true = jax.grad(lambda x: jax.nn.softmax(x) @ reward)(logits)
    np.testing.assert_allclose(expected_gradient(advantages.leave_one_out), true, **EXACT)
    centred = functools.partial(advantages.group_relative, scale="none")
    np.testing.assert_allclose(expected_gradient(centred), (1 - 1 / 3) * true, **EXACT)


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
    """c_G(p) in E[GRPO gradient] = c_G(p) ∇p for binary rewards.

    ∇log π is ∇p / p on a win and −∇p / (1 − p) on a loss.
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
