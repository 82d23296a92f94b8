"""Estimates of KL(policy ‖ reference) from samples of the policy, and the controller of a penalty's coefficient.

The exact KL is a method of the distributions. What an estimate is worth as a *number* and as a
*loss* differs; on-policy:

| | expectation | expected gradient, as a loss |
|---|---|---|
| k1 | KL(policy ‖ reference) | 0: the score function's mean |
| k2 | biased | ∇KL(policy ‖ reference) |
| k3 | KL(policy ‖ reference) | ∇KL(reference ‖ policy) |

Source: Schulman 2020, "Approximating KL divergence"; the gradients are checked by enumeration in
the tests.
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_po.config import Number
from jaxrl_po.distributions import log_ratio


def k1(log_prob: jax.Array, reference_log_prob: jax.Array) -> jax.Array:
    """`log π − log π_ref`: unbiased, of either sign; useless as a loss, right inside a reward.

    Args:
      log_prob: `E*`, nats, under the policy that sampled the actions.
      reference_log_prob: `E*`, nats.

    Returns:
      `E*`, nats.

    Example:
      >>> import jax.numpy as jnp
      >>> round(float(k1(jnp.log(0.5), jnp.log(0.25))), 4)
      0.6931
    """
    chex.assert_equal_shape([log_prob, reference_log_prob])
    return log_ratio(log_prob, reference_log_prob)


def k2(log_prob: jax.Array, reference_log_prob: jax.Array) -> jax.Array:
    """`½ (log π − log π_ref)²`: biased, never negative; its gradient is that of KL(policy ‖ reference).

    Args:
      log_prob: `E*`, nats, under the policy that sampled the actions.
      reference_log_prob: `E*`, nats.

    Returns:
      `E*`, nats.

    Example:
      >>> import jax.numpy as jnp
      >>> round(float(k2(jnp.log(0.5), jnp.log(0.25))), 4)
      0.2402
    """
    chex.assert_equal_shape([log_prob, reference_log_prob])
    return 0.5 * jnp.square(log_ratio(log_prob, reference_log_prob))


def k3(log_prob: jax.Array, reference_log_prob: jax.Array) -> jax.Array:
    """`r − 1 − log r` with `r = π_ref / π`: unbiased, never negative; its gradient is that of KL(reference ‖ policy).

    Args:
      log_prob: `E*`, nats, under the policy that sampled the actions.
      reference_log_prob: `E*`, nats.

    Returns:
      `E*`, nats. Source: Shao et al. 2024 (GRPO), eq. 4. π is the policy being trained: with the
      old policy there is no gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> round(float(k3(jnp.log(0.5), jnp.log(0.25))), 4)
      0.1931
    """
    chex.assert_equal_shape([log_prob, reference_log_prob])
    x = log_ratio(reference_log_prob, log_prob)
    return jnp.expm1(x) - x


def adapt_coefficient(
    coefficient: jax.Array,
    kl: jax.Array,
    target: Number,
    *,
    tolerance: Number = 1.5,
    factor: Number = 2.0,
) -> jax.Array:
    """β · factor where `kl > tolerance · target`, β / factor where `kl < target / tolerance`, else β.

    Args:
      coefficient: `[]`, β.
      kl: `[]`, nats, what the last update moved; a non-finite one leaves β as it is.
      target: d_targ, nats.
      tolerance: above 1.
      factor: above 1.

    Returns:
      `[]`, the next β, kept within [1e-8, 1e8] so that it can come back. Source: Schulman et al.
      2017 (PPO), section 4.

    Example:
      >>> import jax.numpy as jnp
      >>> float(adapt_coefficient(jnp.float32(1.0), jnp.float32(0.02), 0.01))
      2.0
    """
    coefficient, kl = jnp.asarray(coefficient), jnp.asarray(kl)
    chex.assert_rank([coefficient, kl], 0)
    scale = jnp.where(
        kl > tolerance * target, factor, jnp.where(kl < target / tolerance, 1.0 / factor, 1.0)
    )
    return jnp.where(jnp.isfinite(kl), jnp.clip(coefficient * scale, 1e-8, 1e8), coefficient)


def adapt_proportionally(
    coefficient: jax.Array,
    kl: jax.Array,
    target: Number,
    *,
    gain: Number = 0.1,
    limit: Number = 0.2,
) -> jax.Array:
    """`β · (1 + gain · e)`, `e = clip((kl − target) / target, −limit, limit)`: many small steps, for a KL that drifts slowly.

    Args:
      coefficient: `[]`, β.
      kl: `[]`, nats, distance to the reference; a non-finite one leaves β as it is.
      target: nats, above 0.
      gain: share of the error by which β moves.
      limit: of the error; with the defaults β moves by at most 2 % at a time.

    Returns:
      `[]`, the next β, kept within [1e-8, 1e8]. Source: Ziegler et al. 2019 (arXiv:1909.08593),
      section 2.2.

    Example:
      >>> import jax.numpy as jnp
      >>> round(float(adapt_proportionally(jnp.float32(1.0), jnp.float32(0.011), 0.01)), 4)  # 1 + 0.1 · 0.1
      1.01
    """
    coefficient, kl = jnp.asarray(coefficient), jnp.asarray(kl)
    chex.assert_rank([coefficient, kl], 0)
    error = jnp.clip((kl - target) / target, -limit, limit)
    return jnp.where(
        jnp.isfinite(kl), jnp.clip(coefficient * (1.0 + gain * error), 1e-8, 1e8), coefficient
    )
