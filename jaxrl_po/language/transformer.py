"""A small decoder-only transformer: RMSNorm, rotary positions, gated MLP, grouped queries, and a static-shape cache.

Shapes in suffixes: B rows, N new positions, M = B·N, S positions in all, D width, H query heads, K key/value heads, G = H / K,
C head size, F MLP width, V vocabulary. `dtype` is that of the matrix products; parameters are float32, softmax and outputs float32
at least. Rows and positions are one axis outside attention: the weight gradient of a product with two leading axes is several times
slower on a CPU.
"""

import math
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

Cache = tuple[tuple[jax.Array, jax.Array], ...]
"""Keys and values `[B, S, K, C]` of each layer. Layers stay apart, so that a step writes in place and copies nothing."""

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
"""The last two names of a parameter's path to what its dimensions are; the scales of norms are small and stay whole."""


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
      remat: the backward pass computes the inside of each block again, in place of keeping it: less memory, more time.
        On a CPU XLA's default schedule gives most of that memory back; without `concurrency_optimized_scheduler` it does not.
      constrain: says where the activations `[M, D]` between blocks lie on devices; the default leaves it open.
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
        self, tokens: jax.Array, pad: jax.Array, cache: Cache | None = None, start: jax.Array | int = 0, *, last: int = 0
    ) -> tuple[jax.Array, Cache | None]:
        """Logits after each new token.

        Args:
          tokens: `[B, N]`, int32, left-padded: column c stands at position c − pad.
          pad: `[B]`, int32, padding tokens on the left.
          cache: keys and values of earlier columns, to be extended; None attends among the new tokens alone.
          start: column of the first new token, 0 without a cache.
          last: outputs for the last so many tokens only; 0 for all.

        Returns:
          Outputs `[B, N or last, V]` in float32 at least, and the extended cache (None without one).
        """
        chex.assert_rank([tokens, pad], [2, 1])
        batch, new = tokens.shape
        embedding_VxD = self.param("embedding", nn.initializers.normal(1.0), (self.vocabulary, self.width))
        # A product with one-hot rows, because the gradient of an indexed read is a scatter, which is slow on a CPU.
        x_MxD = jax.nn.one_hot(tokens.reshape(-1), self.vocabulary, dtype=self.dtype) @ embedding_VxD.astype(self.dtype)
        x_MxD = self.constrain(x_MxD)
        columns_N = start + jnp.arange(new)
        total = new if cache is None else cache[0][0].shape[1]
        keys_S = jnp.arange(total)
        mask_BxNxS = (keys_S[None, None, :] <= columns_N[None, :, None]) & (keys_S[None, None, :] >= pad[:, None, None])
        position_BxN = jnp.maximum(columns_N[None, :] - pad[:, None], 0)

        attention, mlp = (nn.remat(Attention), nn.remat(Mlp)) if self.remat else (Attention, Mlp)
        layer_caches: list[Any] = []
        for layer in range(self.layers):
            layer_cache = None if cache is None else cache[layer]
            attend = attention(self.heads, self.kv_heads or self.heads, self.dtype, name=f"attention_{layer}")
            feed_forward = mlp(self.mlp_width or 4 * self.width, self.gated, self.dtype, name=f"mlp_{layer}")
            h_MxD = nn.RMSNorm(dtype=self.dtype, name=f"attention_norm_{layer}")(x_MxD)
            h_MxD, layer_cache = attend(h_MxD, position_BxN, mask_BxNxS, layer_cache, start)
            x_MxD = self.constrain(x_MxD + h_MxD)
            x_MxD = self.constrain(x_MxD + feed_forward(nn.RMSNorm(dtype=self.dtype, name=f"mlp_norm_{layer}")(x_MxD)))
            layer_caches.append(layer_cache)

        kept = last or new
        x_MxD = x_MxD.reshape(batch, new, self.width)[:, new - kept :].reshape(batch * kept, self.width)
        x_MxD = nn.RMSNorm(dtype=_wide(self.dtype), name="final_norm")(x_MxD)
        outputs = self.outputs or self.vocabulary
        if self.tied and outputs == self.vocabulary:
            logits_MxV = x_MxD @ embedding_VxD.T / math.sqrt(self.width)
        else:
            logits_MxV = nn.Dense(outputs, use_bias=False, kernel_init=_scaled(0.1, self.width), name="output")(x_MxD)
        return logits_MxV.reshape(batch, kept, outputs), None if cache is None else tuple(layer_caches)

    def empty_cache(self, batch: int, length: int) -> Cache:
        """A cache for `batch` rows of `length` columns."""
        zeros = jnp.zeros((batch, length, self.kv_heads or self.heads, self.width // self.heads), self.dtype)
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
        position_BxN: jax.Array,
        mask_BxNxS: jax.Array,
        cache: tuple[jax.Array, jax.Array] | None,
        start: jax.Array | int,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Attends from the new tokens to the cached and the new; extends the cache."""
        (batch, new), width = position_BxN.shape, x_MxD.shape[-1]
        heads, kv_heads, size = self.heads, self.kv_heads, width // self.heads
        q_MxHC = _dense(self.dtype, heads * size, "query")(x_MxD)
        k_MxKC = _dense(self.dtype, kv_heads * size, "key")(x_MxD)
        v_MxKC = _dense(self.dtype, kv_heads * size, "value")(x_MxD)
        q_BxNxHxC = rotate(q_MxHC.reshape(batch, new, heads, size), position_BxN)
        k_BxSxKxC = rotate(k_MxKC.reshape(batch, new, kv_heads, size), position_BxN)
        v_BxSxKxC = v_MxKC.reshape(batch, new, kv_heads, size)
        if cache is not None:
            k_BxSxKxC = jax.lax.dynamic_update_slice_in_dim(cache[0], k_BxSxKxC, start, axis=1)
            v_BxSxKxC = jax.lax.dynamic_update_slice_in_dim(cache[1], v_BxSxKxC, start, axis=1)
            cache = (k_BxSxKxC, v_BxSxKxC)
        q_BxNxKxGxC = q_BxNxHxC.reshape(batch, new, kv_heads, heads // kv_heads, size)
        scores_BxKxGxNxS = jnp.einsum("bnkgc,bskc->bkgns", q_BxNxKxGxC, k_BxSxKxC).astype(_wide(self.dtype)) / math.sqrt(size)
        scores_BxKxGxNxS = jnp.where(mask_BxNxS[:, None, None], scores_BxKxGxNxS, -1e30)
        weights_BxKxGxNxS = jax.nn.softmax(scores_BxKxGxNxS).astype(self.dtype)
        out_BxNxKxGxC = jnp.einsum("bkgns,bskc->bnkgc", weights_BxKxGxNxS, v_BxSxKxC)
        return _dense(self.dtype, width, "out")(out_BxNxKxGxC.reshape(batch * new, width)), cache


class Mlp(nn.Module):
    """SwiGLU or GELU of width `hidden`."""

    hidden: int
    gated: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_MxD: jax.Array) -> jax.Array:
        """Maps `[M, D]` to itself through width F."""
        up_MxF = _dense(self.dtype, self.hidden, "up")(x_MxD)
        h_MxF = nn.silu(_dense(self.dtype, self.hidden, "gate")(x_MxD)) * up_MxF if self.gated else nn.gelu(up_MxF)
        return _dense(self.dtype, x_MxD.shape[-1], "down")(h_MxF)


def rotate(x_BxNxHxC: jax.Array, position_BxN: jax.Array, *, base: float = 10_000.0) -> jax.Array:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864, eq. 34): halves of C turn by `position · base^(−2i/C)`."""
    half = x_BxNxHxC.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BxNx1xh = position_BxN[:, :, None, None].astype(jnp.float32) * frequency[None, None, None, :]
    cos, sin = jnp.cos(angle_BxNx1xh).astype(x_BxNxHxC.dtype), jnp.sin(angle_BxNx1xh).astype(x_BxNxHxC.dtype)
    a, b = x_BxNxHxC[..., :half], x_BxNxHxC[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    """Of softmax, normalisation and outputs: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)


def _scaled(scale: float, fan_in: int) -> nn.initializers.Initializer:
    return nn.initializers.normal(scale / math.sqrt(fan_in))


def _dense(dtype: jnp.dtype, outputs: int, name: str) -> nn.Dense:
    return nn.Dense(outputs, use_bias=False, dtype=dtype, kernel_init=nn.initializers.lecun_normal(), name=name)
