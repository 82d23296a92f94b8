"""Writes tiny checkpoints of each pretrained family, with odd sizes, in the form that
`transformers` writes.

Weights depend only on the name of a tensor, so that any program can compute them again.
"""

import json
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

NEEDED = "needs pip install '.[pretrained]'"
for module in ("jinja2", "safetensors", "tokenizers"):
    pytest.importorskip(module, reason=NEEDED)
safetensors = pytest.importorskip("safetensors.numpy")
tokenizers = pytest.importorskip("tokenizers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [1, 2],
    "pad_token_id": 2,
    "bos_token_id": 3,
}
STRETCHED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = {
    # The configuration has the former spelling of RoPE; the slow frequencies are stretched.
    "llama": SIZES
    | {
        "model_type": "llama",
        "hidden_act": "silu",
        "head_dim": 8,
        "num_key_value_heads": 2,
        "rope_theta": 5e4,
        "rope_scaling": STRETCHED | {"rope_type": "llama3", "original_max_position_embeddings": 64},
        "tie_word_embeddings": False,
    },
    # SmolLM2 is a Llama whose head size is width / heads, here with one key head for all queries.
    "smollm2": SIZES
    | {
        "model_type": "llama",
        "hidden_act": "silu",
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "tie_word_embeddings": True,
    },
    "qwen2": SIZES
    | {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
    "qwen3": SIZES
    | {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "vocab_size": 1101,
        "head_dim": 10,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_theta": 5e6,
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
    "gemma3": SIZES
    | {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 7,
        "head_dim": 8,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 12,
        "sliding_window": 4,
        "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
        "tie_word_embeddings": True,
    },
}
# Both libraries get rows of random words, of which the second has padding on the left, and a chat.
LENGTH, NEW = 70, 64
MESSAGES = [
    {"role": "system", "content": "w8 w9"},
    {"role": "user", "content": " w4 w5 "},
    {"role": "assistant", "content": "w6"},
    {"role": "user", "content": "w7"},
]
SHARDED, HALF = ("qwen3",), ("qwen2", "qwen3")
TEMPLATE = (
    "{%- if messages[0].role == 'system' %}{{ '<s> ' + messages[0].content + '\\n' }}{% endif %}\n"
    "{%- for message in messages if message.role != 'system' %}\n"
    "{%- if message.role not in ['user', 'assistant'] %}\n"
    "{{- raise_exception('role ' + message.role + ' is unknown') }}\n"
    "{%- endif %}\n"
    "{{- message.role + ': ' }}\n"
    "{%- generation %}{{ message.content | trim }}{% endgeneration %}{{ eos_token + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if tools %}{{ tools | tojson }}{% endif %}\n"
    "{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def shapes_of(config: dict) -> dict[str, list[int]]:
    """Returns `{name: shape}` of the tensors of a checkpoint."""
    width, hidden = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size, family = config.get("head_dim", width // heads), config["model_type"]
    found = {"model.embed_tokens.weight": [config["vocab_size"], width]}
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        norms = ["input_layernorm", "post_attention_layernorm"]
        if family == "gemma3_text":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        found |= {f"{block}.{name}.weight": [width] for name in norms}
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            found[f"{block}.self_attn.{name}_proj.weight"] = [count * size, width]
            if family == "qwen2":
                found[f"{block}.self_attn.{name}_proj.bias"] = [count * size]
            if family in ("qwen3", "gemma3_text") and name != "v":
                found[f"{block}.self_attn.{name}_norm.weight"] = [size]
        found[f"{block}.self_attn.o_proj.weight"] = [width, heads * size]
        found |= {f"{block}.mlp.{name}_proj.weight": [hidden, width] for name in ("gate", "up")}
        found[f"{block}.mlp.down_proj.weight"] = [width, hidden]
    found["model.norm.weight"] = [width]
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = [config["vocab_size"], width]
    return found


def weight(name: str, shape: list[int], family: str) -> np.ndarray:
    """Returns a tensor of order one, far from an initial model, so that differences are visible."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    if "norm" in name:
        return 0.3 * drawn + (0.0 if family == "gemma3_text" else 1.0)
    if "embed" in name:
        return 0.5 * drawn
    return (1.5 * drawn / np.sqrt(shape[-1])) if len(shape) == 2 else 0.5 * drawn


def write(folder: Path, name: str, **changed) -> Path:
    """Writes a checkpoint: config, weights (some of them sharded or in bfloat16), tokenizer,
    template."""
    config = {key: value for key, value in (CONFIGS[name] | changed).items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    dtype = ml_dtypes.bfloat16 if name in HALF else np.float32
    tensors = {
        key: weight(key, shape, config["model_type"]).astype(dtype)
        for key, shape in shapes_of(config).items()
    }
    if name in SHARDED:
        # In a checkpoint with mixed types, the last file is in float32.
        names = sorted(tensors)
        parts = [names[i::3] for i in range(3)]
        files = [f"model-{i + 1:05d}-of-00003.safetensors" for i in range(3)]
        for file, part in zip(files, parts, strict=True):
            kind = np.float32 if file == files[-1] else dtype
            safetensors.save_file(
                {key: tensors[key].astype(kind) for key in part},
                folder / file,
                metadata={"format": "pt"},
            )
        weight_map = {key: file for file, part in zip(files, parts, strict=True) for key in part}
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer: words `w4`, `w5`, … and four special tokens.

    The token PAD also ends a text, as in Qwen 3.
    """
    special = ["<unk>", "<end>", "<pad>", "<bos>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(4, 97))])}
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    rules.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in special])
    rules.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"__type": "AddedToken", "content": "<end>", "special": True},
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
