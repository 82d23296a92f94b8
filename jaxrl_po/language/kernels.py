"""Kernels as a decoding step of few rows reads them fastest on a CPU.

Shape suffixes as in `transformer`; I inputs and O outputs of a matrix.
"""

import functools
from typing import NamedTuple

import jax

from jaxrl_po.types import PyTree

BY_OUTPUTS = "by_outputs"
"""Name of the collection that holds them, beside `params`."""

FEW = 64
"""Rows up to which it pays: above, the other order of a product's operands is as fast."""


class ByOutputs(NamedTuple):
    """One matrix of all blocks, of which one is read.

    Attributes:
      kernels: of each block, `[O, I]`.
      number: that of the block, `[]`, int32.
    """

    kernels: tuple[jax.Array, ...]
    number: jax.Array

    def product(self, x_MxI: jax.Array) -> jax.Array:
        """`x Wᵀ`, `[M, O]`.

        A branch for each block reads its kernel where it lies; a slice of the stack would be copied
        first.
        """
        branches = [
            functools.partial(lambda number, x, *kernels: _left(kernels[number], x), number)
            for number in range(len(self.kernels))
        ]
        y_OxM: jax.Array = jax.lax.switch(self.number, branches, x_MxI, *self.kernels)
        return y_OxM.T


def product(x_MxI: jax.Array, kernel_OxI: jax.Array) -> jax.Array:
    """`x Wᵀ`, `[M, O]`, with the kernel as the left operand.

    With 8 – 32 rows XLA's product for a CPU takes half the time in this order: it reads the longer
    operand along its rows.
    """
    # Else the transpose would be folded into the product, which puts the operands back.
    return jax.lax.optimization_barrier(_left(kernel_OxI, x_MxI)).T


def _left(kernel_OxI: jax.Array, x_MxI: jax.Array) -> jax.Array:
    """`W xᵀ`, `[O, M]`."""
    return jax.lax.dot_general(kernel_OxI, x_MxI, (((1,), (1,)), ((), ())))


def few(rows: int) -> bool:
    """Whether a product with this many rows is faster by outputs."""
    return rows <= FEW and jax.default_backend() == "cpu"


def by_outputs(blocks: PyTree, dtype: jax.typing.DTypeLike) -> PyTree:
    """The kernels of stacked blocks, each `[L, I, O]` as L of `[O, I]` in the dtype of products."""
    kernels = {
        role: {
            name: {"kernel": _apart(matrix["kernel"].astype(dtype))}
            for name, matrix in module.items()
            if "kernel" in matrix
        }
        for role, module in blocks.items()
        if role in ("attention", "mlp")
    }
    # Else the transposes would be folded into the products of every step.
    held: PyTree = jax.lax.optimization_barrier(kernels)
    return held


def _apart(kernel_LxIxO: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(kernel_LxIxO[number].T for number in range(kernel_LxIxO.shape[0]))


def of_block(kernels: PyTree, number: jax.Array) -> PyTree:
    """What a block's layers read: a `ByOutputs` for each matrix."""
    return jax.tree.map(
        lambda each: ByOutputs(each, number), kernels, is_leaf=lambda x: isinstance(x, tuple)
    )
