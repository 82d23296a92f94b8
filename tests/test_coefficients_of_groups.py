"""Tests numbers of the methods of 2025 and 2026 by hand: gates, trust regions and corrections.

As in `test_coefficients`, each test takes one step of gradient descent.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_step import (
    IN_GROUPS,
    assert_moves,
    assert_same,
    gradient,
    in_group,
    known,
    number,
    outcome,
    program,  # noqa: F401  conftest clears the caches that a test file imports
    unclipped,
    weights,
)
from probes import tabular_problem

from jaxrl_po.algorithms import group_policy, kl_cov
from jaxrl_po.config import as_arrays
from jaxrl_po.types import Samples


@number("temperature_positive temperature_negative", "sapo")
def test_gate_closes_at_the_rate_of_each_temperature(algorithm):
    """The gradient of a token is the gradient of −r A times 4 p (1 − p)."""
    k = known(algorithm)
    advantage = in_group(k, k.score)
    for positive, negative in ((1.0, 1.05), (5.0, 1.05), (1.0, 5.0)):
        temperature = np.where(advantage > 0, positive, negative)
        p = 1.0 / (1.0 + np.exp(-temperature * (k.ratio - 1.0)))
        options = {"temperature_positive": positive, "temperature_negative": negative}
        assert_moves(algorithm, k.ratio * advantage * 4.0 * p * (1.0 - p), **options)


@number("epsilon_low epsilon_high", "gmpo")
def test_gmpo_clips_tokens_before_their_geometric_mean(algorithm):
    k = known(algorithm)
    advantage, x, kept = in_group(k, k.score), k.now - k.old, []
    for low, high in ((0.05, 0.1), (0.4, 0.1), (0.4, 0.4)):
        inside = ~(((advantage > 0) & (x > high)) | ((advantage < 0) & (x < -low)))
        clipped = np.where(advantage > 0, np.minimum(x, high), np.maximum(x, -low))
        mean = (k.mask * clipped).sum(1, keepdims=True) / k.mask.sum(1, keepdims=True)
        kept.append((inside * k.mask).sum())
        weight = np.exp(mean) * advantage * inside
        assert_moves(algorithm, weight, epsilon_low=low, epsilon_high=high)
    assert kept[0] < kept[1] < kept[2]


@pytest.mark.parametrize("algorithm", ["gmpo", "cispo"])
def test_clip_fractions_are_shares_of_tokens(algorithm):
    """GMPO clips log-ratios on the side that the sign of A allows; CISPO clips every ratio."""
    k = known(algorithm)
    advantage, x = in_group(k, k.score), k.now - k.old
    low, high = {
        "gmpo": ((advantage < 0) & (x < -0.05), (advantage > 0) & (x > 0.1)),
        "cispo": (k.ratio < 0.95, k.ratio > 1.1),
    }[algorithm]
    _, metrics, _ = outcome(algorithm, epsilon_low=0.05, epsilon_high=0.1)
    for side, outside in (("low", low), ("high", high)):
        share = (k.mask * outside).sum() / k.mask.sum()
        assert 0.0 < share < 0.5
        np.testing.assert_allclose(metrics[f"clip_fraction_{side}"], share, rtol=1e-5)


@number("delta_low delta_high max_ratio", "dppo")
def test_dppo_stops_at_a_given_change_of_probability(algorithm):
    """The change is measured against the sampler: π_old has no influence on it."""
    k = known(algorithm)
    advantage = in_group(k, k.score)
    r, difference, kept = np.exp(k.now - k.sampler), np.exp(k.now) - np.exp(k.sampler), []
    for low, high, most in ((0.02, 0.05, 20.0), (0.2, 0.05, 20.0), (0.2, 0.2, 20.0), (0.2, 0.2, 1)):
        outside = np.where(advantage > 0, difference > high, difference < -low)
        kept.append((~outside * k.mask).sum())
        weight = weights(algorithm) * np.minimum(r, most) * advantage * ~outside
        bounds = {"delta_low": low, "delta_high": high, "max_ratio": most}
        moved, metrics, _ = outcome(algorithm, **bounds)
        assert_same(moved.policy, gradient(algorithm, weight))
        for side, sign in (("low", -1), ("high", 1)):
            share = (k.mask * outside * (advantage * sign > 0)).sum() / k.mask.sum()
            np.testing.assert_allclose(metrics[f"clip_fraction_{side}"], share, rtol=1e-5)
    assert kept[0] < kept[1] < kept[2]
    assert (r * k.mask).max() > 1.1


@number("share penalty", "kl_cov")
def test_tokens_of_largest_covariance_are_held_back(algorithm):
    k = known(algorithm)
    advantage, inside = in_group(k, k.score), k.mask > 0
    product = (advantage - advantage[inside].mean()) * (k.old - k.old[inside].mean())
    for share, penalty in ((0.1, 1.0), (0.5, 1.0), (0.5, 0.3), (1e-6, 1.0)):
        most = max(int(np.floor(share * inside.sum())), 1)
        chosen = np.zeros(inside.size)
        chosen[np.argsort(np.where(inside, -product, np.inf), axis=None, kind="stable")[:most]] = 1
        pull = penalty * chosen.reshape(inside.shape) * np.sign(k.now - k.old)
        assert_moves(algorithm, k.ratio * advantage - pull, share=share, penalty=penalty)


def test_kl_cov_penalizes_selected_tokens_of_all_devices(monkeypatch):
    made = {}
    monkeypatch.setattr(group_policy, "make", lambda *_, **given: made.update(given))
    kl_cov.make(kl_cov.Config(share=0.5, penalty=2.0, axis_name="data"), IN_GROUPS)
    log_prob, advantage = jnp.array([[[-1.0, -2.0]], [[-3.0, -9.0]]]), jnp.zeros((2, 1, 2))

    def selected(log_prob, advantage):
        samples = Samples(None, None, log_prob, advantage, jnp.ones((1, 2), bool))
        return made["select"](samples)

    chosen = jax.vmap(selected, axis_name="data")(log_prob, advantage.at[1, 0, 1].set(-4.0))
    assert chosen.tolist() == [[[True, False]], [[False, True]]]
    columns = {"penalized": jnp.array([True, False, True])}
    samples = Samples(None, None, jnp.zeros(3), jnp.ones(3), jnp.ones(3, bool), columns=columns)
    elements, _ = made["surrogate"](jnp.log(jnp.array([1.5, 1.5, 1.0])), samples)
    np.testing.assert_allclose(elements, [2 * np.log(1.5) - 1.5, -1.5, -1.0], rtol=1e-6)


def test_rounding_of_the_sampler_is_not_penalised():
    table = tabular_problem(num_prompts=8, group_size=2)

    def collect(params, collector, key):
        collector, batch = table.collect(params, collector, key)
        rounding = 1e-6 * jax.random.normal(jax.random.key(7), batch.log_prob.shape)
        return collector, batch._replace(log_prob=batch.log_prob + rounding)

    def after(penalty):
        settings = as_arrays(kl_cov.Config(share=1.0, penalty=penalty))
        learner = kl_cov.make(settings, table._replace(collect=collect), optax.sgd(1.0))
        return jax.jit(learner.step)(learner.init(jax.random.key(0)))[0].params.policy

    jax.tree.map(np.testing.assert_array_equal, after(0.0), after(5.0))


@number("correction_low correction_high", "grpo")
def test_sampler_weight_applies_to_surrogate_but_not_penalty(algorithm):
    k = known(algorithm)
    advantage, rho = in_group(k, k.score), np.exp(k.old - k.sampler)
    clip = k.ratio * advantage * unclipped(k.ratio, advantage, 0.2, 0.2)
    towards = 0.5 * gradient_of_k3(k)
    for high in (1.05, 1.2, 9.0):
        options = {"correction": "truncate", "correction_high": high, "kl_coefficient": 0.5}
        assert_moves(algorithm, clip * np.minimum(rho, high) + towards, **options)
    for low, high in ((0.8, 1.2), (0.95, 1.2), (0.8, 1.05)):
        bounds = {"correction_low": low, "correction_high": high}
        moved, metrics, _ = outcome(algorithm, correction="mask", **bounds)
        rho_kept = rho * ((rho >= low) & (rho <= high))
        assert_same(moved.policy, gradient(algorithm, weights(algorithm) * clip * rho_kept))
        mean = (k.mask * rho_kept).sum() / k.mask.sum()
        np.testing.assert_allclose(metrics["sampler_weight"], mean, rtol=1e-5)


def gradient_of_k3(k):
    return np.expm1(k.reference - k.now)


@number("off_policy_kl", "grpo")
def test_wrong_responses_far_from_sampler_drop_but_count(algorithm):
    k = known(algorithm)
    advantage = in_group(k, k.score)
    behind = (k.mask * (k.sampler - k.now)).sum(1, keepdims=True) / k.mask.sum(1, keepdims=True)
    clip, kept = k.ratio * advantage * unclipped(k.ratio, advantage, 0.2, 0.2), []
    far = np.unique(behind[(advantage[:, :1] < 0) & (behind > 0)])
    for threshold in (0.0, far[:2].mean(), 9.0):
        keep = (advantage >= 0) | (behind <= threshold)
        kept.append(keep.sum())
        moved, metrics, _ = outcome(algorithm, mask_off_policy=True, off_policy_kl=threshold)
        assert_same(moved.policy, gradient(algorithm, weights(algorithm) * clip * keep))
        share = (k.mask * ~keep).sum() / k.mask.sum()
        np.testing.assert_allclose(metrics["off_policy"], share, rtol=1e-5, atol=1e-7)
    assert kept[0] < kept[1] < kept[2] == advantage.size


def test_distillation_follows_the_teacher_token_by_token():
    k = known("distillation")
    towards = np.exp(k.now - k.sampler) * (k.teacher - k.now)
    moved, metrics, _ = outcome("distillation")
    assert_same(moved.policy, gradient("distillation", weights("distillation") * towards))
    kl = (k.mask * (k.now - k.teacher)).sum() / k.mask.sum()
    np.testing.assert_allclose(metrics["teacher_kl"], kl, rtol=1e-4)


def test_pkpo_counts_marginal_gain_of_each_response():
    """For k = 2 the gain of a response is twice its mean margin over the other responses, where
    positive."""
    k = known("pkpo")
    gain = 2 * np.maximum(k.score[:, :, None] - k.score[:, None, :], 0).sum(2) / 3
    advantage = gain.reshape(-1, 1) * np.ones_like(k.mask)
    assert_moves("pkpo", k.ratio * advantage)


@pytest.mark.parametrize("scale", ["batch", "mean"])
def test_divisor_is_batch_std_or_group_mean(scale):
    k = known("grpo")
    centred = k.score - k.score.mean(1, keepdims=True)
    divisor = k.score.std() + 1e-6 if scale == "batch" else k.score.mean(1, keepdims=True)
    advantage = (centred / np.where(divisor > 0, divisor, 1.0)).reshape(-1, 1)
    inside = unclipped(k.ratio, advantage, 0.2, 0.2)
    assert_moves("grpo", k.ratio * advantage * inside, scale=scale)
