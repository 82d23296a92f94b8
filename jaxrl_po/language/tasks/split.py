"""Samples from two disjoint splits of a task's problems, under jit."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.config import ConfigError, Interval

HELD_OUT = 10  # one problem in HELD_OUT is held out
COUNTED = 10_000  # largest number of problems examined to compute the held-out share
FAILURE = 1e-10  # largest probability that none of the candidates is in the split
SHARES = Interval(0.02, 0.5)  # range of held-out shares for which sampling is efficient

Canonical = Callable[[jax.Array], jax.Array]


def is_held_out(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns True if the unordered pair of uint32 operands is held out.

    One pair in ten is, by a hash.
    """
    return rows_held_out(jnp.sort(jnp.stack([a, b], axis=-1)))


def rows_held_out(rows: jax.Array) -> jax.Array:
    """Returns True for each row of operands that is held out.

    Args:
      rows: operands in canonical order, identical for all rows that are the same problem, `[...,
        K]`, uint32.

    Returns:
      True for held-out rows, `[...]`, bool.
    """
    state = _mix(rows[..., 0])
    for i in range(1, rows.shape[-1]):
        state = _mix(state + rows[..., i])
    return state % HELD_OUT == 0


def make_draw(
    bounds: Sequence[tuple[int, int]], *, canonical: Canonical = lambda rows: rows, advice: str
) -> Callable[[jax.Array, bool], jax.Array]:
    """Builds `draw(key, held_out) -> operands [K]` uint32, uniform over one split.

    The sampling rejects candidates, whose number is fixed: the first candidate in the split is
    taken, and the probability that none is in the split is at most 1e-10. To choose the number of
    candidates, the share of held-out problems is counted, or estimated if there are many problems.
    `draw` consumes `key`.

    Args:
      bounds: interval [low, high) of the values of each operand, high < 2^31.
      canonical: `[..., K] -> [..., J]`, maps all orders of operands that are the same problem to
        the same row, e.g. `jnp.sort`.
      advice: advice on how to get more problems, for the error message.

    Raises:
      ConfigError: there are so few problems that a split would be nearly empty.

    Example:
      >>> draw = make_draw([(0, 100), (0, 100)], canonical=jnp.sort, advice="raise num_digits")
      >>> pair = draw(jax.random.key(0), True)
      >>> pair.shape, bool(is_held_out(*pair))
      ((2,), True)
    """
    low, high = (np.array(bound, np.int32) for bound in zip(*bounds, strict=True))
    share = _share(low, high, canonical)
    if share not in SHARES:
        raise ConfigError(
            "task",
            f"has too few problems to hold out one in {HELD_OUT} ({share:.1%} would be): {advice}",
        )

    def draw(key: jax.Array, held_out: bool) -> jax.Array:
        missed = 1.0 - share if held_out else share
        candidates = 2 ** math.ceil(math.log2(math.log(FAILURE) / math.log(missed)))
        rows = jax.random.randint(key, (candidates, len(bounds)), low[None], high[None]).astype(
            jnp.uint32
        )
        # `argmax` finds the first candidate in the split (candidate 0 if no candidate is in the
        # split).
        return rows[jnp.argmax(rows_held_out(canonical(rows)) == held_out)]

    return draw


def _share(low: np.ndarray, high: np.ndarray, canonical: Canonical) -> float:
    sizes = [int(size) for size in high - low]
    if math.prod(sizes) <= COUNTED:
        rows = low + np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=-1)
    else:
        rows = np.random.default_rng(0).integers(low, high, (COUNTED, len(sizes)))
    # The result is a concrete number, even while a caller is being traced.
    with jax.ensure_compile_time_eval():
        return float(
            jnp.mean(jax.jit(lambda rows: rows_held_out(canonical(rows)))(rows.astype(np.uint32)))
        )


def _mix(x: jax.Array) -> jax.Array:
    """Computes a bijective 32-bit hash (two rounds of multiply and xor-shift)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
