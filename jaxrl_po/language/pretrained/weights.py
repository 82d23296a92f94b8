"""Parameters from the tensors of a checkpoint, and back."""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.config import ConfigError
from jaxrl_po.language.pretrained import architectures
from jaxrl_po.language.pretrained.architectures import Tensor
from jaxrl_po.language.pretrained.files import WEIGHTS, ModelFiles, StoredTensor
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.types import PyTree

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Place = Callable[[tuple[str, ...], np.ndarray[Any, Any]], jax.Array]
"""Puts a parameter, given its path, where it belongs."""


def read(
    files: ModelFiles, model: Transformer, *, dtype: Any = "float32", place: Place | None = None
) -> PyTree:
    """Parameters of a model, one by one; shapes are compared before the first is read.

    Args:
      files: the checkpoint.
      model: see `architectures.read`.
      dtype: of the parameters; None keeps that of the tensors, the widest of a parameter's.
      place: see `Place`; None takes the default device.

    Raises:
      ConfigError: no such files, a truncated one, or a tensor that is missing, unknown or of
        another shape.
    """
    from safetensors import SafetensorError

    parts: dict[tuple[str, ...], list[Tensor]] = {}
    for tensor in architectures.tensors(model):
        parts.setdefault(tensor.path, []).append(tensor)
    shapes = model.parameter_shapes()["params"]
    params: dict[str, Any] = {}
    put = place or (lambda _, array: jax.device_put(array))
    try:
        stored = files.tensors()
        _compare(architectures.tensors(model), stored, model)
        # The largest first: while it is put in its place it is held twice.
        for path in sorted(parts, key=lambda path: -_leaf(shapes, path).size):
            inner = functools.reduce(
                lambda tree, name: tree.setdefault(name, {}), path[:-1], params
            )
            # Wait before the next is read; the copy on the host has no name, and is freed.
            inner[path[-1]] = jax.block_until_ready(put(path, _ours(parts[path], stored, dtype)))
    except SafetensorError as error:
        raise ConfigError(
            "folder", f"{files.path} must hold whole safetensors files: {error}"
        ) from None
    return {"params": params}


def _compare(
    wanted: Iterable[Tensor], found: Mapping[str, StoredTensor], model: Transformer
) -> None:
    """Raises ConfigError unless the files hold exactly the tensors of the model."""
    shapes, names = model.parameter_shapes()["params"], set()
    for tensor in wanted:
        names.add(tensor.name)
        if tensor.name not in found:
            raise ConfigError("folder", f"tensor {tensor.name} is missing from the checkpoint")
        shape = _leaf(shapes, tensor.path).shape[0 if tensor.layer is None else 1 :]
        expected = list(shape[::-1] if tensor.transposed else shape)
        if found[tensor.name].shape != expected:
            raise ConfigError(
                "folder",
                f"tensor {tensor.name} must be {expected} by the settings of the model, got "
                f"{found[tensor.name].shape}",
            )
    # Some writers store the output of a tied model a second time, and RoPE's frequencies.
    tied = {HEAD} if model.tied else set()
    for name in sorted(set(found) - names - tied):
        if not name.endswith("rotary_emb.inv_freq"):
            raise ConfigError("folder", f"tensor {name} has no place in the model")
    second = model.tied and HEAD in found
    if second and not np.array_equal(found[EMBEDDING].read(), found[HEAD].read()):
        raise ConfigError(
            "folder",
            f"tensor {HEAD} must equal {EMBEDDING} with tie_word_embeddings true: remove the "
            "tensor, or set tie_word_embeddings to false to read it",
        )


def _leaf(tree: Any, path: tuple[str, ...]) -> Any:
    return functools.reduce(operator.getitem, path, tree)


def _ours(
    parts: list[Tensor], stored: Mapping[str, StoredTensor], dtype: Any
) -> np.ndarray[Any, Any]:
    """A parameter of ours from the tensors that are its parts, one a block."""
    ours: Any = None
    for number, part in enumerate(parts):
        array = stored[part.name].read()
        array = array if dtype is None else array.astype(jnp.dtype(dtype), copy=False)
        if part.offset:
            # In float32: 1 + w has fewer digits for w than w itself.
            wide = np.promote_types(array.dtype, np.float32)
            array = array.astype(wide) + np.float32(part.offset)
        array = array.T if part.transposed else array
        if part.layer is None:
            return array
        if ours is None:
            ours = np.empty((len(parts), *array.shape), array.dtype)
        # Copied at once, so that the tensors of all blocks are never held beside their stack.
        ours = ours.astype(jnp.promote_types(ours.dtype, array.dtype), copy=False)
        ours[number] = array
    return ours


def write(folder: Path, model: Transformer, params: PyTree, *, dtype: Any = None) -> None:
    """Writes `model.safetensors`, as `transformers` reads it.

    Args:
      folder: exists.
      model: whose parameters they are.
      params: leaves of one seed.
      dtype: of the tensors; None keeps that of each parameter.
    """
    from safetensors.numpy import save_file

    arrays = {}
    for tensor in architectures.tensors(model):
        array = _leaf(params["params"], tensor.path)
        array = np.asarray(jax.device_get(array if tensor.layer is None else array[tensor.layer]))
        array = (array.T if tensor.transposed else array) - array.dtype.type(tensor.offset)
        arrays[tensor.name] = np.ascontiguousarray(array.astype(dtype or array.dtype, copy=False))
    save_file(arrays, folder / WEIGHTS, metadata={"format": "pt"})
