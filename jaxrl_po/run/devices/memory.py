"""Memory that a training run needs on each device."""

import math
from typing import Any, NamedTuple

import jax
from rich import filesize

from jaxrl_po.types import PyTree


class Memory(NamedTuple):
    """Memory of one device, in bytes.

    Attributes:
      state: its shard of the training state.
      peak: state, metrics and temporaries while a chunk runs; None if the compiler does not report
        it.
    """

    state: int
    peak: int | None

    def describe(self) -> str:
        """One line for the user.

        Example:
          >>> Memory(3_100_000, 12_440_000).describe()
          'a device holds 3.1 MB of state and at most 12.4 MB while it trains'
        """
        peak = (
            ""
            if self.peak is None
            else f" and at most {filesize.decimal(self.peak)} while it trains"
        )
        return f"a device holds {filesize.decimal(self.state)} of state{peak}"


def measure(program: Any, like: PyTree) -> Memory:
    """The memory of one device: the state from shapes and shardings, the rest from the compiler.

    Args:
      program: a compiled function of the state.
      like: `jax.ShapeDtypeStruct`s of the state, with shardings.
    """
    leaves = jax.tree.leaves(like)
    state = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )
    sizes = program.memory_analysis()
    if sizes is None:
        return Memory(state, None)
    # A donated argument and its output are one buffer, counted in both sizes.
    arrays = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return Memory(state, arrays + sizes.temp_size_in_bytes)
