"""Tests that models of GGUF files equal a folder with the same tensors and tokens, or give one
error line."""

import importlib.util
import json
import sys

import ggufs
import jax
import numpy as np
import pytest
from folders import SMALL, write_rows
from numpy.testing import assert_array_equal
from tables import cases

from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.language import pretrained
from jaxrl_po.language.pretrained import architectures, gguf
from jaxrl_po.language.rope import Rope
from jaxrl_po.run.experiment import models

# Widths are at least 32, the number of values in a quantised block.
WIDE = {"hidden_size": 32, "intermediate_size": 64}
TWINS = {
    # Two of the frequencies lie between those that remain unchanged and those that are divided.
    "llama": ("llama", "llama-bpe", {"rope_theta": 100.0, "head_dim": 8}),
    "smollm2": ("smollm2", "smollm", {}),
    "qwen2": ("qwen2", "qwen2", {"num_attention_heads": 4}),
    "qwen3": ("qwen3", "gpt-2", {"rms_norm_eps": 1e-6}),
}
KINDS = {"embed_tokens": "Q8_0", "q_proj.weight": "Q8_0", "up_proj": "BF16", "gate_proj": "F16"}
PIECES = {
    "gpt-2": ["I", "'", "LL", " pay", " 12345", " €!", "\n\n ", " ok", " it", "'s"],
    "smollm": ["I", "'", "LL", " pay", " ", *"12345", " €!", "\n\n ", " ok", " it", "'s"],
    "llama-bpe": ["I", "'LL", " pay", " ", "123", "45", " €!\n\n", " ", " ok", " it", "'s"],
    "qwen2": ["I", "'LL", " pay", " ", *"12345", " €!\n\n", " ", " ok", " it", "'s"],
}


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """Returns a function `family -> (GGUF file, folder, loaded file, loaded folder)` for the same
    model."""
    place, made = tmp_path_factory.mktemp("gguf"), {}

    def both(name):
        if name not in made:
            family, pre, changed = TWINS[name]
            folder = ggufs.write_folder(place / name, family, pre, **WIDE, **changed)
            file = ggufs.write(place / f"{name}.gguf", folder, pre, kinds=KINDS)
            made[name] = file, folder, pretrained.load(file), pretrained.load(folder)
        return made[name]

    return both


def equal(ours, theirs):
    jax.tree.map(assert_array_equal, ours.params, theirs.params)
    assert ours.model == theirs.model
    assert ours.chat_template.source == theirs.chat_template.source
    for name in ("size", "pad", "ends"):
        assert getattr(ours.tokenizer, name) == getattr(theirs.tokenizer, name)
    for text in ggufs.ODD:
        for special in (False, True):
            found = ours.tokenizer.encode(text, special=special)
            assert found == theirs.tokenizer.encode(text, special=special), text
        assert ours.tokenizer.decode(found) == theirs.tokenizer.decode(found)


@pytest.mark.parametrize("name", TWINS)
def test_file_equals_folder_of_same_tensors_and_tokens(twins, name):
    file, folder, ours, theirs = twins(name)
    equal(ours, theirs)
    assert architectures.write(ours.model) == architectures.write(theirs.model)
    assert ours.model.epsilon == json.loads((folder / "config.json").read_text())["rms_norm_eps"]
    # Parameters that keep their types have the half-precision type of the file.
    kept = pretrained.load(file, param_dtype=None).params
    jax.tree.map(assert_array_equal, kept, pretrained.load(folder, param_dtype=None).params)
    assert str(kept["params"]["blocks"]["mlp"]["up"]["kernel"].dtype) == "bfloat16"


def test_llama_3_context_is_found_from_divisors():
    published = {"rope_scaling": ggufs.families.STRETCHED, "head_dim": 64}
    for factor in (8.0, 32.0):
        published["rope_scaling"] |= {"factor": factor, "original_max_position_embeddings": 8192}
        found = gguf._stretched(ggufs.stretched(published, 5e5), 5e5, 64)
        assert architectures._rope(found | {"rope_theta": 5e5}) == Rope(5e5, factor, 8192)


