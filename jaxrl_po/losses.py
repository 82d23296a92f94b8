"""Per-element losses, all minimised, and the aggregators that turn elements into a `Mean`.

A loss is elementwise over any shape `E*`. An aggregator pools elements under a mask and leaves the
division to the end, after microbatches and devices were added: that is the whole difference between
GRPO's, DAPO's and Dr.GRPO's losses.

In float32: advantages up to 1e25 (a ratio is at most 5e8) and values up to 1e18 (they are squared)
overflow nothing.
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_po import masked
from jaxrl_po.config import Number
from jaxrl_po.distributions import ratio
from jaxrl_po.masked import Mean


def policy_gradient(log_prob: jax.Array, advantage: jax.Array) -> jax.Array:
    """`−log π(a|s) · A`: its gradient is the score-function estimate of the negative policy gradient.

    Args:
      log_prob: `E*`, nats, under the parameters that are trained.
      advantage: `E*`, held constant.

    Returns:
      `E*`, to be minimised. Source: Williams 1992; Sutton et al. 2000.

    Example:
      >>> import jax.numpy as jnp
      >>> policy_gradient(jnp.array([-1.0]), jnp.array([2.0])).tolist()
      [2.0]
    """
    chex.assert_equal_shape([log_prob, advantage])
    return -log_prob * jax.lax.stop_gradient(advantage)


def surrogate(log_prob: jax.Array, old_log_prob: jax.Array, advantage: jax.Array) -> jax.Array:
    """`−r · A`, `r = π(a|s) / π_old(a|s)`: equal to the policy gradient to first order at π_old.

    Args:
      log_prob: `E*`, nats, under the parameters that are trained.
      old_log_prob: `E*`, nats, under the policy that sampled.
      advantage: `E*`, held constant.

    Returns:
      `E*`, to be minimised. Source: Schulman et al. 2015 (TRPO), eq. 14; the expectation is over
      samples of π_old.

    Example:
      >>> import jax.numpy as jnp
      >>> surrogate(jnp.array([0.0]), jnp.array([0.0]), jnp.array([3.0])).tolist()
      [-3.0]
    """
    chex.assert_equal_shape([log_prob, old_log_prob, advantage])
    return -ratio(log_prob, old_log_prob) * jax.lax.stop_gradient(advantage)


def self_normalized_surrogate(
    log_prob: jax.Array, old_log_prob: jax.Array, advantage: jax.Array
) -> jax.Array:
    """`−Σ_k r_k A_k / Σ_k r_k` over K actions from one state: a constant that is added to all A_k changes no gradient.

    Args:
      log_prob: `[K]`, nats, under the parameters that are trained.
      old_log_prob: `[K]`, nats, under the policy that sampled.
      advantage: `[K]`, held constant.

    Returns:
      `[]`, to be minimised. Source: Schulman et al. 2015 (TRPO), eq. 18, for the vine method with
      continuous actions.

    Example:
      >>> import jax.numpy as jnp
      >>> round(float(self_normalized_surrogate(jnp.log(jnp.array([3.0, 1.0])), jnp.zeros(2), jnp.array([1.0, 5.0]))), 4)
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
    """`−min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A)`, a pessimistic bound for either sign of A.

    Equals `−(1 + ε_high)·A` where A > 0 and r is beyond it, `−(1 − ε_low)·A` where A < 0 and r is
    below it, else `−r·A`. With `dual_clip = c`, a negative advantage costs at most `−c·A`:
    `−max(min(…), c·A)`.

    Args:
      log_prob: `E*`, nats, under the parameters that are trained.
      old_log_prob: `E*`, nats, under the policy that sampled.
      advantage: `E*`, held constant.
      epsilon_low: in [0, 1).
      epsilon_high: at least 0; DAPO's clip-higher has ε_high > ε_low.
      dual_clip: c > 1, or None for none (Ye et al. 2020, eq. 5).

    Returns:
      `E*`, to be minimised. Source: Schulman et al. 2017 (PPO), eq. 7; Yu et al. 2025 (DAPO), eq.
      10.

    Example:
      >>> import jax.numpy as jnp
      >>> r = jnp.log(jnp.array([1.5, 0.5, 1.5, 0.5]))
      >>> a = jnp.array([1.0, 1.0, -1.0, -1.0])
      >>> [round(x, 3) for x in clipped_surrogate(r, jnp.zeros(4), a, epsilon_low=0.2, epsilon_high=0.2).tolist()]
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
    """1 where the lower clip takes the gradient away (A < 0 and r < 1 − ε_low), else 0; `E*`, float32."""
    chex.assert_equal_shape([log_prob, old_log_prob, advantage])
    return ((advantage < 0) & (ratio(log_prob, old_log_prob) < 1.0 - epsilon_low)).astype(
        jnp.float32
    )


def clip_fraction_high(
    log_prob: jax.Array, old_log_prob: jax.Array, advantage: jax.Array, epsilon_high: Number
) -> jax.Array:
    """1 where the upper clip takes the gradient away (A > 0 and r > 1 + ε_high), else 0; `E*`, float32."""
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
    """`−stop_gradient(clip(r, 1 − ε_low, 1 + ε_high)) · A · log π`: the weight is clipped, no token loses its gradient.

    Args:
      log_prob: `E*`, nats, under the policy that is trained.
      old_log_prob: `E*`, nats, under the policy that sampled.
      advantage: `E*`, no gradient flows into it.
      epsilon_low: at 1 or above nothing is clipped from below.
      epsilon_high: above 0.

    Returns:
      `E*`, to be minimised. Source: CISPO, MiniMax 2025 (arXiv:2506.13585), eq. 4 and 5.

    Example:
      >>> bool(jnp.isclose(cispo(jnp.log(0.5), jnp.log(0.1), 1.0, epsilon_low=1.0, epsilon_high=4.0), -5.0 * jnp.log(0.5)))
      True
    """
    weight = jnp.clip(ratio(log_prob, old_log_prob), 1.0 - epsilon_low, 1.0 + epsilon_high)
    return -jax.lax.stop_gradient(weight * advantage) * log_prob


def sequence_log_ratio(log_prob: jax.Array, old_log_prob: jax.Array, mask: jax.Array) -> jax.Array:
    """`(1 / |y|) Σ_t (log π − log π_old)` of each row, for all of its tokens: GSPO's ratio of a whole sequence, in logs.

    Args:
      log_prob: `[B, T]`, nats, under the policy that is trained.
      old_log_prob: `[B, T]`, nats, under the policy that sampled.
      mask: `[B, T]`, bool.

    Returns:
      `[B, T]`, nats, equal along a row; 0 in an empty one. Source: Zheng et al. 2025
      (arXiv:2507.18071), eq. 7.

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
    """`½ (v − G)²`; a coefficient c on (v − G)², as in the PPO paper's eq. 9, is 2c on this.

    Args:
      value: `E*`, reward units.
      target: `E*`, reward units, held constant.

    Returns:
      `E*`, reward units squared, to be minimised.

    Example:
      >>> import jax.numpy as jnp
      >>> squared_value(jnp.array([3.0]), jnp.array([1.0])).tolist()
      [2.0]
    """
    chex.assert_equal_shape([value, target])
    return 0.5 * jnp.square(value - jax.lax.stop_gradient(target))


