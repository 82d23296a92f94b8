"""Special tokens, ends and files of text as models and users bring them."""

import json

import families
import pytest
from families import tokenizers

from jaxrl_po.config import ConfigError
from jaxrl_po.language import pretrained
from jaxrl_po.language.pretrained import text
from jaxrl_po.language.pretrained.templates import ChatTemplate
from jaxrl_po.run.data import prompts

UNK, END, PAD, BOS = range(4)
SIZE = 97


@pytest.fixture
def folder(tmp_path):
    families.write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def change(path, **settings):
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def flags(folder, **settings):
    change(folder / text.SETTINGS, **{"bos_token": "<bos>"} | settings)


def read(folder):
    return text.read_tokenizer(folder, SIZE)[0]


def adds_bos(folder):
    rules = tokenizers.Tokenizer.from_file(str(folder / text.TOKENIZER))
    rules.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    rules.save(str(folder / text.TOKENIZER))


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, [BOS, 8]),
        ({"tokenizer_class": "GemmaTokenizer", "add_eos_token": True}, [BOS, 8, END]),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, [8]),
        # Other classes go by tokenizer.json alone.
        ({"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True}, [8]),
        ({"add_bos_token": True}, [8]),
    ],
)
def test_what_a_tokenizer_adds_is_what_transformers_adds(folder, settings, ids):
    flags(folder, **settings)
    tokenizer = read(folder)
    assert tokenizer.encode("w8", special=True) == ids
    assert tokenizer.encode("w8") == [8]


def test_flags_that_contradict_the_rules_are_refused(folder):
    flags(folder, tokenizer_class="LlamaTokenizerFast", add_bos_token=False)
    adds_bos(folder)
    with pytest.raises(ConfigError, match=r"tokenizer_config.json: add_bos_token and add_eos_"):
        read(folder)
    flags(folder, add_bos_token=True)
    assert read(folder).encode("w8", special=True) == [BOS, 8]
    flags(folder, bos_token="<s>", add_bos_token=True)
    with pytest.raises(ConfigError, match=r"add_bos_token must be false or left out, or bos_token"):
        read(folder)


def test_bos_is_not_written_twice_and_said_once(folder):
    adds_bos(folder)
    tokenizer = read(folder)
    assert tokenizer.encode("<bos> w8", special=True) == [BOS, 8]
    assert tokenizer.encode("w8 <bos>", special=True) == [BOS, 8, BOS]
    chosen = prompts.Text(tokenizer, None, {})
    with pytest.warns(UserWarning, match="it is not written twice"):
        assert chosen.encode(prompts.Row({"prompt": "<bos> w8"}, "here")) == (BOS, 8)
    assert chosen.encode(prompts.Row({"prompt": "w8"}, "here")) == (BOS, 8)


TRIMS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}"
KEEPS = TRIMS.replace(" | trim", "") + "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.mark.parametrize(
    ("source", "said", "written"),
    [(TRIMS, "4 is ", "4 is"), (KEEPS, "4 is ", "4 is "), (KEEPS, "4", "4")],
)
def test_messages_that_end_with_the_assistant_are_continued(source, said, written):
    messages = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": said}]
    template = ChatTemplate(source, {})
    shown = template.render(messages, continue_final_message=True)
    assert shown == f"[user]2+2</s>[assistant]{written}"
    asked = template.render(messages[:1])
    assert asked == "[user]2+2</s>" + "[assistant]" * (source == KEEPS)


def test_a_template_that_hides_the_last_message_is_refused():
    with pytest.raises(ConfigError, match="chat template: it does not show the last message"):
        ChatTemplate("{{ messages[0].content }}", {}).render(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            continue_final_message=True,
        )


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("absent", [[], None, -1])
def test_ends_that_are_none_are_absent(folder, file, absent):
    (folder / file).write_text(json.dumps({"eos_token_id": absent}))
    assert read(folder).ends == (END,)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("wrong", [[1, None], "</s>", SIZE, [1, -1], True, 1.0])
def test_ends_that_are_none_of_the_vocabulary_are_refused(folder, file, wrong):
    (folder / file).write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(ConfigError, match=rf"{file}: eos_token_id must be one id or a list of ids"):
        read(folder)


def test_an_added_token_beyond_the_vocabulary_is_refused_only_where_it_is_used(folder):
    rules = tokenizers.Tokenizer.from_file(str(folder / text.TOKENIZER))
    rules.add_special_tokens([tokenizers.AddedToken("<image>", special=True)])
    rules.save(str(folder / text.TOKENIZER))
    tokenizer = read(folder)
    assert tokenizer.encode("w8") == [8]
    with pytest.raises(ConfigError, match=rf"'<image>' must be left out: its id is {SIZE}"):
        tokenizer.encode("w8 <image>")


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_files_may_begin_with_a_mark_and_end_lines_as_windows_does(tmp_path, mark, ends):
    folder = families.write(tmp_path / "model", "qwen2")
    for name in ("config.json", text.SETTINGS, text.TOKENIZER, text.TEMPLATE):
        content = mark + (folder / name).read_text(encoding="utf-8").replace("\n", ends)
        (folder / name).write_bytes(content.encode())
    loaded = pretrained.load(folder)
    assert loaded.tokenizer.encode("w8") == [8]
    assert loaded.chat_template.source.replace("\r\n", "\n") == families.TEMPLATE
    rows = [json.dumps({"prompt": "é", "answer": "w9"}, ensure_ascii=False)] * 2
    (tmp_path / "rows.jsonl").write_bytes((mark + f"{ends}{mark}".join(rows) + ends).encode())
    read_rows = prompts.read_jsonl(str(tmp_path / "rows.jsonl"))
    assert [row.columns for row in read_rows] == [{"prompt": "é", "answer": "w9"}] * 2


@pytest.mark.parametrize("name", ["config.json", text.SETTINGS, text.TEMPLATE])
def test_a_file_in_another_encoding_is_named(folder, name):
    (folder / name).write_bytes('{"a": "é"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"{name} must be UTF-8"):
        read(folder)
