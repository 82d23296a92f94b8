"""Computes a gated recurrent unit over time.

Products that do not need the loop are outside of it.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp

Gates = tuple[jax.Array, jax.Array, jax.Array]
"""Three arrays: one for each of reset gate r, update gate z and candidate n."""


def run_gru(
    params: Mapping[str, Any],
    memory: jax.Array,
    features: jax.Array,
    begins: jax.Array,
    unroll: int = 1,
) -> jax.Array:
    """Computes the memories after each of T steps.

    The equations are `r = σ(W_r x + U_r h + b_r)`, `z = σ(W_z x + U_z h + b_z)`, `n = tanh(W_n x +
    b_n + r ⊙ (U_n h + c))`, `h' = (1 − z) ⊙ n + z ⊙ h` (Cho et al. 2014, arXiv:1406.1078, with c as
    in cuDNN), with h set to 0 before a step that begins an episode. The memories equal those of
    `nn.GRUCell` in a loop.

    Args:
      params: parameters of a `nn.GRUCell`: W as `ir`, `iz`, `in`, U as `hr`, `hz`, `hn`.
      memory: `[B, H]`, memory before the first step.
      features: `[T, B, D]`, inputs x of the unit.
      begins: `[T, B]`, bool, True if an episode begins with the step.
      unroll: number of steps in one pass of the loop, see `backend.Target.unroll`.

    Returns:
      `[T, B, H]`.
    """
    chex.assert_rank((memory, features, begins), (2, 3, 2))
    chex.assert_equal_shape_prefix((features, begins), 2)
    read = tuple(
        features @ params[name]["kernel"] + params[name]["bias"][None, None]
        for name in ("ir", "iz", "in")
    )
    kernels = tuple(params[name]["kernel"] for name in ("hr", "hz", "hn"))
    bias = jnp.broadcast_to(params["hn"]["bias"], memory.shape)
    return _memories(unroll, kernels, bias, read, memory, begins)


# Differentiated by JAX, the loop would add up the gradient of each kernel in every step. With this
# derivative a step of the backward pass is elementwise except for three products with the memories'
# cotangent, and the gradient of a kernel is one product over all steps: on a CPU up to 2.7 times as
# fast.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _memories(unroll: int, *primals: Any) -> jax.Array:
    return _run(unroll, *primals)[0]


@_memories.defjvp
def _memories_jvp(unroll: int, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Computes `dh' = z ⊙ dh + Σ_g ∂h'/∂(U_g h) ⊙ (U_g dh + dU_g h) + …`, linear in dh."""
    kernels, begins = primals[0], primals[-1]
    d_kernels, d_bias, d_read, d_memory, _ = tangents
    after, before, z, by_n, slopes = _run(unroll, *primals)

    rows = before.reshape(-1, before.shape[-1])
    d_r, d_z, d_n = ((rows @ kernel).reshape(before.shape) for kernel in d_kernels)
    added = by_n * d_read[2] + _total(
        slopes, (d_r + d_read[0], d_z + d_read[1], d_n + d_bias[None])
    )
    keep = 1.0 - begins[..., None].astype(z.dtype)
    # The transpose is computed once, so that the backward pass does not need a transpose in each
    # step.
    transposed = [kernel.T for kernel in kernels]

    def step(dh: jax.Array, x: Any) -> tuple[jax.Array, jax.Array]:
        added, keep, z, slopes = x
        dh = keep * dh
        products = [
            jax.lax.dot_general(dh, kernel, (((1,), (1,)), ((), ()))) for kernel in transposed
        ]
        dh = added + z * dh + _total(slopes, products)
        return dh, dh

    xs = added, keep, z, slopes
    return after, jax.lax.scan(step, d_memory, xs, unroll=unroll)[1]


def _run(
    unroll: int, kernels: Gates, bias: jax.Array, read: Gates, memory: jax.Array, begins: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, Gates]:
    """Returns h', h, z and the slopes of h' in `W_n x` and each `U_g h`, all `[T, B, H]`."""

    def step(h: jax.Array, x: tuple[Gates, jax.Array]) -> tuple[jax.Array, Any]:
        (read_r, read_z, read_n), begins = x
        h = jnp.where(begins[:, None], 0.0, h)
        r = jax.nn.sigmoid(read_r + h @ kernels[0])
        z = jax.nn.sigmoid(read_z + h @ kernels[1])
        of_n = h @ kernels[2] + bias
        n = jnp.tanh(read_n + r * of_n)
        after = (1.0 - z) * n + z * h
        by_n = (1.0 - z) * (1.0 - n * n)
        slopes = by_n * of_n * r * (1.0 - r), (h - n) * z * (1.0 - z), by_n * r
        return after, (after, h, z, by_n, slopes)

    return jax.lax.scan(step, memory, (read, begins), unroll=unroll)[1]


def _total(slopes: Gates, values: Sequence[jax.Array]) -> jax.Array:
    return slopes[0] * values[0] + slopes[1] * values[1] + slopes[2] * values[2]
