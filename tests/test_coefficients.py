"""Tests every number of every config by hand: the term that it scales, its sign and its size.

Each test takes one step of gradient descent: unless the default optimizer is tested, the optimizer
is `sgd(1)`, so that the change of the parameters is a gradient. The parameters differ from the
parameters that sampled the batch, so that ratios are not 1, and the reference differs from both.
The expected gradient is computed in NumPy, from the weight of every step on `∇ log π`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from fields import CASES
from one_step import (
    GROUPS,
    WITH_CRITIC,
    assert_moves,
    assert_same,
    change,
    config_of,
    flat,
    gae,
    gradient,
    in_group,
    known,
    minus,
    n_step,
    number,
    problem_of,
    program,  # noqa: F401  conftest clears the caches that a test file imports
    situation,
    times,
    unclipped,
    value_gradient,
    weights,
    whitened,
)

from jaxrl_po.config import as_arrays

# Tests of coefficients of terms.


@number("entropy_coefficient", "ppo", "a2c", "reinforce", *GROUPS)
def test_the_entropy_bonus_raises_entropy_in_proportion(algorithm):
    nothing = change(algorithm, entropy_coefficient=0.0).policy
    up = gradient(algorithm, weights(algorithm), "entropy")
    for c in (0.5, 1.0):
        assert_same(minus(change(algorithm, entropy_coefficient=c).policy, nothing), times(c, up))


@number("value_coefficient", "ppo", "a2c")
def test_value_loss_is_coefficient_times_half_squared_error(algorithm):
    k = known(algorithm)
    target = n_step(k, 0.99, 5) if algorithm == "a2c" else gae(k, 0.99, 0.95) + k.value
    towards = value_gradient(algorithm, weights(algorithm) * (target - k.value_now))
    policies = []
    for c in (0.5, 1.0):
        moved = change(algorithm, value_coefficient=c)
        assert_same(moved.value, times(c, towards))
        policies.append(moved.policy)
    np.testing.assert_array_equal(*map(flat, policies))


@number(
    "kl_coefficient",
    *("grpo", "dapo", "gspo", "cispo"),
    *("dr_grpo", "sapo", "gmpo", "dppo", "pkpo", "kl_cov", "distillation"),
)
def test_the_penalty_pulls_towards_the_reference_in_proportion(algorithm):
    """The k3 penalty has the gradient (1 − π_ref / π) ∇ log π; along the step the exact KL(π_ref ‖
    π) falls."""
    k = known(algorithm)
    towards = gradient(algorithm, weights(algorithm) * np.expm1(k.reference - k.now))
    nothing = change(algorithm, kl_coefficient=0.0).policy
    for c in (0.5, 1.0):
        assert_same(minus(change(algorithm, kl_coefficient=c).policy, nothing), times(c, towards))
    assert flat(gradient(algorithm, k.mask, "kl")) @ flat(towards) < 0


@number("kl_coefficient", "rloo")
def test_rloo_takes_the_distance_from_the_outcome(algorithm):
    k = known(algorithm)
    for c in (0.0, 0.5, 1.0):
        groups = (
            (k.reward * k.mask - c * k.mask * (k.old - k.reference)).sum(1).reshape(k.score.shape)
        )
        advantage = ((groups - groups.mean(1, keepdims=True)) * 4 / 3).reshape(-1, 1)
        assert_moves(algorithm, k.ratio * advantage, kl_coefficient=c)


@number("kl_coefficient", "reinforce_pp")
def test_reinforce_pp_puts_kl_in_returns_or_loss(algorithm):
    k = known(algorithm)
    for c in (0.5, 1.0):
        reward = k.mask * (k.reward - c * (k.old - k.reference))
        advantage = whitened(np.flip(np.cumsum(np.flip(reward, 1), 1), 1), k.mask)
        weight = unclipped(k.ratio, advantage, 0.2, 0.2) * k.ratio * advantage
        assert_moves(algorithm, weight, kl_coefficient=c)
    nothing = change(algorithm, kl_coefficient=0.0, group_baseline=True).policy
    for c in (0.5, 1.0):
        pulled = minus(change(algorithm, kl_coefficient=c, group_baseline=True).policy, nothing)
        assert_same(
            pulled, times(c, gradient(algorithm, weights(algorithm) * (k.reference - k.now)))
        )


@number("kl_coefficient", "ppo_penalty")
def test_ppo_is_pulled_back_to_the_update_start(algorithm):
    """The first step of an update has no gradient.

    The second step of the update has the gradient of the exact KL(old ‖ new).
    """
    k, params = known(algorithm), situation(WITH_CRITIC)[0].policy
    first = gradient(algorithm, weights(algorithm) * k.ratio * gae(k, 0.99, 0.95))
    after = jax.tree.map(jnp.add, params, first)
    away = gradient(algorithm, weights(algorithm), "kl", at=after, frm=params)
    settings = {"penalty": "fixed", "num_epochs": 2}
    nothing = change(algorithm, kl_coefficient=0.0, **settings).policy
    for c in (0.5, 1.0):
        assert_same(
            minus(change(algorithm, kl_coefficient=c, **settings).policy, nothing), times(-c, away)
        )


@number("reference_kl_coefficient", "ppo_reference")
def test_ppo_subtracts_reference_kl_from_each_reward(algorithm):
    k = known(algorithm)
    for c in (0.0, 0.5, 1.0):
        reward = k.reward - c * k.mask * (k.old - k.reference)
        advantage = gae(k, 0.99, 0.95, reward)
        moved = change(algorithm, clip=False, reference_kl_coefficient=c)
        assert_same(moved.policy, gradient(algorithm, weights(algorithm) * k.ratio * advantage))
        error = advantage + k.value - k.value_now
        assert_same(moved.value, times(0.5, value_gradient(algorithm, weights(algorithm) * error)))


# Estimation.


@number("gamma", "ppo", "a2c", "reinforce")
def test_gamma_discounts_what_follows(algorithm):
    k = known(algorithm)
    for gamma in (0.99, 0.5, 0.0):
        advantage = {
            "ppo": lambda g: (
                gae(k, g, 0.95) * k.ratio * unclipped(k.ratio, gae(k, g, 0.95), 0.2, 0.2)
            ),
            "a2c": lambda g: n_step(k, g, 5) - k.value,
            "reinforce": lambda g: n_step(k, g, 8) - k.value,
        }[algorithm](gamma)
        assert_moves(algorithm, advantage, gamma=gamma)


@number("lambda_", "ppo")
def test_lambda_decays_what_follows(algorithm):
    k = known(algorithm)
    for lambda_ in (1.0, 0.5, 0.0):
        advantage = gae(k, 0.99, lambda_)
        inside = unclipped(k.ratio, advantage, 0.2, 0.2)
        assert_moves(algorithm, k.ratio * advantage * inside, lambda_=lambda_)


@number("std_epsilon", "grpo")
def test_std_epsilon_is_added_to_group_std(algorithm):
    k = known(algorithm)
    for epsilon in (0.1, 0.5, 1.0):
        advantage = in_group(k, k.score, epsilon)
        inside = unclipped(k.ratio, advantage, 0.2, 0.2)
        assert_moves(algorithm, k.ratio * advantage * inside, std_epsilon=epsilon)


@number("overlong_factor", "dapo")
def test_length_penalty_is_factor_times_share_of_cache(algorithm):
    k = known(algorithm)
    for factor in (0.5, 1.0, 2.0):
        reward = k.score.ravel() - factor * np.clip((k.mask.sum(1) - 2) / 6, 0, 1)
        advantage = in_group(k, reward)
        inside = unclipped(k.ratio, advantage, 0.2, 0.28)
        assert_moves(algorithm, k.ratio * advantage * inside, overlong_factor=factor)


@number("running_decay", "grpo")
def test_earlier_outcomes_keep_that_weight_in_each_iteration(algorithm):
    problem = problem_of(algorithm)

    @jax.jit
    def rewards(decay):
        learner = CASES[algorithm][0].make(
            as_arrays(config_of(algorithm, running_statistics=True, running_decay=decay)), problem
        )
        state = learner.init(jax.random.key(0))
        batches = []
        for key in jax.random.split(jax.random.key(7), 3):
            state, batch = learner.sample(state._replace(key=key))
            stratum = batch.columns["stratum"]
            batches.append((batch.score.reshape(-1), stratum, batch.reward.sum(1)))
        return batches

    for decay in (0.0, 0.5, 1.0):
        seen = [tuple(np.asarray(x, np.float64) for x in batch) for batch in rewards(decay)]
        outcome, stratum, relative = (np.concatenate(x) for x in zip(*seen, strict=True))
        weight = np.repeat(decay ** np.array([2.0, 1.0, 0.0]), len(seen[0][0]))
        varied = 0
        for s in np.unique(seen[2][1]):
            of, last = (weight * (stratum == s)), (seen[2][1] == s)
            mean = of @ outcome / of.sum()
            std = np.sqrt(of @ np.square(outcome - mean) / of.sum())
            want = np.where(std > 0, (seen[2][0][last] - mean) / (std + 1e-6), 0.0)
            np.testing.assert_allclose(relative[-len(last) :][last], want, rtol=1e-3, atol=1e-5)
            varied += std > 0
        assert varied


# Clips.


@number("epsilon_low epsilon_high", "ppo", "grpo", "dapo")
def test_ratios_lose_their_gradient_outside_the_clip(algorithm):
    k = known(algorithm)
    if algorithm == "ppo":
        advantage = gae(k, 0.99, 0.95)
    else:
        shaped = k.score.ravel() - (algorithm == "dapo") * np.clip((k.mask.sum(1) - 2) / 6, 0, 1)
        advantage = in_group(k, shaped)
    kept = []
    for low, high in ((0.05, 0.2), (0.2, 0.2), (0.2, 0.9)):
        inside = unclipped(k.ratio, advantage, low, high)
        kept.append((inside * k.mask).sum())
        assert_moves(algorithm, k.ratio * advantage * inside, epsilon_low=low, epsilon_high=high)
    assert kept[0] < kept[1] < kept[2]


def test_the_value_is_clipped_at_epsilon_high():
    k = known("ppo")
    target = gae(k, 0.99, 0.95) + k.value
    for epsilon in (0.1, 0.6):
        inside = np.abs(k.value_now - k.value) <= epsilon
        bound = k.value + np.clip(k.value_now - k.value, -epsilon, epsilon)
        error = k.value_now - target
        weight = np.where(inside | (np.square(error) >= np.square(bound - target)), -error, 0.0)
        moved = change("ppo", clip_value=True, epsilon_low=0.1, epsilon_high=epsilon)
        assert_same(moved.value, times(0.5, value_gradient("ppo", weights("ppo") * weight)))


@number("epsilon_low epsilon_high", "gspo")
def test_gspo_clips_the_geometric_mean_of_a_sequence(algorithm):
    k = known(algorithm)
    advantage = in_group(k, k.score)
    ratio = np.exp(
        (k.mask * (k.now - k.old)).sum(1, keepdims=True) / k.mask.sum(1, keepdims=True)
    ) * np.ones_like(k.mask)
    kept = []
    for low, high in ((0.1, 0.26), (0.25, 0.26), (0.25, 0.5)):
        inside = unclipped(ratio, advantage, low, high)
        kept.append((inside * k.mask).sum())
        assert_moves(algorithm, ratio * advantage * inside, epsilon_low=low, epsilon_high=high)
    assert kept[0] < kept[1] < kept[2]


@number("epsilon_low epsilon_high", "cispo")
def test_cispo_clips_the_weight_and_drops_nothing(algorithm):
    k = known(algorithm)
    advantage = in_group(k, k.score)
    for low, high in ((0.1, 0.2), (0.4, 0.2), (0.4, 0.6)):
        weight = np.clip(k.ratio, 1 - low, 1 + high) * advantage
        assert_moves(algorithm, weight, epsilon_low=low, epsilon_high=high)


@number("dual_clip_ratio", "grpo")
def test_a_negative_advantage_admits_that_ratio_at_most(algorithm):
    k = known(algorithm)
    advantage = in_group(k, k.score)
    kept = []
    for most in (1.02, 1.2, 50.0):
        inside = unclipped(k.ratio, advantage, 0.2, 0.2) & ~((advantage < 0) & (k.ratio > most))
        kept.append((inside * k.mask).sum())
        options = {"dual_clip": True, "dual_clip_ratio": most}
        assert_moves(algorithm, k.ratio * advantage * inside, **options)
    assert kept[0] < kept[1] < kept[2]
