"""Loads pretrained transformers: folders that `transformers` reads and writes too, and GGUF files.

`load` needs the extra `jaxrl_po[pretrained]` (safetensors, tokenizers and jinja2), and
`jaxrl_po[gguf]` for a GGUF file.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.config import ConfigError
from jaxrl_po.language.pretrained import architectures, files, gguf, text, weights
from jaxrl_po.language.pretrained.architectures import FAMILIES
from jaxrl_po.language.pretrained.files import ModelFiles
from jaxrl_po.language.pretrained.templates import ChatTemplate
from jaxrl_po.language.pretrained.text import TextTokenizer
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.types import PyTree, short_repr

__all__ = ["FAMILIES", "ChatTemplate", "Pretrained", "TextTokenizer", "load", "save"]


class Pretrained(NamedTuple):
    """Content of a pretrained model's folder or GGUF file.

    Attributes:
      model: transformer, whose logits are `model.apply(params, tokens, pad)[0]`.
      params: parameters of the model.
      tokenizer: tokenizer of the model, a `TextTokenizer`.
      chat_template: model's `ChatTemplate`; None if the model does not have one.
    """

    model: Transformer
    params: PyTree
    tokenizer: TextTokenizer
    chat_template: ChatTemplate | None


Pretrained.__repr__ = short_repr  # type: ignore[method-assign]


def load(
    folder: str | Path,
    *,
    dtype: Any = "float32",
    param_dtype: Any = "float32",
    remat: bool = False,
    place: weights.Place | None = None,
) -> Pretrained:
    """Loads a pretrained model: Llama, Qwen 2 and 3, or Gemma 3 for text.

    Args:
      folder: folder with `config.json`, `model.safetensors` or its index and shards,
        `tokenizer.json`, and `tokenizer_config.json`, `chat_template.jinja`,
        `generation_config.json` for models that have them; or a GGUF file of a Llama or Qwen, see
        `gguf`.
      dtype: type of the matrix products.
      param_dtype: type of the parameters; None keeps the type of each tensor.
      remat: True to recompute activations in the backward pass, see `Transformer`.
      place: `(path, value) -> array`, puts a parameter on its devices; None uses the default
        device.

    Raises:
      ConfigError: a file is missing or malformed; the message names the file. Weights are read
        after all other files.

    Example:
      >>> loaded = load("path/to/Qwen3-0.6B")  # doctest: +SKIP
      >>> messages = [{"role": "user", "content": "1 + 1?"}]
      >>> prompt = loaded.chat_template.render(messages)  # doctest: +SKIP
      >>> tokens = loaded.tokenizer.encode(prompt)  # doctest: +SKIP
    """
    try:
        found = read_files(folder)
        model = architectures.read(found.json(files.CONFIG), dtype=dtype, remat=remat)
        tokenizer, template = text.read_tokenizer(found, model.vocabulary)
        params = weights.read(found, model, dtype=param_dtype, place=place)
    except ImportError as error:
        extra = "gguf" if error.name == "gguf" else "pretrained"
        raise ConfigError(
            "folder", f"needs the package {error.name}: pip install 'jaxrl_po[{extra}]'"
        ) from None
    return Pretrained(model, params, tokenizer, template)


def read_files(path: str | Path) -> ModelFiles:
    """Reads the text files of a model; its tensors are read later.

    Args:
      path: folder or GGUF file.

    Raises:
      ConfigError: the path does not exist or lacks `config.json`; `gguf.read` lists errors of GGUF
        files.
    """
    path = Path(path)
    if not path.exists():
        raise ConfigError(
            "folder", f"{path} must be a folder with a pretrained model, or a GGUF file"
        )
    found = gguf.read(path) if path.is_file() else files.read_folder(path)
    if files.CONFIG not in found.contents:
        raise ConfigError("folder", f"{path} must hold {files.CONFIG}")
    return found


def save(
    folder: str | Path,
    model: Transformer,
    params: PyTree,
    tokenizer: TextTokenizer,
    chat_template: ChatTemplate | None = None,
    *,
    dtype: Any = None,
    context: int = 0,
) -> None:
    """Writes a folder that `load` and `transformers` read.

    Args:
      folder: folder to write to, new or empty.
      model: transformer of a pretrained family, or a transformer with the same formulas, such as
        models made by this package without `tied`.
      params: parameters of a single seed.
      tokenizer: tokenizer to write.
      chat_template: chat template to write; None writes no template.
      dtype: type of the tensors; None keeps the type of each parameter.
      context: number of tokens in the longest text; 0 omits the entry from `config.json`.

    Raises:
      ConfigError: the folder holds files, or no family computes the same function as the model.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError("folder", f"must be new or empty, got {folder}")
    config = architectures.write(model) | ({files.CONTEXT: context} if context else {})
    # `transformers` loads all tensors in this type; its default is the type of the first tensor.
    kind = jnp.dtype(dtype or jnp.result_type(*jax.tree.leaves(params))).name
    config |= {"dtype": kind, "torch_dtype": kind}
    folder.mkdir(parents=True, exist_ok=True)
    weights.write(folder, model, params, dtype=dtype)
    text.write_tokenizer(folder, tokenizer, chat_template)
    text.dump_json(folder / files.CONFIG, config | {"eos_token_id": list(tokenizer.ends)})
