"""Blocks of a transformer: attention and MLP, each added to the residual stream.

The module `transformer` explains shape suffixes and `dtype`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_po.language import kernels
from jaxrl_po.language.attention import AttentionMask, attend
from jaxrl_po.language.lora import ADAPTERS, Lora
from jaxrl_po.language.rope import rotate


class Block(nn.Module):
    """Transformer block of attention, then an MLP, each added to the residual stream.

    Attributes:
      attention: `(name=…) -> Attention`, builds the attention module.
      mlp: `(name=…) -> Mlp`, builds the MLP.
      norm: `(name=…) -> RMSNorm`, builds a norm.
      post_norms: True if attention and MLP also pass a norm before they are added, see
        `Transformer`.
      constrain: sharding constraint on the activations `[M, D]`, see `Transformer`.
    """

    attention: Callable[..., "Attention"]
    mlp: Callable[..., "Mlp"]
    norm: Callable[..., nn.RMSNorm]
    post_norms: bool
    constrain: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(
        self, x_MxD: jax.Array, turns_Nxh: Sequence[jax.Array], sight: AttentionMask, *cached: Any
    ) -> tuple[jax.Array, Any]:
        """Returns the last R new positions, `[B·R, D]`, and the extended cache.

        `cached` are the arguments of `Attention` from `cache` on.
        """
        h_MxD, cache = self.attention(name="attention")(
            self.norm(name="attention_norm")(x_MxD), turns_Nxh, sight, *cached
        )
        if self.post_norms:
            h_MxD = self.norm(name="attention_post_norm")(h_MxD)
        if h_MxD.shape != x_MxD.shape:
            x_MxD = last_of(x_MxD, *sight.mask_BxRxS.shape[:2])
        x_MxD = self.constrain(x_MxD + h_MxD)
        h_MxD = self.mlp(name="mlp")(self.norm(name="mlp_norm")(x_MxD))
        if self.post_norms:
            h_MxD = self.norm(name="mlp_post_norm")(h_MxD)
        return self.constrain(x_MxD + h_MxD), cache


class UnstackedBlocks(nn.Module):
    """Separately named modules of all blocks; the names determine their initial parameters.

    Attributes:
      attention: `(name=…) -> Attention`, builds an attention module.
      mlp: `(name=…) -> Mlp`, builds an MLP.
      layers: number L of blocks.
    """

    attention: Callable[..., "Attention"]
    mlp: Callable[..., "Mlp"]
    layers: int

    @nn.compact
    def __call__(
        self, x_MxD: jax.Array, turns_Nxh: Sequence[jax.Array], sight: AttentionMask
    ) -> None:
        """Calls each module once, which draws its parameters."""
        for number in range(self.layers):
            self.attention(name=f"attention_{number}")(x_MxD, turns_Nxh, sight)
            self.mlp(name=f"mlp_{number}")(x_MxD)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries.

    Attributes:
      heads: number H of query heads.
      kv_heads: number K of key/value heads.
      size: size C of a head.
      dtype: type of the matrix products.
      bias: True if queries, keys and values have biases.
      norm_epsilon: epsilon of the RMSNorm over each head's queries and keys; None disables the
        norm.
      scale: scale of the attention scores.
      lora: low-rank adapters, see `Transformer`; None to disable adapters.
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
        sight: AttentionMask,
        cache: tuple[jax.Array, jax.Array] | None = None,
        start: jax.Array | int = 0,
        number: jax.Array | None = None,
        shared: int = 0,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Attends from the last R new tokens to cached and new tokens; caches all new tokens.

        If the cache contains all blocks, `number` is the index of this block.

        With `shared` > 0 the rows of a group have their first `shared` columns in common. The
        positions are then each group's shared columns, followed by each row's other columns.
        """
        (batch, read, _), width = sight.mask_BxRxS.shape, x_MxD.shape[-1]
        asking_MxD = x_MxD if shared else last_of(x_MxD, batch, read)
        q_MxHxC = self._normed(self._project(self.heads, "query")(asking_MxD), "query_norm")
        k_MxKxC = self._normed(self._project(self.kv_heads, "key")(x_MxD), "key_norm")
        v_MxKxC = self._project(self.kv_heads, "value")(x_MxD)
        v_MxKxC = v_MxKxC.reshape(-1, self.kv_heads, self.size)

        def attended(
            part: slice, columns: slice, sight: AttentionMask, join: "Join"
        ) -> tuple[Any, Any]:
            turned = [turn[columns] for turn in turns_Nxh]
            return self._attend(q_MxHxC[part], k_MxKxC[part], v_MxKxC[part], turned, sight, join)

        if shared:
            own = batch * (read - shared)
            groups = (x_MxD.shape[0] - own) // shared
            before_MxHC, read_before = attended(
                slice(groups * shared),
                slice(shared),
                sight._replace(
                    mask_BxRxS=sight.mask_BxRxS[:: batch // groups, :shared, :shared],
                    pad_B=sight.pad_B[:: batch // groups],
                ),
                lambda new: (new, new),
            )
            after_MxHC, _ = attended(
                slice(groups * shared, None),
                slice(shared, None),
                sight._replace(mask_BxRxS=sight.mask_BxRxS[:, shared:]),
                lambda new: (_behind(read_before, new), None),
            )
            out_MxHC = jnp.concatenate([before_MxHC, after_MxHC])
        else:
            joined = functools.partial(_cached, cache, start, number)
            out_MxHC, cache = attended(slice(None), slice(None), sight, joined)
        return Linear(width, self.dtype, self.lora, name="out")(out_MxHC), cache

    def _attend(
        self,
        q_MxHxC: jax.Array,
        k_MxKxC: jax.Array,
        v_MxKxC: jax.Array,
        turns_Nxh: Sequence[jax.Array],
        sight: AttentionMask,
        join: "Join",
    ) -> tuple[jax.Array, Any]:
        """Attends from each row's last R of N positions to the keys and values from `join`."""
        (batch, read, _), new = sight.mask_BxRxS.shape, turns_Nxh[0].shape[0]
        heads, kv_heads, size = self.heads, self.kv_heads, self.size
        q_BxRxHxC = q_MxHxC.reshape(batch, read, heads, size)
        q_BxRxHxC = rotate(q_BxRxHxC, *(turn[new - read :] for turn in turns_Nxh))
        k_BxNxKxC, v_BxNxKxC = (
            x_MxKxC.reshape(batch, new, kv_heads, size) for x_MxKxC in (k_MxKxC, v_MxKxC)
        )
        k_BxNxKxC = rotate(k_BxNxKxC, *turns_Nxh)
        pair, kept = join((k_BxNxKxC.swapaxes(1, 2), v_BxNxKxC.swapaxes(1, 2)))
        out_BxRxHxC = attend((q_BxRxHxC, *pair), sight, self.scale)
        return out_BxRxHxC.reshape(batch * read, heads * size), kept

    def _project(self, heads: int, name: str) -> "Linear":
        return Linear(heads * self.size, self.dtype, self.lora, self.bias, name=name)

    def _normed(self, x_MxHC: jax.Array, name: str) -> jax.Array:
        """Splits the last axis into heads, `[M, H, C]`.

        Normalises each head if the norm is enabled.
        """
        x_MxHxC = x_MxHC.reshape(x_MxHC.shape[0], -1, self.size)
        if self.norm_epsilon is None:
            return x_MxHxC
        normed: jax.Array = nn.RMSNorm(self.norm_epsilon, dtype=self.dtype, name=name)(x_MxHxC)
        return normed


class Mlp(nn.Module):
    """MLP with one hidden layer of width `hidden`, gated or not."""

    hidden: int
    gated: bool
    activation: Callable[[jax.Array], jax.Array]
    dtype: jnp.dtype
    lora: Lora | None

    @nn.compact
    def __call__(self, x_MxD: jax.Array) -> jax.Array:
        """Maps `[M, D]` to `[M, D]` through a hidden layer of width F."""
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
    """Dense layer with an optional bias and an optional low-rank adapter."""

    outputs: int
    dtype: jnp.dtype
    lora: Lora | None = None
    bias: bool = False

    @nn.compact
    def __call__(self, x_MxI: jax.Array) -> jax.Array:
        """Maps `[M, inputs]` to `[M, outputs]`."""
        x_MxI, inputs = x_MxI.astype(self.dtype), x_MxI.shape[-1]
        if self.has_variable(kernels.BY_OUTPUTS, "kernel"):
            y_MxO = kernels.left_product(x_MxI, self.get_variable(kernels.BY_OUTPUTS, "kernel"))
        else:
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


Pair = tuple[jax.Array, jax.Array]
Join = Callable[[Pair], tuple[Pair, Any]]
"""`(keys and values of new columns [B, K, N, C]) -> (keys and values to attend to, cache)`."""


def _cached(
    cache: Pair | None, start: jax.Array | int, number: jax.Array | None, new: Pair
) -> tuple[Pair, Pair | None]:
    """Joins new columns to earlier columns; returns them and the extended cache, see `Join`."""
    if cache is None:
        return new, None
    (keys, k_BxKxSxC), (values, v_BxKxSxC) = (
        _extend(held, columns, start, number) for held, columns in zip(cache, new, strict=True)
    )
    return (k_BxKxSxC, v_BxKxSxC), (keys, values)


def _behind(shared: Pair, new: Pair) -> Pair:
    """Joins the shared columns, repeated for a group's members, to each member's own columns."""
    keys, values = (
        jnp.concatenate([jnp.repeat(of_group, own.shape[0] // of_group.shape[0], axis=0), own], 2)
        for of_group, own in zip(shared, new, strict=True)
    )
    return keys, values


def _extend(
    held: jax.Array, new_BxKxNxC: jax.Array, start: jax.Array | int, number: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Writes new columns into the cache from `start`.

    Returns the cache and this block's part of it.
    """
    if number is None:
        held = jax.lax.dynamic_update_slice_in_dim(held, new_BxKxNxC, start, axis=2)
        return held, held
    new_Bx1xKxNxC = new_BxKxNxC[:, None]
    # All indices need one type: in double precision, Python integers would become int64.
    at = [jnp.int32(i) for i in (0, number, 0, start, 0)]
    held = jax.lax.dynamic_update_slice(held, new_Bx1xKxNxC, at)
    return held, jax.lax.dynamic_index_in_dim(held, number, axis=1, keepdims=False)


def last_of(x_MxD: jax.Array, batch: int, count: int) -> jax.Array:
    """Selects the last `count` positions of each row: `[B·N, D]` to `[B·count, D]`."""
    x_BxNxD = x_MxD.reshape(batch, -1, x_MxD.shape[-1])
    return x_BxNxD[:, x_BxNxD.shape[1] - count :].reshape(batch * count, x_MxD.shape[-1])


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of softmax, final normalisation and outputs: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)


def scaled(scale: float, fan_in: int) -> nn.initializers.Initializer:
    """Returns a normal initializer with the std `scale / √fan_in`."""
    return nn.initializers.normal(scale / math.sqrt(fan_in))