@pytest.mark.parametrize("pre", PIECES)
def test_texts_are_split_as_the_pre_tokenizer_says(tmp_path, pre):
    folder = ggufs.write_folder(tmp_path / "folder", "smollm2", pre)
    rules = pretrained.load(ggufs.write(tmp_path / "m.gguf", folder, pre)).tokenizer.rules
    pieces = rules.pre_tokenizer.pre_tokenize_str("I'LL pay 12345 €!\n\n  ok it's")
    assert [rules.decoder.decode([piece]) for piece, _ in pieces] == PIECES[pre]


def test_llama_3_vocabulary_word_needs_no_merges(tmp_path):
    folder = ggufs.write_folder(tmp_path / "folder", "smollm2", "smollm")
    for pre, pieces in (("llama-bpe", 1), ("smollm", 3)):
        path = ggufs.write(tmp_path / f"{pre}.gguf", folder, pre, tokenizer__ggml__merges=["s a"])
        assert len(pretrained.load(path).tokenizer.encode("the")) == pieces


def test_saved_model_is_a_folder_of_same_tensors(twins, tmp_path):
    _, _, ours, _ = twins("qwen3")
    pretrained.save(tmp_path / "saved", *ours)
    again = pretrained.load(tmp_path / "saved")
    equal(again, ours)
    assert again.tokenizer.encode("a<|end|>") == ours.tokenizer.encode("a<|end|>")


