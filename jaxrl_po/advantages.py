"""Estimators of returns and advantages, for one stream `[T]` or one group `[G]`; callers `vmap`.

In a stream, `reward`, `value` = V(s_t) and `next_value` are in reward units, `terminated` and
`truncated` are bool, and γ and λ lie in [0, 1]. The entry `next_value[t]` is V of the *true* next
observation: the final one where an episode ended, never the first of the next episode. After a
termination nothing is bootstrapped; after a truncation V(final observation) is; no return crosses a
termination or a truncation. The argument `unroll` is the number of loop steps that one pass
computes, see `backend.Target.unroll`.

In float32, rewards up to 1e30 do not overflow; deviations above 1e19 have an infinite std, which
makes the normalised advantages 0.
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_po import masked
from jaxrl_po.config import Number


def discounted_returns(
    reward: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    gamma: Number,
    unroll: int = 1,
) -> jax.Array:
    """Computes Monte Carlo returns, bootstrapped at truncations and at the segment's end.

    `G_t = r_t + γ G_{t+1}` within an episode, `G_t = r_t` where it terminates, and where it is
    truncated and at the last step of the segment. The returns equal the λ-return at λ = 1.

    Example:
      >>> no = jnp.zeros(3, bool)
      >>> discounted_returns(jnp.ones(3), jnp.full(3, 8.0), no, no, gamma=0.5).tolist()
      [2.75, 3.5, 5.0]
    """
    _check_stream(reward, next_value, terminated, truncated)
    cut = (terminated | truncated).at[-1].set(True)
    bootstrap = jnp.where(cut & ~terminated, next_value, 0.0)
    return _discounted_sum(reward + gamma * bootstrap, gamma * jnp.where(cut, 0.0, 1.0), unroll)


def n_step_returns(
    reward: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    gamma: Number,
    n: int,
) -> jax.Array:
    """Computes `G_t = r_t + γ r_{t+1} + … + γ^{n−1} r_{t+n−1} + γ^n V(s_{t+n})`.

    Fewer than n steps are summed where the episode or the segment ends first. An n ≥ T gives
    `discounted_returns`; some lecture notes write A3C(k) for n = k + 1.

    Raises:
      ValueError: n is below 1.

    Example:
      >>> no = jnp.zeros(3, bool)
      >>> n_step_returns(jnp.ones(3), jnp.full(3, 8.0), no, no, gamma=0.5, n=1).tolist()
      [5.0, 5.0, 5.0]
    """
    _check_stream(reward, next_value, terminated, truncated)
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    one_step = reward + gamma * jnp.where(terminated, 0.0, next_value)
    # The mask is False at the last step of the segment: the return after the segment is unknown.
    has_next = ~(terminated | truncated) & (jnp.arange(reward.shape[0]) < reward.shape[0] - 1)

    def extend(returns: jax.Array, _: None) -> tuple[jax.Array, None]:
        # The k-step return from t is r_t plus the discounted (k − 1)-step return from t + 1.
        following = jnp.concatenate([returns[1:], returns[-1:]])
        return jnp.where(has_next, reward + gamma * following, one_step), None

    returns, _ = jax.lax.scan(extend, one_step, None, length=min(n, reward.shape[0]) - 1)
    return returns


def gae(
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    gamma: Number,
    lambda_: Number,
    unroll: int = 1,
) -> jax.Array:
    """Computes generalised advantage estimates `Â_t = δ_t + γλ Â_{t+1}`.

    `δ_t = r_t + γ (1 − terminated_t) V(s_{t+1}) − V(s_t)`; the recursion is cut where an episode is
    terminated or truncated. λ = 0 gives δ, λ = 1 the Monte Carlo return minus V. Adding `value` to
    the estimates gives the λ-return, the critic's target. Schulman et al. 2016 (arXiv:1506.02438),
    eq. 16.

    Example:
      >>> terminated, truncated = jnp.array([False, False, True]), jnp.zeros(3, bool)
      >>> gae(
      ...     jnp.ones(3), jnp.zeros(3), jnp.full(3, 9.0), terminated, truncated,
      ...     gamma=1.0, lambda_=0.5,
      ... ).tolist()
      [15.25, 10.5, 1.0]
    """
    chex.assert_equal_shape([reward, value])
    _check_stream(reward, next_value, terminated, truncated)
    delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
    decay = gamma * lambda_ * jnp.where(terminated | truncated, 0.0, 1.0)
    return _discounted_sum(delta, decay, unroll)


def _discounted_sum(x: jax.Array, decay: jax.Array, unroll: int) -> jax.Array:
    """Computes `y_t = x_t + decay_t · y_{t+1}`, `[T]`, with `y_T = 0`."""

    def step(y: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, decay = inputs
        y = x + decay * y
        return y, y

    zero = jnp.zeros_like(x[0])
    return jax.lax.scan(step, zero, (x, decay), reverse=True, unroll=unroll)[1]


def _check_stream(
    reward: jax.Array, next_value: jax.Array, terminated: jax.Array, truncated: jax.Array
) -> None:
    chex.assert_rank(reward, 1)
    chex.assert_equal_shape([reward, next_value, terminated, truncated])
    chex.assert_type([terminated, truncated], bool)


def informative(score: jax.Array) -> jax.Array:
    """Returns whether the scores of a group differ, `max ≠ min`: `[…, G]` to bool `[…]`.

    A group of equal scores has no relative advantages and gives no gradient. Scores that are sums
    of rewards are computed by `group_advantages.outcomes`.

    Example:
      >>> informative(jnp.array([[0.0, 1.0], [1.0, 1.0]])).tolist()
      [True, False]
    """
    return score.max(axis=-1) != score.min(axis=-1)


def group_relative(
    reward: jax.Array, *, scale: str = "std", ddof: int = 0, epsilon: Number = 1e-6
) -> jax.Array:
    """Computes `(r_i − mean(r)) / (std(r) + ε)` within one group.

    Exactly 0 if all rewards are equal.

    Args:
      reward: `[G]`, one reward per member of the group.
      scale: divisor: `std`, or `none` for the centred reward alone (Dr. GRPO).
      ddof: correction of the std's divisor: 0 gives the papers' formula; TRL, verl and tunix use 1.
      epsilon: constant added to the std.

    Returns:
      `[G]`. Shao et al. 2024 (arXiv:2402.03300), section 4.1.2.

    Raises:
      ValueError: G = 1 (a baseline needs another member), ddof ≥ G, or an unknown scale.

    Example:
      >>> [round(a, 2) for a in group_relative(jnp.array([3.8, 5.2, 6.1])).tolist()]
      [-1.3, 0.18, 1.13]
      >>> [round(a, 2) for a in group_relative(jnp.array([3.8, 5.2, 6.1]), ddof=1).tolist()]
      [-1.06, 0.14, 0.92]
    """
    chex.assert_rank(reward, 1)
    size = reward.shape[0]
    if size < 2 or ddof >= size:
        raise ValueError(
            f"a group needs more than {max(1, ddof)} members for a relative advantage, got {size}"
        )
    if scale not in ("std", "none"):
        raise ValueError(f"scale must be 'std' or 'none', got {scale!r}")
    reward = reward.astype(jnp.promote_types(reward.dtype, jnp.float32))
    centred = reward - reward.mean()
    # Compares the rewards themselves, because rounding of the mean leaves std > 0 in many constant
    # groups.
    differ = informative(reward)
    if scale == "std":
        centred = centred / (jnp.sqrt(jnp.sum(jnp.square(centred)) / (size - ddof)) + epsilon)
    return jnp.where(differ, centred, 0.0)


def leave_one_out(reward: jax.Array) -> jax.Array:
    """Computes `r_i − mean_{j≠i} r_j = G/(G−1) · (r_i − mean(r))` in one group: `[G]` to `[G]`.

    A baseline that does not depend on r_i leaves the gradient unbiased. RLOO, Ahmadian et al. 2024
    (arXiv:2402.14740), eq. 8.

    Raises:
      ValueError: G = 1, which leaves no other member to average.

    Example:
      >>> leave_one_out(jnp.array([1.0, 0.0, 0.0])).tolist()
      [1.0, -0.5, -0.5]
    """
    chex.assert_rank(reward, 1)
    size = reward.shape[0]
    if size < 2:
        raise ValueError("a group needs at least 2 members for a leave-one-out baseline, got 1")
    reward = reward.astype(jnp.promote_types(reward.dtype, jnp.float32))
    return jnp.where(informative(reward), reward - (reward.sum() - reward) / (size - 1), 0.0)


def maximum_likelihood(reward: jax.Array) -> jax.Array:
    """Computes `(r_i − mean(r)) / mean(r)` within one group; 0 if no member has a reward.

    The expected gradient equals the gradient of `log p`, where p is the probability of a right
    answer, up to terms that need more than G samples: a prompt that is solved one time in ten has
    ten times the weight that it has in the gradient of p.

    Args:
      reward: `[G]`, at least 0; a negative reward makes the advantages of its group NaN and skips
        the update.

    Returns:
      `[G]`. Tajwar et al. 2026 (arXiv:2602.02710), MaxRL.

    Raises:
      ValueError: G = 1.

    Example:
      >>> maximum_likelihood(jnp.array([1.0, 0.0, 0.0, 0.0])).tolist()
      [3.0, -1.0, -1.0, -1.0]
    """
    chex.assert_rank(reward, 1)
    mean = reward.mean()
    relative = group_relative(reward, scale="none") / jnp.where(mean > 0, mean, 1.0)
    return jnp.where(reward.min() < 0, jnp.nan, relative)


def scale_of(mean: jax.Array, std: jax.Array) -> jax.Array:
    """Computes `max(std, |mean| / 10)`: the std with a floor, a divisor that gives unit scale.

    The std of a nearly constant return is small or mere rounding error, and division by such a std
    would amplify noise.

    Args:
      mean: `E*`, mean of the values that are scaled.
      std: `E*`, std of the values, with ddof 0.

    Returns:
      Divisor `E*`, at least 0; 0 only where mean and std are both 0.

    Example:
      >>> scale_of(jnp.array([-5.0, -5.0]), jnp.array([2.0, 0.0])).tolist()
      [2.0, 0.5]
    """
    return jnp.maximum(std, 0.1 * jnp.abs(mean))


def whiten(
    x: jax.Array,
    mask: jax.Array | None = None,
    *,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
    axis_name: str | None = None,
) -> jax.Array:
    """Computes `(x − mean) / (std + ε)` over unmasked elements `E*`, ddof 0; 0 where masked.

    Args:
      x: `E*`, array of any shape.
      mask: `E*`, bool; None counts all elements.
      shift_mean: False adds the mean back: `(x − mean) / (std + ε) + mean`.
      epsilon: constant added to the std.
      axis_name: device axis that the statistics are pooled over, or None.

    Example:
      >>> whiten(jnp.array([1.0, 3.0, 99.0]), jnp.array([True, True, False])).tolist()
      [-1.0, 1.0, 0.0]
    """
    mean, std = masked.moments(x, mask, axis_name=axis_name)
    whitened = (x - mean) / (std + epsilon)
    whitened = whitened if shift_mean else whitened + mean
    return whitened if mask is None else jnp.where(mask.astype(bool), whitened, 0.0)
