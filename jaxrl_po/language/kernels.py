"""Kernels that speed up decoding steps on a CPU: transposed, or cut out of their stacks.

Shape suffixes as in `transformer`; I inputs and O outputs of a matrix.
"""

import jax

from jaxrl_po import backend
from jaxrl_po.backend import Target
from jaxrl_po.types import PyTree

BY_OUTPUTS = "by_outputs"
"""Name of the collection that holds kernels by outputs, beside `params`."""

APART = "apart"
"""Name of the one that holds the parameters of each block."""

FORMS = {BY_OUTPUTS, APART}

FEW = 64
"""Rows up to which it pays: above, the other order of a product's operands is as fast."""


def few(rows: int, target: Target | None) -> bool:
    """Whether a product with this many rows is faster by outputs; None is `backend.here()`."""
    return rows <= FEW and (target or backend.here()).on_cpu


def apart(blocks: PyTree, layers: int) -> PyTree:
    """The parameters of each of L stacked blocks, cut out of their stacks before the loop."""
    cut = tuple(jax.tree.map(lambda x, n=n: x[n], blocks) for n in range(layers))
    # Else the cuts would be made in every step.
    held: PyTree = jax.lax.optimization_barrier(cut)
    return held


def by_outputs(blocks: PyTree, dtype: jax.typing.DTypeLike) -> PyTree:
    """The kernels of stacked blocks, `[L, I, O]`, as `[L, O, I]` in the dtype of products."""
    kernels = {
        role: {
            name: {"kernel": matrix["kernel"].astype(dtype).swapaxes(1, 2)}
            for name, matrix in module.items()
            if "kernel" in matrix
        }
        for role, module in blocks.items()
        if role in ("attention", "mlp")
    }
    # Else the transposes would be folded into the products of every step.
    held: PyTree = jax.lax.optimization_barrier(kernels)
    return held


def product(x_MxI: jax.Array, kernel_OxI: jax.Array) -> jax.Array:
    """`x Wᵀ`, `[M, O]`, with the kernel as the left operand.

    With 8 – 32 rows XLA's CPU product takes as little as half the time in this order, because it
    reads the larger operand along its rows; on some processors there is no difference.
    """
    y_OxM = jax.lax.dot_general(kernel_OxI, x_MxI, (((1,), (1,)), ((), ())))
    # Else the transpose would be folded into the product, which puts the operands back.
    return jax.lax.optimization_barrier(y_OxM).T
