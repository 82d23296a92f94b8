"""Two splits of a task's problems without a problem in common, drawn from inside the program."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.config import ConfigError, Interval

HELD_OUT = 10  # one problem in so many is held out
COUNTED = 10_000  # problems of which the held-out share is counted
FAILURE = 1e-10  # chance, at most, that no candidate is of the split
SHARES = Interval(0.02, 0.5)  # held-out shares that can be drawn from

Canonical = Callable[[jax.Array], jax.Array]


def is_held_out(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether the unordered pair of uint32 operands belongs to the held-out split (one in ten, by a hash)."""
    return rows_held_out(jnp.sort(jnp.stack([a, b], axis=-1)))


def rows_held_out(rows: jax.Array) -> jax.Array:
    """Whether each row of operands belongs to the held-out split.

    Args:
      rows: `[..., K]`, uint32, in the order that stands for all orders which are one problem.

    Returns:
      `[...]`, bool.
    """
    state = _mix(rows[..., 0])
    for i in range(1, rows.shape[-1]):
        state = _mix(state + rows[..., i])
    return state % HELD_OUT == 0


def make_draw(
    bounds: Sequence[tuple[int, int]], *, canonical: Canonical = lambda rows: rows, advice: str
) -> Callable[[jax.Array, bool], jax.Array]:
    """Builds `draw(key, held_out) -> operands [K]` uint32, uniform over the problems of one split; consumes `key`.

    It draws so many candidates that one is of the split, but for a chance of 1e-10, and takes the
    first such: no loop whose length nobody knows. The share of the held-out split is counted, over
    every problem where there are few, for that.

    Args:
      bounds: of each operand the lowest value and the one above the highest, below 2^31.
      canonical: `[..., K] -> [..., J]`, the form that all orders of operands which are one problem
        share, e.g. `jnp.sort`.
      advice: what gives more problems, for the error.

    Raises:
      ConfigError: so few problems that one of the splits would be empty or nearly so.

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
            f"too few problems to hold out one in {HELD_OUT} ({share:.1%} would be): {advice}"
        )

    def draw(key: jax.Array, held_out: bool) -> jax.Array:
        missed = 1.0 - share if held_out else share
        candidates = 2 ** math.ceil(math.log2(math.log(FAILURE) / math.log(missed)))
        rows = jax.random.randint(key, (candidates, len(bounds)), low[None], high[None]).astype(
            jnp.uint32
        )
        return rows[jnp.argmax(rows_held_out(canonical(rows)) == held_out)]

    return draw


def _share(low: np.ndarray, high: np.ndarray, canonical: Canonical) -> float:
    sizes = [int(size) for size in high - low]
    if math.prod(sizes) <= COUNTED:
        rows = low + np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=-1)
    else:
        rows = np.random.default_rng(0).integers(low, high, (COUNTED, len(sizes)))
    with jax.ensure_compile_time_eval():
        return float(
            jnp.mean(jax.jit(lambda rows: rows_held_out(canonical(rows)))(rows.astype(np.uint32)))
        )


def _mix(x: jax.Array) -> jax.Array:
    """A bijective 32-bit hash (two rounds of multiply and xor-shift)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
