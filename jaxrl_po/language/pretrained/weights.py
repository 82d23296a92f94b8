"""Parameters from `model.safetensors`, or from the shards of an index, and back."""

import contextlib
import functools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.config import ConfigError
from jaxrl_po.language.pretrained import architectures, gguf
from jaxrl_po.language.pretrained.architectures import Tensor
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.types import PyTree

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = ("F64", "F32", "F16", "BF16")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")

Place = Callable[[tuple[str, ...], np.ndarray[Any, Any]], jax.Array]
"""Puts a parameter, given its path, where it belongs."""


def read(
    folder: Path | gguf.Folder,
    model: Transformer,
    *,
    dtype: Any = "float32",
    place: Place | None = None,
) -> PyTree:
    """Parameters of a model, one by one; shapes are compared before the first is read.

    Args:
      folder: of the checkpoint.
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
        source = folder if isinstance(folder, gguf.Folder) else _Shards(folder)
        _compare(architectures.tensors(model), source.shapes(), model)
        if isinstance(source, _Shards):
            source.check(model.tied)
        # The largest first: while it is put in its place it is held twice.
        for path in sorted(parts, key=lambda path: -_leaf(shapes, path).size):
            inner = functools.reduce(
                lambda tree, name: tree.setdefault(name, {}), path[:-1], params
            )
            # Wait before the next is read; the copy on the host has no name, and is freed.
            inner[path[-1]] = jax.block_until_ready(put(path, _ours(parts[path], source, dtype)))
    except SafetensorError as error:
        raise ConfigError(
            "folder", f"{folder} must hold whole safetensors files: {error}"
        ) from None
    return {"params": params}


class _Shards:
    """The safetensors files of a folder: name of each tensor to its file, and to its shape."""

    def __init__(self, folder: Path):
        from safetensors import safe_open

        self._files: dict[str, Path] = {}
        self._shapes: dict[str, list[int]] = {}
        self._dtypes: dict[str, str] = {}
        for file in _files(folder):
            with safe_open(file, framework="numpy") as shard:
                for name in shard.keys():  # noqa: SIM118
                    self._files[name] = file
                    tensor = shard.get_slice(name)
                    self._shapes[name], self._dtypes[name] = tensor.get_shape(), tensor.get_dtype()

    def shapes(self) -> Mapping[str, list[int]]:
        return self._shapes

    def check(self, tied: bool) -> None:
        """Raises ConfigError for quantized tensors, and for the second output of a tied model."""
        for name, dtype in self._dtypes.items():
            if dtype not in DTYPES:
                raise ConfigError(
                    "folder",
                    f"tensor {name} must be of a type in {', '.join(DTYPES)}, got {dtype}: "
                    "dequantize the weights",
                )
        if tied and HEAD in self._shapes:
            embedding, head = self.arrays([EMBEDDING, HEAD])
            if not np.array_equal(embedding, head):
                raise ConfigError(
                    "folder",
                    f"tensor {HEAD} must equal {EMBEDDING} with tie_word_embeddings true: remove "
                    "the tensor, or set tie_word_embeddings to false to read it",
                )

    def arrays(self, names: Sequence[str]) -> Iterator[np.ndarray[Any, Any]]:
        from safetensors import safe_open

        # Opened for one parameter at a time, so that the files do not stay in memory.
        with contextlib.ExitStack() as stack:
            opened = {
                path: stack.enter_context(safe_open(path, framework="numpy"))
                for path in {self._files[name] for name in names}
            }
            for name in names:
                yield opened[self._files[name]].get_tensor(name)


def _files(folder: Path) -> list[Path]:
    """Returns the one file, which `transformers` prefers too, or the files of the index."""
    if (folder / FILE).exists():
        return [folder / FILE]
    if (folder / INDEX).exists():
        try:
            names = json.loads((folder / INDEX).read_text(encoding="utf-8-sig"))["weight_map"]
            files = sorted({folder / file for file in names.values()})
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ConfigError(
                "folder", f"{folder / INDEX} must be JSON with a weight_map"
            ) from None
        for path in files:
            if not path.exists():
                raise ConfigError("folder", f"{path} is missing, which {INDEX} names")
        return files
    pickled = sorted(path.name for kind in PICKLED for path in folder.glob(kind))
    refused = f"; {pickled[0]} is not read: unpickling a file can run code" if pickled else ""
    raise ConfigError("folder", f"{folder} must hold {FILE} or {INDEX}{refused}")


def _compare(wanted: Iterable[Tensor], found: Mapping[str, list[int]], model: Transformer) -> None:
    """Raises ConfigError unless the files hold exactly the tensors of the model."""
    shapes, names = model.parameter_shapes()["params"], set()
    for tensor in wanted:
        names.add(tensor.name)
        if tensor.name not in found:
            raise ConfigError("folder", f"tensor {tensor.name} is missing from the checkpoint")
        shape = _leaf(shapes, tensor.path).shape[0 if tensor.layer is None else 1 :]
        expected = list(shape[::-1] if tensor.transposed else shape)
        if list(found[tensor.name]) != expected:
            raise ConfigError(
                "folder",
                f"tensor {tensor.name} must be {expected} by the settings of the model, got "
                f"{found[tensor.name]}",
            )
    # Some writers store the output of a tied model a second time, and RoPE's frequencies.
    tied = {HEAD} if model.tied else set()
    for name in sorted(set(found) - names - tied):
        if not name.endswith("rotary_emb.inv_freq"):
            raise ConfigError("folder", f"tensor {name} has no place in the model")


def _leaf(tree: Any, path: tuple[str, ...]) -> Any:
    return functools.reduce(operator.getitem, path, tree)


def _ours(parts: list[Tensor], source: gguf.Folder | _Shards, dtype: Any) -> np.ndarray[Any, Any]:
    """A parameter of ours from the tensors that are its parts, one a block."""
    ours: Any = None
    arrays = source.arrays([part.name for part in parts])
    for number, (part, array) in enumerate(zip(parts, arrays, strict=True)):
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
    save_file(arrays, folder / FILE, metadata={"format": "pt"})
