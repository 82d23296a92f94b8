"""Represents files of a pretrained model: texts by name, and tensors that are read one by one."""

import functools
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxrl_po.config import ConfigError

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
SPECIAL_MAP, TEMPLATES = "special_tokens_map.json", "additional_chat_templates"
CONTEXT = "max_position_embeddings"  # entry of config.json: number of tokens in the longest text
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class StoredTensor(NamedTuple):
    """Tensor of a checkpoint, which stays on disk until it is read.

    Attributes:
      shape: sizes of the tensor's axes; `[outputs, inputs]` for a matrix.
      read: `() -> array`, reads the tensor.
    """

    shape: list[int]
    read: Callable[[], npt.NDArray[Any]]


class ModelFiles(NamedTuple):
    """Content of a pretrained model's folder, or of the folder that a GGUF file stands for.

    Attributes:
      path: path of the folder or GGUF file, for messages.
      contents: bytes of each text, such as `config.json`, by its path in the folder.
      tensors: `() -> {name: StoredTensor}`, lists the tensors of the checkpoint.
      adds_tokens: True if every tokenizer class obeys `add_bos_token` and `add_eos_token`.
    """

    path: Path
    contents: Mapping[str, bytes]
    tensors: Callable[[], Mapping[str, StoredTensor]]
    adds_tokens: bool = False

    def text(self, name: str) -> str:
        """Returns the content of a text file, without its byte order mark.

        Raises:
          ConfigError: the file is not UTF-8.
        """
        try:
            return io.TextIOWrapper(io.BytesIO(self.contents[name]), encoding="utf-8-sig").read()
        except UnicodeDecodeError as error:
            raise ConfigError("folder", f"{self.path / name} must be UTF-8: {error}") from None

    def json(self, name: str) -> dict[str, Any]:
        """Returns the content of a JSON file, empty if the file is missing.

        Raises:
          ConfigError: the file is not a JSON object in UTF-8.
        """
        if name not in self.contents:
            return {}
        text = self.text(name)
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ConfigError("folder", f"{self.path / name} must be JSON: {error}") from None
        if not isinstance(content, dict):
            raise ConfigError("folder", f"{self.path / name} must be a JSON object")
        return content


def read_folder(folder: Path) -> ModelFiles:
    """Reads the text files of a folder; its tensors are listed and read later."""
    names = CONFIG, GENERATION, TOKENIZER, SETTINGS, TEMPLATE, SPECIAL_MAP
    found = [path for name in names if (path := folder / name).exists()]
    found += (folder / TEMPLATES).glob("*.jinja")
    contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
    return ModelFiles(folder, contents, functools.partial(_tensors, folder))


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    """Lists the tensors of a folder; raises ConfigError for a quantized tensor."""
    from safetensors import safe_open

    tensors = {}
    for file in _weight_files(folder):
        with safe_open(file, framework="numpy") as shard:
            for name in shard.keys():  # noqa: SIM118
                part = shard.get_slice(name)
                if (dtype := part.get_dtype()) not in DTYPES:
                    raise ConfigError(
                        "folder",
                        f"tensor {name} must be of a type in {', '.join(DTYPES)}, got {dtype}: "
                        "dequantize the weights",
                    )
                read = functools.partial(_array, file, name)
                tensors[name] = StoredTensor(part.get_shape(), read)
    return tensors


def _array(file: Path, name: str) -> np.ndarray[Any, Any]:
    """Reads one tensor.

    Opens the file only for this tensor, so that the file does not stay in memory.
    """
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as shard:
        array: np.ndarray[Any, Any] = shard.get_tensor(name)
    return array


def _weight_files(folder: Path) -> list[Path]:
    """Returns `model.safetensors`, which `transformers` prefers too, or the files of the index."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
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
    raise ConfigError("folder", f"{folder} must hold {WEIGHTS} or {INDEX}{refused}")
