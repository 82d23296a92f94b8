"""Computes advantages within a group beyond outcome advantages: for steps, turns and the best of k.

The module `advantages` documents the units and has the outcome advantages.
"""

import math

import chex
import jax
import jax.numpy as jnp

from jaxrl_po import compensated, masked
from jaxrl_po.config import Number


def outcomes(reward: jax.Array) -> jax.Array:
    """Computes `R_i = Σ_t r_it` for the members of a group: `[G, T]` to `[G]`.

    Sums that differ by no more than their rounding, such as sums of the same rewards in another
    order, are made equal to the bit. Callers may therefore compare outcomes exactly.

    Example:
      >>> outcomes(jnp.array([[100.1, -100.1, 0.3], [0.3, 100.1, -100.1]])).tolist()
      [0.30000001192092896, 0.30000001192092896]
      >>> outcomes(jnp.array([[0.0, 1000.0], [1000.001, 0.0]])).tolist()
      [1000.0, 1000.0009765625]
    """
    chex.assert_rank(reward, 2)
    reward = reward.astype(jnp.promote_types(reward.dtype, jnp.float32))
    sums = jax.tree.map(lambda x: x[:, 0], compensated.sums_to_go(reward))
    differ = compensated.sums_differ(sums, reward.shape[1])
    return jnp.where(differ, sums.value, sums.value.max())


def process_relative(
    reward: jax.Array,
    mask: jax.Array,
    step_end: jax.Array | None = None,
    *,
    scale: str = "std",
    ddof: int = 0,
    epsilon: Number = 1e-6,
) -> jax.Array:
    """Computes `Â_t = Σ_{steps u ≥ t} (r_u − mean(r)) / (std(r) + ε)`, for process supervision.

    Mean and std are over the rewards of all steps of the group; a token that does not end a step
    adds nothing, so that length alone costs nothing. The advantage is exactly 0 if all rewards are
    equal.

    Args:
      reward: `[G, T]`, rewards, of which only those at the ends of steps count.
      mask: `[G, T]`, bool, True for tokens of the response.
      step_end: `[G, T]`, bool, True for tokens that end a step; None makes every token a step.
      scale: divisor: `std`, or `none` for the centred rewards alone.
      ddof: delta degrees of freedom of the std.
      epsilon: constant added to the std.

    Returns:
      Advantages `[G, T]`, 0 where masked. Shao et al. 2024 (arXiv:2402.03300), section 4.1.3.

    Raises:
      ValueError: the scale is unknown.

    Example:
      >>> reward, mask = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.ones((2, 2), bool)
      >>> process_relative(reward, mask, epsilon=0.0).tolist()
      [[0.0, -1.0], [0.0, 1.0]]
      >>> last = jnp.array([[False, True]] * 2)
      >>> process_relative(jnp.array([[0.0, 1.0], [0.0, 0.0]]), mask, last, epsilon=0.0).tolist()
      [[1.0, 1.0], [-1.0, -1.0]]
    """
    step = mask if step_end is None else mask & step_end
    chex.assert_rank([reward, step], 2)
    chex.assert_equal_shape([reward, step])
    if scale not in ("std", "none"):
        raise ValueError(f"scale must be 'std' or 'none', got {scale!r}")
    centred = jnp.where(step, reward - masked.mean(reward, step), 0.0)
    differ = step.any() & (
        jnp.where(step, reward, -jnp.inf).max() != jnp.where(step, reward, jnp.inf).min()
    )
    if scale == "std":
        std = jnp.sqrt(jnp.sum(jnp.square(centred)) / jnp.maximum(step.sum() - ddof, 1))
        centred = centred / jnp.where(differ, std + epsilon, 1.0)
    to_go = jnp.flip(jnp.cumsum(jnp.flip(centred, axis=1), axis=1), axis=1)
    return jnp.where(mask & differ, to_go, 0.0)