def clipped_value(
    value: jax.Array, old_value: jax.Array, target: jax.Array, *, epsilon: Number
) -> jax.Array:
    """`½ max((v − G)², (v_old + clip(v − v_old, ±ε) − G)²)`; there is no evidence that it helps.

    Args:
      value: `E*`, reward units.
      old_value: `E*`, the critic that collected.
      target: `E*`, held constant.
      epsilon: largest change of the value that is rewarded, reward units.

    Returns:
      `E*`, reward units squared, to be minimised. Source: the PPO paper's reference code.

    Example:
      >>> import jax.numpy as jnp
      >>> clipped_value(jnp.array([1.0]), jnp.array([0.0]), jnp.array([1.0]), epsilon=0.5).tolist()
      [0.125]
    """
    chex.assert_equal_shape([value, old_value, target])
    old_value, target = jax.lax.stop_gradient((old_value, target))
    clipped = old_value + jnp.clip(value - old_value, -epsilon, epsilon)
    return 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(clipped - target))


def bradley_terry(chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    """`−log σ(r_w − r_l)`: the chosen of two wins with probability `σ(r_w − r_l)`.

    Args:
      chosen: `E*`, r_w, reward units.
      rejected: `E*`, r_l, reward units.

    Returns:
      `E*`, nats, to be minimised. Source: Bradley and Terry 1952; Ouyang et al. 2022
      (arXiv:2203.02155), eq. 1.

    Example:
      >>> import jax.numpy as jnp
      >>> round(float(bradley_terry(jnp.log(3.0), jnp.log(1.0))), 4)  # −log(3 / (3 + 1))
      0.2877
    """
    chex.assert_equal_shape([chosen, rejected])
    return -jax.nn.log_sigmoid(chosen - rejected)


def token_mean(elements: jax.Array, mask: jax.Array) -> Mean:
    """Every unmasked element weighs the same: `Σ x / Σ mask` (DAPO eq. 8; PPO and TRPO over steps).

    Args:
      elements: `E*`, any shape.
      mask: `E*`, bool.

    Returns:
      `Mean` whose count is the number of unmasked elements (tokens or steps).

    Example:
      >>> import jax.numpy as jnp
      >>> x, mask = jnp.array([[1.0, 2.0], [6.0, 0.0]]), jnp.array([[True, True], [True, False]])
      >>> float(token_mean(x, mask).value()), float(sequence_mean(x, mask).value())
      (3.0, 3.75)
    """
    return masked.total(elements, mask)


def sequence_mean(elements: jax.Array, mask: jax.Array) -> Mean:
    """Every row weighs the same: the mean over non-empty rows of the row's mean (GRPO, Shao et al. 2024, eq. 3).

    Args:
      elements: `[B, T]`.
      mask: `[B, T]`, bool.

    Returns:
      `Mean` whose count is the number of rows with an unmasked element.
    """
    chex.assert_rank(elements, 2)
    rows = jax.vmap(masked.total)(elements, mask)
    return masked.total(rows.value(), rows.count > 0)


def fixed_length_mean(elements: jax.Array, mask: jax.Array, length: int) -> Mean:
    """A constant denominator, rows × length, so that a row's length changes no weight (Dr.GRPO, Liu et al. 2025).

    Args:
      elements: `[B, T]`.
      mask: `[B, T]`, bool.
      length: tokens in the budget, at least 1.

    Returns:
      `Mean` whose count is B × length.

    Raises:
      ValueError: `length` below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> float(fixed_length_mean(jnp.ones((2, 3)), jnp.ones((2, 3), bool), 4).value())
      0.75
    """
    chex.assert_rank(elements, 2)
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    pooled = masked.total(elements, mask)
    return Mean(pooled.total, jnp.full_like(pooled.count, elements.shape[0] * length))
