"""Compensated sums: whether two are equal up to their rounding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sums(NamedTuple):
    """Compensated sums, a shape `E*` each.

    Attributes:
      value: the sums.
      error: what was rounded off, on the way to `value`.
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
    rounded = (a.value - (value - share)) + (b.value - share)  # Knuth's TwoSum, exact
    error = a.error + b.error + jnp.where(jnp.isfinite(value), rounded, 0.0)
    return Sums(value, error, a.size + b.size, a.terms + b.terms)


def sums_to_go(reward: jax.Array) -> Sums:
    """`Σ_{u ≥ t} r_u` along the last axis, `[…, T]`, with what decides whether two are equal."""
    terms = (reward != 0).astype(jnp.int32)
    single = Sums(reward, jnp.zeros_like(reward), jnp.abs(reward), terms)
    sums: Sums = jax.lax.associative_scan(_add, single, reverse=True, axis=reward.ndim - 1)
    return sums._replace(value=sums.value + sums.error, error=jnp.zeros_like(reward))


def rounding(value: jax.Array, size: jax.Array, terms: jax.Array, length: int) -> jax.Array:
    """What compensated sums may err by: `4 ε |value| + T ε² size`, and 0 for a single term.

    Args:
      value: `E*`, the sum, or the largest of several.
      size: `E*`, its sum of absolute values.
      terms: `E*`, its number of terms other than 0.
      length: T, the largest number of terms.
    """
    epsilon = jnp.finfo(value.dtype).eps
    return jnp.where(terms > 1, 4 * epsilon * jnp.abs(value) + length * epsilon**2 * size, 0.0)


def sums_differ(sums: Sums, length: int, valid: jax.Array | bool = True) -> jax.Array:
    """Whether sums of a group, along the first axis, differ by more than `rounding`.

    NaN and infinity differ.

    Args:
      sums: `[G, …]`.
      length: T, the largest number of terms.
      valid: which members there are, `[G, …]`.
    """

    def largest(x: jax.Array) -> jax.Array:
        return jnp.where(valid, x, 0).max(axis=0)

    error = rounding(largest(jnp.abs(sums.value)), largest(sums.size), largest(sums.terms), length)
    highest = jnp.where(valid, sums.value, -jnp.inf).max(axis=0)
    spread = highest - jnp.where(valid, sums.value, jnp.inf).min(axis=0)
    return ~(spread <= error) | (spread == jnp.inf)
