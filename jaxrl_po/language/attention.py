"""Attention of the last positions of each row to its columns: by two products, or in one kernel.

A fused kernel holds blocks of the scores, with their running maximum and sum, and never all
`[B, H, R, S]`; its backward pass computes them again (Dao et al. 2022, arXiv:2205.14135).

Shape suffixes as in `transformer`.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.backend import Target

Kernel = Callable[..., jax.Array]
"""`kernel(q_BxRxHxC, k_BxKxSxC, v_BxKxSxC, pad_B, window=0, scale=1.0) -> [B, R, H, C]`."""

BLOCKS = (512, 256, 128)
"""Columns of a block of splash attention, the largest that divides a row; it reads 128 at once."""

LARGEST = 128
"""Head size up to which cuDNN has kernels for every GPU; it must be a multiple of 8."""


class Sight(NamedTuple):
    """Which of its S columns the last R positions of each row see.

    Attributes:
      mask_BxRxS: bool, what follows from the others.
      pad_B: int32, columns of padding on the left; no position sees them.
      window: how many positions each sees, its own included; 0 for all up to its own.
      windows: what `window` may be, ascending.
      kernel: a fused one, for which the mask is not computed; None for two products.
    """

    mask_BxRxS: jax.Array
    pad_B: jax.Array
    window: Any = 0
    windows: tuple[int, ...] = (0,)
    kernel: Kernel | None = None


def attend(
    q_BxRxHxC: jax.Array,
    k_BxKxSxC: jax.Array,
    v_BxKxSxC: jax.Array,
    sight: Sight,
    scale: float,
) -> jax.Array:
    """`softmax(scale · q kᵀ) v` over what each position sees, `[B, R, H, C]`.

    Padding gets finite numbers, which depend on how they are computed.
    """
    qkv = q_BxRxHxC, k_BxKxSxC, v_BxKxSxC
    if sight.kernel is None:
        return by_products(*qkv, sight.mask_BxRxS, scale)
    each = [functools.partial(sight.kernel, window=window, scale=scale) for window in sight.windows]
    # The window of a scanned block is traced, and a kernel is compiled for one.
    number = jnp.searchsorted(jnp.asarray(sight.windows), sight.window)
    return jax.lax.switch(number, each, *qkv, sight.pad_B)


def by_products(
    q_BxRxHxC: jax.Array,
    k_BxKxSxC: jax.Array,
    v_BxKxSxC: jax.Array,
    mask_BxRxS: jax.Array,
    scale: float,
) -> jax.Array:
    """The reference of `attend`: all scores are held, in float32 at least."""
    (batch, read, heads, size), kv_heads = q_BxRxHxC.shape, k_BxKxSxC.shape[1]
    dtype = q_BxRxHxC.dtype
    q_BxRxKxGxC = q_BxRxHxC.reshape(batch, read, kv_heads, heads // kv_heads, size)
    scores_BxKxGxRxS = scale * jnp.einsum("brkgc,bksc->bkgrs", q_BxRxKxGxC, k_BxKxSxC).astype(
        jnp.promote_types(dtype, jnp.float32)
    )
    # Finite: a padding row is masked throughout and would give NaN with −∞.
    scores_BxKxGxRxS = jnp.where(mask_BxRxS[:, None, None], scores_BxKxGxRxS, -1e30)
    weights_BxKxGxRxS = jax.nn.softmax(scores_BxKxGxRxS).astype(dtype)
    # Not straight into the order of the rows: the product would then read V down its columns.
    out_BxKxGxRxC = jnp.einsum("bkgrs,bksc->bkgrc", weights_BxKxGxRxS, v_BxKxSxC)
    return out_BxKxGxRxC.transpose(0, 3, 1, 2, 4).reshape(batch, read, heads, size)


def splash(
    q_BxRxHxC: jax.Array,
    k_BxKxSxC: jax.Array,
    v_BxKxSxC: jax.Array,
    pad_B: jax.Array,
    *,
    window: int = 0,
    scale: float = 1.0,
    interpret: bool = False,
) -> jax.Array:
    """`attend` by a TPU's kernel; `interpret` runs it elsewhere, operation by operation."""
    # Not above: a run without it would start later by a third of a second.
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    read, columns = q_BxRxHxC.shape[1], k_BxKxSxC.shape[2]
    q_BxHxRxC = (q_BxRxHxC * jnp.asarray(scale, q_BxRxHxC.dtype)).transpose(0, 2, 1, 3)
    q_BxHxRxC, k_BxKxSxC, v_BxKxSxC = (
        _longer(x, 2, -(-x.shape[2] // BLOCKS[-1]) * BLOCKS[-1])
        for x in (q_BxHxRxC, k_BxKxSxC, v_BxKxSxC)
    )
    asking, whole = q_BxHxRxC.shape[2], k_BxKxSxC.shape[2]
    shape, behind = (asking, whole), whole - asking
    mask = (
        kernels.LocalMask(shape, (window - 1, 0), behind)
        if window
        else kernels.CausalMask(shape, behind)
    )
    q, kv = (next(n for n in BLOCKS if length % n == 0) for length in shape)
    kernel = kernels.make_splash_mha_single_device(
        kernels.MultiHeadMask([mask] * q_BxHxRxC.shape[1]),
        block_sizes=kernels.BlockSizes(q, kv, kv, q, kv, kv, q, kv),
        interpret=interpret,
    )
    # Padding sees padding: a position without any column would be divided by 0.
    real_BxS = (jnp.arange(whole)[None] >= (pad_B + whole - columns)[:, None]).astype(jnp.int32)
    segments = kernels.SegmentIds(real_BxS[:, behind:], real_BxS)
    out_BxHxRxC = jax.vmap(kernel)(q_BxHxRxC, k_BxKxSxC, v_BxKxSxC, segments)
    return out_BxHxRxC[:, :, asking - read :].transpose(0, 2, 1, 3)


def cudnn(
    q_BxRxHxC: jax.Array,
    k_BxKxSxC: jax.Array,
    v_BxKxSxC: jax.Array,
    pad_B: jax.Array,
    *,
    window: int = 0,
    scale: float = 1.0,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """`attend` by cuDNN; `implementation="xla"` computes what it is asked for elsewhere."""
    read, columns = q_BxRxHxC.shape[1], k_BxKxSxC.shape[2]
    shift = jax.vmap(functools.partial(jnp.roll, axis=0))
    # Its masks count from the first column: padding goes behind the positions, which never see it.
    q, k, v = (
        shift(_longer(x_BxNxHxC, 1, columns), -pad_B)
        for x_BxNxHxC in (
            q_BxRxHxC,
            k_BxKxSxC.transpose(0, 2, 1, 3),
            v_BxKxSxC.transpose(0, 2, 1, 3),
        )
    )
    out_BxSxHxC = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=True,  # without it, windows would reach ahead (jax #39576)
        local_window_size=(window - 1, 0) if window else None,
        implementation=implementation,
    )
    return shift(out_BxSxHxC, pad_B)[:, columns - read :]


def _longer(x: jax.Array, axis: int, length: int) -> jax.Array:
    """With zeros in front, up to a length."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (length - x.shape[axis], 0)
    return jnp.pad(x, widths)


def kernel_for(target: Target, dtype: jnp.dtype, size: int) -> Kernel | None:
    """The fused kernel of a target, for head size C; None without one."""
    if target.platform == "tpu":
        return splash if dtype in (jnp.float32, jnp.bfloat16) else None
    fits = dtype == jnp.bfloat16 and size % 8 == 0 and size <= LARGEST
    return cudnn if target.platform == "gpu" and fits else None
