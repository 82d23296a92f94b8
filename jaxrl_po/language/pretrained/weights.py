"""Parameters from `model.safetensors`, or from the shards of an index, and back."""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.config import ConfigError
from jaxrl_po.language.pretrained import architectures
from jaxrl_po.language.pretrained.architectures import Tensor
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.types import PyTree

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")

Place = Callable[[tuple[str, ...], np.ndarray[Any, Any]], jax.Array]
"""Puts a parameter, given its path, where it belongs."""


def read(
    folder: Path, model: Transformer, *, dtype: Any = "float32", place: Place | None = None
) -> PyTree:
    """Parameters of a model, tensor by tensor; shapes are compared before the first is read.

    Args:
      folder: of the checkpoint.
      model: see `architectures.read`.
      dtype: of the parameters; None keeps that of each tensor.
      place: see `Place`; None takes the default device.

    Raises:
      ConfigError: no such files, a truncated one, or a tensor that is missing, unknown or of
        another shape.
    """
    from safetensors import SafetensorError, safe_open

    files = _files(folder)
    params: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        try:
            opened = {
                path: stack.enter_context(safe_open(path, framework="numpy"))
                for path in sorted(set(files.values()) if files else [folder / FILE])
            }
            found = {name: shard for shard in opened.values() for name in shard.keys()}  # noqa: SIM118
            wanted = list(architectures.tensors(model))
            _compare(wanted, {n: s.get_slice(n).get_shape() for n, s in found.items()}, model)
            for tensor in wanted:
                array = found[tensor.name].get_tensor(tensor.name)
                _put(params, tensor, _ours(tensor, array, dtype), place)
        except SafetensorError as error:
            raise ConfigError(f"{folder} must hold whole safetensors files: {error}") from None
    return {"params": params}


def _files(folder: Path) -> dict[str, Path]:
    """Name of each tensor to its file, by the index; empty where there is one file."""
    if (folder / INDEX).exists():
        try:
            names = json.loads((folder / INDEX).read_text())["weight_map"]
            files = {name: folder / file for name, file in names.items()}
        except (ValueError, KeyError, AttributeError):
            raise ConfigError(f"{folder / INDEX} must be JSON with a weight_map") from None
        for path in sorted(set(files.values())):
            if not path.exists():
                raise ConfigError(f"{path} is missing, which {INDEX} names")
        return files
    if (folder / FILE).exists():
        return {}
    pickled = sorted(path.name for kind in PICKLED for path in folder.glob(kind))
    refused = f"; {pickled[0]} is not read: unpickling a file can run code" if pickled else ""
    raise ConfigError(f"{folder} must hold {FILE} or {INDEX}{refused}")


def _compare(wanted: list[Tensor], found: Mapping[str, list[int]], model: Transformer) -> None:
    """Raises ConfigError unless the files hold exactly the tensors of the model."""
    shapes = model.parameter_shapes()["params"]
    for tensor in wanted:
        if tensor.name not in found:
            raise ConfigError(f"tensor {tensor.name} is missing from the checkpoint")
        shape = _leaf(shapes, tensor.path).shape
        expected = list(shape[::-1] if tensor.transposed else shape)
        if list(found[tensor.name]) != expected:
            raise ConfigError(
                f"tensor {tensor.name} must be {expected} by config.json, got {found[tensor.name]}"
            )
    # Some writers store the output of a tied model a second time, and RoPE's frequencies.
    tied = {"lm_head.weight"} if model.tied else set()
    for name in sorted(set(found) - {tensor.name for tensor in wanted} - tied):
        if not name.endswith("rotary_emb.inv_freq"):
            raise ConfigError(f"tensor {name} has no place in the model of config.json")


def _leaf(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _ours(tensor: Tensor, array: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """A tensor as our parameter."""
    array = array if dtype is None else array.astype(jnp.dtype(dtype), copy=False)
    if tensor.offset:
        # In float32: 1 + w has fewer digits for w than w itself.
        array = array.astype(np.promote_types(array.dtype, np.float32)) + np.float32(tensor.offset)
    return array.T if tensor.transposed else array


def _put(params: dict[str, Any], tensor: Tensor, array: Any, place: Place | None) -> None:
    *outer, last = tensor.path
    for name in outer:
        params = params.setdefault(name, {})
    params[last] = jnp.asarray(array) if place is None else place(tensor.path, array)


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
        array = np.asarray(jax.device_get(_leaf(params["params"], tensor.path)))
        array = (array.T if tensor.transposed else array) - array.dtype.type(tensor.offset)
        arrays[tensor.name] = np.ascontiguousarray(array.astype(dtype or array.dtype, copy=False))
    save_file(arrays, folder / FILE, metadata={"format": "pt"})