def test_a_token_is_added_where_the_file_says(tmp_path):
    folder = ggufs.write_folder(tmp_path / "folder", "smollm2", "llama-bpe")
    for added, expected in (
        ({}, [1, "a"]),
        ({"tokenizer__ggml__add_bos_token": False}, ["a"]),
        (
            {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__add_eos_token": True},
            [1, "a", 2],
        ),
    ):
        path = ggufs.write(tmp_path / f"{len(expected)}.gguf", folder, "llama-bpe", **added)
        tokenizer = pretrained.load(path).tokenizer
        a = tokenizer.rules.token_to_id("a")
        assert tokenizer.encode("a", special=True) == [a if e == "a" else e for e in expected]


def tensor(name, data, kind="F32"):
    def change(tensors):
        tensors[name] = data, kind

    return {"change": change}


BAD = {
    "architecture": (
        {"general__architecture": "gemma3"},
        r"general\.architecture must be llama or qwen2 or qwen3, got 'gemma3'",
    ),
    "experts": ({"llama__expert_count": 8}, r"llama\.expert_count must be left out, got 8"),
    "parts": ({"split__count": 2}, r"split\.count must be 0 or 1, got 2"),
    "yarn": (
        {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0},
        "rope_type must be default, linear or llama3, got 'yarn'",
    ),
    "partial": (
        {"llama__rope__dimension_count": 4},
        r"llama\.rope\.dimension_count must be 6, got 4",
    ),
    "entry": ({"llama__block_count": None}, r"must have llama\.block_count"),
    "lists": (
        {"llama__feed_forward_length": [64, 64]},
        r"llama\.feed_forward_length must be one number, got \[64, 64\]",
    ),
    "pieces": ({"tokenizer__ggml__model": "llama"}, r"ggml\.model must be gpt2, got 'llama'"),
    "pre": (
        {"tokenizer__ggml__pre": "tekken"},
        r"ggml\.pre must be gpt-2 or llama-bpe or qwen2 or smollm, got 'tekken'",
    ),
    "prefix": (
        {"tokenizer__ggml__add_space_prefix": True},
        r"add_space_prefix must be False, got True",
    ),
    "kinds": ({"tokenizer__ggml__token_type": None}, r"must have tokenizer\.ggml\.token_type"),
    "unknown": (
        tensor("rope_factors_long.weight", np.ones(3, np.float32)),
        r"tensor rope_factors_long\.weight has no place",
    ),
    "type": (
        tensor("blk.0.ffn_down.weight", np.zeros((24, 64), np.int8), kind="I8"),
        r"tensor model\.layers\.0\.mlp\.down_proj\.weight is of type I8, which gguf does not read",
    ),
    "divisors": (
        tensor("rope_freqs.weight", np.array([1, 2, 3], np.float32)),
        r"rope_freqs\.weight must be the divisors of Llama 3's RoPE",
    ),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Returns a small folder whose files a test may damage."""
    place = tmp_path_factory.mktemp("small")
    changed = {"intermediate_size": 64}
    return ggufs.write_folder(place / "folder", "smollm2", "smollm", **changed)


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_read_is_named(small, tmp_path, bad):
    changed, message = BAD[bad]
    path = ggufs.write(tmp_path / "m.gguf", small, **({"pre": "smollm"} | changed))
    with pytest.raises(ConfigError, match=message) as raised:
        pretrained.load(path)
    assert "\n" not in str(raised.value)


def test_an_old_stretch_of_every_frequency_is_read(small, tmp_path):
    path = ggufs.write(tmp_path / "m.gguf", small, "smollm", llama__rope__scaling__factor=2.0)
    assert pretrained.load(path).model.rope == Rope(1e5, 2.0)


@pytest.fixture
def rows(tmp_path):
    return write_rows(
        tmp_path / "rows.jsonl", [{"prompt": f"{i}", "answer": "1"} for i in range(9)]
    )


@cases(
    "spoil",
    lambda content: content[:-100],
    lambda content: content[:3000],
    lambda content: b"",
    lambda content: b"PK\x03\x04" + content[4:],
    lambda content: content[:4] + b"\x09" + content[5:],
    lambda content: content.replace(b"token_embd.weight", b"\xff" * 17),
    ids=["truncated", "header", "empty", "foreign", "version", "name"],
)
def test_damaged_file_gives_one_line_before_any_writing(small, tmp_path, rows, spoil):
    path = ggufs.write(tmp_path / "m.gguf", small, "smollm")
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ConfigError, match=r"^init_from: \S+: \S+ must be a whole GGUF") as raised:
        launch.language([*SMALL, f"--init_from={path}", rows, f"--out={tmp_path / 'run'}"])
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_file_may_lack_a_template(small, tmp_path):
    path = ggufs.write(tmp_path / "m.gguf", small, "smollm", tokenizer__chat_template=None)
    assert pretrained.load(path).chat_template is None


def test_the_package_is_asked_for(small, tmp_path, rows, monkeypatch):
    path = ggufs.write(tmp_path / "m.gguf", small, "smollm")
    find = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda n: None if n == "gguf" else find(n))
        with pytest.raises(
            ConfigError, match=r"^init_from: needs .* gguf: pip install 'jaxrl_po\[gg"
        ):
            launch.language([*SMALL, f"--init_from={path}", rows, f"--out={tmp_path / 'run'}"])
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"needs .* gguf: pip install 'jaxrl_po\[gguf\]'"):
        pretrained.load(path)


def test_the_digest_is_of_weights_and_entries(small, tmp_path):
    def digest(**changed):
        path = ggufs.write(tmp_path / "m.gguf", small, "smollm", **changed)
        base = models.read_base(str(path), models.Computation())
        return models.digest_base(pretrained.load(path).params, base)

    first = digest()
    other = digest(tokenizer__ggml__eot_token_id=3)
    weights = digest(**tensor("output_norm.weight", np.ones(24, np.float32)))
    assert first == digest()
    # Another process computes the same digest, which therefore does not depend on the iteration
    # order of a set.
    names = list(gguf.read(tmp_path / "m.gguf").json("config.json"))
    assert names[4:9] == list(gguf.REQUIRED.values())
    assert len({first, other, weights}) == 3
