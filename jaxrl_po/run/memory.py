"""What a training run holds on each device."""

import math
from typing import Any, NamedTuple

import jax
from rich import filesize

from jaxrl_po.types import PyTree


class Memory(NamedTuple):
    """What one device holds, in bytes.

    Attributes:
      state: its part of the training state.
      peak: while a chunk runs: state, metrics and all that is computed in between; None where the
        compiler does not tell.
    """

    state: int
    peak: int | None

    def describe(self) -> str:
        """One line for a person.

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
    """What one device holds: its part of the state by shapes and shardings, the rest as the compiler tells.

    Args:
      program: compiled, of the state.
      like: `jax.ShapeDtypeStruct`s with shardings, of the state.
    """
    leaves = jax.tree.leaves(like)
    state = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )
    told = program.memory_analysis()
    if told is None:
        return Memory(state, None)
    held = told.argument_size_in_bytes + told.output_size_in_bytes - told.alias_size_in_bytes
    return Memory(state, held + told.temp_size_in_bytes)
