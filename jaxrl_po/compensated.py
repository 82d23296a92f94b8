"""Computes compensated sums, which tell whether two sums are equal up to their rounding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sums(NamedTuple):
    """Compensated sums; each field has the shape `E*`.

    Attributes:
      value: sums in floating point.
      error: error of `value`: the sum of all that was rounded off.
      size: sums of absolute values.
      terms: numbers of terms other than 0.
    """

    value: jax.Array
    error: jax.Array
    size: jax.Array
    terms: jax.Array


def _add(a: Sums, b: Sums) -> Sums:
    value = a.value + b.value
    share = value - a.value
    rounded = (a.value - (value - share)) + (b.value - share)  # Knuth's TwoSum, which is exact
    error = a.error + b.error + jnp.where(jnp.isfinite(value), rounded, 0.0)
    return Sums(value, error, a.size + b.size, a.terms + b.terms)


def sums_to_go(reward: jax.Array) -> Sums:
    """Computes `Σ_{u ≥ t} r_u`, `[…, T]`, along the last axis, as compensated sums."""
    terms = (reward != 0).astype(jnp.int32)
    single = Sums(reward, jnp.zeros_like(reward), jnp.abs(reward), terms)
    sums: Sums = jax.lax.associative_scan(_add, single, reverse=True, axis=reward.ndim - 1)
    return sums._replace(value=sums.value + sums.error, error=jnp.zeros_like(reward))


def rounding(value: jax.Array, size: jax.Array, terms: jax.Array, length: int) -> jax.Array:
    """Computes the error bound of compensated sums, `4 ε |value| + T ε² size`; 0 for one term.

    Args:
      value: `E*`, compensated sum, or the largest of several sums.
      size: `E*`, sum of absolute values of the terms.
      terms: `E*`, number of terms that are not 0.
      length: T, the largest number of terms in a sum.
    """
    epsilon = jnp.finfo(value.dtype).eps
    return jnp.where(terms > 1, 4 * epsilon * jnp.abs(value) + length * epsilon**2 * size, 0.0)


def sums_differ(sums: Sums, length: int, valid: jax.Array | bool = True) -> jax.Array:
    """Returns whether sums of a group, along the first axis, differ by more than `rounding`.

    A NaN or an infinity counts as different from every sum.

    Args:
      sums: `[G, …]`, sums of the members of a group.
      length: T, the largest number of terms in a sum.
      valid: `[G, …]`, bool, False for a member that does not have the sum.
    """

    def largest(x: jax.Array) -> jax.Array:
        return jnp.where(valid, x, 0).max(axis=0)

    error = rounding(largest(jnp.abs(sums.value)), largest(sums.size), largest(sums.terms), length)
    highest = jnp.where(valid, sums.value, -jnp.inf).max(axis=0)
    spread = highest - jnp.where(valid, sums.value, jnp.inf).min(axis=0)
    return ~(spread <= error) | (spread == jnp.inf)
