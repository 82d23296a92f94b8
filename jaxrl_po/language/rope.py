"""Rotary position embeddings, plain and stretched to longer contexts."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Rope(NamedTuple):
    """Which angles turn queries and keys: pair i at position n by n·f_i, f_i = θ^(−2i/C).

    With a factor, frequencies are divided by it: all of them (position interpolation), or, with
    `context`, only the slow ones (Llama 3). There f of wavelength λ = 2π/f stays where
    λ < context / high, becomes f / factor where λ > context / low, and between them is
    (1 − s)·f / factor + s·f with s = (context / λ − low) / (high − low).

    Attributes:
      theta: θ, above 1.
      factor: 1 for none.
      context: length of the context before it was stretched, in tokens; 0 stretches every
        frequency.
      low: see above.
      high: see above, greater than `low`.
    """

    theta: float = 10_000.0
    factor: float = 1.0
    context: int = 0
    low: float = 1.0
    high: float = 4.0


PLAIN = Rope()


def frequencies(size: int, rope: Rope = PLAIN) -> np.ndarray[Any, Any]:
    """The f_i after they are stretched, `[C/2]`, float64, for head size C."""
    half = size // 2
    frequency_h = rope.theta ** (-np.arange(half) / half)
    stretched_h = frequency_h / rope.factor
    if rope.context:
        periods_h = rope.context * frequency_h / (2 * math.pi)
        kept_h = np.clip((periods_h - rope.low) / (rope.high - rope.low), 0.0, 1.0)
        stretched_h = (1 - kept_h) * stretched_h + kept_h * frequency_h
    return stretched_h


def turns(positions: int, size: int, rope: Rope = PLAIN) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every angle, `[positions, C/2]` each, for head size C."""
    angle_Nxh = np.arange(positions)[:, None] * frequencies(size, rope)
    return jnp.asarray(np.cos(angle_Nxh)), jnp.asarray(np.sin(angle_Nxh))


def rotate(x_BxNxHxC: jax.Array, cos_Nxh: jax.Array, sin_Nxh: jax.Array) -> jax.Array:
    """Rotary position embedding, with the angles of `turns`.

    Su et al. 2021 (arXiv:2104.09864), eq. 34, but pairing component i with i + C/2, not with its
    neighbour.
    """
    half = x_BxNxHxC.shape[-1] // 2
    cos, sin = (
        turn_Nxh[None, :, None, :].astype(x_BxNxHxC.dtype) for turn_Nxh in (cos_Nxh, sin_Nxh)
    )
    a, b = x_BxNxHxC[..., :half], x_BxNxHxC[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
