"""Per-element losses, all to be minimised, and the aggregators that turn elements into a `Mean`.

In every loss, `log_prob` is log π(a|s) in nats under the parameters being trained, `old_log_prob`
is log π_old(a|s) under the policy that sampled the actions, and r = π / π_old is the probability
ratio. Inputs and outputs have the shape `E*`, any common shape. No gradient flows into advantages,
targets and old values.

An aggregator pools the unmasked elements and postpones the division until totals and counts have
been summed over microbatches and devices. The losses of GRPO, DAPO and Dr. GRPO differ in their
aggregator.

In float32 no loss overflows for advantages up to 1e25 (a ratio is at most 5e8) and values up to
1e18 (they are squared).
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_po import masked
from jaxrl_po.config import Number
from jaxrl_po.divergences import log_ratio, ratio
from jaxrl_po.masked import Mean


def policy_gradient(log_prob: jax.Array, advantage: jax.Array) -> jax.Array:
    """Computes `−log π · A`, whose gradient is the score-function estimate of the policy gradient.

    Williams 1992; Sutton et al. 2000.

    Example:
      >>> policy_gradient(jnp.array([-1.0]), jnp.array([2.0])).tolist()
      [2.0]
    """
    chex.assert_equal_shape([log_prob, advantage])
    return -log_prob * jax.lax.stop_gradient(advantage)


def surrogate(log_prob: jax.Array, old_log_prob: jax.Array, advantage: jax.Array) -> jax.Array:
    """Computes `−r · A`, with the gradient of `policy_gradient` at π = π_old.

    Schulman et al. 2015 (TRPO), eq. 14, with samples of π_old.

    Example:
      >>> surrogate(jnp.array([0.0]), jnp.array([0.0]), jnp.array([3.0])).tolist()
      [-3.0]
    """
    chex.assert_equal_shape([log_prob, old_log_prob, advantage])
    return -ratio(log_prob, old_log_prob) * jax.lax.stop_gradient(advantage)


def self_normalized_surrogate(
    log_prob: jax.Array, old_log_prob: jax.Array, advantage: jax.Array
) -> jax.Array:
    """Computes `−Σ_k r_k A_k / Σ_k r_k` over K actions sampled in one state: `[K]` to `[]`.

    A constant added to all A_k does not change the gradient, so no baseline is needed. Schulman et
    al. 2015 (TRPO), section 5.2: the vine method with continuous actions.

    Example:
      >>> log_prob, advantage = jnp.log(jnp.array([3.0, 1.0])), jnp.array([1.0, 5.0])
      >>> round(float(self_normalized_surrogate(log_prob, jnp.zeros(2), advantage)), 4)
      -2.0
    """
    chex.assert_rank(log_prob, 1)
    chex.assert_equal_shape([log_prob, old_log_prob, advantage])
    r = ratio(log_prob, old_log_prob)
    return -jnp.sum(r * jax.lax.stop_gradient(advantage)) / jnp.sum(r)


def clipped_surrogate(
    log_prob: jax.Array,
    old_log_prob: jax.Array,
    advantage: jax.Array,
    *,
    epsilon_low: Number,
    epsilon_high: Number,
    dual_clip: Number | None = None,
) -> jax.Array:
    """Computes `−min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A)`, pessimistic for either sign of A.

    The gradient vanishes where A > 0 and r > 1 + ε_high, and where A < 0 and r < 1 − ε_low. Where
    A < 0 the loss grows with r without bound, unless `dual_clip` = c limits it to −c·A:
    `−max(min(…), c·A)`.

    Args:
      log_prob: `E*`, log π in nats.
      old_log_prob: `E*`, log π_old in nats.
      advantage: `E*`, advantage A.
      epsilon_low: lower clip ε_low in [0, 1).
      epsilon_high: upper clip ε_high, at least 0; DAPO's clip-higher has ε_high > ε_low.
      dual_clip: bound c > 1, or None (Ye et al. 2020, eq. 5).

    Returns:
      `E*`. Schulman et al. 2017 (PPO), eq. 7; Yu et al. 2025 (DAPO), eq. 10.

    Example:
      >>> log_ratio = jnp.log(jnp.array([1.5, 0.5, 1.5, 0.5]))
      >>> advantage = jnp.array([1.0, 1.0, -1.0, -1.0])
      >>> loss = clipped_surrogate(
      ...     log_ratio, jnp.zeros(4), advantage, epsilon_low=0.2, epsilon_high=0.2
      ... )
      >>> [round(x, 3) for x in loss.tolist()]
      [-1.2, -0.5, 1.5, 0.8]
    """
    chex.assert_equal_shape([log_prob, old_log_prob, advantage])
    advantage = jax.lax.stop_gradient(advantage)
    r = ratio(log_prob, old_log_prob)
    objective = jnp.minimum(
        r * advantage, jnp.clip(r, 1.0 - epsilon_low, 1.0 + epsilon_high) * advantage
    )
    if dual_clip is not None:
        objective = jnp.where(
            advantage < 0, jnp.maximum(objective, dual_clip * advantage), objective
        )
    return -objective


def clip_fraction_low(
    log_prob: jax.Array, old_log_prob: jax.Array, advantage: jax.Array, epsilon_low: Number
) -> jax.Array:
    """Returns 1.0 where the lower clip removes the gradient (A < 0, r < 1 − ε_low), else 0.0."""
    chex.assert_equal_shape([log_prob, old_log_prob, advantage])
    return ((advantage < 0) & (ratio(log_prob, old_log_prob) < 1.0 - epsilon_low)).astype(
        jnp.float32
    )


def clip_fraction_high(
    log_prob: jax.Array, old_log_prob: jax.Array, advantage: jax.Array, epsilon_high: Number
) -> jax.Array:
    """Returns 1.0 where the upper clip removes the gradient (A > 0, r > 1 + ε_high), else 0.0."""
    chex.assert_equal_shape([log_prob, old_log_prob, advantage])
    return ((advantage > 0) & (ratio(log_prob, old_log_prob) > 1.0 + epsilon_high)).astype(
        jnp.float32
    )


def cispo(
    log_prob: jax.Array,
    old_log_prob: jax.Array,
    advantage: jax.Array,
    *,
    epsilon_low: Number,
    epsilon_high: Number,
) -> jax.Array:
    """Computes `−stop_gradient(clip(r, 1 − ε_low, 1 + ε_high)) · A · log π`.

    The importance weight is clipped, but every token keeps a gradient.

    Args:
      log_prob: `E*`, log π in nats.
      old_log_prob: `E*`, log π_old in nats.
      advantage: `E*`, advantage A.
      epsilon_low: lower clip ε_low; at 1 or above the ratio is not clipped from below.
      epsilon_high: upper clip ε_high, above 0.

    Returns:
      `E*`. MiniMax 2025 (arXiv:2506.13585), eq. 4 and 5.

    Example:
      >>> log_prob = jnp.log(0.5)  # the ratio 0.5 / 0.02 = 25 is clipped to 5
      >>> loss = cispo(log_prob, jnp.log(0.02), 1.0, epsilon_low=1.0, epsilon_high=4.0)
      >>> bool(jnp.isclose(loss, -5.0 * log_prob))
      True
    """
    weight = jnp.clip(ratio(log_prob, old_log_prob), 1.0 - epsilon_low, 1.0 + epsilon_high)
    return -jax.lax.stop_gradient(weight * advantage) * log_prob


def sapo(
    log_prob: jax.Array,
    old_log_prob: jax.Array,
    advantage: jax.Array,
    *,
    temperature_positive: Number,
    temperature_negative: Number,
) -> jax.Array:
    """Computes `−(4/τ) σ(τ (r − 1)) · A`, a soft gate in place of the clip.

    The gradient is the gradient of `−r · A` times `4 p (1 − p)`, p = σ(τ (r − 1)); this factor is 1
    at r = 1 and falls on both sides, to 0 for large r and to 0.79 at r = 0 for τ = 1.

    Args:
      log_prob: `E*`, log π in nats.
      old_log_prob: `E*`, log π_old in nats.
      advantage: `E*`, advantage A.
      temperature_positive: temperature τ where A > 0, above 0; larger values give a narrower gate.
      temperature_negative: temperature τ where A ≤ 0, above 0.

    Returns:
      `E*`. Gao et al. 2025 (arXiv:2511.20347).

    Example:
      >>> loss = sapo(
      ...     jnp.log(1.5), jnp.log(1.0), 1.0, temperature_positive=1.0, temperature_negative=1.05
      ... )
      >>> round(float(loss), 4)  # −4 σ(½)
      -2.4898
    """
    advantage = jax.lax.stop_gradient(jnp.asarray(advantage))
    chex.assert_equal_shape([log_prob, old_log_prob, advantage])
    temperature = jnp.where(advantage > 0, temperature_positive, temperature_negative)
    r = ratio(log_prob, old_log_prob)
    return -4.0 / temperature * jax.nn.sigmoid(temperature * (r - 1.0)) * advantage


def dppo(
    log_prob: jax.Array,
    sampler_log_prob: jax.Array,
    advantage: jax.Array,
    *,
    delta_low: Number,
    delta_high: Number,
    max_ratio: Number,
) -> jax.Array:
    """Computes `−stop_gradient(min(r, c) · 1[inside]) · A · log π`, r = π / μ: DPPO's binary TV.

    A token leaves the trust region through the change of its probability, not through its ratio:
    outside is `π − μ > δ_high` where A > 0 and `π − μ < −δ_low` where A < 0. A rare token may
    therefore change by a large factor, whereas a frequent token may not change by much.

    Args:
      log_prob: `E*`, log π in nats.
      sampler_log_prob: `E*`, nats, log μ under the policy that sampled the actions.
      advantage: `E*`, advantage A.
      delta_low: largest fall of the probability, δ_low in (0, 1).
      delta_high: largest rise of the probability, δ_high in (0, 1).
      max_ratio: bound c of the ratio, above 0.

    Returns:
      `E*`. Qi et al. 2026 (arXiv:2602.04879); the bound c is from section 5.4.

    Example:
      >>> bounds = {"delta_low": 0.2, "delta_high": 0.2, "max_ratio": 20.0}
      >>> rare = dppo(jnp.log(0.1), jnp.log(0.01), 1.0, **bounds)  # r = 10, π − μ = .09
      >>> frequent = dppo(jnp.log(0.9), jnp.log(0.6), 1.0, **bounds)  # r = 1.5, π − μ = .3
      >>> print(round(float(rare / jnp.log(0.1)), 4), float(frequent) == 0.0)
      -10.0 True
    """
    advantage = jnp.asarray(advantage)
    chex.assert_equal_shape([log_prob, sampler_log_prob, advantage])
    inside = ~outside_total_variation(
        log_prob, sampler_log_prob, advantage, delta_low=delta_low, delta_high=delta_high
    )
    weight = jnp.where(inside, jnp.minimum(ratio(log_prob, sampler_log_prob), max_ratio), 0.0)
    return -jax.lax.stop_gradient(weight * advantage) * log_prob


def outside_total_variation(
    log_prob: jax.Array,
    sampler_log_prob: jax.Array,
    advantage: jax.Array,
    *,
    delta_low: Number,
    delta_high: Number,
) -> jax.Array:
    """Returns where `dppo` removes the gradient, bool `E*`; takes the arguments of `dppo`."""
    change = jnp.exp(log_prob) - jnp.exp(sampler_log_prob)
    return jnp.where(advantage > 0, change > delta_high, (advantage < 0) & (change < -delta_low))


def clipped_log_ratio(
    log_prob: jax.Array,
    old_log_prob: jax.Array,
    advantage: jax.Array,
    *,
    epsilon_low: Number,
    epsilon_high: Number,
) -> jax.Array:
    """Computes `s · min(s · log r, s · clip(log r, −ε_low, ε_high))`, s the sign of A (GMPO).

    As in `clipped_surrogate`, the side that would undo a step is not clipped.

    Args:
      log_prob: `E*`, log π in nats.
      old_log_prob: `E*`, log π_old in nats.
      advantage: `E*`, advantage A; an advantage of 0 counts as negative.
      epsilon_low: lower clip ε_low, above 0, nats.
      epsilon_high: upper clip ε_high, above 0, nats.

    Returns:
      `E*`, nats. Zhao et al. 2025 (arXiv:2507.20673).

    Example:
      >>> advantage = jnp.array([1.0, -1.0])
      >>> print(
      ...     clipped_log_ratio(
      ...         jnp.ones(2), jnp.zeros(2), advantage, epsilon_low=0.4, epsilon_high=0.4
      ...     )
      ... )
      [0.4 1. ]
    """
    chex.assert_equal_shape([log_prob, old_log_prob, advantage])
    x = log_ratio(log_prob, old_log_prob)
    return jnp.where(advantage > 0, jnp.minimum(x, epsilon_high), jnp.maximum(x, -epsilon_low))


def sequence_log_ratio(log_prob: jax.Array, old_log_prob: jax.Array, mask: jax.Array) -> jax.Array:
    """Computes GSPO's log-ratio `(1 / |y|) Σ_t (log π − log π_old)` of a row at all of its tokens.

    Args:
      log_prob: `[B, T]`, log π in nats.
      old_log_prob: `[B, T]`, log π_old in nats.
      mask: `[B, T]`, bool, True for tokens of the response.

    Returns:
      Log-ratios `[B, T]`, nats, constant along a row, masked slots included; 0 in an empty row.
      Zheng et al. 2025 (arXiv:2507.18071), eq. 7.

    Example:
      >>> mask = jnp.array([[True, True, False]])
      >>> sequence_log_ratio(jnp.array([[0.5, 1.5, 9.0]]), jnp.zeros((1, 3)), mask).tolist()
      [[1.0, 1.0, 1.0]]
    """
    chex.assert_rank(mask, 2)
    chex.assert_equal_shape([log_prob, old_log_prob, mask])
    mean = jax.vmap(masked.mean)(log_prob - old_log_prob, mask)
    return jnp.broadcast_to(mean[:, None], mask.shape)


def squared_value(value: jax.Array, target: jax.Array) -> jax.Array:
    """Computes `½ (v − G)²`, in reward units squared.

    A coefficient c₁ of (v − G)² in the PPO paper's eq. 9 corresponds to 2c₁ on this loss.

    Example:
      >>> squared_value(jnp.array([3.0]), jnp.array([1.0])).tolist()
      [2.0]
    """
    chex.assert_equal_shape([value, target])
    return 0.5 * jnp.square(value - jax.lax.stop_gradient(target))


def clipped_value(
    value: jax.Array, old_value: jax.Array, target: jax.Array, *, epsilon: Number
) -> jax.Array:
    """Computes `½ max((v − G)², (v_old + clip(v − v_old, ±ε) − G)²)`, in reward units squared.

    The formula is from the PPO paper's reference code; no evidence shows that clipping helps.

    Args:
      value: `E*`, critic's value v, reward units.
      old_value: `E*`, v_old, value from the critic during collection.
      target: `E*`, regression target G.
      epsilon: largest change of v, reward units; beyond this change the gradient towards the target
        is removed.

    Example:
      >>> value, old_value, target = jnp.array([1.0]), jnp.array([0.0]), jnp.array([1.0])
      >>> clipped_value(value, old_value, target, epsilon=0.5).tolist()
      [0.125]
    """
    chex.assert_equal_shape([value, old_value, target])
    old_value, target = jax.lax.stop_gradient((old_value, target))
    clipped = old_value + jnp.clip(value - old_value, -epsilon, epsilon)
    return 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(clipped - target))


def bradley_terry(chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    """Computes `−log σ(r_w − r_l)`, nats; the chosen response wins with probability `σ(r_w − r_l)`.

    Args:
      chosen: `E*`, reward r_w of the chosen response.
      rejected: `E*`, reward r_l of the rejected response.

    Returns:
      `E*`. Bradley and Terry 1952; Ouyang et al. 2022 (arXiv:2203.02155), eq. 1.

    Example:
      >>> round(float(bradley_terry(jnp.log(3.0), jnp.log(1.0))), 4)  # −log(3 / (3 + 1))
      0.2877
    """
    chex.assert_equal_shape([chosen, rejected])
    return -jax.nn.log_sigmoid(chosen - rejected)


def token_mean(elements: jax.Array, mask: jax.Array) -> Mean:
    """Computes the mean over all unmasked elements: each token (or step) has the same weight.

    The mean is DAPO's token-level loss (Yu et al. 2025, eq. 8); PPO and TRPO average over steps.
    The count is the number of unmasked elements.

    Example:
      >>> x, mask = jnp.array([[1.0, 2.0], [6.0, 0.0]]), jnp.array([[True, True], [True, False]])
      >>> float(token_mean(x, mask).value()), float(sequence_mean(x, mask).value())
      (3.0, 3.75)
    """
    return masked.total(elements, mask)


def sequence_mean(elements: jax.Array, mask: jax.Array) -> Mean:
    """Computes the mean over non-empty rows `[B, T]` of row means: sequences have equal weight.

    The mean is GRPO's loss (Shao et al. 2024, eq. 3). The count is the number of rows with an
    unmasked element.
    """
    chex.assert_rank(elements, 2)
    rows = jax.vmap(masked.total)(elements, mask)
    return masked.total(rows.value(), rows.count > 0)


def fixed_length_mean(elements: jax.Array, mask: jax.Array, length: int) -> Mean:
    """Computes the sum over unmasked elements `[B, T]`, divided by the constant B × length.

    The length of a sequence then does not change the weight of its tokens: Dr. GRPO (Liu et al.
    2025, arXiv:2503.20783) with the token budget as `length`. A `length=1` averages the sums of
    rows. Rows
    without a token are counted too: if `dynamic_sampling` cannot fill a batch, the mean is smaller.

    Raises:
      ValueError: `length` is below 1.

    Example:
      >>> float(fixed_length_mean(jnp.ones((2, 3)), jnp.ones((2, 3), bool), 4).value())
      0.75
    """
    chex.assert_rank(elements, 2)
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    pooled = masked.total(elements, mask)
    return Mean(pooled.total, jnp.full_like(pooled.count, elements.shape[0] * length))
