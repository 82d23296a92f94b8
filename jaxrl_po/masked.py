"""Masked reductions that keep the numerator and the denominator apart until the one division.

A mean over shards or microbatches of different sizes is not the mean of their means. Losses and
metrics therefore travel as `Mean(total, count)`: add them, sum them over devices, and divide once.
"""

import dataclasses
from typing import TypeVar

import chex
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

Tree = TypeVar("Tree")

SMALL = 2**16  # elements: a larger array is worth a meeting of its own, and a copy of it is not


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean that is not divided yet: `total / count`.

    `a + b` pools two means (totals and counts add); `a * c` scales the total by a scalar and keeps
    the count.

    Attributes:
      total: sum of the unmasked elements, in their unit.
      count: how many elements (or rows) were summed; never depends on parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> pooled = Mean(jnp.float32(6.0), jnp.float32(2.0)) + Mean(jnp.float32(3.0), jnp.float32(1.0))
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
        """Total / max(count, 1): 0 when empty, which is what a loss wants."""
        return self.total / jnp.maximum(self.count, 1.0)

    def metric(self) -> jax.Array:
        """Total / count: NaN when empty, which is what a log wants."""
        return jnp.where(self.count > 0, self.total / jnp.maximum(self.count, 1.0), jnp.nan)


def psum(tree: Tree, axis_name: str | None) -> Tree:
    """Sums every leaf over the devices of `axis_name`; the identity when it is None.

    Never differentiate through it: take local gradients and sum those. Small leaves of one dtype
    travel as one vector, since on a CPU every array is a meeting of all devices of its own, and a
    gradient of a dozen arrays waits a dozen times.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> sums = jax.vmap(lambda x: psum({"a": x, "b": 2 * x}, "devices"), axis_name="devices")(jnp.arange(3))
      >>> sums["a"].tolist(), sums["b"].tolist()
      ([3, 3, 3], [6, 6, 6])
    """
    if axis_name is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
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
      x: `E*`, any shape.
      mask: `E*`, True (or 1) where an element counts; None counts all. What stands behind the mask
        is never read, so a NaN there changes neither the value nor the gradient.

    Returns:
      A float32 `Mean`.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if mask is None:
        return Mean(x.sum(), jnp.asarray(x.size, x.dtype))
    chex.assert_equal_shape([x, mask])
    valid = mask.astype(bool)
    return Mean(jnp.where(valid, x, 0.0).sum(), valid.sum(dtype=x.dtype))


def zero(x: jax.Array, mask: jax.Array) -> jax.Array:
    """`x` with zeros (False) in the masked slots, so that no NaN there can reach a gradient through a `where`.

    Args:
      x: `[E*, D*]`, any dtype.
      mask: `E*`, bool.

    Example:
      >>> import jax.numpy as jnp
      >>> zero(jnp.array([[1.0, 2.0], [jnp.nan, 3.0]]), jnp.array([True, False])).tolist()
      [[1.0, 2.0], [0.0, 0.0]]
    """
    chex.assert_tree_shape_prefix(x, mask.shape)
    return jnp.where(
        mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, jnp.zeros((), x.dtype)
    )


def mean(x: jax.Array, mask: jax.Array | None = None, *, axis_name: str | None = None) -> jax.Array:
    """Mean of the unmasked elements over all devices of `axis_name`; 0 when there are none.

    Example:
      >>> import jax.numpy as jnp
      >>> float(mean(jnp.array([1.0, 2.0, jnp.nan]), jnp.array([True, True, False])))
      1.5
    """
    return psum(total(x, mask), axis_name).value()


def moments(
    x: jax.Array, mask: jax.Array | None = None, *, axis_name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Mean and standard deviation (ddof 0) of the unmasked elements over all devices; (0, 0) when there are none.

    Two passes, `std = sqrt(mean((x - mean)^2))`: the one-pass form cancels in float32. Equal
    elements have exactly their value and 0; the std is infinite where squares overflow, for
    deviations above 1e19.

    Example:
      >>> import jax.numpy as jnp
      >>> [float(m) for m in moments(jnp.array([1.0, 3.0, 9.0]), jnp.array([1, 1, 0]))]
      [2.0, 1.0]
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # Deviations from one of the elements: rounding would leave equal ones a std, and whitening
    # would make of it a unit.
    low = jax.lax.stop_gradient(
        x if mask is None else jnp.where(mask.astype(bool), x, jnp.inf)
    ).min(initial=jnp.inf)
    low = low if axis_name is None else jax.lax.pmin(low, axis_name)
    low = jnp.where(jnp.isfinite(low), low, 0.0)
    centre = low + mean(x - low, mask, axis_name=axis_name)
    variance = mean(jnp.square(x - centre), mask, axis_name=axis_name)
    return centre, jnp.sqrt(variance)
