"""States of earlier versions, brought into the layout of this one."""

import re
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]

ROLES = (".params.policy", ".params.value")
BLOCK = re.compile(r"\['(attention|mlp)(_norm|_post_norm)?_(\d+)'\]")
"""A module of one block, as the path of a leaf names it before 0.3: `mlp_norm_7` of block 7."""
FIRST = re.compile(r"\['attention_0'\]\['(query|key|value|out)'\]")
"""A leaf of the first block. Modules of a user's own may be called `mlp_0` too."""


def stacked(arrays: Arrays) -> Arrays:
    """A stored state whose transformers have their blocks stacked, as they are since 0.3.

    Args:
      arrays: leaf path to array `[S, …]`, of seeds; with blocks apart, as before, or stacked.

    Returns:
      Leaf path to array; stacked leaves are `[S, L, …]`. Moments that are one flat vector are
      brought into the order of the stacked parameters.
    """
    if not any(FIRST.search(name) for name in arrays):
        return arrays
    state = _stack(arrays)
    # An optimizer has the moments of the policy, of the value, or of both.
    for roles in (ROLES[:1], ROLES[1:], ROLES):
        params = {name: array for name, array in arrays.items() if name.startswith(roles)}
        size = sum(array[0].size for array in params.values())
        for name, array in arrays.items():
            if name.startswith(".opt_state") and array.ndim == 2 and array.shape[1] == size:
                state[name] = _reordered(array, params)
    return state


def _stack(arrays: Arrays) -> Arrays:
    """Leaves of the same name in each block, `[S, …]`, as one `[S, L, …]`."""
    transformers = {name[: found.start()] for name in arrays if (found := FIRST.search(name))}
    kept: Arrays = {}
    blocks: dict[str, dict[int, npt.NDArray[Any]]] = {}
    for name, array in arrays.items():
        found = BLOCK.search(name)
        if found is None or name[: found.start()] not in transformers:
            kept[name] = array
            continue
        module = f"['blocks']['{found[1]}{found[2] or ''}']"
        path = name[: found.start()] + module + name[found.end() :]
        blocks.setdefault(path, {})[int(found[3])] = array
    return kept | {
        path: np.stack([layers[number] for number in sorted(layers)], axis=1)
        for path, layers in blocks.items()
    }


def _reordered(vector_SxN: npt.NDArray[Any], params: Arrays) -> npt.NDArray[Any]:
    """One number for each parameter, in the order of the stacked ones."""
    names = sorted(params, key=_place)
    ends = np.cumsum([params[name][0].size for name in names])
    parts = np.split(vector_SxN, ends[:-1], axis=1)
    tree = _stack(
        {name: part.reshape(params[name].shape) for name, part in zip(names, parts, strict=True)}
    )
    seeds = len(vector_SxN)
    return np.concatenate([tree[name].reshape(seeds, -1) for name in sorted(tree, key=_place)], 1)


def _place(name: str) -> tuple[bool, list[str]]:
    """Where JAX has a leaf in the order of a tree: the policy's first, then by names."""
    return not name.startswith(ROLES[0]), re.findall(r"\['([^']*)'\]", name)
