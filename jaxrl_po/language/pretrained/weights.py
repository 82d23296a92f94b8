"""Converts a checkpoint's tensors to parameters, and back."""

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
"""`(path, value) -> array`, puts a parameter on the parameter's devices."""


def read(
    files: ModelFiles, model: Transformer, *, dtype: Any = "float32", place: Place | None = None
) -> PyTree:
    """Reads a model's parameters one by one, after a comparison of all shapes.

    Args:
      files: files of the checkpoint.
      model: transformer that `architectures.read` returns.
      dtype: type of the parameters; None keeps the type of the tensors, the widest type where
        several tensors make up a parameter.
      place: `(path, value) -> array`, see `Place`; None uses the default device.

    Raises:
      ConfigError: a file is missing or truncated, or a tensor is missing, unknown or has the wrong
        shape.
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
        # The largest parameter is read first: while it moves to its devices, memory holds it twice.
        for path in sorted(parts, key=lambda path: -_leaf(shapes, path).size):
            inner = functools.reduce(
                lambda tree, name: tree.setdefault(name, {}), path[:-1], params
            )
            # The copy is awaited before the next parameter is read: the host copy has no reference
            # left and is freed.
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
    # Some writers store the output matrix of a tied model again, and the frequencies of RoPE.
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
    """Builds one parameter from its tensors, one tensor per block."""
    ours: Any = None
    for number, part in enumerate(parts):
        array = stored[part.name].read()
        array = array if dtype is None else array.astype(jnp.dtype(dtype), copy=False)
        if part.offset:
            # The offset is added in float32: 1 + w keeps fewer digits of w than w itself.
            wide = np.promote_types(array.dtype, np.float32)
            array = array.astype(wide) + np.float32(part.offset)
        array = array.T if part.transposed else array
        if part.layer is None:
            return array
        if ours is None:
            ours = np.empty((len(parts), *array.shape), array.dtype)
        # Each tensor is copied immediately, so that memory never holds all blocks' tensors beside
        # their stack.
        ours = ours.astype(jnp.promote_types(ours.dtype, array.dtype), copy=False)
        ours[number] = array
    return ours


def write(folder: Path, model: Transformer, params: PyTree, *, dtype: Any = None) -> None:
    """Writes `model.safetensors` in the form that `transformers` reads.

    Args:
      folder: folder to write to, which must exist.
      model: transformer that the parameters belong to.
      params: parameters of a single seed.
      dtype: type of the tensors; None keeps the type of each parameter.
    """
    from safetensors.numpy import save_file

    arrays = {}
    for tensor in architectures.tensors(model):
        array = _leaf(params["params"], tensor.path)
        array = np.asarray(jax.device_get(array if tensor.layer is None else array[tensor.layer]))
        array = (array.T if tensor.transposed else array) - array.dtype.type(tensor.offset)
        arrays[tensor.name] = np.ascontiguousarray(array.astype(dtype or array.dtype, copy=False))
    save_file(arrays, folder / WEIGHTS, metadata={"format": "pt"})
