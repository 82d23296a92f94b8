"""Tests pretrained folders that are refused, and the message of each."""

import json

import families
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_po.config import ConfigError
from jaxrl_po.language import pretrained

NORM = "model.norm.weight"


def rewrite(folder, **changed):
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | changed
    path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))


def drop(folder, name):
    (folder / name).unlink()


def tensors(folder, change):
    path = folder / "model.safetensors"
    held = load_file(path)
    change(held)
    save_file(held, path)


def pickled(folder):
    drop(folder, "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def without_end(folder):
    drop(folder, "generation_config.json")
    rewrite(folder, eos_token_id=None)
    (folder / "tokenizer_config.json").write_text("{}")


BAD = {
    "no config": (lambda f: drop(f, "config.json"), "must hold config.json"),
    "config of another kind": (lambda f: (f / "config.json").write_text("[]"), "JSON object"),
    "config that is no JSON": (lambda f: (f / "config.json").write_text("{"), "must be JSON"),
    "unknown family": (
        lambda f: rewrite(f, model_type="mamba"),
        "model_type must be one of llama, qwen2, qwen3, gemma3_text, got 'mamba'",
    ),
    "missing entry": (lambda f: rewrite(f, hidden_size=None), "llama must have 'hidden_size'"),
    "bias": (lambda f: rewrite(f, mlp_bias=True), "mlp_bias must be False or left out, got True"),
    "rope": (
        lambda f: rewrite(f, rope_scaling={"rope_type": "yarn", "factor": 2.0}),
        "rope_type must be default, linear or llama3, got 'yarn'",
    ),
    "partial rope": (
        lambda f: rewrite(f, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor must be 1.0 or left out, got 0.5",
    ),
    "windows": (
        lambda f: rewrite(f, layer_types=["sliding_attention", "full_attention"]),
        "layer_types of llama must all be full_attention",
    ),
    "activation": (lambda f: rewrite(f, hidden_act="relu"), "hidden_act must be one of silu, gelu"),
    "missing tensor": (
        lambda f: tensors(f, lambda held: held.pop(NORM)),
        "tensor model.norm.weight is missing",
    ),
    "misshaped tensor": (
        lambda f: tensors(f, lambda held: held.update({"lm_head.weight": np.ones((97, 3))})),
        r"tensor lm_head.weight must be \[97, 24\] by the settings of the model, got \[97, 3\]",
    ),
    "unknown tensor": (
        lambda f: tensors(f, lambda held: held.update(extra=np.ones(2))),
        "tensor extra has no place",
    ),
    "pickle": (pickled, "must hold model.safetensors or .* pytorch_model.bin is not read"),
    "truncated": (truncated, "must hold whole safetensors files"),
    "no tokenizer": (lambda f: drop(f, "tokenizer.json"), "must hold tokenizer.json"),
    "no real tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        "tokenizer.json must be a tokenizer",
    ),
    "vocabulary": (
        lambda f: rewrite(f, vocab_size=50),
        "must have ids below 50, the vocabulary of the model, got 96",
    ),
    "no end": (without_end, "must name a token that ends a text"),
    "no heads": (
        lambda f: rewrite(f, num_attention_heads=0),
        r"config.json of llama: num_attention_heads must be a whole number in \[1, inf\), got 0",
    ),
    "text for a number": (
        lambda f: rewrite(f, rms_norm_eps="1e-5"),
        r"rms_norm_eps must be a number in \(0, inf\), got '1e-5'",
    ),
    "text for a switch": (
        lambda f: rewrite(f, tie_word_embeddings="false"),
        "tie_word_embeddings must be true or false, got 'false'",
    ),
    "quantized": (
        lambda f: rewrite(f, quantization_config={"quant_method": "fp8"}),
        "quantization_config must be left out, got {'quant_method': 'fp8'}: dequantize",
    ),
    "fp8": (
        lambda f: tensors(
            f, lambda held: held.update({NORM: held[NORM].astype(ml_dtypes.float8_e4m3fn)})
        ),
        "tensor model.norm.weight must be of a type in F64, F32, F16, BF16, got F8_E4M3: deq",
    ),
    "another head of a tied model": (
        lambda f: rewrite(f, tie_word_embeddings=True),
        "tensor lm_head.weight must equal model.embed_tokens.weight with tie_word_embeddings true",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_folder_is_named(tmp_path, bad):
    spoil, message = BAD[bad]
    folder = families.write(tmp_path / "llama", "llama")
    spoil(folder)
    with pytest.raises(ConfigError, match=message):
        pretrained.load(folder)


def test_repeated_head_of_tied_model_is_read(tmp_path):
    folder = families.write(tmp_path / "smollm2", "smollm2")
    tensors(folder, lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"]}))
    assert "output" not in pretrained.load(folder).params["params"]


def test_a_bad_index_is_named(tmp_path):
    folder = families.write(tmp_path / "qwen3", "qwen3")
    drop(folder, "model-00002-of-00003.safetensors")
    with pytest.raises(ConfigError, match=r"model-00002-of-00003.safetensors is missing"):
        pretrained.load(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="must be JSON with a weight_map"):
        pretrained.load(folder)
    with pytest.raises(ConfigError, match="nowhere must be a folder"):
        pretrained.load(folder / "nowhere")
