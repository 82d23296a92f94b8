"""Population-based training: members with low scores continue from members with high scores.

A member is a training state with its own settings, and a population is a stack of N members, in
which the settings are data. Source: Jaderberg et al. 2017, arXiv:1711.09846.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.config import ConfigError, with_field_docs
from jaxrl_po.types import TrainState

PART = 5  # the lowest fifth of the members is replaced by the highest fifth
FACTORS = 0.8, 1.2

Settings = Mapping[str, jax.Array]
"""Values `[N]` of the members, by name of the setting."""


@with_field_docs
class Space(NamedTuple):
    """Values that the settings of a population may take.

    Attributes:
      bounds: lowest and highest value of each setting that is multiplied by a factor, by name.
      choices: values of each setting that is drawn again, by name.
    """

    bounds: Mapping[str, tuple[float, float]]
    choices: Mapping[str, Sequence[float]] = {}


def select_parents(score: jax.Array, key: jax.Array) -> jax.Array:
    """Draws a parent from the highest fifth for each member of the lowest fifth.

    A fifth is ⌊N/5⌋ members, at least 1. Of equal scores, the later ranks higher; NaN ranks lowest.

    Args:
      score: `[N]`, score of each member, N ≥ 2.
      key: PRNG key, consumed.

    Returns:
      Index `[N]`, int32, of each member's parent: the member itself if it is not replaced, or if
      the parent that was drawn has no score.

    Raises:
      ConfigError: the population has fewer than 2 members.

    Example:
      >>> select_parents(jnp.array([3.0, jnp.nan, 1.0]), jax.random.key(0))
      Array([0, 0, 2], dtype=int32)
    """
    size = len(score)
    if size < 2:
        raise ConfigError("score", f"must have at least 2 members, got {size}")
    count = max(1, size // PART)
    ranked = jnp.lexsort((score, ~jnp.isnan(score))).astype(jnp.int32)
    low, high = ranked[:count], ranked[-count:]
    drawn = jax.random.choice(key, high, (count,))
    parents = jnp.where(jnp.isnan(score[drawn]), low, drawn)
    return jnp.arange(size, dtype=jnp.int32).at[low].set(parents)


def perturb(settings: Settings, space: Space, key: jax.Array) -> dict[str, jax.Array]:
    """Multiplies settings by 0.8 or 1.2, clipped to their bounds; draws choices again.

    Args:
      settings: values `[N]` by name.
      space: bounds and choices of the settings; other settings do not change.
      key: PRNG key, consumed.
    """
    names = sorted([*space.bounds, *space.choices])
    after = dict(settings)
    for name, own in zip(names, jax.random.split(key, len(names)), strict=True):
        value = settings[name]
        if name in space.bounds:
            factor = jax.random.choice(own, jnp.array(FACTORS, value.dtype), value.shape)
            after[name] = jnp.clip(value * factor, *space.bounds[name])
        else:
            choices = jnp.array(space.choices[name], value.dtype)
            after[name] = jax.random.choice(own, choices, value.shape)
    return after


def exploit(
    state: TrainState, settings: Settings, score: jax.Array, space: Space, key: jax.Array
) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
    """Replaces the lowest fifth of a population by perturbed copies of members of the highest.

    A replaced member gets all of the parent's state except the key, and the parent's settings after
    `perturb`. Its key is new, so that its random numbers are not the parent's. The adaptive
    coefficient `state.kl_coefficient` is scaled as a setting of that name is.

    Args:
      state: training states of N members; leaves `[N, …]`, except the frozen parameters, which the
        members share.
      settings: values `[N]` by name.
      score: `[N]`, score of each member, see `select_parents`.
      space: values that the settings may take.
      key: PRNG key, typed or raw as `state.key`, consumed.

    Returns:
      The states, the settings and the parents `[N]` of `select_parents`.
    """
    of_parents, of_settings, of_members = jax.random.split(key, 3)
    parents = select_parents(score, of_parents)
    replaced = parents != jnp.arange(len(parents))
    copied = jax.tree.map(lambda x: x[parents], (state.with_frozen(None), dict(settings)))
    perturbed = perturb(copied[1], space, of_settings)
    after = {name: jnp.where(replaced, x, settings[name]) for name, x in perturbed.items()}
    fresh = jax.random.split(of_members, len(parents))
    other = replaced.reshape(-1, *[1] * (state.key.ndim - 1))
    own = copied[0]._replace(key=jnp.where(other, fresh, state.key))
    if (beta := "kl_coefficient") in perturbed:
        old, new = copied[1][beta], perturbed[beta]
        scaled = jnp.where(old == 0.0, new, own.kl_coefficient * new / old)
        own = own._replace(kl_coefficient=jnp.where(replaced, scaled, own.kl_coefficient))
    return own.with_frozen(state.params.frozen), after, parents
