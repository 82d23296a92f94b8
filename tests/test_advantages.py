"""Tests returns and advantages by hand, especially at the ends of episodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal
from tables import cases

from jaxrl_po import advantages, group_advantages

NONE = [False, False, False]
gae = jax.jit(advantages.gae)
discounted_returns = jax.jit(advantages.discounted_returns)
n_step_returns = jax.jit(advantages.n_step_returns, static_argnames="n")


def stream(*columns):
    return [jnp.asarray(c, bool if isinstance(c[0], bool) else jnp.float32) for c in columns]


# r = 1, 2, 3; V(s) = 10, 20, 30; V(s') = 20, 30, 40; γ = ½, λ = ½, so γλ = ¼.
# Without an end, δ is 1 + 10 − 10 = 1; 2 + 15 − 20 = −3; 3 + 20 − 30 = −7. With a termination in
# the middle δ₁ = 2 − 20 = −18; with a truncation and V(final) = 36, δ₁ = 2 + 18 − 20 = 0.
GAE_CASES = {
    "rollout end": (NONE, NONE, [20, 30, 40], [1 - 0.25 * 4.75, -3 - 0.25 * 7, -7]),
    "terminated": ([False, True, False], NONE, [20, 36, 40], [1 - 0.25 * 18, -18, -7]),
    "truncated": (NONE, [False, True, False], [20, 36, 40], [1 + 0.25 * 0, 0, -7]),
    "both": ([False, True, False], [False, True, False], [20, 36, 40], [1 - 0.25 * 18, -18, -7]),
    "terminated at the rollout's end": (
        [False, False, True],
        NONE,
        [20, 30, 40],
        [1 + 0.25 * -9.75, -3 - 0.25 * 27, -27],
    ),
}


@pytest.mark.parametrize("case", GAE_CASES)
def test_gae_by_hand(case):
    terminated, truncated, next_value, expected = GAE_CASES[case]
    inputs = stream(
        [1.0, 2.0, 3.0], [10.0, 20.0, 30.0], list(map(float, next_value)), terminated, truncated
    )
    assert_allclose(gae(*inputs, gamma=0.5, lambda_=0.5), expected, rtol=1e-6)


# On the same stream with γ = ½, Monte Carlo gives G₂ = 3 + 20 = 23 at the rollout's end, G₁ = 2 +
# 11.5, G₀ = 1 + 6.75.
RETURN_CASES = {
    "rollout end": (NONE, NONE, [20, 30, 40], [7.75, 13.5, 23]),
    "terminated": ([False, True, False], NONE, [20, 36, 40], [2, 2, 23]),
    "truncated": (NONE, [False, True, False], [20, 36, 40], [11, 20, 23]),
    "both": ([False, True, False], [False, True, False], [20, 36, 40], [2, 2, 23]),
    "terminated at the rollout's end": ([False, False, True], NONE, [20, 30, 40], [2.75, 3.5, 3]),
}


@pytest.mark.parametrize("case", RETURN_CASES)
@cases("n", None, 3, 99)
def test_discounted_returns_by_hand_and_long_windows(case, n):
    terminated, truncated, next_value, expected = RETURN_CASES[case]
    inputs = stream([1.0, 2.0, 3.0], list(map(float, next_value)), terminated, truncated)
    returns = (
        n_step_returns(*inputs, gamma=0.5, n=n) if n else discounted_returns(*inputs, gamma=0.5)
    )
    assert_allclose(returns, expected, rtol=1e-6)


# For n = 2, G₀ = r₀ + γ r₁ + γ² V(s₂); the rollout's end cuts the window from s₁, and the window
# from s₂ has one step.
TWO_STEP_CASES = {
    "rollout end": (NONE, NONE, [20, 30, 40], [1 + 1 + 7.5, 2 + 1.5 + 10, 23]),
    "terminated": ([False, True, False], NONE, [20, 36, 40], [2, 2, 23]),
    "truncated": (NONE, [False, True, False], [20, 36, 40], [1 + 1 + 9, 2 + 18, 23]),
    "truncated first": (NONE, [True, False, False], [36, 30, 40], [1 + 18, 2 + 1.5 + 10, 23]),
}


@pytest.mark.parametrize("case", TWO_STEP_CASES)
def test_two_step_returns_by_hand(case):
    terminated, truncated, next_value, expected = TWO_STEP_CASES[case]
    inputs = stream([1.0, 2.0, 3.0], list(map(float, next_value)), terminated, truncated)
    assert_allclose(n_step_returns(*inputs, gamma=0.5, n=2), expected, rtol=1e-6)


def random_stream(seed, length=12, end=0.25):
    rng = np.random.default_rng(seed)
    reward, value, next_value = (
        jnp.asarray(rng.normal(size=length), jnp.float32) for _ in range(3)
    )
    terminated, truncated = (jnp.asarray(rng.random(length) < end) for _ in range(2))
    return reward, value, next_value, terminated, truncated


def test_nan_value_behind_termination_is_not_read():
    inputs = stream(
        [1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [20.0, np.nan, 40.0], [False, True, False], NONE
    )
    assert np.isfinite(gae(*inputs, gamma=0.5, lambda_=0.5)).all()
    reward, _, *rest = inputs
    assert np.isfinite(discounted_returns(reward, *rest, gamma=0.5)).all()
    assert np.isfinite(n_step_returns(reward, *rest, gamma=0.5, n=2)).all()


def test_streams_must_agree_and_flags_are_booleans():
    reward, value, next_value, terminated, truncated = random_stream(0)
    with pytest.raises(AssertionError):
        gae(
            reward[None],
            value[None],
            next_value[None],
            terminated[None],
            truncated[None],
            gamma=0.9,
            lambda_=0.9,
        )
    with pytest.raises(AssertionError):
        gae(reward, value[:-1], next_value, terminated, truncated, gamma=0.9, lambda_=0.9)
    with pytest.raises(AssertionError):
        discounted_returns(reward, next_value, terminated.astype(jnp.float32), truncated, gamma=0.9)
    with pytest.raises(ValueError, match="n must be at least 1"):
        n_step_returns(reward, next_value, terminated, truncated, gamma=0.9, n=0)


def constant_groups():
    values = jnp.asarray(np.random.default_rng(0).normal(size=200), jnp.float32)
    return jnp.broadcast_to(values[:, None], (200, 7))


# The rewards have mean 5.033; deviations −1.233, .167, 1.067; Σd² = 2.687: std .946 (ddof 0), 1.159
# (ddof 1).
@cases("ddof, expected", (0, [-1.303, 0.176, 1.127]), (1, [-1.064, 0.144, 0.920]))
def test_group_of_the_slides(ddof, expected):
    assert_allclose(
        advantages.group_relative(jnp.array([3.8, 5.2, 6.1]), ddof=ddof), expected, atol=1e-3
    )


@cases("estimator", advantages.group_relative, advantages.leave_one_out, advantages.whiten)
def test_equal_rewards_give_exactly_zero(estimator):
    assert_array_equal(jax.vmap(estimator)(constant_groups()), np.zeros((200, 7)))


def test_half_precision_rewards_are_compared_in_float32():
    # The mean of 1 and 512 is 256.5, or 256 in bfloat16; their difference is 511, or 512 in
    # bfloat16.
    reward = jnp.array([1.0, 512.0], jnp.bfloat16)
    for got, expected in (
        (advantages.group_relative(reward, scale="none"), [-255.5, 255.5]),
        (advantages.leave_one_out(reward), [-511.0, 511.0]),
    ):
        assert got.dtype == jnp.float32
        assert_array_equal(got, expected)


# The unmasked elements 1, 0, 2, 0, 3 have mean 1.2, deviations −.2, −1.2, .8, −1.2, 1.8, Σd² 6.8;
# the result sums the unmasked part of each row.
@cases(
    "options, divisor",
    ({"scale": "none"}, 1.0),
    ({}, 1.36**0.5),
    ({"ddof": 1}, 1.7**0.5),
    ({"epsilon": 1.0}, 1.36**0.5 + 1.0),
)
def test_process_relative_by_hand(options, divisor):
    reward, mask = (
        jnp.array([[1.0, 0.0, 2.0], [0.0, 3.0, jnp.nan]]),
        jnp.array([[True] * 3, [True, True, False]]),
    )
    expected = np.array([[-0.6, -0.4, 0.8], [0.6, 1.8, 0.0]]) / divisor
    assert_allclose(
        group_advantages.process_relative(reward, mask, **options), expected, rtol=1e-5, atol=1e-6
    )


@cases("garbage", 5.0, -5.0)
@cases("scale", "std", "none")
def test_process_rewards_without_a_difference_are_exactly_zero(scale, garbage):
    for count in (0, 1, 7):
        mask = jnp.arange(8).reshape(2, 4) < count
        dead = group_advantages.process_relative(
            jnp.where(mask, 0.1, garbage), mask, scale=scale, ddof=1
        )
        assert_array_equal(dead, np.zeros((2, 4)))


def test_process_rewards_need_a_known_scale():
    with pytest.raises(ValueError, match="scale must be"):
        group_advantages.process_relative(jnp.ones((2, 2)), jnp.ones((2, 2), bool), scale="mean")


def test_a_lone_member_has_no_baseline():
    for call in (advantages.group_relative, advantages.leave_one_out):
        with pytest.raises(ValueError, match="a group needs"):
            call(jnp.ones(1))
    with pytest.raises(ValueError, match="a group needs more than 2 members"):
        advantages.group_relative(jnp.ones(2), ddof=2)
    with pytest.raises(ValueError, match="scale must be"):
        advantages.group_relative(jnp.ones(2), scale="mean")


def test_whiten_by_hand():
    # the unmasked elements 1, 3, 5 have mean 3 and variance 8/3
    x, mask = jnp.array([[1.0, 3.0], [5.0, jnp.nan]]), jnp.array([[True, True], [True, False]])
    scale = (8 / 3) ** -0.5
    assert_allclose(
        advantages.whiten(x, mask), [[-2 * scale, 0.0], [2 * scale, 0.0]], rtol=1e-5, atol=1e-6
    )
    shifted = advantages.whiten(x, mask, shift_mean=False)
    assert_allclose(shifted, [[3 - 2 * scale, 3.0], [3 + 2 * scale, 0.0]], rtol=1e-5)
    assert_allclose(advantages.whiten(jnp.array([1.0, 3.0]), epsilon=1.0), [-0.5, 0.5], rtol=1e-6)


def test_whiten_over_devices_uses_global_statistics():
    rng = np.random.default_rng(0)
    x, mask = (
        jnp.asarray(rng.normal(size=(8, 5)) + np.arange(8)[:, None], jnp.float32),
        jnp.asarray(rng.random((8, 5)) < 0.5),
    )
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    sharded = jax.jit(
        jax.shard_map(
            lambda x, mask: advantages.whiten(x, mask, axis_name="data"),
            mesh=mesh,
            in_specs=(P("data"), P("data")),
            out_specs=P("data"),
            check_vma=False,
        )
    )
    expected = advantages.whiten(x, mask)
    assert_allclose(sharded(x, mask), expected, rtol=1e-4, atol=1e-5)
    local = jnp.concatenate(
        [advantages.whiten(x[i : i + 2], mask[i : i + 2]) for i in range(0, 8, 2)]
    )
    assert float(jnp.abs(local - expected).max()) > 0.1


def test_process_rewards_count_where_a_step_ends():
    """A right answer has six tokens, a wrong answer two: length costs the right answer nothing."""
    lengths, tokens = np.array([6, 2]), np.arange(6)
    mask = jnp.asarray(tokens < lengths[:, None])
    last = jnp.asarray(tokens == lengths[:, None] - 1)
    reward = jnp.where(last, jnp.array([[1.0], [0.0]]), 0.0)
    got = group_advantages.process_relative(reward, mask, last, epsilon=0.0)
    assert_allclose(got, np.where(mask, [[1.0], [-1.0]], 0.0), rtol=1e-6)
    # If every token were a step, the long right answer would begin below the short wrong answer.
    every = group_advantages.process_relative(reward, mask, epsilon=0.0)
    assert float(every[0, 0]) < float(every[1, 0]) + 2.0
    garbage = jnp.where(last, reward, 7.0)
    assert_array_equal(group_advantages.process_relative(garbage, mask, last, epsilon=0.0), got)


def test_two_steps_of_a_trace():
    """A token gets the normalised rewards of the steps that end at or after it.

    Shao et al. 2024, section 4.1.3.
    """
    reward = jnp.array([[0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
    step_end = jnp.array([[False, True, False, True]] * 2)
    got = group_advantages.process_relative(reward, jnp.ones((2, 4), bool), step_end, epsilon=0.0)
    mean, std = 0.75, np.sqrt(3) / 4
    a, b = (1.0 - mean) / std, (0.0 - mean) / std
    assert_allclose(got, [[a + b, a + b, b, b], [2 * a, 2 * a, a, a]], rtol=1e-6)
