"""Computes sums over rows of unequal length.

Rows are sorted, and each part ends at its longest row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_po import minibatches
from jaxrl_po.types import Samples, SumInParts

Shorten = Callable[[Samples, int], Samples]
"""`(samples, n) -> samples`, keeps the first n slots of each row, and the inputs of `apply` in
these slots."""

# Rows are cut to a quarter, to a half, or not at all; a program is compiled for each length.
PARTS = (4, 2, 1)


def lengths(samples: Samples) -> jax.Array:
    """Returns the number of slots of each row up to the last slot in `mask`: `[B]`, int32."""
    return (samples.mask * jnp.arange(1, samples.mask.shape[1] + 1)[None, :]).max(axis=1)


def sort(samples: Samples) -> Samples:
    """Sorts the rows by their length, ascending."""
    order = jnp.argsort(lengths(samples))
    return jax.tree.map(lambda x: x[order], samples)


def sizes(steps: int) -> list[int]:
    """Returns the lengths that rows of `steps` slots may be cut to, ascending.

    Example:
      >>> sizes(50)
      [13, 25, 50]
    """
    return [-(-steps // part) for part in PARTS]


def by_length(shorten: Shorten) -> SumInParts:
    """Builds `minibatches.sum_in_parts` for rows sorted by length, each part up to its longest row.

    Masked elements must not count in the function's sums; the result is the same up to the order of
    its terms. With `in_order=True` rows are not sorted, for inputs that `apply` reads group by
    group.
    """

    def sum_in_parts(
        function: Callable[[Samples], Any],
        samples: Samples,
        num_parts: int,
        *,
        in_order: bool = False,
    ) -> Any:
        rows = samples if in_order else sort(samples)
        return minibatches.sum_in_parts(cut(function, shorten), rows, num_parts)

    return sum_in_parts


def cut(function: Callable[[Samples], Any], shorten: Shorten) -> Callable[[Samples], Any]:
    """Computes a function on samples without the slots beyond the longest row.

    Args:
      function: `(samples) -> sums over their elements`; masked elements must not count.
      shorten: function that cuts rows, see `Shorten`.

    Returns:
      Function of samples with leaves `[B, T, …]`, equal to `function` up to the order of sums.
      Under `vmap` all samples are cut to the longest row of all, because a batched branch would run
      every case.
    """

    def of_longest(samples: Samples) -> Any:
        possible = sizes(samples.mask.shape[1])
        longest = _of_all(lengths(samples).max())
        branches = [lambda samples, n=n: function(shorten(samples, n)) for n in possible]
        return jax.lax.switch((longest > jnp.array(possible[:-1])).sum(), branches, samples)

    return of_longest


@jax.custom_batching.custom_vmap
def _of_all(longest: jax.Array) -> jax.Array:
    """Returns the largest number over all axes of `vmap`."""
    return longest


@_of_all.def_vmap
def _of_all_vmap(
    axis_size: int, in_batched: list[bool], longest: jax.Array
) -> tuple[jax.Array, bool]:
    del axis_size, in_batched
    return _of_all(longest.max()), False
