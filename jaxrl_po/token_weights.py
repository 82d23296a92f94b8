"""Weights and masks of tokens in a loss, computed from their log-probabilities.

Shapes and names follow `losses`; `sampler_log_prob` is log μ(a|s) under the policy μ that sampled
the actions, if μ is not the old policy. No gradient flows into or through any weight or mask.
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_po import masked
from jaxrl_po.config import Number
from jaxrl_po.divergences import ratio


def truncated_weight(
    old_log_prob: jax.Array, sampler_log_prob: jax.Array, maximum: Number
) -> jax.Array:
    """Computes `min(π_old / μ, C)` without gradient: truncated importance sampling (TIS).

    The weight corrects for a sampler μ that is not the old policy, such as a sampler with another
    precision.

    Args:
      old_log_prob: `E*`, log π_old in nats.
      sampler_log_prob: `E*`, log μ in nats.
      maximum: bound C, above 0.

    Returns:
      `E*`, in [0, C]. Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings
      you off-policy RL training".

    Example:
      >>> old, sampler = jnp.log(jnp.array([0.5, 0.9])), jnp.log(jnp.array([0.4, 0.1]))
      >>> print(truncated_weight(old, sampler, 2.0))
      [1.25 2.  ]
    """
    return jax.lax.stop_gradient(jnp.minimum(ratio(old_log_prob, sampler_log_prob), maximum))


def masked_weight(
    old_log_prob: jax.Array, sampler_log_prob: jax.Array, minimum: Number, maximum: Number
) -> jax.Array:
    """Computes `ρ · 1[low ≤ ρ ≤ high]`, ρ = π_old / μ, without gradient: IcePop's token weight.

    Args:
      old_log_prob: `E*`, log π_old in nats.
      sampler_log_prob: `E*`, log μ in nats.
      minimum: lower bound of ρ, at least 0.
      maximum: upper bound of ρ, above the lower bound.

    Returns:
      `E*`. Source: Ling team 2025 (arXiv:2510.18855), which takes the bounds 0.5 and 5.

    Example:
      >>> old = jnp.log(jnp.array([0.5, 0.9, 0.1]))
      >>> print(masked_weight(old, jnp.log(jnp.array([0.4, 0.1, 0.4])), 0.5, 5.0))
      [1.25 0.   0.  ]
    """
    rho = ratio(old_log_prob, sampler_log_prob)
    return jax.lax.stop_gradient(jnp.where((rho >= minimum) & (rho <= maximum), rho, 0.0))


def off_policy_mask(
    log_prob: jax.Array,
    sampler_log_prob: jax.Array,
    advantage: jax.Array,
    mask: jax.Array,
    threshold: Number,
) -> jax.Array:
    """Returns False where A < 0 and the row's mean of `log μ − log π` exceeds δ (DeepSeek-V3.2).

    A wrong sequence that has become unlikely under the policy would push the policy further in a
    direction that the policy no longer samples.

    Args:
      log_prob: `[B, T]`, nats, under the policy being trained; no gradient flows into it.
      sampler_log_prob: `[B, T]`, log μ in nats.
      advantage: `[B, T]`, advantage A.
      mask: `[B, T]`, bool, True for tokens of the response.
      threshold: bound δ, nats per token.

    Returns:
      `[B, T]`, bool. DeepSeek-AI 2025 (arXiv:2512.02556), eq. 9.

    Example:
      >>> mask, zero = jnp.ones((2, 1), bool), jnp.zeros((2, 1))
      >>> off_policy_mask(zero - 1.0, zero, jnp.array([[1.0], [-1.0]]), mask, 0.5).tolist()
      [[True], [False]]
    """
    chex.assert_equal_shape([log_prob, sampler_log_prob, advantage, mask])
    behind = jax.vmap(masked.mean)(sampler_log_prob - jax.lax.stop_gradient(log_prob), mask)
    return (advantage >= 0) | (behind[:, None] <= threshold)


def top_covariance(
    log_prob: jax.Array,
    advantage: jax.Array,
    mask: jax.Array,
    share: Number,
    *,
    axis_name: str | None = None,
) -> jax.Array:
    """Selects the tokens with the largest `(A − mean A)(log π − mean log π)`, at least one.

    Entropy falls by the covariance of advantage and log-probability; few tokens contribute most of
    it.

    Args:
      log_prob: `[B, T]`, log π in nats; no gradient flows into it.
      advantage: `[B, T]`, advantage A.
      mask: `[B, T]`, bool, True for tokens of the response.
      share: share of the unmasked tokens, in (0, 1]; the number of selected tokens is rounded down.
      axis_name: device axis that rows are sharded over, or None; with an axis, the products of all
        devices are gathered.

    Returns:
      `[B, T]`, bool. Cui et al. 2025 (arXiv:2505.22617), KL-Cov.

    Example:
      >>> log_prob, mask = jnp.array([[-1.0, -2.0, -3.0, 0.0]]), jnp.array([[True] * 3 + [False]])
      >>> top_covariance(log_prob, jnp.array([[1.0, 1.0, -2.0, 0.0]]), mask, 0.34).tolist()
      [[False, False, True, False]]
    """
    chex.assert_equal_shape([log_prob, advantage, mask])
    log_prob = jax.lax.stop_gradient(log_prob)
    mean_log_prob, mean_advantage = (
        masked.mean(x, mask, axis_name=axis_name) for x in (log_prob, advantage)
    )
    product = jnp.where(
        mask, (advantage - mean_advantage) * (log_prob - mean_log_prob), -jnp.inf
    ).ravel()
    count = masked.psum(mask.sum(dtype=jnp.float32), axis_name)
    everywhere, first = product, jnp.int32(0)
    if axis_name is not None:
        everywhere = jax.lax.all_gather(product, axis_name, tiled=True)
        first = jax.lax.axis_index(axis_name) * product.size
    rank = (
        jnp.zeros(everywhere.size, jnp.int32)
        .at[jnp.argsort(-everywhere)]
        .set(jnp.arange(everywhere.size, dtype=jnp.int32))
    )
    mine = jax.lax.dynamic_slice_in_dim(rank, first, product.size)
    return mask & (mine < jnp.maximum(jnp.floor(share * count), 1.0)).reshape(mask.shape)
