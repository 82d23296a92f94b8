"""Tests losses and their gradients element by element; denominators and masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from tables import cases

from jaxrl_po import losses, token_weights

EPSILONS = {"epsilon_low": 0.2, "epsilon_high": 0.28}


def slope(loss, log_ratio, *args, **options):
    """Returns the loss and its derivative with respect to the log-probability, for an old
    log-probability of 0."""
    value, gradient = jax.value_and_grad(
        lambda x: loss(x, jnp.zeros_like(x), *args, **options).sum()
    )(jnp.asarray(log_ratio))
    return float(value), float(gradient)


# The derivative d/dlog π of −r·A is −r·A; where the clip has an effect the derivative is 0. The
# columns are A, r, loss, gradient.
FOUR_CASES = [
    (1.0, 1.5, -1.28, 0.0),  # good action, already more likely: no further gain
    (1.0, 0.5, -0.5, -0.5),  # good action, less likely: pulled back
    (-1.0, 1.5, 1.5, 1.5),  # bad action, more likely: pushed back, without a bound
    (-1.0, 0.5, 0.8, 0.0),  # bad action, already less likely: no further gain
    (2.0, 1.1, -2.2, -2.2),  # ratio inside the interval: the plain surrogate
    (-2.0, 1.1, 2.2, 2.2),
    # Clip-higher: the ratio is still inside the interval on the upper side.
    (1.0, 1.25, -1.25, -1.25),
    (-1.0, 0.75, 0.8, 0.0),
]


@pytest.mark.parametrize(("advantage", "ratio", "loss", "gradient"), FOUR_CASES)
def test_clipping(advantage, ratio, loss, gradient):
    got = slope(losses.clipped_surrogate, np.log(ratio), jnp.float32(advantage), **EPSILONS)
    assert_allclose(got, (loss, gradient), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("advantage", "ratio", "loss", "gradient"), FOUR_CASES)
def test_clip_fractions_are_where_the_gradient_is_lost(advantage, ratio, loss, gradient):
    log_ratio, zero, advantage = jnp.log(ratio), jnp.float32(0.0), jnp.float32(advantage)
    low = losses.clip_fraction_low(log_ratio, zero, advantage, 0.2)
    high = losses.clip_fraction_high(log_ratio, zero, advantage, 0.28)
    assert low.dtype == high.dtype == jnp.float32
    assert float(low + high) == float(gradient == 0.0)
    assert float(low) == float(gradient == 0.0 and advantage < 0)


def test_clip_fractions_vanish_without_advantage_or_at_edge():
    zero, one = jnp.float32(0.0), jnp.float32(1.0)
    assert float(losses.clip_fraction_low(jnp.log(0.5), zero, zero, 0.2)) == 0.0
    assert float(losses.clip_fraction_high(jnp.log(1.5), zero, zero, 0.2)) == 0.0
    assert float(losses.clip_fraction_low(zero, zero, -one, 0.0)) == 0.0
    assert float(losses.clip_fraction_high(zero, zero, one, 0.0)) == 0.0


def test_bradley_terry_by_hand():
    # The loss is −log(1 / (1 + e²)), whose slope in the reward of the chosen response is −σ(2).
    got = jax.value_and_grad(losses.bradley_terry)(jnp.float32(1.0), jnp.float32(3.0))
    assert_allclose(got, (2.126928, -0.880797), rtol=1e-5)


@cases(
    "advantage, ratio, loss, gradient",
    (-1.0, 5.0, 3.0, 0.0),  # beyond c = 3 the loss of a bad action does not grow
    (-1.0, 2.0, 2.0, 2.0),
    (-1.0, 0.5, 0.8, 0.0),
    # The loss of a good action is not bounded: max(0.1, 3) would be the bound.
    (1.0, 0.1, -0.1, -0.1),
    (1.0, 5.0, -1.28, 0.0),
    (-2.0, 5.0, 6.0, 0.0),
    (0.5, 0.1, -0.05, -0.05),
)
def test_dual_clip(advantage, ratio, loss, gradient):
    got = slope(
        losses.clipped_surrogate, np.log(ratio), jnp.float32(advantage), **EPSILONS, dual_clip=3.0
    )
    assert_allclose(got, (loss, gradient), rtol=1e-5, atol=1e-7)


def test_what_is_held_constant_has_no_gradient():
    x = jnp.array([0.3, -0.4])
    held = {
        "policy_gradient": lambda y: losses.policy_gradient(x, y),
        "surrogate": lambda y: losses.surrogate(x, 0.5 * x, y),
        "self_normalized_surrogate": lambda y: losses.self_normalized_surrogate(x, 0.5 * x, y),
        "cispo": lambda y: losses.cispo(x, 0.5 * x, y, **EPSILONS),
        "cispo old": lambda y: losses.cispo(x, y, x, **EPSILONS),
        "clipped_surrogate": lambda y: losses.clipped_surrogate(
            x, 0.5 * x, y, **EPSILONS, dual_clip=3.0
        ),
        "squared_value": lambda y: losses.squared_value(x, y),
        "clipped_value target": lambda y: losses.clipped_value(x, 0.5 * x, y, epsilon=0.1),
        "clipped_value old": lambda y: losses.clipped_value(x, y, 2.0 * x, epsilon=0.1),
    }
    for name, loss in held.items():
        assert_array_equal(
            jax.grad(lambda y, loss=loss: loss(y).sum())(2.0 * x), [0.0, 0.0], err_msg=name
        )


# v_old = 0, G = 1, ε = .5. The columns are v, loss ½ max(…), gradient.
@cases(
    "value, loss, gradient",
    (0.2, 0.32, -0.8),  # value inside the interval: the squared loss
    (0.8, 0.125, 0.0),  # value moved too far towards the target: ½ (.5 − 1)², no gradient
    (-1.0, 2.0, -2.0),  # value moved away: ½ (−1 − 1)² is the larger term
    (2.0, 0.5, 1.0),  # value overshot: ½ (2 − 1)² is the larger term
)
def test_clipped_value_by_hand(value, loss, gradient):
    """The same cases are repeated from another old value, and mirrored."""
    for old, sign in ((0.0, 1.0), (2.0, 1.0), (2.0, -1.0)):
        moved, target = jnp.float32(old + sign * value), jnp.float32(old + sign)
        got = jax.value_and_grad(losses.clipped_value)(moved, jnp.float32(old), target, epsilon=0.5)
        assert_allclose(got, (loss, sign * gradient), rtol=1e-5, atol=1e-6)


# The rows are 1 2 3 | 13 | empty, with garbage in masked slots.
X = jnp.array([[1.0, 2.0, 3.0], [13.0, jnp.nan, 1e30], [jnp.inf, jnp.nan, -7.0]])
MASK = jnp.array([[True, True, True], [True, False, False], [False, False, False]])
AGGREGATES = {
    "token": (losses.token_mean, 19.0, 4.0),  # 19 divided by 4 tokens
    # 2 + 13 divided by the two rows that are not empty.
    "sequence": (losses.sequence_mean, 15.0, 2.0),
    # 19 divided by 3 rows × 5 tokens
    "fixed length": (lambda x, mask: losses.fixed_length_mean(x, mask, 5), 19.0, 15.0),
}


@pytest.mark.parametrize("name", AGGREGATES)
def test_aggregators_by_hand(name):
    aggregate, total, count = AGGREGATES[name]
    mean = aggregate(X, MASK)
    assert (float(mean.total), float(mean.count)) == (total, count)
    assert float(mean.value()) == pytest.approx(total / count)


def test_a_budget_of_one_token_is_one():
    assert float(losses.fixed_length_mean(X, MASK, 1).count) == 3.0


def test_aggregators_check_shapes():
    with pytest.raises(AssertionError):
        losses.sequence_mean(X[0], MASK[0])
    with pytest.raises(AssertionError):
        losses.token_mean(X, MASK[:2])
    with pytest.raises(ValueError, match="length must be at least 1"):
        losses.fixed_length_mean(X, MASK, 0)
    with pytest.raises(AssertionError):
        losses.surrogate(jnp.zeros(3), jnp.zeros(3), jnp.zeros((3, 1)))


def test_weights_include_their_bounds_and_have_no_gradient():
    x = jnp.log(jnp.array([0.5, 0.9, 0.1]))
    assert token_weights.masked_weight(x, x, 1.0, 2.0).tolist() == [1.0] * 3
    assert token_weights.masked_weight(x, x, 0.5, 1.0).tolist() == [1.0] * 3
    kept = token_weights.off_policy_mask(x[None], x[None], -jnp.ones((1, 3)), MASK[:1], 0.0)
    assert kept.all()
    for weight in (
        lambda y: token_weights.truncated_weight(y, 0.5 * x, 2.0),
        lambda y: token_weights.masked_weight(y, 0.5 * x, 0.5, 5.0),
    ):
        assert_array_equal(jax.grad(lambda y, f=weight: f(y).sum())(x), jnp.zeros(3))
