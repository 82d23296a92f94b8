"""Pretrained transformers: folders that `transformers` reads and writes too, and GGUF files.

`load` needs the extra `jaxrl_po[pretrained]`: safetensors, tokenizers and jinja2; for a GGUF file
`jaxrl_po[gguf]`.
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
    """What a folder or a GGUF file holds.

    Attributes:
      model: `model.apply(params, tokens, pad)[0]` are the logits.
      params: its parameters.
      tokenizer: see `TextTokenizer`.
      chat_template: see `ChatTemplate`; None where there is none.
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
    """A pretrained model: Llama, Qwen 2 and 3, and Gemma 3 for text.

    Args:
      folder: with `config.json`, `model.safetensors` or its index and shards, `tokenizer.json`,
        and `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json` where the model
        has them; or a GGUF file of a Llama or Qwen, see `gguf`.
      dtype: of the matrix products.
      param_dtype: of the parameters; None keeps that of each tensor.
      remat: see `Transformer`.
      place: puts a parameter, given its path and value, on its devices; None takes the default one.

    Raises:
      ConfigError: a file is missing or not what it should be; names it. Weights are read last.

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
    """Reads the texts of a model, whose tensors are read later.

    Args:
      path: folder or GGUF file.

    Raises:
      ConfigError: it does not exist or lacks `config.json`; see `gguf.read` too.
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
      folder: new or empty.
      model: of a pretrained family, or with the same formulas, as our own are without `tied`.
      params: of one seed.
      tokenizer: see `TextTokenizer`.
      chat_template: see `ChatTemplate`.
      dtype: of the tensors; None keeps that of each parameter.
      context: the longest text, tokens; 0 leaves it out.

    Raises:
      ConfigError: the folder holds files, or no family computes what the model does.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError("folder", f"must be new or empty, got {folder}")
    config = architectures.write(model) | ({files.CONTEXT: context} if context else {})
    # `transformers` reads all tensors in this type, by default that of the first one.
    kind = jnp.dtype(dtype or jnp.result_type(*jax.tree.leaves(params))).name
    config |= {"dtype": kind, "torch_dtype": kind}
    folder.mkdir(parents=True, exist_ok=True)
    weights.write(folder, model, params, dtype=dtype)
    text.write_tokenizer(folder, tokenizer, chat_template)
    text.write_json(folder / files.CONFIG, config | {"eos_token_id": list(tokenizer.ends)})
