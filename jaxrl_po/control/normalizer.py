"""Tracks running mean and variance, as a pytree in the training state."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_po import masked

MOST = 2**30  # number of vectors at which the weight of new vectors stops falling


class Normalizer(NamedTuple):
    """Statistics of all vectors so far.

    Attributes:
      seen: `[]`, int32, number of vectors; remains at `MOST` once `MOST` is reached.
      mean: `[D*]`.
      variance: `[D*]`, variance with ddof 0.
    """

    seen: jax.Array
    mean: jax.Array
    variance: jax.Array

    def std(self) -> jax.Array:
        """Computes the standard deviation (ddof 0) `[D*]`; 1 before any data."""
        return jnp.where(self.seen > 0, jnp.sqrt(self.variance), 1.0)

    def divisor(self, epsilon: float = 1e-4) -> jax.Array:
        """Computes std + epsilon `[D*]`, which divides deviations from the mean."""
        return self.std() + epsilon

    def normalize(self, x: jax.Array, *, clip: float = 10.0, epsilon: float = 1e-4) -> jax.Array:
        """Computes `clip((x − mean) / (std + epsilon), ±clip)` of `[E*, D*]`."""
        lead = (None,) * (x.ndim - self.mean.ndim)
        return jnp.clip((x - self.mean[lead]) / self.divisor(epsilon)[lead], -clip, clip)


def empty(shape: tuple[int, ...]) -> Normalizer:
    """Returns the statistics before any data; mean 0, standard deviation 1."""
    return Normalizer(jnp.int32(0), jnp.zeros(shape), jnp.zeros(shape))


def merge_batch(
    old: Normalizer, x: jax.Array, mask: jax.Array | None = None, *, axis_name: str | None = None
) -> Normalizer:
    """Merges a batch into the statistics; the result equals one pass over all data.

    A batch with a value that is not finite is ignored, since the value would stay in the statistics
    forever.

    Args:
      old: statistics so far.
      x: `[E*, D*]`, this device's shard of the batch.
      mask: `[E*]`, bool, False for vectors to ignore; None includes all vectors.
      axis_name: device axis to sum over, or None.

    Returns:
      Merged statistics, equal on all devices (Chan, Golub & LeVeque 1983, eq. 2.1).

    Example:
      >>> merged = merge_batch(merge_batch(empty(()), jnp.array([1.0, 2.0])), jnp.array([6.0]))
      >>> float(merged.mean), round(float(merged.std()), 4)
      (3.0, 2.1602)
    """
    lead = tuple(range(x.ndim - old.mean.ndim))
    chex.assert_equal_shape([old.mean, x[(0,) * len(lead)]])
    x = x.astype(old.mean.dtype)

    def kept(x: jax.Array) -> jax.Array:
        return (x if mask is None else masked.zero(x, mask)).sum(lead)

    local = x.size // max(old.mean.size, 1) if mask is None else mask.sum()
    count = masked.psum(jnp.int32(local), axis_name)
    number = jnp.maximum(count, 1).astype(x.dtype)
    around = masked.psum(kept(x), axis_name) / number
    # A second pass around the first mean makes a constant's mean exact and its variance 0.
    gap = x - around[(None,) * len(lead)]
    shift, square = masked.psum((kept(gap), kept(jnp.square(gap))), axis_name)
    shift = shift / number
    mean, variance = around + shift, jnp.maximum(square / number - jnp.square(shift), 0.0)
    seen = jnp.minimum(old.seen, MOST - jnp.minimum(count, MOST)) + count
    share, delta = count / jnp.maximum(seen, 1).astype(x.dtype), mean - old.mean
    new = Normalizer(
        seen,
        old.mean + share * delta,
        (1.0 - share) * old.variance + share * variance + share * (1.0 - share) * jnp.square(delta),
    )
    finite = jnp.isfinite(new.mean).all() & jnp.isfinite(new.variance).all()
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
