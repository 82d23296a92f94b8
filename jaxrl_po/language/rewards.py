"""Shapes outcome rewards."""

import jax
import jax.numpy as jnp

from jaxrl_po.config import ConfigError, Number

OVERLONG_SHARE = 5  # divisor of the budget that gives the default cache


def overlong_cache(budget: int) -> int:
    """Returns the default length of the punishment's ramp, a fifth of the budget in tokens, ≥ 1.

    Example:
      >>> overlong_cache(20), overlong_cache(4)
      (4, 1)
    """
    return max(1, budget // OVERLONG_SHARE)


def budget_with_room(answer_length: int) -> int:
    """Returns a budget whose last fifth exceeds the longest answer, so that no answer is punished.

    Args:
      answer_length: number of tokens in the longest correct answer, EOS included.

    Returns:
      Budget in tokens; `budget − overlong_cache(budget)` is at least `answer_length`.

    Example:
      >>> budget_with_room(16), budget_with_room(4)
      (20, 5)
    """
    return -(-OVERLONG_SHARE * answer_length // (OVERLONG_SHARE - 1))


def soft_overlong(
    length: jax.Array, *, max_length: int, cache: int, factor: Number = 1.0
) -> jax.Array:
    """Computes DAPO's overlong punishment: 0 to `max_length − cache`, `−factor` from `max_length`.

    The punishment is `factor · clip((max_length − cache − length) / cache, −1, 0)`.

    Args:
      length: number of tokens generated, EOS included, `E*`.
      max_length: smallest length, in tokens, that is punished in full.
      cache: length of the linear ramp below `max_length`, in tokens, in [1, max_length].
      factor: size of the full punishment, reward units.

    Returns:
      Punishments `E*`, float32, in [−factor, 0], which are added to the reward. Source: Yu et al.
      2025 (arXiv:2503.14476), eq. 13.

    Raises:
      ConfigError: `cache` is outside [1, max_length].

    Example:
      >>> soft_overlong(jnp.array([10, 14, 16, 18, 30]), max_length=18, cache=4).tolist()
      [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    if not 1 <= cache <= max_length:
        raise ConfigError(
            "cache", f"must lie in [1, max_length = {max_length}] tokens, got {cache}"
        )
    excess = (max_length - cache - length.astype(jnp.float32)) / cache
    return factor * jnp.clip(excess, -1.0, 0.0)
