"""Tests pretrained models: equality with `transformers`, written and loaded files."""

import functools
import json
import sys
from pathlib import Path

import chex
import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from tables import cases

from jaxrl_po import language, types
from jaxrl_po.config import ConfigError
from jaxrl_po.language import Transformer, pretrained, sampling
from jaxrl_po.language.pretrained import architectures

GOLDEN = json.loads((Path(__file__).parent / "golden_pretrained.json").read_text())["families"]
EVERY_FAMILY = pytest.mark.parametrize("name", families.CONFIGS)
LENGTH, NEW = families.LENGTH, families.NEW
MESSAGES = families.MESSAGES


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Returns a map `family -> model` of models that `load` reads from a checkpoint."""
    folder = tmp_path_factory.mktemp("pretrained")
    return functools.cache(lambda name: pretrained.load(families.write(folder / name, name)))


def tokens_and_pad():
    """Returns the tokens and the padding that `make parity` uses."""
    usual = [i for i in range(97) if i not in (1, 2)]
    tokens = np.random.default_rng(0).choice(usual, size=(2, LENGTH))
    pad = LENGTH // 4
    tokens[1, :pad] = 2
    return jnp.asarray(tokens, jnp.int32), jnp.array([0, pad])


def last_logits(model, params):
    """Returns the logits that the golden file stores, `[2, 40]`."""
    return jax.jit(functools.partial(model.apply, last=1))(params, *tokens_and_pad())[0][:, 0, :40]


@EVERY_FAMILY
def test_logits_are_those_of_transformers(loaded, name):
    model = loaded(name)
    assert_allclose(last_logits(model.model, model.params), GOLDEN[name]["logits"], atol=1e-4)


def generated(model, tokens, pad, *, greedy, seed=0):
    return jax.jit(
        lambda: sampling.generate(
            model.model,
            model.params,
            tokens,
            pad,
            jax.random.split(jax.random.key(seed), len(tokens)),
            group_size=1,
            decoding=sampling.Decoding(NEW),
            eos=model.tokenizer.ends,
            pad_token=model.tokenizer.pad,
            greedy=greedy,
        )
    )()


@EVERY_FAMILY
def test_greedy_tokens_are_those_of_transformers(loaded, name):
    found = generated(loaded(name), *tokens_and_pad(), greedy=True)
    assert_array_equal(found.tokens, GOLDEN[name]["greedy"])


@EVERY_FAMILY
def test_chat_is_rendered_as_transformers_does(loaded, name):
    template = loaded(name).chat_template
    assert template.render(MESSAGES, tools=[{"é": 1}]) == GOLDEN[name]["chat"]
    assert not template.render(MESSAGES, add_generation_prompt=False).endswith("assistant: ")


@EVERY_FAMILY
def test_what_is_saved_is_loaded_again(loaded, name, tmp_path):
    first = loaded(name)
    pretrained.save(tmp_path / "again", *first)
    again = pretrained.load(tmp_path / "again")
    chex.assert_trees_all_close(first.params, again.params, rtol=1e-6, atol=2e-7)
    assert_allclose(last_logits(*again[:2]), last_logits(*first[:2]), atol=1e-5)
    assert again.chat_template == first.chat_template
    assert again.tokenizer.ends == (1, 2)
    assert again.tokenizer.pad == 2
    text = "w4 w5"
    assert again.tokenizer.encode(text) == first.tokenizer.encode(text) == [4, 5]
    with pytest.raises(ConfigError, match=r"^folder: must be new or empty, got .*again"):
        pretrained.save(tmp_path / "again", *first)


NAMED = [
    {"name": "default", "template": "{{ bos_token }}" + families.TEMPLATE},
    {"name": "tool_use", "template": "{{ tools }}"},
]


@cases("where", "list", "files")
def test_special_tokens_generation_and_named_templates_are_written(tmp_path, where):
    """Only the map of special tokens contains BOS: without the map, the template of our own folder
    would be refused."""
    folder = families.write(tmp_path / "first", "llama")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"bos_token": "<bos>", "additional_special_tokens": ["<unk>"]}
    generation = {"eos_token_id": [1, 2], "temperature": 0.6, "do_sample": True}
    if where == "list":
        settings["chat_template"] = NAMED
        (folder / "chat_template.jinja").unlink()
    else:
        (folder / "chat_template.jinja").write_text(NAMED[0]["template"])
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    for name, content in (
        ("tokenizer_config.json", settings),
        ("special_tokens_map.json", named),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content))
    first = pretrained.load(folder)
    assert first.chat_template.render(MESSAGES).startswith("<bos>")
    pretrained.save(tmp_path / "again", *first)
    again = pretrained.load(tmp_path / "again")
    assert again.chat_template == first.chat_template
    assert again.tokenizer._replace(rules=None) == first.tokenizer._replace(rules=None)
    for path in [*folder.glob("*token*.json"), *folder.glob("gen*.json"), *folder.rglob("*.jinja")]:
        written = (tmp_path / "again" / path.relative_to(folder)).read_text()
        if path.suffix == ".jinja":
            assert written == path.read_text()
        elif path.name != "tokenizer.json":
            assert json.loads(written) == json.loads(path.read_text()), path.name


def test_a_completion_ends_at_any_of_the_ends(loaded):
    tokenizer = loaded("llama").tokenizer
    assert tokenizer.decode([4, 5, 2, 6]) == tokenizer.decode([4, 5, 1, 6]) == "w4 w5"
    rows, mask = np.array([[4, 5, 2, 0], [6, 1, 4, 4]]), np.arange(4) < [[3], [2]]
    # An end token that the tokenizer does not mark as special counts as well.
    plain = tokenizer._replace(ends=(*tokenizer.ends, 5))
    assert tokenizer.decode_rows(rows, mask) == ["w4 w5", "w6"]
    assert plain.decode_rows(rows, mask) == ["w4", "w6"]
    assert tokenizer.eos == 1
    one = loaded("llama")._replace(tokenizer=tokenizer._replace(ends=(1,)))
    tokens, pad = tokens_and_pad()
    both = generated(loaded("llama"), tokens, pad, greedy=False, seed=4)
    cut = generated(one, tokens, pad, greedy=False, seed=4)
    assert both.tokens[jnp.arange(2), both.length - 1].tolist() == [1, 2]
    assert both.ended.all()
    assert cut.length[0] == both.length[0]
    assert cut.length[1] > both.length[1]


@cases(
    "settings, ends, pad",
    ({"pad_token": "<end>"}, [1], 0),  # PAD equals EOS, as in many fine-tuned Llamas
    ({}, [1, 2], 2),
    ({}, [0], 1),
    ({"pad_token": "<pad>"}, [1], 2),
)
def test_pad_is_never_the_eos_of_a_demonstration(tmp_path, settings, ends, pad):
    folder = families.write(tmp_path / "llama", "llama")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer = pretrained.load(folder).tokenizer
    assert (tokenizer.pad, tokenizer.eos) == (pad, ends[0])
    row = language.tasks.Example("w4", "w5 w6")
    task = language.tasks.table("one", tokenizer, [row], [row._replace(prompt="w7 w8")])
    whole = jnp.append(task.demonstrate(jnp.int32(0)), jnp.full(2, pad))
    assert float(task.score(jnp.int32(0), whole)) == 1.0
    assert_allclose(task.credit(jnp.int32(0), whole), [1 / 3] * 3 + [0, 0])


def test_any_end_is_accepted_and_the_templates_taught(tmp_path):
    """As in Llama 3, the first end token in the file differs from the end token that a chat model
    writes."""
    folder = families.write(tmp_path / "llama", "llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 1, 2]}))
    tokenizer = pretrained.load(folder).tokenizer
    assert (tokenizer.eos, set(tokenizer.ends), tokenizer.pad) == (1, {9, 1, 2}, 2)
    row = language.tasks.Example("w4", "w5 w6")
    task = language.tasks.table("one", tokenizer, [row], [row._replace(prompt="w7 w8")])
    assert task.demonstrate(jnp.int32(0)).tolist() == [5, 6, 1]
    for completion, score, credit in (
        ([5, 6, 1, 2, 2], 1.0, [1, 1, 1, 0, 0]),
        ([5, 6, 9, 2, 2], 1.0, [1, 1, 1, 0, 0]),
        ([5, 6, 2, 2, 2], 1.0, [1, 1, 1, 0, 0]),
        ([5, 6, 7, 1, 2], 0.0, [1, 1, 0, 0, 0]),
        ([5, 9, 2, 2, 2], 0.0, [1, 0, 0, 0, 0]),
        ([5, 6, 7, 8, 8], 0.0, [1, 1, 0, 0, 0]),
    ):
        given = jnp.array(completion)
        assert float(task.score(jnp.int32(0), given)) == score
        assert_allclose(task.credit(jnp.int32(0), given), np.array(credit) / 3)


def test_a_chat_is_shown_whole(loaded):
    """Each message of the chat ends with an end token, and PAD on the left is an end token too."""
    model = loaded("smollm2")
    ask = model.chat_template.render
    rows = [
        language.tasks.Example(ask([*MESSAGES[1:3], {"role": "user", "content": text}]), "w7")
        for text in ("w4", "w4 w5")
    ]
    task = language.tasks.table("chat", model.tokenizer, rows[:1], rows[1:])
    describe = language.make_describe(task, model.model, num_prompts=1)
    params = types.ActorCritic(model.params)
    shown = language.render(task, jax.jit(describe)(params, None, jax.random.key(0)))
    assert [row["prompt"] for row in shown] == ["w4 w5 w6 w4 w5"] * 2


def test_own_model_is_written_as_a_llama(loaded, tmp_path):
    model = Transformer(97, width=12, layers=1, heads=2, mlp_width=20)
    params = jax.jit(model.init)(jax.random.key(0), *tokens_and_pad())
    pretrained.save(tmp_path / "ours", model, params, loaded("llama").tokenizer)
    again = pretrained.load(tmp_path / "ours")
    assert_allclose(last_logits(*again[:2]), last_logits(model, params), atol=1e-6)
    assert again.chat_template is None


@cases(
    "changed, message",
    ({"gated": False}, "nearest to llama, where gated is True, got False"),
    ({"tied": True}, "where tied_scale is 1.0, got 0.28"),
    ({"embedding_scale": 2.0}, "where embedding_scale is 1.0, got 2.0"),
    ({"qkv_bias": True, "qk_norm": True}, "nearest to qwen3, where qkv_bias is False"),
)
def test_a_model_of_no_family_is_not_written(loaded, tmp_path, changed, message):
    model = Transformer(97, width=12, layers=1, heads=2, **changed)
    with pytest.raises(ConfigError, match=message):
        pretrained.save(tmp_path / "ours", model, {}, loaded("llama").tokenizer)
    assert not (tmp_path / "ours").exists()


def test_former_spelling_of_windows_is_read():
    new = families.CONFIGS["gemma3"]
    whole = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
    old = {k: v for k, v in new.items() if k not in ("rope_parameters", "layer_types")}
    old |= whole | {"rope_scaling": {"type": "linear", "factor": 8.0}}
    assert architectures.read(old) == architectures.read(new)


def test_each_parameter_is_placed_once_in_requested_type(tmp_path):
    folder, placed = families.write(tmp_path / "qwen3", "qwen3"), []

    def place(path, array):
        placed.append(path)
        return jnp.asarray(array)

    params = pretrained.load(folder, param_dtype=None, place=place).params
    assert len(placed) == len(set(placed)) == len(jax.tree.leaves(params))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16", "float32"}
    half = pretrained.load(folder, dtype="bfloat16", param_dtype="bfloat16")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(half.params)} == {"bfloat16"}
    found = last_logits(half.model, half.params)
    assert found.dtype == jnp.float32
    assert_allclose(found, GOLDEN["qwen3"]["logits"], atol=0.5)


def test_one_file_comes_before_an_index(tmp_path):
    """As in `transformers`, an index beside `model.safetensors` comes from an earlier save."""
    folder = families.write(tmp_path / "llama", "llama")
    stale = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(stale))
    found = pretrained.load(folder)
    assert_allclose(last_logits(found.model, found.params), GOLDEN["llama"]["logits"], atol=1e-4)


def test_templates_are_sandboxed_and_their_errors_named(loaded):
    template = loaded("llama").chat_template
    with pytest.raises(ConfigError, match=r"^chat_template: line \d+: role tool is unknown$"):
        template.render([{"role": "tool", "content": ""}])
    for source in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% if %}"):
        with pytest.raises(ConfigError, match=r"^chat_template: line 2: "):
            template._replace(source=f"\n{source}").render(MESSAGES)


@cases(
    "source, reason",
    ("{{ 1 // 0 }}", "ZeroDivisionError: "),
    ("{{ [1][messages[0].content] + 1 }}", "TypeError|'list object' has no"),
    ("{{ messages[0].content.index('?') }}", "ValueError: substring not found"),
    ("{{ strftime_now(5) }}", "TypeError: "),
)
def test_any_error_inside_a_template_is_named(loaded, source, reason):
    template = loaded("llama").chat_template._replace(source=f"\n\n{source}")
    with pytest.raises(ConfigError, match=rf"^chat_template: line 3: .*({reason})"):
        template.render(MESSAGES)


def test_missing_libraries_are_named(tmp_path, monkeypatch):
    folder = families.write(tmp_path / "llama", "llama")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxrl_po\[pretrained\]'"):
        pretrained.load(folder)
