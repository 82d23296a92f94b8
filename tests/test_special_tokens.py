"""Tests special tokens: additions by a tokenizer, ends of texts, files as other programs write
them."""

import codecs
import json
import os
import subprocess
import sys
from pathlib import Path

import families
import pytest
from families import tokenizers
from tables import cases

from jaxrl_po.config import ConfigError
from jaxrl_po.language.pretrained import text
from jaxrl_po.language.pretrained.files import read_folder
from jaxrl_po.language.pretrained.templates import ChatTemplate
from jaxrl_po.run.data import prompts
from jaxrl_po.run.experiment import policies

WORDS = 97
NAMED = {"bos_token": "<bos>", "eos_token": "<end>"}
BOS, NOTHING, LLAMA = "<bos> $A", "$A", "LlamaTokenizerFast"


@pytest.fixture
def folder(tmp_path):
    families.write_tokenizer(tmp_path)
    return tmp_path


def change(path, **changed):
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(stored | changed), encoding="utf-8")


def adding(folder, single):
    """Changes `tokenizer.json` so that the tokenizer adds the tokens of a template."""
    rules = tokenizers.Tokenizer.from_file(str(folder / text.TOKENIZER))
    rules.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, special_tokens=[("<bos>", 3), ("<end>", 1)]
    )
    rules.save(str(folder / text.TOKENIZER))


def read(folder):
    return text.read_tokenizer(read_folder(folder), WORDS)[0]


@cases(
    "kind, flags, single, ids",
    (LLAMA, {"add_bos_token": True}, "", [3, 4]),
    (LLAMA, {"add_bos_token": False, "add_eos_token": True}, "", [4, 1]),
    (LLAMA, {"add_eos_token": True}, "", [3, 4, 1]),
    (LLAMA, {"add_eos_token": None}, BOS, [3, 4]),
    ("GemmaTokenizer", {"add_bos_token": True, "add_eos_token": False}, BOS, [3, 4]),
    (LLAMA, {}, "", [4]),
    (LLAMA, {}, BOS, [3, 4]),
    (None, {"add_bos_token": True}, "", [3, 4]),
    ("PreTrainedTokenizerFast", {"add_bos_token": False}, BOS, [3, 4]),
    ("Qwen2Tokenizer", {"add_bos_token": True}, "", [4]),
)
def test_flags_add_tokens_as_in_transformers(folder, kind, flags, single, ids):
    if single:
        adding(folder, single)
    change(folder / text.SETTINGS, tokenizer_class=kind, **NAMED, **flags)
    change(folder / text.CONFIG, model_type="llama")
    assert read(folder).encode("w4", special=True) == ids
    assert read(folder).encode("w4") == [4]
    text.write_tokenizer(folder, read(folder), None)
    assert read(folder).encode("w4", special=True) == ids


@cases(
    "flags, single, message",
    ({"add_bos_token": False}, BOS, r"make \['<unk>'\] of 'a', and it \['<bos>', '<unk>'\]"),
    ({"add_bos_token": True}, NOTHING, r"make \['<bos>', '<unk>'\] of 'a', and it"),
    ({"add_eos_token": True}, BOS, "must agree with post_processor of tokenizer.json"),
    ({"add_bos_token": True, "bos_token": None}, "", "or bos_token one of tokenizer.json"),
    ({"add_eos_token": True, "eos_token": "w"}, "", "or eos_token one of .*, got 'w'"),
)
def test_flags_that_contradict_the_tokenizer_are_refused(folder, flags, single, message):
    if single:
        adding(folder, single)
    change(folder / text.SETTINGS, **{"tokenizer_class": LLAMA, **NAMED, **flags})
    with pytest.raises(ConfigError, match=rf"tokenizer_config.json: add_\w+ .*{message}"):
        read(folder)


def test_prompt_that_begins_with_bos_gets_no_second(folder):
    adding(folder, "<bos> $A <end>")
    tokenizer = read(folder)
    reader = prompts.PromptEncoder(tokenizer, None)
    for said, ids in (("<bos> w4 w4", (3, 4, 4, 1)), ("<bos>", (3, 1))):
        with pytest.warns(UserWarning, match="begins with what the tokenizer adds, such as BOS"):
            assert reader.encode(prompts.Row({"prompt": said}, "")) == ids
        assert policies._encode(tokenizer, said) == [*ids]
    assert reader.encode(prompts.Row({"prompt": "w4 w4"}, "")) == (3, 4, 4, 1)
    adding(folder, "$A <end>")  # the template does not begin with a token that could be doubled
    assert policies._encode(read(folder), "w4 w4") == [4, 4, 1]


SAID = [{"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5 w6 "}]
KEEPS = "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}"


@cases(
    "template, expected",
    (KEEPS, "user: w4<end>assistant: w5 w6 "),
    (KEEPS.replace("m.content", "m.content | trim"), "user: w4<end>assistant: w5 w6"),
    (KEEPS + "{% if add_generation_prompt %}new{% endif %}", "user: w4<end>assistant: w5 w6 "),
)
def test_a_last_message_of_the_assistant_is_continued(folder, template, expected):
    found = ChatTemplate(template, {}).render(SAID, continue_final_message=True)
    assert found == expected
    row = prompts.Row({"messages": SAID}, "rows.jsonl line 3")
    reader = prompts.PromptEncoder(read(folder), ChatTemplate(template, {}))
    assert reader.encode(row) == tuple(read(folder).encode(expected))


