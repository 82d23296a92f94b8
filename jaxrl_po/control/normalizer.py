"""Running mean and variance, as a pytree in the training state."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_po import masked


class Normalizer(NamedTuple):
    """Statistics of all vectors so far.

    Attributes:
      seen: `[]`, float32, number of vectors.
      mean: `[D*]`.
      m2: `[D*]`, sum of squared deviations from the mean.
    """

    seen: jax.Array
    mean: jax.Array
    m2: jax.Array

    def std(self) -> jax.Array:
        """Standard deviation (ddof 0) `[D*]`; 1 where there is no data yet."""
        return jnp.where(self.seen > 0, jnp.sqrt(self.m2 / jnp.maximum(self.seen, 1.0)), 1.0)

    def normalize(self, x: jax.Array, *, clip: float = 10.0, epsilon: float = 1e-4) -> jax.Array:
        """`clip((x − mean) / (std + epsilon), ±clip)` of `[E*, D*]`."""
        lead = (None,) * (x.ndim - self.mean.ndim)
        return jnp.clip((x - self.mean[lead]) / (self.std()[lead] + epsilon), -clip, clip)


def empty(shape: tuple[int, ...]) -> Normalizer:
    """Statistics of no data: mean 0, standard deviation 1."""
    return Normalizer(jnp.float32(0.0), jnp.zeros(shape), jnp.zeros(shape))


def merge(old: Normalizer, x: jax.Array, *, axis_name: str | None = None) -> Normalizer:
    """Merges a batch into the statistics; the result is that of one pass over all data.

    Args:
      old: statistics so far.
      x: `[E*, D*]`, this device's shard of the batch.
      axis_name: device axis to sum over, or None.

    Returns:
      The merged statistics, equal on all devices (Chan, Golub & LeVeque 1983, eq. 2.1).

    Example:
      >>> merged = merge(merge(empty(()), jnp.array([1.0, 2.0])), jnp.array([6.0]))
      >>> float(merged.mean), round(float(merged.std()), 4)
      (3.0, 2.1602)
    """
    lead = tuple(range(x.ndim - old.mean.ndim))
    chex.assert_equal_shape([old.mean, x[(0,) * len(lead)]])
    count = masked.psum(jnp.float32(x.size // max(old.mean.size, 1)), axis_name)
    mean = masked.psum(x.sum(lead), axis_name) / count
    # A second all-reduce: deviations are from the mean over all devices.
    m2 = masked.psum(jnp.square(x - mean[(None,) * len(lead)]).sum(lead), axis_name)
    total, delta = old.seen + count, mean - old.mean
    return Normalizer(
        total,
        old.mean + delta * count / total,
        old.m2 + m2 + jnp.square(delta) * old.seen * count / total,
    )
