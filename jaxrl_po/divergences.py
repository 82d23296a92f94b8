"""Sample estimates of KL(policy ‖ reference), and controllers for the coefficient of a KL penalty.

The exact KL is a method of the distributions. An estimate can be used as a number or as a loss;
with actions sampled by the policy itself, x = log π − log π_ref:

| | formula | expected value | expected gradient |
|---|---|---|---|
| k1 | x | KL(policy ‖ reference) | 0 |
| k2 | x² / 2 | biased | ∇KL(policy ‖ reference) |
| k3 | e⁻ˣ − 1 + x | KL(policy ‖ reference) | ∇KL(reference ‖ policy) |

In each estimate, `log_prob` is log π in nats under the policy that sampled the actions, and shapes
are `E*`. Log-ratios are clamped to ±20. Source: Schulman 2020, "Approximating KL divergence".
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_po.config import Number

# Nats. Rounding can make a sampler's log π differ from the log π of a pass over sequences by up to
# this number.
ROUNDING = 1e-4

MAX_LOG_RATIO = 20.0


def ratio(log_prob: jax.Array, old_log_prob: jax.Array) -> jax.Array:
    """Computes the ratio `exp(clip(log_prob − old_log_prob, ±20))`, in float32 at least.

    Without the clamp one token could overflow `exp` and turn an update into NaN; beyond the clamp
    the gradient is 0. The ratio lies in [2e-9, 5e8].

    Example:
      >>> float(ratio(jnp.log(0.5), jnp.log(0.25)))
      2.0
    """
    chex.assert_equal_shape([log_prob, old_log_prob])
    return jnp.exp(log_ratio(log_prob, old_log_prob))


def log_ratio(log_prob: jax.Array, old_log_prob: jax.Array) -> jax.Array:
    """Computes `clip(log_prob − old_log_prob, ±20)`, in float32 at least."""
    dtype = jnp.promote_types(jnp.result_type(log_prob, old_log_prob), jnp.float32)
    return jnp.clip(log_prob.astype(dtype) - old_log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def exp_excess(x: jax.Array) -> jax.Array:
    """Computes `eˣ − 1 − x`, `E*`: never negative, and without cancellation near 0."""
    # Below the limit the difference loses more to cancellation than the truncated series omits.
    limit = 1e-3 if x.dtype == jnp.float64 else 0.05
    small = jnp.abs(x) < limit
    # Powers of the input must not overflow: 0 · ∞ would be the gradient.
    near = jnp.clip(x, -limit, limit)
    series = jnp.square(near) * (0.5 + near * (1 / 6 + near * (1 / 24 + near / 120)))
    return jnp.where(small, series, jnp.expm1(x) - x)


def k1(log_prob: jax.Array, reference_log_prob: jax.Array) -> jax.Array:
    """Computes `log π − log π_ref`, nats: unbiased and of either sign.

    The estimate k1 is useful inside a reward; as a loss its expected gradient is 0.

    Example:
      >>> round(float(k1(jnp.log(0.5), jnp.log(0.25))), 4)
      0.6931
    """
    chex.assert_equal_shape([log_prob, reference_log_prob])
    return log_ratio(log_prob, reference_log_prob)


def k2(log_prob: jax.Array, reference_log_prob: jax.Array) -> jax.Array:
    """Computes `½ (log π − log π_ref)²`, nats: biased and never negative.

    As a loss, k2 has the expected gradient ∇KL(policy ‖ reference).

    Example:
      >>> round(float(k2(jnp.log(0.5), jnp.log(0.25))), 4)
      0.2402
    """
    chex.assert_equal_shape([log_prob, reference_log_prob])
    return 0.5 * jnp.square(log_ratio(log_prob, reference_log_prob))


def k3(log_prob: jax.Array, reference_log_prob: jax.Array) -> jax.Array:
    """Computes `r − 1 − log r` with `r = π_ref / π`, nats: unbiased and never negative.

    As a loss, k3 has the expected gradient ∇KL(reference ‖ policy). In Shao et al. 2024 (GRPO), eq.
    4, π is the policy being trained: the old policy's log-probabilities have no gradient.

    Example:
      >>> round(float(k3(jnp.log(0.5), jnp.log(0.25))), 4)
      0.1931
    """
    chex.assert_equal_shape([log_prob, reference_log_prob])
    return exp_excess(log_ratio(reference_log_prob, log_prob))


def adapt_coefficient(
    coefficient: jax.Array,
    kl: jax.Array,
    target: Number,
    *,
    tolerance: Number = 1.5,
    factor: Number = 2.0,
) -> jax.Array:
    """Adapts β: β · factor if `kl > tolerance · target`, β / factor if `kl < target / tolerance`.

    Args:
      coefficient: `[]`, β.
      kl: `[]`, nats, KL between the policies before and after the last update; if the KL is not
        finite, β does not change.
      target: target KL d_targ, nats.
      tolerance: ratio of KL and target, above 1; beyond this ratio β changes.
      factor: factor by which β changes, above 1.

    Returns:
      Next coefficient β, `[]`, within [1e-8, 1e8]. Schulman et al. 2017 (PPO), section 4.

    Example:
      >>> float(adapt_coefficient(jnp.float32(1.0), jnp.float32(0.02), 0.01))
      2.0
    """
    kl = jnp.asarray(kl)
    scale = jnp.where(
        kl > tolerance * target, factor, jnp.where(kl < target / tolerance, 1.0 / factor, 1.0)
    )
    return _scaled(coefficient, kl, scale)


def adapt_proportionally(
    coefficient: jax.Array,
    kl: jax.Array,
    target: Number,
    *,
    gain: Number = 0.1,
    limit: Number = 0.2,
) -> jax.Array:
    """Computes `β · (1 + gain · e)` with error `e = clip((kl − target) / target, −limit, limit)`.

    Args:
      coefficient: `[]`, β.
      kl: `[]`, nats, KL(policy ‖ reference); if the KL is not finite, β does not change.
      target: target KL, nats, above 0.
      gain: gain of the proportional controller.
      limit: bound of the error e; with the defaults β changes by at most 2 % per call.

    Returns:
      Next coefficient β, `[]`, within [1e-8, 1e8]. Ziegler et al. 2019 (arXiv:1909.08593), section
      2.2.

    Example:
      >>> beta = adapt_proportionally(jnp.float32(1.0), jnp.float32(0.011), 0.01)
      >>> round(float(beta), 4)  # 1 + 0.1 · 0.1
      1.01
    """
    kl = jnp.asarray(kl)
    error = jnp.clip((kl - target) / target, -limit, limit)
    return _scaled(coefficient, kl, 1.0 + gain * error)


def _scaled(coefficient: jax.Array, kl: jax.Array, scale: jax.Array) -> jax.Array:
    """Computes `β · scale` in [1e-8, 1e8], so that β can adapt back; β if the KL is not finite."""
    coefficient = jnp.asarray(coefficient)
    chex.assert_rank([coefficient, kl], 0)
    return jnp.where(jnp.isfinite(kl), jnp.clip(coefficient * scale, 1e-8, 1e8), coefficient)
