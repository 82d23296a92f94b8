"""A small decoder-only transformer: RMSNorm, RoPE, gated MLP, grouped queries and a static cache.

Shape suffixes: B rows, N new positions, R ≤ N of them with outputs, M = B·N or B·R, S positions in
all, D width, H query heads, K key/value heads, G = H / K, C head size, F MLP width, V vocabulary.
`dtype` is that of the matrix products; parameters are float32, softmax and outputs float32 at
least. Outside attention, rows and positions are one axis: the weight gradient of a product with two
leading axes is several times slower on a CPU.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.types import PyTree

Cache = tuple[tuple[jax.Array, jax.Array], ...]
"""Keys and values `[B, K, S, C]` of each layer.

The order of axes is that of the products, so that a decoding step needs no transpose; layers are
separate arrays, so that it updates them in place.
"""

LOGICAL_AXES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("params", "embedding"): ("vocab", "embed"),
    ("query", "kernel"): ("embed", "heads"),
    ("key", "kernel"): ("embed", "kv_heads"),
    ("value", "kernel"): ("embed", "kv_heads"),
    ("out", "kernel"): ("heads", "embed"),
    ("up", "kernel"): ("embed", "mlp"),
    ("gate", "kernel"): ("embed", "mlp"),
    ("down", "kernel"): ("mlp", "embed"),
    ("output", "kernel"): ("embed", "vocab"),
}
"""Logical axes of a parameter by the last two names of its path; norm scales are replicated."""


class Transformer(nn.Module):
    """Decoder-only transformer; `outputs` is the vocabulary for a policy and 1 for a critic.

    Attributes:
      vocabulary: size of the input embedding, V.
      outputs: size of the output; 0 takes the vocabulary.
      width: D.
      layers: number of blocks.
      heads: H query heads; width / heads is the head size C, an even number.
      kv_heads: K key/value heads, a divisor of H; 0 takes H.
      mlp_width: F; 0 takes 4·D.
      gated: SwiGLU, else GELU.
      tied: the output reuses the embedding.
      dtype: of the matrix products: float32, bfloat16, or float64 where JAX has it on.
      remat: recompute the activations inside blocks in the backward pass: less memory, more time.
        On a CPU XLA's default schedule undoes most of the saving; without
        `concurrency_optimized_scheduler` it does not.
      constrain: sharding constraint on the activations `[M, D]` between blocks; the default has
        none.
    """

    vocabulary: int
    outputs: int = 0
    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 0
    mlp_width: int = 0
    gated: bool = True
    tied: bool = False
    dtype: jnp.dtype = jnp.dtype("float32")
    remat: bool = False
    constrain: Callable[[jax.Array], jax.Array] = lambda x_MxD: x_MxD

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        pad: jax.Array,
        cache: Cache | None = None,
        start: jax.Array | int = 0,
        *,
        last: int = 0,
    ) -> tuple[jax.Array, Cache | None]:
        """Logits after each new token.

        Args:
          tokens: `[B, N]`, int32, left-padded. Positions are relative, so that padding does not
            change the outputs.
          pad: `[B]`, int32, padding tokens on the left.
          cache: keys and values of earlier columns, to be extended; None attends to the new tokens
            only.
          start: column of the first new token, 0 without a cache.
          last: number of last tokens to compute outputs for; 0 for all. For the others the last
            block computes keys and values only.

        Returns:
          Outputs `[B, N or last, V]` in float32 at least, and the extended cache (None without
          one).
        """
        chex.assert_rank([tokens, pad], [2, 1])
        batch, new = tokens.shape
        embedding_VxD = self.param(
            "embedding", nn.initializers.normal(1.0), (self.vocabulary, self.width)
        )
        # One-hot times embedding: the gradient of a lookup is a scatter, which is slow on a CPU.
        x_MxD = jax.nn.one_hot(
            tokens.reshape(-1), self.vocabulary, dtype=self.dtype
        ) @ embedding_VxD.astype(self.dtype)
        x_MxD = self.constrain(x_MxD)
        columns_N = start + jnp.arange(new)
        total = new if cache is None else cache[0][0].shape[2]
        keys_S = jnp.arange(total)
        mask_BxNxS = (keys_S[None, None, :] <= columns_N[None, :, None]) & (
            keys_S[None, None, :] >= pad[:, None, None]
        )
        # A constant of the program: fused into it, sines would be recomputed for every element that
        # they rotate.
        turns_Nxh = [
            jax.lax.dynamic_slice_in_dim(table, start, new)
            for table in turns(total, self.width // self.heads)
        ]

        attention, mlp = (nn.remat(Attention), nn.remat(Mlp)) if self.remat else (Attention, Mlp)
        layer_caches: list[Any] = []
        for layer in range(self.layers):
            read = new if layer < self.layers - 1 else last or new
            layer_cache = None if cache is None else cache[layer]
            attend = attention(
                self.heads, self.kv_heads or self.heads, self.dtype, name=f"attention_{layer}"
            )
            feed_forward = mlp(
                self.mlp_width or 4 * self.width, self.gated, self.dtype, name=f"mlp_{layer}"
            )
            h_MxD = nn.RMSNorm(dtype=self.dtype, name=f"attention_norm_{layer}")(x_MxD)
            h_MxD, layer_cache = attend(
                h_MxD, turns_Nxh, mask_BxNxS[:, new - read :], layer_cache, start
            )
            x_MxD = self.constrain(_last(x_MxD, batch, read) + h_MxD)
            x_MxD = self.constrain(
                x_MxD + feed_forward(nn.RMSNorm(dtype=self.dtype, name=f"mlp_norm_{layer}")(x_MxD))
            )
            layer_caches.append(layer_cache)

        x_MxD = nn.RMSNorm(dtype=_wide(self.dtype), name="final_norm")(
            _last(x_MxD, batch, last or new)
        )
        outputs = self.outputs or self.vocabulary
        if self.tied and outputs == self.vocabulary:
            logits_MxV = x_MxD @ embedding_VxD.T / math.sqrt(self.width)
        else:
            logits_MxV = nn.Dense(
                outputs, use_bias=False, kernel_init=_scaled(0.1, self.width), name="output"
            )(x_MxD)
        return logits_MxV.reshape(batch, -1, outputs), None if cache is None else tuple(
            layer_caches
        )

    def parameter_shapes(self) -> PyTree:
        """Shape and type of each parameter; nothing is computed."""
        return jax.eval_shape(
            self.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
        )

    def empty_cache(self, batch: int, length: int) -> Cache:
        """A cache for `batch` rows of `length` columns."""
        zeros = jnp.zeros(
            (batch, self.kv_heads or self.heads, length, self.width // self.heads), self.dtype
        )
        return ((zeros, zeros),) * self.layers


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries."""

    heads: int
    kv_heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        x_MxD: jax.Array,
        turns_Nxh: Sequence[jax.Array],
        mask_BxRxS: jax.Array,
        cache: tuple[jax.Array, jax.Array] | None,
        start: jax.Array | int,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Attends from the last R new tokens to cached and new ones; caches all new ones."""
        (batch, read, _), width, new = mask_BxRxS.shape, x_MxD.shape[-1], turns_Nxh[0].shape[0]
        heads, kv_heads, size = self.heads, self.kv_heads, width // self.heads
        q_MxHC = _dense(self.dtype, heads * size, "query")(_last(x_MxD, batch, read))
        k_MxKC = _dense(self.dtype, kv_heads * size, "key")(x_MxD)
        v_MxKC = _dense(self.dtype, kv_heads * size, "value")(x_MxD)
        q_BxRxHxC = rotate(
            q_MxHC.reshape(batch, read, heads, size), *(turn[new - read :] for turn in turns_Nxh)
        )
        k_BxKxSxC = rotate(k_MxKC.reshape(batch, new, kv_heads, size), *turns_Nxh).transpose(
            0, 2, 1, 3
        )
        v_BxKxSxC = v_MxKC.reshape(batch, new, kv_heads, size).transpose(0, 2, 1, 3)
        if cache is not None:
            k_BxKxSxC = jax.lax.dynamic_update_slice_in_dim(cache[0], k_BxKxSxC, start, axis=2)
            v_BxKxSxC = jax.lax.dynamic_update_slice_in_dim(cache[1], v_BxKxSxC, start, axis=2)
            cache = (k_BxKxSxC, v_BxKxSxC)
        q_BxRxKxGxC = q_BxRxHxC.reshape(batch, read, kv_heads, heads // kv_heads, size)
        scores_BxKxGxRxS = jnp.einsum("brkgc,bksc->bkgrs", q_BxRxKxGxC, k_BxKxSxC).astype(
            _wide(self.dtype)
        ) / math.sqrt(size)
        # Finite: a padding row is masked throughout and would give NaN with −∞.
        scores_BxKxGxRxS = jnp.where(mask_BxRxS[:, None, None], scores_BxKxGxRxS, -1e30)
        weights_BxKxGxRxS = jax.nn.softmax(scores_BxKxGxRxS).astype(self.dtype)
        out_BxRxKxGxC = jnp.einsum("bkgrs,bksc->brkgc", weights_BxKxGxRxS, v_BxKxSxC)
        return _dense(self.dtype, width, "out")(out_BxRxKxGxC.reshape(batch * read, width)), cache


class Mlp(nn.Module):
    """SwiGLU or GELU of width `hidden`."""

    hidden: int
    gated: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_MxD: jax.Array) -> jax.Array:
        """Maps `[M, D]` to itself through width F."""
        up_MxF = _dense(self.dtype, self.hidden, "up")(x_MxD)
        h_MxF = (
            nn.silu(_dense(self.dtype, self.hidden, "gate")(x_MxD)) * up_MxF
            if self.gated
            else nn.gelu(up_MxF)
        )
        return _dense(self.dtype, x_MxD.shape[-1], "down")(h_MxF)


def turns(positions: int, size: int, *, base: float = 10_000.0) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of `position · base^(−2i/C)`, `[positions, C/2]` each, for head size C."""
    half = size // 2
    angle_Nxh = np.arange(positions)[:, None] * base ** (-np.arange(half) / half)
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


def _last(x_MxD: jax.Array, batch: int, count: int) -> jax.Array:
    """The last `count` positions of each row: `[B·N, D]` to `[B·count, D]`."""
    x_BxNxD = x_MxD.reshape(batch, -1, x_MxD.shape[-1])
    return x_BxNxD[:, x_BxNxD.shape[1] - count :].reshape(batch * count, x_MxD.shape[-1])


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of softmax, final normalisation and outputs: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)


def _scaled(scale: float, fan_in: int) -> nn.initializers.Initializer:
    return nn.initializers.normal(scale / math.sqrt(fan_in))


def _dense(dtype: jnp.dtype, outputs: int, name: str) -> nn.Dense:
    return nn.Dense(
        outputs, use_bias=False, dtype=dtype, kernel_init=nn.initializers.lecun_normal(), name=name
    )
