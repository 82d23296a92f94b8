"""A training state as a dict from the path of each leaf to a host array, and back."""

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxrl_po.run.devices import processes
from jaxrl_po.types import PyTree

Arrays = dict[str, npt.NDArray[Any]]


class CheckpointError(Exception):
    """Checkpoints exist, but none can be used."""


def _named(tree: PyTree) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(leaf: Any) -> Any:
    """The PRNG implementation of a key, or of a `jax.ShapeDtypeStruct` of one."""
    impls: list[Any] = []
    # `key_impl` takes no shapes, but sees the dtype of a traced key.
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), leaf)
    return impls[0]


def to_host(state: PyTree) -> Arrays:
    """Leaf path to host array, for every leaf of non-zero size; copies, safe from donation."""
    words = {
        name: jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for name, leaf in _named(state).items()
    }
    return {name: processes.whole(leaf) for name, leaf in words.items() if leaf.size}


def from_host(arrays: Arrays, like: PyTree) -> PyTree:
    """The inverse of `to_host`, with the structure, dtypes and placement of `like`.

    Raises:
      CheckpointError: names a leaf that is missing, unexpected, or of another shape or dtype.
    """
    remaining = dict(arrays)

    def restore(path: Any, leaf: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        shape = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
        array = remaining.pop(name, None) if shape.size else np.zeros(shape.shape, shape.dtype)
        if array is None or array.shape != shape.shape or array.dtype != shape.dtype:
            stored = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
            raise CheckpointError(
                f"the checkpoint holds {stored} for {name}, where "
                f"{shape.dtype}{list(shape.shape)} is wanted"
            )
        placed = processes.place(array, getattr(leaf, "sharding", None))
        return jax.random.wrap_key_data(placed, impl=_key_impl(leaf)) if _is_key(leaf) else placed

    state = jax.tree_util.tree_map_with_path(restore, like)
    if remaining:
        raise CheckpointError(f"the checkpoint holds {next(iter(remaining))}, which is not wanted")
    return state