@cases("content", "m.content[:5]", "m.content.split('w5')[-1]", "''")
def test_incompletely_rendered_last_message_is_refused(folder, content):
    template = ChatTemplate(KEEPS.replace("m.content", content), {})
    row = prompts.Row({"messages": SAID}, "rows.jsonl line 3")
    with pytest.raises(
        ConfigError, match=r"^task.train: rows.jsonl line 3: chat_template: does not show"
    ):
        prompts.PromptEncoder(read(folder), template).encode(row)


@cases("name", text.GENERATION, text.CONFIG)
@cases("given, ends", ([], (1,)), (None, (1,)), (-1, (1,)), (2, (2,)), ([5, 1, 5], (5, 1)))
def test_ends_that_are_absent_are_looked_for_elsewhere(folder, name, given, ends):
    (folder / text.GENERATION).unlink()
    (folder / text.TEMPLATE).unlink()
    change(folder / name, eos_token_id=given)
    assert read(folder).ends == ends


@cases("name", text.GENERATION, text.CONFIG)
@cases("given", [1, None], "</s>", WORDS, [1, WORDS], -2, [-1], True, 1.5, {})
def test_ends_that_are_no_ids_are_refused(folder, name, given):
    (folder / text.GENERATION).unlink()
    change(folder / name, eos_token_id=given)
    with pytest.raises(ConfigError, match=rf"{name}: eos_token_id must be one id or a list .* 97"):
        read(folder)


def test_only_use_of_token_outside_vocabulary_is_refused(folder):
    rules = tokenizers.Tokenizer.from_file(str(folder / text.TOKENIZER))
    rules.add_special_tokens(["<image>"])
    rules.save(str(folder / text.TOKENIZER))
    change(folder / text.SETTINGS, pad_token="<image>")
    tokenizer = read(folder)
    assert tokenizer.encode("w4 w5") == [4, 5]
    assert tokenizer.pad < tokenizer.size == WORDS
    row = prompts.Row({"prompt": "w4 <image>"}, "rows.jsonl line 2")
    with pytest.raises(
        ConfigError,
        match=r"^task.train: rows.jsonl line 2: text: must leave out the token '<image>'",
    ):
        prompts.PromptEncoder(tokenizer, None).encode(row)
    (folder / text.GENERATION).unlink()
    change(folder / text.SETTINGS, eos_token="<image>")
    with pytest.raises(ConfigError, match="must name a token that ends a text"):
        read(folder)


READ = """
import sys
from pathlib import Path
from jaxrl_po.language.pretrained import text
from jaxrl_po.language.pretrained.files import read_folder
from jaxrl_po.run.experiment import models
from jaxrl_po.run.data import prompts
folder = Path(sys.argv[1])
tokenizer, template = text.read_tokenizer(read_folder(folder), 97)
reader = prompts.PromptEncoder(tokenizer, template)
for row in prompts.read_jsonl(str(folder / "rows.jsonl")):
    print(ascii(row.columns["answer"]), reader.encode(row))
print(ascii(template.source), models.root(str(folder)) == str(folder))
text.write_tokenizer(folder, tokenizer, template)
"""


def test_files_are_utf8_in_any_locale_despite_mark(folder):
    """Byte order marks are removed, also between joined files, and Windows line ends are
    accepted."""
    rows = [{"prompt": "w4 w5", "answer": "é"}, {"prompt": "w6", "answer": "ü"}]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (folder / text.TEMPLATE).write_text("é\n{{ messages }}", encoding="utf-8")
    (folder / "rows.jsonl").write_text("\ufeff".join(lines), encoding="utf-8")
    change(folder / text.CONFIG, model_type="llama", note="é")
    change(folder / text.SETTINGS, note="é")
    for path in folder.iterdir():
        content = path.read_bytes().replace(b"\n", b"\r\n")
        path.write_bytes(codecs.BOM_UTF8 + content)
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    found = subprocess.run(
        [sys.executable, "-c", READ, str(folder)],
        env=environment | {"PYTHONPATH": str(Path(text.__file__).parents[3])},
        capture_output=True,
        check=False,
        encoding="utf-8",
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        r"'\xe9' (4, 5)",
        r"'\xfc' (6,)",
        r"'\xe9\n{{ messages }}' True",
    ]
    assert (folder / text.TEMPLATE).read_bytes() == "é\n{{ messages }}".encode()


@cases("name", text.SETTINGS, text.TEMPLATE, text.TOKENIZER)
def test_another_encoding_is_named(folder, name):
    path = folder / name
    path.write_bytes(path.read_text(encoding="utf-8").encode("utf-16"))
    with pytest.raises(ConfigError, match=rf"{name} must be .*'utf-8' codec can't decode"):
        read(folder)
