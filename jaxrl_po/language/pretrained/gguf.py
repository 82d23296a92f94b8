"""Reads GGUF files of Llama, Qwen 2 and Qwen 3 with byte-level BPE, as folders.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and the converter of llama.cpp,
whose steps this module inverts. Any unknown entry of a file is refused by name.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_po.config import ConfigError
from jaxrl_po.language import rope
from jaxrl_po.language.pretrained import files
from jaxrl_po.language.pretrained.architectures import (
    ARCHITECTURES,
    LLAMA,
    QWEN2,
    QWEN3,
    rope_settings,
)
from jaxrl_po.language.pretrained.files import ModelFiles, StoredTensor

FAMILIES = (LLAMA, QWEN2, QWEN3)
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
# Architecture entries of a GGUF file, and their names in `config.json`.
REQUIRED = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
SETTINGS = REQUIRED | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
# Entries that are redundant, that must have the value common to all models, or that RoPE uses.
OTHERS = ("attention.value_length", "rope.dimension_count", "tensor_data_layout", "vocab_size")
SCALING = tuple(
    f"rope.scaling.{name}" for name in ("type", "factor", "finetuned", "original_context_length")
)
FREQUENCIES = "rope_freqs.weight"
# Types in `tokenizer.ggml.token_type`; all other types are special.
NORMAL, USER_DEFINED, UNUSED = 1, 4, 5
SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
ENDS = ("eos", "eot", "eom")  # entries for the end of a text, of a turn and of a message

_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_GPT2 = _BYTES | {"use_regex": True}


def _split(digits: str) -> list[dict[str, Any]]:
    pattern = {"Regex": _PIECES % digits}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return [split, _BYTES | {"use_regex": False}]


# Patterns that split a text before pairs of tokens are merged, by the value of
# `tokenizer.ggml.pre`.
PRE_TOKENIZERS = {
    "gpt-2": [_GPT2],
    "llama-bpe": _split("{1,3}"),
    "qwen2": _split(""),
    "smollm": [{"type": "Digits", "individual_digits": True}, _GPT2],
}


def read(path: Path) -> ModelFiles:
    """Reads a GGUF file as the folder that was converted to the file; tensors are read later.

    Raises:
      ConfigError: the file is not GGUF, is damaged or has an entry that this module cannot read.
    """
    found = path.stat()
    return _read(path, found.st_mtime_ns, found.st_size)


# The package `gguf` takes seconds to read the vocabulary of a large model.
@functools.lru_cache(maxsize=2)
def _read(path: Path, *_: int) -> ModelFiles:
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        entries = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ConfigError("folder", f"{path} must be a whole GGUF file: {error}") from None
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    try:
        config = _config(entries, tensors)
        contents = _contents(config, entries)
    except KeyError as missing:
        raise ConfigError("folder", f"{path} must have {missing.args[0]}") from None
    except ConfigError as error:
        raise ConfigError("folder", f"{path}: {error.message}") from None
    stored = _stored(config, tensors)
    return ModelFiles(path, contents, lambda: stored, adds_tokens=True)


def _contents(config: dict[str, Any], entries: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the text files of the folder that a GGUF file stands for, by name."""
    rules, settings = _tokenizer(entries)
    ends = [entries[key] for end in ENDS if (key := f"tokenizer.ggml.{end}_token_id") in entries]
    objects = {
        files.CONFIG: config | {"vocab_size": len(entries["tokenizer.ggml.tokens"])},
        files.TOKENIZER: rules,
        files.SETTINGS: settings,
        files.GENERATION: {"eos_token_id": list(dict.fromkeys(ends))},
    }
    contents = {name: json.dumps(content).encode() for name, content in objects.items()}
    if template := entries.get("tokenizer.chat_template"):
        contents[files.TEMPLATE] = template.encode()
    return contents


