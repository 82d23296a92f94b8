"""The blocks of a transformer: attention and MLP, each added to the stream.

Shape suffixes and `dtype` as in `transformer`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_po.language.lora import ADAPTERS, Lora
from jaxrl_po.language.rope import rotate


class Block(nn.Module):
    """Attention, then an MLP, each added to the stream.

    Attributes:
      attention: makes an `Attention`, given its name.
      mlp: makes an `Mlp`.
      norm: makes a norm.
      post_norms: see `Transformer`.
      constrain: see `Transformer`.
    """

    attention: Callable[..., "Attention"]
    mlp: Callable[..., "Mlp"]
    norm: Callable[..., nn.RMSNorm]
    post_norms: bool
    constrain: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(
        self, x_MxD: jax.Array, turns_Nxh: Sequence[jax.Array], mask_BxRxS: jax.Array, *cached: Any
    ) -> tuple[jax.Array, Any]:
        """The last R new positions, `[B·R, D]`, and the extended cache; `cached` as `Attention`."""
        batch, read, _ = mask_BxRxS.shape
        h_MxD, cache = self.attention(name="attention")(
            self.norm(name="attention_norm")(x_MxD), turns_Nxh, mask_BxRxS, *cached
        )
        if self.post_norms:
            h_MxD = self.norm(name="attention_post_norm")(h_MxD)
        x_MxD = self.constrain(last_of(x_MxD, batch, read) + h_MxD)
        h_MxD = self.mlp(name="mlp")(self.norm(name="mlp_norm")(x_MxD))
        if self.post_norms:
            h_MxD = self.norm(name="mlp_post_norm")(h_MxD)
        return self.constrain(x_MxD + h_MxD), cache


class Apart(nn.Module):
    """The modules of all blocks by names of their own, which their initial parameters follow.

    Attributes:
      attention: see `Block`.
      mlp: see `Block`.
      layers: L.
    """

    attention: Callable[..., "Attention"]
    mlp: Callable[..., "Mlp"]
    layers: int

    @nn.compact
    def __call__(
        self, x_MxD: jax.Array, turns_Nxh: Sequence[jax.Array], mask_BxRxS: jax.Array
    ) -> None:
        """Calls each once."""
        for number in range(self.layers):
            self.attention(name=f"attention_{number}")(x_MxD, turns_Nxh, mask_BxRxS)
            self.mlp(name=f"mlp_{number}")(x_MxD)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries.

    Attributes:
      heads: H.
      kv_heads: K.
      size: C.
      dtype: of the matrix products.
      bias: on queries, keys and values.
      norm_epsilon: of RMSNorm over each head's queries and keys; None for no such norm.
      scale: of the scores.
      lora: see `Transformer`.
    """

    heads: int
    kv_heads: int
    size: int
    dtype: jnp.dtype
    bias: bool
    norm_epsilon: float | None
    scale: float
    lora: Lora | None

    @nn.compact
    def __call__(
        self,
        x_MxD: jax.Array,
        turns_Nxh: Sequence[jax.Array],
        mask_BxRxS: jax.Array,
        cache: tuple[jax.Array, jax.Array] | None = None,
        start: jax.Array | int = 0,
        number: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Attends from the last R new tokens to cached and new ones; caches all new ones.

        Where a cache holds all blocks, `number` is that of this one.
        """
        (batch, read, _), width, new = mask_BxRxS.shape, x_MxD.shape[-1], turns_Nxh[0].shape[0]
        heads, kv_heads, size = self.heads, self.kv_heads, self.size
        q_MxHC = self._project(heads, "query")(last_of(x_MxD, batch, read))
        k_MxKC, v_MxKC = (self._project(kv_heads, name)(x_MxD) for name in ("key", "value"))
        q_BxRxHxC = self._normed(q_MxHC.reshape(batch, read, heads, size), "query_norm")
        k_BxNxKxC = self._normed(k_MxKC.reshape(batch, new, kv_heads, size), "key_norm")
        q_BxRxHxC = rotate(q_BxRxHxC, *(turn[new - read :] for turn in turns_Nxh))
        k_BxKxSxC = rotate(k_BxNxKxC, *turns_Nxh).transpose(0, 2, 1, 3)
        v_BxKxSxC = v_MxKC.reshape(batch, new, kv_heads, size).transpose(0, 2, 1, 3)
        if cache is not None:
            (keys, k_BxKxSxC), (values, v_BxKxSxC) = (
                _extend(held, new, start, number)
                for held, new in zip(cache, (k_BxKxSxC, v_BxKxSxC), strict=True)
            )
            cache = keys, values
        q_BxRxKxGxC = q_BxRxHxC.reshape(batch, read, kv_heads, heads // kv_heads, size)
        scores_BxKxGxRxS = self.scale * jnp.einsum(
            "brkgc,bksc->bkgrs", q_BxRxKxGxC, k_BxKxSxC
        ).astype(wide(self.dtype))
        # Finite: a padding row is masked throughout and would give NaN with −∞.
        scores_BxKxGxRxS = jnp.where(mask_BxRxS[:, None, None], scores_BxKxGxRxS, -1e30)
        weights_BxKxGxRxS = jax.nn.softmax(scores_BxKxGxRxS).astype(self.dtype)
        out_BxRxKxGxC = jnp.einsum("bkgrs,bksc->brkgc", weights_BxKxGxRxS, v_BxKxSxC)
        out_MxHC = out_BxRxKxGxC.reshape(batch * read, heads * size)
        return Linear(width, self.dtype, self.lora, name="out")(out_MxHC), cache

    def _project(self, heads: int, name: str) -> "Linear":
        return Linear(heads * self.size, self.dtype, self.lora, self.bias, name=name)

    def _normed(self, x_BxNxHxC: jax.Array, name: str) -> jax.Array:
        if self.norm_epsilon is None:
            return x_BxNxHxC
        normed: jax.Array = nn.RMSNorm(self.norm_epsilon, dtype=self.dtype, name=name)(x_BxNxHxC)
        return normed


class Mlp(nn.Module):
    """A hidden layer of width `hidden`, gated or not."""

    hidden: int
    gated: bool
    activation: Callable[[jax.Array], jax.Array]
    dtype: jnp.dtype
    lora: Lora | None

    @nn.compact
    def __call__(self, x_MxD: jax.Array) -> jax.Array:
        """Maps `[M, D]` to itself through width F."""
        up_MxF = self._linear(self.hidden, "up")(x_MxD)
        h_MxF = (
            self.activation(self._linear(self.hidden, "gate")(x_MxD)) * up_MxF
            if self.gated
            else self.activation(up_MxF)
        )
        return self._linear(x_MxD.shape[-1], "down")(h_MxF)

    def _linear(self, outputs: int, name: str) -> "Linear":
        return Linear(outputs, self.dtype, self.lora, name=name)


class Linear(nn.Module):
    """A matrix, with a bias and a low-rank adapter where asked for."""

    outputs: int
    dtype: jnp.dtype
    lora: Lora | None = None
    bias: bool = False

    @nn.compact
    def __call__(self, x_MxI: jax.Array) -> jax.Array:
        """Maps `[M, inputs]` to `[M, outputs]`."""
        x_MxI, inputs = x_MxI.astype(self.dtype), x_MxI.shape[-1]
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (inputs, self.outputs))
        y_MxO = x_MxI @ kernel.astype(self.dtype)
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, (self.outputs,))
            y_MxO += bias.astype(self.dtype)[None]
        if self.lora is None or self.name not in self.lora.targets:
            return y_MxO
        rank = self.lora.rank
        a_IxR = self.variable(
            ADAPTERS,
            "a",
            lambda: scaled(1.0, inputs)(self.make_rng("params"), (inputs, rank), jnp.float32),
        ).value
        b_RxO = self.variable(ADAPTERS, "b", jnp.zeros, (rank, self.outputs), jnp.float32).value
        change_MxO = (x_MxI @ a_IxR.astype(self.dtype)) @ b_RxO.astype(self.dtype)
        return y_MxO + self.lora.scale * change_MxO


def _extend(
    held: jax.Array, new_BxKxNxC: jax.Array, start: jax.Array | int, number: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """What is held with the new columns from `start` on; and of one block, `[B, K, S, C]`."""
    if number is None:
        held = jax.lax.dynamic_update_slice_in_dim(held, new_BxKxNxC, start, axis=2)
        return held, held
    new_Bx1xKxNxC = new_BxKxNxC[:, None]
    held = jax.lax.dynamic_update_slice(held, new_Bx1xKxNxC, (0, number, 0, start, 0))
    return held, jax.lax.dynamic_index_in_dim(held, number, axis=1, keepdims=False)


def last_of(x_MxD: jax.Array, batch: int, count: int) -> jax.Array:
    """The last `count` positions of each row: `[B·N, D]` to `[B·count, D]`."""
    x_BxNxD = x_MxD.reshape(batch, -1, x_MxD.shape[-1])
    return x_BxNxD[:, x_BxNxD.shape[1] - count :].reshape(batch * count, x_MxD.shape[-1])


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of softmax, final normalisation and outputs: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)


def scaled(scale: float, fan_in: int) -> nn.initializers.Initializer:
    """Normal, with the std `scale / √fan_in`."""
    return nn.initializers.normal(scale / math.sqrt(fan_in))
