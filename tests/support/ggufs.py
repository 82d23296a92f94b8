"""Writes tiny GGUF files, as llama.cpp's converter makes them from a folder, and the folders."""

import json
import math

import families
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

gguf = pytest.importorskip("gguf", reason="needs pip install '.[gguf]'")
tokenizers = families.tokenizers

CORPUS = [
    "the cat said that it's 12 or 3456, isn't it? they'll see what we've got and I'd say don't",
    "cat\n\n  the dog\tsaid: what? what!! 1234 + 5678 = 6912\n",
    "naïve café 中文字 中文 日本語 🙂🙂 it's the the the said said",
]
SPECIAL, PLAIN = ["<|endoftext|>", "<|start|>", "<|end|>"], "<think>"
LAST = "[PAD]"  # a row of the embedding that does not stand for a token
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\\n' + m.content + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
MESSAGES = [
    {"role": "user", "content": "What is 12 + 34?"},
    {"role": "assistant", "content": "46"},
    {"role": "user", "content": "And 1/3?"},
]
NUMERALS = "½ ² ٣ Ⅷ 9²"
# Texts that the pre-tokenizers split differently.
ODD = [
    "",
    "12345 1 22 333 4444, 3.14159 and 1,000,000",
    "it's IT'S they'll WE'VE don't I'd 'tis",
    "中文字 日本語テキスト 한국어 عربى",
    "🙂🙂👩‍👩‍👧 café e\u0301 naïve ﬁ",
    "  two   spaces\t\ttabs\n\n\nlines \r\n  end  ",
    "a\u00a0b\u2003c\u200bd\u3000e \x00\x07",
    "<|start|>user\nthe cat<|end|>\n<think> x</think> <|endoftext|>",
    "<think>the<think>  [PAD] <|start",
    NUMERALS,
]
# Pre-tokenizers as in the `tokenizer.json` of GPT-2, Llama 3, Qwen 2 and SmolLM.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def pre_tokenizer(pre):
    of = tokenizers.pre_tokenizers
    if pre in ("gpt-2", "smollm"):
        byte_level = of.ByteLevel(add_prefix_space=False, use_regex=True)
        return byte_level if pre == "gpt-2" else of.Sequence([of.Digits(True), byte_level])
    pattern = WORDS.replace("DIGITS", "{1,3}" if pre == "llama-bpe" else "")
    split = of.Split(tokenizers.Regex(pattern), "isolated")
    return of.Sequence([split, of.ByteLevel(add_prefix_space=False, use_regex=False)])


def write_tokenizer(folder, pre):
    """Writes a tokenizer: special tokens first, as in SmolLM, then BPE tokens and an added ordinary
    token."""
    rules = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=pre == "llama-bpe"))
    rules.pre_tokenizer = pre_tokenizer(pre)
    if pre == "qwen2":
        rules.normalizer = tokenizers.normalizers.NFC()
    rules.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rules.train_from_iterator(CORPUS, trainer)
    rules.add_tokens([tokenizers.AddedToken(PLAIN, normalized=False)])
    if pre == "llama-bpe":
        rules.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{SPECIAL[1]} $A", special_tokens=[(SPECIAL[1], 1)]
        )
    rules.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[2], "bos_token": SPECIAL[1], "unk_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return rules.get_vocab_size()


def write_folder(folder, name, pre, **changed):
    """Writes a checkpoint of `families` in float32 with the tokenizer of `write_tokenizer` and an
    extra row."""
    folder.mkdir(parents=True)
    size = write_tokenizer(folder, pre) + 1
    kept = {file.name: file.read_bytes() for file in folder.iterdir()}
    families.write(folder, name, vocab_size=size, eos_token_id=None, **changed)
    for file, content in kept.items():
        (folder / file).write_bytes(content)
    shards = sorted(folder.glob("model*.safetensors"))
    tensors = {key: value for shard in shards for key, value in load_file(shard).items()}
    for shard in [*shards, folder / "model.safetensors.index.json"]:
        shard.unlink(missing_ok=True)
    save({key: value.astype(np.float32) for key, value in tensors.items()}, folder)
    return folder


