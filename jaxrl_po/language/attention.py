"""Attention of the last positions of each row to its columns: by two products, or in one kernel.

A fused kernel stores blocks of the scores, with their running maximum and sum, and never all `[B,
H, R, S]`; the kernel's backward pass recomputes the blocks (Dao et al. 2022, arXiv:2205.14135).

The module `transformer` explains the shape suffixes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.backend import Target

Qkv = tuple[jax.Array, jax.Array, jax.Array]
"""Queries `[B, R, H, C]`, keys and values `[B, K, S, C]`."""

Kernel = Callable[..., jax.Array]
"""`kernel(qkv, pad_B, window=0, scale=1.0) -> [B, R, H, C]`, computes attention."""

BLOCKS = (512, 256, 128)
"""Block sizes of splash attention, in columns; the largest size that divides the row is used. The
kernel reads 128 columns at once."""

LARGEST = 128
"""Largest head size that cuDNN supports on every GPU; head sizes are multiples of 8."""


class AttentionMask(NamedTuple):
    """Columns, among the S of a row, that the row's last R positions attend to.

    Attributes:
      mask_BxRxS: True for columns attended to, bool; determined by the other fields.
      pad_B: number of padding columns on the left, int32; no position attends to padding.
      window: number of positions that each position attends to, its own included; 0 for all
        positions up to its own.
      windows: possible values of `window`, ascending.
      kernel: fused kernel, which does not use the mask; None for attention by two products.
    """

    mask_BxRxS: jax.Array
    pad_B: jax.Array
    window: Any = 0
    windows: tuple[int, ...] = (0,)
    kernel: Kernel | None = None


def attend(qkv: Qkv, sight: AttentionMask, scale: float) -> jax.Array:
    """Computes `softmax(scale · q kᵀ) v` over the columns of `sight`, `[B, R, H, C]`.

    Padding positions get finite numbers, which depend on the implementation.
    """
    if sight.kernel is None:
        return by_products(qkv, sight.mask_BxRxS, scale)
    each = [functools.partial(sight.kernel, window=window, scale=scale) for window in sight.windows]
    # The window of a scanned block is traced, but a kernel is compiled for a fixed window.
    number = jnp.searchsorted(jnp.asarray(sight.windows), sight.window)
    return jax.lax.switch(number, each, qkv, sight.pad_B)


def by_products(qkv: Qkv, mask_BxRxS: jax.Array, scale: float) -> jax.Array:
    """Computes `attend` by two products, the reference: stores all scores, at least in float32."""
    q_BxRxHxC, k_BxKxSxC, v_BxKxSxC = qkv
    (batch, read, heads, size), kv_heads = q_BxRxHxC.shape, k_BxKxSxC.shape[1]
    q_BxRxKxGxC = q_BxRxHxC.reshape(batch, read, kv_heads, heads // kv_heads, size)
    scores_BxKxGxRxS = jnp.einsum("brkgc,bksc->bkgrs", q_BxRxKxGxC, k_BxKxSxC)
    dtype = scores_BxKxGxRxS.dtype
    scores_BxKxGxRxS = scale * scores_BxKxGxRxS.astype(jnp.promote_types(dtype, jnp.float32))
    # The mask value is finite: all columns of a padding row are masked, which would give NaN with
    # −∞.
    scores_BxKxGxRxS = jnp.where(mask_BxRxS[:, None, None], scores_BxKxGxRxS, -1e30)
    weights_BxKxGxRxS = jax.nn.softmax(scores_BxKxGxRxS).astype(dtype)
    # The transpose comes after the product, which would otherwise read V down its columns.
    out_BxKxGxRxC = jnp.einsum("bkgrs,bksc->bkgrc", weights_BxKxGxRxS, v_BxKxSxC)
    return out_BxKxGxRxC.transpose(0, 3, 1, 2, 4).reshape(batch, read, heads, size)


def splash(
    qkv: Qkv, pad_B: jax.Array, *, window: int = 0, scale: float = 1.0, interpret: bool = False
) -> jax.Array:
    """Computes `attend` by a TPU's kernel; `interpret` runs it elsewhere, step by step."""
    # The import is inside the function: at the top, it would delay the start of every run by a
    # third of a second.
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    (_, read, heads, _), columns = qkv[0].shape, qkv[1].shape[2]
    q_BxHxRxC = (qkv[0] * jnp.asarray(scale, qkv[0].dtype)).swapaxes(1, 2)
    q_BxHxRxC, k_BxKxSxC, v_BxKxSxC = (
        _longer(x, 2, -(-x.shape[2] // BLOCKS[-1]) * BLOCKS[-1]) for x in (q_BxHxRxC, *qkv[1:])
    )
    asking, whole = shape = q_BxHxRxC.shape[2], k_BxKxSxC.shape[2]
    behind = whole - asking
    mask = (
        kernels.LocalMask(shape, (window - 1, 0), behind)
        if window
        else kernels.CausalMask(shape, behind)
    )
    q, kv = (next(n for n in BLOCKS if length % n == 0) for length in shape)
    kernel = kernels.make_splash_mha_single_device(
        kernels.MultiHeadMask([mask] * heads),
        block_sizes=kernels.BlockSizes(q, kv, kv, q, kv, kv, q, kv),
        interpret=interpret,
    )
    # Padding attends to padding: a position without any column would divide by 0.
    real_BxS = (jnp.arange(whole)[None] >= (pad_B + whole - columns)[:, None]).astype(jnp.int32)
    segments = kernels.SegmentIds(real_BxS[:, behind:], real_BxS)
    out_BxHxRxC = jax.vmap(kernel)(q_BxHxRxC, k_BxKxSxC, v_BxKxSxC, segments)
    return out_BxHxRxC[:, :, asking - read :].swapaxes(1, 2)


def cudnn(
    qkv: Qkv, pad_B: jax.Array, *, window: int = 0, scale: float = 1.0, by: Any = "cudnn"
) -> jax.Array:
    """Computes `attend` by cuDNN; `by="xla"` computes the same on other hardware."""
    read, columns = qkv[0].shape[1], qkv[1].shape[2]
    shift = jax.vmap(functools.partial(jnp.roll, axis=0))
    # cuDNN's masks count from the first column: padding is therefore moved behind all positions,
    # out of reach.
    q, k, v = (
        shift(_longer(x_BxNxHxC, 1, columns), -pad_B)
        for x_BxNxHxC in (qkv[0], qkv[1].swapaxes(1, 2), qkv[2].swapaxes(1, 2))
    )
    within = (window - 1, 0) if window else None
    # Without `is_causal`, windows would include later positions (jax #39576).
    out_BxSxHxC = jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=True, local_window_size=within, implementation=by
    )
    return shift(out_BxSxHxC, pad_B)[:, columns - read :]


def _longer(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Pads an axis with zeros in front, up to a length."""
    before = (length - x.shape[axis], 0)
    return jnp.pad(x, [before if i == axis else (0, 0) for i in range(x.ndim)])


def kernel_for(target: Target, dtype: jnp.dtype, size: int) -> Kernel | str:
    """Returns the target's fused kernel for head size C, or the reason why it lacks one."""
    if target.platform == "tpu" and dtype in (jnp.float32, jnp.bfloat16):
        return splash
    if target.platform == "tpu":
        return f"on a TPU dtype must be float32 or bfloat16, got {dtype}"
    if target.on_cpu:
        return "a CPU has no such kernel"
    if dtype == jnp.bfloat16 and size % 8 == 0 and size <= LARGEST:
        return cudnn
    return (
        f"on a GPU dtype must be bfloat16 and the head size a multiple of 8 up to {LARGEST}, got "
        f"{dtype} and {size}"
    )