def _stored(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Returns the tensors by their names in a folder; q and k of a Llama return to split halves."""
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config.get("num_key_value_heads", config["num_attention_heads"]),
    }
    rotated = heads if config["model_type"] == LLAMA else {}
    stored = {}
    for tensor in tensors.values():
        name = _name(tensor.name)
        read = functools.partial(_array, name, tensor, rotated.get(name.split(".")[-2:][0], 0))
        stored[name] = StoredTensor(tensor.shape.tolist()[::-1], read)
    return stored


def _name(name: str) -> str:
    """Returns a tensor's name in a folder; a name outside `OUTER` and `INNER` is unchanged."""
    outer, *rest = name.split(".")
    if outer == "blk" and len(rest) == 3 and rest[1] in INNER:
        return f"model.layers.{rest[0]}.{INNER[rest[1]]}.{rest[2]}"
    return ".".join([OUTER.get(outer, outer), *rest])


def _config(entries: Mapping[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of `config.json`; removes stretched RoPE frequencies from `tensors`."""
    family = entries["general.architecture"]
    _require("general.architecture", family, FAMILIES)
    _require("split.count", entries.get("split.count", 0), (0, 1))
    own = _inside(entries, f"{family}.")
    for name, value in own.items():
        if value and name not in (*SETTINGS, *OTHERS, *SCALING):
            raise ConfigError("folder", f"{family}.{name} must be left out, got {value}")
    config = {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    # The order is the same in every process, since the digest of a base model hashes the resulting
    # text.
    for name, ours in SETTINGS.items():
        if name in REQUIRED and name not in own:
            raise KeyError(f"{family}.{name}")
        if name not in own:
            continue
        value = own[name]
        if isinstance(value, list):
            raise ConfigError("folder", f"{family}.{name} must be one number, got {value}")
        # The number is written in decimal as in the file: float32 stores 9.99999975e-6 for 1e-5.
        config[ours] = float(str(np.float32(value))) if isinstance(value, float) else value
    size = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for name in ("rope.dimension_count", "attention.value_length"):
        _require(f"{family}.{name}", own.get(name, size), (size,))
    factor = own.get("rope.scaling.factor", 0.0)
    kind = own.get("rope.scaling.type", "linear" if factor else "none")
    if kind != "none":
        config["rope_scaling"] = {"rope_type": kind, "factor": factor}
    if family == LLAMA and FREQUENCIES in tensors:
        _require(f"{family}.rope.scaling.type", kind, ("none",))
        divisors = np.asarray(tensors.pop(FREQUENCIES).data)
        config["rope_scaling"] = _stretched(divisors, config.get("rope_theta", 1e4), size)
    return config


def _inside(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Returns the entries whose names begin with a prefix, without the prefix."""
    return {key.removeprefix(prefix): entries[key] for key in entries if key.startswith(prefix)}


def _require(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        choices = " or ".join(map(str, allowed))
        raise ConfigError("folder", f"{name} must be {choices}, got {value!r}")


def _stretched(divisors: np.ndarray[Any, Any], theta: float, size: int) -> dict[str, Any]:
    """Finds the settings of Llama 3's RoPE from the divisor of each frequency, `[C/2]`.

    The bounds of the wavelengths are assumed to be the same as in every published model; only the
    context is searched.
    """
    factor = float(str(np.float32(divisors.max())))
    plain = rope.frequencies(size, rope.Rope(theta))
    for context in (8192, *(2**n for n in range(5, 24))):
        found = rope.Rope(theta, factor, context, low=1.0, high=4.0)
        expected = plain / rope.frequencies(size, found)
        if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-4):
            settings = rope_settings(found)
            del settings["rope_theta"]
            return settings
    raise ConfigError(
        "folder",
        f"{FREQUENCIES} must be the divisors of Llama 3's RoPE with low_freq_factor 1 and "
        f"high_freq_factor 4, got {len(divisors)} others",
    )


def _tokenizer(entries: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the contents of `tokenizer.json` and `tokenizer_config.json`."""
    own = _inside(entries, "tokenizer.ggml.")
    _require("tokenizer.ggml.model", own.get("model"), ("gpt2",))
    _require("tokenizer.ggml.pre", own.get("pre"), tuple(PRE_TOKENIZERS))
    _require("tokenizer.ggml.add_space_prefix", own.get("add_space_prefix", False), (False,))
    for name in ("tokens", "token_type", "merges", "eos_token_id"):
        if name not in own:
            raise KeyError(f"tokenizer.ggml.{name}")
    pre, tokens, kinds = own["pre"], own["tokens"], own["token_type"]
    texts = dict(enumerate(tokens))
    ids = {name: own.get(f"{name}_token_id") for name in SPECIAL}
    special = {name: texts[i] for name, i in ids.items() if i in texts}
    rules = {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "decoder": _GPT2,
        "model": {
            "type": "BPE",
            # A token of type UNUSED fills a row of the embedding and has no text.
            "vocab": {token: i for i, token in texts.items() if kinds[i] != UNUSED},
            "merges": own["merges"],
            "ignore_merges": pre == "llama-bpe",
        },
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "special": kinds[i] != USER_DEFINED,
                **dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False),
            }
            for i, token in texts.items()
            if kinds[i] not in (NORMAL, UNUSED)
        ],
    }
    settings = {f"{SPECIAL[name]}_token": token for name, token in special.items()}
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # The defaults are llama.cpp's defaults for a file without the entry.
        "add_bos_token": own.get("add_bos_token", pre == "llama-bpe"),
        "add_eos_token": own.get("add_eos_token", False),
    }
    return rules, settings


def _array(name: str, tensor: Any, heads: int) -> np.ndarray[Any, Any]:
    """Returns a copy of a tensor, float32 if quantised; reorders `heads` heads by `_halves`."""
    import gguf

    kind: str = tensor.tensor_type.name
    if kind in ("F32", "F16", "BF16"):
        array = np.array(tensor.data)
        array = array.view(ml_dtypes.bfloat16) if kind == "BF16" else array
    else:
        try:
            array = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ConfigError(
                "folder", f"tensor {name} is of type {kind}, which gguf does not read"
            ) from None
    return _halves(array, heads) if heads else array


def _halves(array: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorders each head's rows, rotated in pairs, from the file's `[C/2, 2]` to `[2, C/2]`."""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)
