"""Lays out weight matrices (kernels) for fast decoding on a CPU: transposed, or unstacked.

The module `transformer` explains the shape suffixes; a matrix has I inputs and O outputs.
"""

import jax

from jaxrl_po import backend
from jaxrl_po.backend import Target
from jaxrl_po.types import PyTree

BY_OUTPUTS = "by_outputs"
"""Name of the collection, beside `params`, with kernels in the layout `[outputs, inputs]`."""

APART = "apart"
"""Name of the collection, beside `params`, with the unstacked parameters of each block."""

FORMS = {BY_OUTPUTS, APART}

FEW = 64
"""Largest number of rows that are faster by outputs.

For more rows the usual operand order is as fast.
"""


def few(rows: int, target: Target | None) -> bool:
    """Returns True if a product of `rows` rows is faster by outputs.

    Target None is `backend.here()`.
    """
    return rows <= FEW and (target or backend.here()).on_cpu


def unstack(blocks: PyTree, layers: int) -> PyTree:
    """Returns the parameters of each of L stacked blocks, unstacked before the decode loop."""
    cut = tuple(jax.tree.map(lambda x, n=n: x[n], blocks) for n in range(layers))
    # Without the barrier, every step would slice the stacks again.
    held: PyTree = jax.lax.optimization_barrier(cut)
    return held


def by_outputs(blocks: PyTree, dtype: jax.typing.DTypeLike) -> PyTree:
    """Transposes the kernels of stacked blocks, `[L, I, O]`, to `[L, O, I]`, cast to `dtype`."""
    kernels = {
        role: {
            name: {"kernel": matrix["kernel"].astype(dtype).swapaxes(1, 2)}
            for name, matrix in module.items()
            if "kernel" in matrix
        }
        for role, module in blocks.items()
        if role in ("attention", "mlp")
    }
    # Without the barrier, XLA would fold the transposes into the products of every step.
    held: PyTree = jax.lax.optimization_barrier(kernels)
    return held


def left_product(x_MxI: jax.Array, kernel_OxI: jax.Array) -> jax.Array:
    """Computes `x Wᵀ`, `[M, O]`, with the kernel as the left operand.

    With 8 – 32 rows XLA's CPU product takes as little as half the time with the kernel on the left,
    because the product reads the larger operand along its rows; on some processors there is no
    difference.
    """
    y_OxM = jax.lax.dot_general(kernel_OxI, x_MxI, (((1,), (1,)), ((), ())))
    # Without the barrier, XLA would fold the transpose into the product and swap the operands back.
    return jax.lax.optimization_barrier(y_OxM).T
