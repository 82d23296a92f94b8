"""Masked reductions that store numerator and denominator separately until one final division.

A mean over shards or microbatches of different sizes is not the mean of their means. Losses and
metrics are therefore stored as `Mean(total, count)`: added, summed over devices, and divided once.
"""

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

import chex
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jaxrl_po.config import ConfigError

Tree = TypeVar("Tree")

# Number of elements: each larger array has its own all-reduce, which is cheaper than copying the
# array.
SMALL = 2**16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """Mean before its division, `total / count`.

    `a + b` pools two means (totals and counts add); `a * c` scales the total by a scalar and keeps
    the count.

    Attributes:
      total: sum of the unmasked elements, in the unit of the elements.
      count: number of elements (or rows) summed; never depends on parameters.

    Example:
      >>> one, two = jnp.float32(1.0), jnp.float32(2.0)
      >>> pooled = Mean(total=6.0 * one, count=two) + Mean(total=3.0 * one, count=one)
      >>> float(pooled.value()), float((2.0 * pooled).value())
      (3.0, 6.0)
    """

    total: jax.Array
    count: jax.Array

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def __mul__(self, scalar: jax.Array | float) -> "Mean":
        return Mean(self.total * scalar, self.count)

    __rmul__ = __mul__

    def value(self) -> jax.Array:
        """Returns `total / max(count, 1)`; 0 if the mean is empty, for losses."""
        return self.total / jnp.maximum(self.count, 1.0)

    def metric(self) -> jax.Array:
        """Returns `total / count`; NaN if the mean is empty, for logs."""
        return jnp.where(self.count > 0, self.total / jnp.maximum(self.count, 1.0), jnp.nan)


def merge(*named: Mapping[str, Tree]) -> dict[str, Tree]:
    """Joins dicts of metrics, or of elements to log.

    Raises:
      ConfigError: two of the dicts have an entry of the same name.

    Example:
      >>> merge({"kl": 1.0}, {"entropy": 2.0})
      {'kl': 1.0, 'entropy': 2.0}
    """
    joined: dict[str, Tree] = {}
    for metrics in named:
        for name in joined.keys() & metrics.keys():
            raise ConfigError(name, "must have another name: the library has this metric")
        joined.update(metrics)
    return joined


def psum(tree: Tree, axis_name: str | None) -> Tree:
    """Sums every leaf over the devices of `axis_name`; the identity if `axis_name` is None.

    Never differentiate through this sum: compute local gradients and sum the gradients. Small
    leaves of one dtype are concatenated into one all-reduce, because on CPU each all-reduce
    synchronises all devices.

    Example:
      >>> sum_both = lambda x: psum({"a": x, "b": 2 * x}, "devices")
      >>> sums = jax.vmap(sum_both, axis_name="devices")(jnp.arange(3))
      >>> sums["a"].tolist(), sums["b"].tolist()
      ([3, 3, 3], [6, 6, 6])
    """
    if axis_name is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    # Leaves are grouped by dtype; each large leaf is a group of its own, keyed by its index.
    groups: dict[object, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(jnp.result_type(leaf) if jnp.size(leaf) <= SMALL else i, []).append(i)
    for group in groups.values():
        vector, unravel = ravel_pytree([leaves[i] for i in group])
        for i, leaf in zip(group, unravel(jax.lax.psum(vector, axis_name)), strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


def total(x: jax.Array, mask: jax.Array | None = None) -> Mean:
    """Pools the unmasked elements of `x`: `Mean(sum(x[mask]), sum(mask))`.

    Args:
      x: `E*`, array of any shape.
      mask: `E*`, True (or 1) where an element counts; None counts all elements. A NaN in a masked
        slot changes neither the value nor the gradient with respect to `x`.

    Returns:
      Pooled float32 `Mean`.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if mask is None:
        return Mean(x.sum(), jnp.asarray(x.size, x.dtype))
    chex.assert_equal_shape([x, mask])
    valid = mask.astype(bool)
    return Mean(jnp.where(valid, x, 0.0).sum(), valid.sum(dtype=x.dtype))


def zero(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns `x` with zeros (False) in the masked slots.

    Use the function on inputs of a differentiated function: selecting an output with `where` is too
    late, since the gradient of the branch not taken is 0 · NaN = NaN.

    Args:
      x: `[E*, D*]`, any dtype.
      mask: `E*`, bool, True where an element counts.

    Example:
      >>> zero(jnp.array([[1.0, 2.0], [jnp.nan, 3.0]]), jnp.array([True, False])).tolist()
      [[1.0, 2.0], [0.0, 0.0]]
    """
    chex.assert_tree_shape_prefix(x, mask.shape)
    return jnp.where(
        mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, jnp.zeros((), x.dtype)
    )


def mean(x: jax.Array, mask: jax.Array | None = None, *, axis_name: str | None = None) -> jax.Array:
    """Computes the mean of unmasked elements over all devices of `axis_name`; 0 without elements.

    Example:
      >>> float(mean(jnp.array([1.0, 2.0, jnp.nan]), jnp.array([True, True, False])))
      1.5
    """
    return psum(total(x, mask), axis_name).value()


def moments(
    x: jax.Array, mask: jax.Array | None = None, *, axis_name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes mean and std (ddof 0) of unmasked elements over all devices.

    (0, 0) without elements.

    The computation takes two passes, `std = sqrt(mean((x − mean)²))`: the one-pass form cancels in
    float32. Equal elements give exactly their value as mean and 0 as std. The std is infinite where
    squares overflow, for deviations above 1e19.

    Example:
      >>> [float(m) for m in moments(jnp.array([1.0, 3.0, 9.0]), jnp.array([1, 1, 0]))]
      [2.0, 1.0]
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # Elements are shifted by their minimum: otherwise rounding of the mean would give equal
    # elements a tiny std, which whitening would scale up to 1.
    low = jax.lax.stop_gradient(
        x if mask is None else jnp.where(mask.astype(bool), x, jnp.inf)
    ).min(initial=jnp.inf)
    low = low if axis_name is None else jax.lax.pmin(low, axis_name)
    low = jnp.where(jnp.isfinite(low), low, 0.0)
    centre = low + mean(x - low, mask, axis_name=axis_name)
    variance = mean(jnp.square(x - centre), mask, axis_name=axis_name)
    return centre, jnp.sqrt(variance)