def turn_relative(
    reward: jax.Array,
    mask: jax.Array,
    turn_end: jax.Array,
    *,
    scale: str = "std",
    ddof: int = 0,
    epsilon: Number = 1e-6,
) -> jax.Array:
    """Computes `(R_k − mean(R_k)) / (std(R_k) + ε)`, turn by turn, for R_k = Σ_{u ≥ k} r_u.

    R_k is the reward-to-go of turn k. Turn k of a member is compared with turn k of the other
    members that have a turn k. The histories of these members may differ: the baseline depends on
    the turn's number alone. The advantage is exactly 0 if all rewards-to-go are equal, up to the
    rounding of sums, or if only one member has a turn k.

    Args:
      reward: `[G, T]`; the rewards of a turn's tokens are summed.
      mask: `[G, T]`, bool, True for tokens of the response.
      turn_end: `[G, T]`, bool, True for the last token of each turn.
      scale: divisor: `std`, or `none` for the centred rewards alone.
      ddof: delta degrees of freedom of the std.
      epsilon: constant added to the std.

    Returns:
      Advantages `[G, T]`, the same for all tokens of a turn, 0 where masked.

    Raises:
      ValueError: the scale is unknown.

    Example:
      >>> mask, end = jnp.array([[True, True], [True, False]]), jnp.ones((2, 2), bool)
      >>> turn_relative(jnp.array([[0.0, 2.0], [1.0, 0.0]]), mask, end, epsilon=0.0).tolist()
      [[1.0, 0.0], [-1.0, 0.0]]
    """
    chex.assert_rank([reward, mask, turn_end], 2)
    chex.assert_equal_shape([reward, mask, turn_end])
    if scale not in ("std", "none"):
        raise ValueError(f"scale must be 'std' or 'none', got {scale!r}")
    end = mask & turn_end
    turn = jnp.cumsum(end, axis=1) - end  # index k of the turn of each token
    slots = reward.shape[1]

    # Rewards-to-go from the first token of each turn.
    first = jax.vmap(lambda turn: jnp.searchsorted(turn, jnp.arange(slots)))(turn)
    sums = jax.tree.map(
        lambda x: jnp.take_along_axis(x, jnp.minimum(first, slots - 1), axis=1),
        compensated.sums_to_go(jnp.where(mask, reward, 0.0)),
    )
    add = jax.vmap(lambda has, turn: jax.ops.segment_max(has, turn, num_segments=slots))
    has = add(mask.astype(jnp.int32), turn) > 0
    to_go, count = sums.value, has.sum(axis=0)
    mean = jnp.where(has, to_go, 0.0).sum(axis=0) / jnp.maximum(count, 1)
    centred = jnp.where(has, to_go - mean[None], 0.0)
    differ = compensated.sums_differ(sums, slots, has)
    if scale == "std":
        std = jnp.sqrt(jnp.square(centred).sum(axis=0) / jnp.maximum(count - ddof, 1))
        centred = centred / jnp.where(differ, std + epsilon, 1.0)[None]
    relative = jnp.where(differ[None], centred, 0.0)
    return jnp.where(mask, jnp.take_along_axis(relative, turn, axis=1), 0.0)


def pass_at_k(reward: jax.Array, k: int) -> jax.Array:
    """Computes `k · E[max(r_i − max of k − 1 others, 0)]` over subsets of a group's other members.

    The result weights the scores in an unbiased gradient of the expected maximum of k samples,
    which is pass@k for rewards of 0 and 1, minus a baseline: the maximum without member i. In the
    paper's notation the result is `G · s_i^(loo−1)`, for a mean over the group where the paper has
    a sum.

    Args:
      reward: `[G]`, one reward per member.
      k: number of samples, in [2, G]; at k = 1 pass@k is the mean reward, see `leave_one_out`.

    Returns:
      Weights `[G]`, never negative; exactly 0 if all rewards are equal. Walder and Karkhanis 2025
      (arXiv:2505.15201), eq. 33.

    Raises:
      ValueError: k is out of range.

    Example:
      >>> [round(a, 3) for a in pass_at_k(jnp.array([1.0, 1.0, 0.0, 0.0]), 2).tolist()]
      [1.333, 1.333, 0.0, 0.0]
    """
    chex.assert_rank(reward, 1)
    size = reward.shape[0]
    if not 2 <= k <= size:
        raise ValueError(f"k must lie in [2, {size}], the size of a group, got {k}")
    reward = reward.astype(jnp.promote_types(reward.dtype, jnp.float32))
    order = jnp.argsort(reward)
    ascending = reward[order]
    # Row i holds the other members in ascending order. The m-th of the other members is the largest
    # of k − 1 in C(m − 1, k − 2) of C(G − 1, k − 1) subsets.
    others = ascending[jnp.array([[j for j in range(size) if j != i] for i in range(size)])]
    largest = jnp.array(
        [math.comb(m, k - 2) / math.comb(size - 1, k - 1) for m in range(size - 1)], ascending.dtype
    )
    gain = k * jnp.maximum(ascending[:, None] - others, 0.0) @ largest
    return jnp.zeros_like(gain).at[order].set(gain)
