"""Tests losses and their gradients element by element; denominators and masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from tables import cases

from jaxrl_po import learner, losses, masked, token_weights
from jaxrl_po.types import Batch

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


# The loss is −clip(r, .8, 1.28) · A · log r: its gradient is the weight on A, inside and outside
# the interval.
@cases("advantage, ratio, weight", (1.0, 1.5, 1.28), (-1.0, 0.5, 0.8), (2.0, 1.1, 1.1))
def test_cispo_by_hand(advantage, ratio, weight):
    got = slope(losses.cispo, np.log(ratio), jnp.float32(advantage), **EPSILONS)
    assert_allclose(got, (-weight * advantage * np.log(ratio), -weight * advantage), rtol=1e-5)


# The loss is −w · A · log π with δ_low = .1, δ_high = .2, c = 5. The columns are A, π, μ, w.
@cases(
    "advantage, prob, sampler, weight",
    (1.0, 0.6, 0.5, 1.2),
    (2.0, 0.6, 0.3, 0.0),  # the probability rose by more than δ_high
    (1.0, 0.2, 0.5, 0.4),
    (-1.0, 0.4, 0.45, 8 / 9),
    (-2.0, 0.4, 0.55, 0.0),  # the probability fell by more than δ_low
    (-1.0, 0.6, 0.3, 2.0),
    (1.0, 0.1, 0.01, 5.0),  # the ratio 10 is truncated to c
)
def test_dppo_by_hand(advantage, prob, sampler, weight):
    bounds = {"delta_low": 0.1, "delta_high": 0.2, "max_ratio": 5.0}
    got = jax.value_and_grad(losses.dppo)(jnp.log(prob), jnp.log(sampler), advantage, **bounds)
    wanted = -weight * advantage * np.log(prob), -weight * advantage
    assert_allclose(got, wanted, rtol=1e-5)


def test_sequence_log_ratio_by_hand():
    log_prob = jnp.array([[-1.0, -2.0, jnp.nan], [-3.0, jnp.inf, 7.0], [jnp.nan] * 3])
    old = jnp.array([[-2.0, -2.5, 9.0], [-1.0, jnp.nan, 7.0], [0.0] * 3])
    mask = jnp.array([[True, True, False], [True, False, False], [False] * 3])
    assert_allclose(
        losses.sequence_log_ratio(log_prob, old, mask), [[0.75] * 3, [-2.0] * 3, [0.0] * 3]
    )


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


def test_clipped_surrogate_is_the_decoupled_bound():
    """The identity is min(rA, clip(r)A) = min(rA, (1 + ε_high)A or (1 − ε_low)A by the sign of
    A)."""
    rng = np.random.default_rng(0)
    r, a = rng.uniform(0.2, 2.0, 200), rng.normal(size=200)
    bound = np.where(a >= 0, (1 + 0.28) * a, (1 - 0.2) * a)
    loss = losses.clipped_surrogate(jnp.log(r), jnp.zeros(200), jnp.asarray(a), **EPSILONS)
    assert_allclose(loss, -np.minimum(r * a, bound), rtol=1e-5, atol=1e-6)


def test_epsilons_vmap():
    loss = jax.vmap(
        lambda e: losses.clipped_surrogate(
            jnp.log(3.0), jnp.float32(0.0), jnp.float32(1.0), epsilon_low=e, epsilon_high=e
        )
    )
    assert_allclose(loss(jnp.array([0.1, 0.2, 0.5])), [-1.1, -1.2, -1.5], rtol=1e-6)


@cases("log_ratio", 1e3, -1e3)
@cases("advantage", 1.0, -1.0)
@cases("loss", losses.surrogate, lambda *args: losses.clipped_surrogate(*args, **EPSILONS))
def test_extreme_ratios_stay_finite(loss, log_ratio, advantage):
    value, gradient = slope(loss, log_ratio, jnp.float32(advantage))
    assert np.isfinite(value)
    assert gradient == 0.0  # beyond ±20 the ratio is constant
    assert abs(value) <= np.exp(20.0) * (1 + 1e-6)


def test_the_clamp_is_at_twenty():
    inside = slope(losses.surrogate, 19.9, jnp.float32(1.0))
    assert_allclose(inside, [-np.exp(19.9)] * 2, rtol=1e-4)
    assert_allclose(slope(losses.surrogate, 20.1, jnp.float32(1.0))[0], -np.exp(20.0), rtol=1e-4)


def test_half_precision_log_probs_make_float32_ratios():
    loss = losses.surrogate(jnp.bfloat16(-1.0), jnp.bfloat16(-1.5), jnp.float32(1.0))
    assert loss.dtype == jnp.float32
    assert_allclose(loss, -np.exp(0.5), rtol=1e-5)


def test_policy_gradient_and_surrogate_agree_at_old_policy():
    log_prob, advantage = jnp.log(jnp.array([0.2, 0.5])), jnp.array([1.5, -2.0])
    policy_gradient = jax.grad(lambda x: losses.policy_gradient(x, advantage).sum())(log_prob)
    surrogate = jax.grad(lambda x: losses.surrogate(x, log_prob, advantage).sum())(log_prob)
    assert_allclose(policy_gradient, -advantage, rtol=1e-6)
    assert_allclose(surrogate, -advantage, rtol=1e-6)


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


def test_squared_value_has_the_half():
    got = jax.value_and_grad(lambda v: losses.squared_value(v, jnp.float32(1.0)))(jnp.float32(4.0))
    assert_allclose(got, (4.5, 3.0))


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


@pytest.mark.parametrize("name", AGGREGATES)
def test_aggregator_gradients_weigh_and_mask(name):
    aggregate, _, count = AGGREGATES[name]
    gradient = jax.grad(lambda x: aggregate(x, MASK).value())(X)
    row = [1 / 3] * 3 if name == "sequence" else [1.0] * 3
    assert_allclose(gradient, np.array([row, [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]) / count, rtol=1e-6)


@pytest.mark.parametrize("name", AGGREGATES)
def test_aggregators_pool_before_they_divide(name):
    aggregate, total, count = AGGREGATES[name]
    parts = [aggregate(X[i : i + 1], MASK[i : i + 1]) for i in range(3)]
    pooled = parts[0] + parts[1] + parts[2]
    assert (float(pooled.total), float(pooled.count)) == (total, count)
    mean_of_means = sum(float(part.value()) for part in parts) / 3
    assert name == "fixed length" or mean_of_means != pytest.approx(total / count)


@pytest.mark.parametrize("name", AGGREGATES)
def test_fully_masked_batch_has_zero_loss_finite_gradient(name):
    aggregate = AGGREGATES[name][0]
    value, gradient = jax.value_and_grad(lambda x: aggregate(x, jnp.zeros_like(MASK)).value())(X)
    assert float(value) == 0.0
    assert_array_equal(gradient, np.zeros((3, 3)))


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


def token_batch(garbage):
    """Returns two completions of 3 and 1 tokens in 4 slots; `garbage` fills all masked slots."""
    mask = jnp.array([[True, True, True, False], [True, False, False, False]])
    x = jnp.where(mask, jnp.array([[-0.5, -1.0, -0.2, 0.0], [-2.0, 0.0, 0.0, 0.0]]), garbage)
    flag = jnp.zeros((2, 4), bool)
    inputs = jnp.where(mask[..., None], jnp.arange(16.0).reshape(2, 4, 2) / 10, garbage)
    return Batch(
        inputs, jnp.zeros((2, 4), jnp.int32), x, x, x, x, flag, flag, mask, jnp.zeros((1, 2)), {}
    )


@pytest.mark.parametrize("aggregate", [AGGREGATES[name][0] for name in AGGREGATES])
@cases("garbage", 0.0, 1e6, jnp.nan, jnp.inf)
def test_masked_values_change_neither_loss_nor_gradient(aggregate, garbage):
    """Masked slots must be zeroed first: a `where` on the loss would let a NaN into the
    gradient."""

    def loss(w, batch):
        log_prob = jax.nn.log_sigmoid(batch.inputs @ w)
        policy = losses.clipped_surrogate(log_prob, batch.log_prob, batch.reward, **EPSILONS)
        value = losses.clipped_value(batch.inputs @ w, batch.value, batch.next_value, epsilon=0.2)
        return aggregate(policy + value, batch.mask).value()

    w = jnp.array([0.3, -0.1])
    clean = jax.value_and_grad(loss)(w, token_batch(0.0))
    batch = token_batch(garbage)
    # The problem itself must zero its inputs.
    own = batch._replace(inputs=masked.zero(batch.inputs, batch.mask))
    dirty = jax.value_and_grad(loss)(w, learner.zero_masked(own))
    assert_array_equal(clean[0], dirty[0])
    assert_array_equal(clean[1], dirty[1])
    assert np.any(clean[1])
    if not np.isfinite(garbage):
        assert not np.isfinite(jax.grad(loss)(w, token_batch(garbage))).all()


@jax.jit
def clipped_with_gradient(log_prob, old_log_prob, advantage, mask):
    def loss(log_prob):
        elements = losses.clipped_surrogate(
            log_prob, old_log_prob, advantage, **EPSILONS, dual_clip=3.0
        )
        means = [
            losses.token_mean(elements, mask),
            losses.sequence_mean(elements, mask),
            losses.fixed_length_mean(elements, mask, 3),
        ]
        return sum(mean.value() for mean in means)

    return jax.value_and_grad(loss)(log_prob)


ELEMENT = st.tuples(
    st.floats(-1e4, 0, width=32),
    st.floats(-1e4, 0, width=32),
    st.floats(-10, 10, width=32),
    st.booleans(),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(ELEMENT, min_size=6, max_size=6))
def test_losses_are_finite_under_any_mask(elements):
    log_prob, old_log_prob, advantage, mask = (
        np.reshape(x, (2, 3)) for x in zip(*elements, strict=True)
    )
    value, gradient = clipped_with_gradient(
        *(x.astype(np.float32) for x in (log_prob, old_log_prob, advantage)), mask
    )
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert not np.any(np.asarray(gradient)[~mask])
    if not mask.any():
        assert float(value) == 0.0


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
