"""Tests chat templates of the kinds that models include, rendered as `transformers` renders
them."""

import json

import families
import pytest
from tables import cases

from jaxrl_po.config import ConfigError
from jaxrl_po.language import pretrained
from jaxrl_po.language.pretrained.templates import ChatTemplate

SAID = [{"role": "user", "content": "é"}]


def rendered(source, special=(), **arguments):
    return ChatTemplate(source, dict(special)).render(SAID, **arguments)


@cases(
    "source, text",
    ("{% if tools is not none %}tools{% else %}none{% endif %}", "none"),
    ("{% if documents is not none %}some{% else %}none{% endif %}", "none"),
    ("{% if tools %}tools{% endif %}{{ tools is none }}", "True"),
    ("{{ messages[0] | tojson }}", '{"role": "user", "content": "é"}'),
    ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
    ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
    ("{{ {'b': 1, 'a': 2} | tojson(false, none, none, true) }}", '{"a": 2, "b": 1}'),
    ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
    ("{{ '<b>' | tojson }}", '"<b>"'),
    ("{{ nothing }}|", "|"),
    ("{% if bos_token is defined %}{{ bos_token }}{% endif %}|", "|"),
)
def test_what_a_template_is_given(source, text):
    assert rendered(source) == text


@cases("source", "{{ bos_token }}a", "{{ 'a' ~ mask_token }}")
def test_missing_special_token_is_an_error(source):
    with pytest.raises(ConfigError, match=r"^chat_template: line 1: '(bos|mask)_token' is undef"):
        rendered(source)


def test_special_tokens_come_from_either_file(tmp_path):
    folder = families.write(tmp_path / "model", "qwen2")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"mask_token": "w9", "add_bos_token": False}
    settings.pop("pad_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    more = {"pad_token": {"content": "w11"}, "sep_token": "w12", "mask_token": "w13"}
    (folder / "special_tokens_map.json").write_text(json.dumps(more))
    (folder / "chat_template.jinja").write_text("{{ pad_token + sep_token + mask_token }}")
    loaded = pretrained.load(folder)
    assert loaded.chat_template.render(SAID) == "w11w12w9"
    assert loaded.tokenizer.pad == loaded.tokenizer.encode("w11")[0]
    assert "add_bos_token" not in loaded.chat_template.special