def save(tensors, folder):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def name_of(name):
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def interleaved(array, heads):
    """Returns the rows of q and k in the order of the converter's `permute`."""
    halves = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def stretched(config, theta):
    """Returns the divisors that the converter applies to the frequencies of Llama 3's RoPE."""
    given, size = config["rope_scaling"], config["head_dim"]
    original, low, high = (
        given[key]
        for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    found = []
    for i in range(0, size, 2):
        length = 2 * math.pi * theta ** (i / size)
        smooth = (original / length - low) / (high - low)
        if length < original / high:
            found.append(1.0)
        elif length > original / low:
            found.append(given["factor"])
        else:
            found.append(1 / ((1 - smooth) / given["factor"] + smooth))
    return np.array(found, np.float32)


def entries_of(folder, config, pre):
    family = config["model_type"]
    heads, width = config["num_attention_heads"], config["hidden_size"]
    rules = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = rules["model"]["vocab"] | {t["content"]: t["id"] for t in rules["added_tokens"]}
    tokens = [*sorted(vocabulary, key=vocabulary.get), LAST]
    kinds = [1] * len(tokens)
    for token in rules["added_tokens"]:
        kinds[token["id"]] = 3 if token["special"] else 4
    kinds[-1] = 5
    rope = config.get("rope_parameters") or config
    return {
        f"{family}.block_count": config["num_hidden_layers"],
        f"{family}.context_length": config["max_position_embeddings"],
        f"{family}.embedding_length": width,
        f"{family}.feed_forward_length": config["intermediate_size"],
        f"{family}.attention.head_count": heads,
        f"{family}.attention.head_count_kv": config["num_key_value_heads"],
        f"{family}.attention.key_length": config.get("head_dim", width // heads),
        f"{family}.attention.value_length": config.get("head_dim", width // heads),
        f"{family}.rope.freq_base": float(rope["rope_theta"]),
        f"{family}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{family}.expert_count": 0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in rules["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.eom_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }


def write(path, folder, pre, *, kinds=None, change=lambda tensors: None, **changed):
    """Writes the GGUF file of a folder from `write_folder`.

    Args:
      path: Path of the file.
      folder: Folder of the checkpoint; its tensors are replaced by rounded values where the GGUF
        file rounds them.
      pre: Name of the pre-tokenizer in the GGUF file.
      kinds: `{part of a tensor's name: type}`; tensors that no part matches are in float32.
      change: `({name: (data, type)}) -> None`, changes the file's tensors in place.
      **changed: Metadata entries of the GGUF file, with `__` for a dot; None omits an entry.
    """
    kinds = kinds or {}
    config = json.loads((folder / "config.json").read_text())
    family, held = config["model_type"], load_file(folder / "model.safetensors")
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    tensors = {}
    for name, array in held.items():
        kind = next((kinds[part] for part in kinds if part in name), "F32")
        data, held[name] = quantised(array, kind)
        part = name.split(".")[-2]
        if family == "llama" and part in heads:
            data = interleaved(data, config[heads[part]])
        tensors[name_of(name)] = (data, kind)
    save(held, folder)
    if config.get("rope_scaling"):
        tensors["rope_freqs.weight"] = (stretched(config, config["rope_theta"]), "F32")
    change(tensors)
    entries = entries_of(folder, config, pre)
    entries |= {name.replace("__", "."): value for name, value in changed.items()}
    writer = gguf.GGUFWriter(path, entries.pop("general.architecture", family))
    for name, value in entries.items():
        if value is not None:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for name, (data, kind) in tensors.items():
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantised(array, kind):
    """Returns the quantised data for the file, and the numbers that the data represent."""
    if kind == "F32":
        return array, array
    if kind == "F16":
        return array.astype(np.float16), array.astype(np.float16)
    if kind == "BF16":
        half = array.astype(ml_dtypes.bfloat16)
        return half.view(np.uint8), half
    assert kind == "Q8_0"
    data = gguf.quantize(array, gguf.GGMLQuantizationType.Q8_0)
    blocks = data.reshape(len(array), -1, 34)  # a block has a scale and 32 numbers of eight bits
    scale, numbers = blocks[..., :2].copy().view(np.float16), blocks[..., 2:].view(np.int8)
    return data, (scale.astype(np.float32) * numbers).reshape(array.shape)
