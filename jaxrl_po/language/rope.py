"""Computes rotary position embeddings, plain or stretched to longer contexts."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Rope(NamedTuple):
    """Angles that rotate queries and keys, n·f_i for pair i at position n, f_i = θ^(−2i/C).

    With a factor, frequencies are divided by the factor: all frequencies (position interpolation),
    or, with `context`, only the slow ones (Llama 3). With `context`, a frequency f of wavelength λ
    = 2π/f is unchanged if λ < context / high, becomes f / factor if λ > context / low, and
    otherwise (1 − s)·f / factor + s·f with s = (context / λ − low) / (high − low).

    Attributes:
      theta: base θ of the frequencies, above 1.
      factor: divisor of the frequencies; 1 leaves them unchanged.
      context: length of the context before stretching, in tokens; 0 stretches every frequency.
      low: ratio context / λ below which frequencies are divided by the full factor.
      high: ratio context / λ above which frequencies are unchanged, greater than `low`.
    """

    theta: float = 10_000.0
    factor: float = 1.0
    context: int = 0
    low: float = 1.0
    high: float = 4.0


PLAIN = Rope()


def frequencies(size: int, rope: Rope = PLAIN) -> np.ndarray[Any, Any]:
    """Returns the stretched frequencies f_i, `[C/2]`, float64, for head size C."""
    half = size // 2
    frequency_h = rope.theta ** (-np.arange(half) / half)
    stretched_h = frequency_h / rope.factor
    if rope.context:
        periods_h = rope.context * frequency_h / (2 * math.pi)
        kept_h = np.clip((periods_h - rope.low) / (rope.high - rope.low), 0.0, 1.0)
        stretched_h = (1 - kept_h) * stretched_h + kept_h * frequency_h
    return stretched_h


def turns(positions: int, size: int, rope: Rope = PLAIN) -> tuple[jax.Array, jax.Array]:
    """Computes cosine and sine of every angle, `[positions, C/2]` each, for head size C."""
    angle_Nxh = np.arange(positions)[:, None] * frequencies(size, rope)
    return jnp.asarray(np.cos(angle_Nxh)), jnp.asarray(np.sin(angle_Nxh))


def rotate(x_BxNxHxC: jax.Array, cos_Nxh: jax.Array, sin_Nxh: jax.Array) -> jax.Array:
    """Applies the rotary position embedding, with the angles of `turns`.

    The formula is Su et al. 2021 (arXiv:2104.09864), eq. 34, but pairs component i with i + C/2,
    not with its neighbour.
    """
    half = x_BxNxHxC.shape[-1] // 2
    cos, sin = (
        turn_Nxh[None, :, None, :].astype(x_BxNxHxC.dtype) for turn_Nxh in (cos_Nxh, sin_Nxh)
    )
    a, b = x_BxNxHxC[..., :half], x_BxNxHxC[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
