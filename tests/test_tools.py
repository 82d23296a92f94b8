"""Tests schemas of tools, their calls in a chat template, and texts that environments return."""

import contextlib
import json
import random
import re
import signal
import time
from pathlib import Path

import golden_tools
import pytest
from families import tokenizers
from folders import TOOLS_TEMPLATE, write_tools
from tables import cases

from jaxrl_po.config import ConfigError
from jaxrl_po.language.pretrained import text, tools
from jaxrl_po.language.pretrained.files import read_folder
from jaxrl_po.language.pretrained.templates import ChatTemplate
from jaxrl_po.run.data import scoring_worker
from jaxrl_po.run.host.dialogues import instances, schemas, tool_env

GOLDEN = json.loads((Path(__file__).parent / "golden_schemas.json").read_text())


@pytest.mark.parametrize("name", list(GOLDEN))
def test_schemas_are_those_of_transformers(name):
    # The JSON text is compared, because a chat template shows the order of the keys.
    found = schemas.schema_of(getattr(golden_tools, name), name)
    assert json.dumps(found) == json.dumps(GOLDEN[name])


def bare(x: int):
    pass


def unhinted(x):
    """Doubles."""


def undescribed(x: int):
    """Doubles.

    Returns:
      twice x
    """


def odd(x: golden_tools.Object):
    """Doubles.

    Args:
      x: an object
    """


def chosen(x: str):
    """Doubles.

    Args:
      x: a side (choices: left, right)
    """


def starred(*numbers: int):
    """Adds.

    Args:
      numbers: to add
    """


@cases(
    "tool, lacks",
    (bare, "lacks a docstring"),
    (unhinted, "parameter x of tool lacks a type hint"),
    (undescribed, "parameter x of tool lacks a line in the section Args"),
    (odd, "parameter x of tool has the type Object, which JSON does not have"),
    (chosen, "parameter x of tool must list its choices as JSON"),
    (starred, "parameter numbers of tool must be a named one"),
)
def test_what_a_tool_lacks_is_named(tool, lacks):
    with pytest.raises(schemas.ToolError, match=re.escape(lacks)):
        schemas.schema_of(tool, "tool")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Returns the tools of a tiny model."""
    folder = write_tools(tmp_path_factory.mktemp("tools")) / "model"
    tokenizer, template = text.read_tokenizer(read_folder(folder), 22)
    named = [schemas.schema_of(golden_tools.silent, name) for name in ("guess", "raises")]
    return tools.detect_format(template, tokenizer, named)


def test_tags_are_found_and_calls_are_never_evaluated(found):
    assert (found.opening, found.closing) == ("<call>", "</call>")
    assert found.calls("no call") == []
    right = '<call>{"name": "guess", "arguments": {"number": 1}}</call>'
    assert found.calls(f"I guess {right} and {right}") == [tools.Call("guess", {"number": 1})] * 2
    for inner, error in (
        ('{"name": "guess"', "not JSON"),
        ("__import__('os')", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('["guess"]', "name and arguments"),
        ('{"name": "get_reward", "arguments": {}}', "Tool get_reward not found"),
        ('{"name": "guess", "arguments": [1]}', "must be an object"),
        (f'{{"name": "guess", "arguments": {{"x": {"[" * 64}{"]" * 64}}}}}', "at most 64 times"),
    ):
        (call,) = found.calls(f"<call>{inner}</call>")
        assert error in call.error
        assert not call.arguments
    (call,) = found.calls('<call>{"name": "guess"}')
    assert "</call> is missing" in call.error


@cases(
    "changed, said",
    (("{%- if tools %}", "{%- if false %}"), "^chat_template: does not show the tool guess"),
    (("message.tool_calls or []", "[]"), "it does not show them"),
    (("call.function | tojson", "call.function.name"), "writes them otherwise"),
    (("' <call>' +", "' ' +"), "JSON between tags"),
    (("message.role + ': ' +", "message.role if message.role == 'tool' else"), "results"),
)
def test_a_template_that_cannot_write_tools_is_refused(found, changed, said):
    assert TOOLS_TEMPLATE.count(changed[0]) == 1
    template = ChatTemplate(TOOLS_TEMPLATE.replace(*changed), {"eos_token": "<end>"})
    named = [schemas.schema_of(golden_tools.silent, "guess")]
    with pytest.raises(ConfigError, match=said):
        tools.detect_format(template, found.tokenizer, named)


def test_environment_may_name_a_token_the_model_lacks(found, tmp_path):
    folder = write_tools(tmp_path) / "model"
    rules = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    rules.add_special_tokens(["<image>"])
    rules.save(str(folder / "tokenizer.json"))
    tokenizer, template = text.read_tokenizer(read_folder(folder), 22)
    lacking = tools.detect_format(template, tokenizer, ())
    assert (lacking.foreign, found.foreign) == (("<image>",), ())

    def written(texts):
        return tokenizer.encode(" ".join(texts))

    said = ["low <image>", "high"]
    assert tool_env.cut_to_fit(written, said, 9, lacking) == (written(["low ?", "high"]), False)
    with pytest.raises(
        ConfigError, match=r"^text: must leave out the token '<image>': its id is 22"
    ):
        written(said)


def test_what_a_method_returns_becomes_text():
    assert instances.content([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"
    assert instances.content([1, 2]) == "[1, 2]"
    assert instances.content([]) == "[]"
    assert instances.content(None) == "None"


def test_a_method_is_interrupted_whatever_it_catches():
    def deaf():
        begun = time.monotonic()
        while time.monotonic() < begun + 5.0:
            with contextlib.suppress(Exception):
                time.sleep(5.0)

    before = signal.signal(signal.SIGALRM, instances._interrupt)
    try:
        with pytest.raises(instances.OutOfTime):
            instances.timed(0.05, deaf)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_reset_draws_what_its_first_seed_says():
    class Draws:
        def reset(self):
            return str(random.random())

        def get_reward(self):
            return random.random()

    def said(seeds):
        held = []
        reset = instances._answer({"reset": {}, "seeds": seeds}, held, Draws, 1.0)
        return reset["said"], instances._answer({"reward": True}, held, Draws, 1.0)["reward"]

    first, second, third = said([1, 2]), said([1, 3]), said([4, 2])
    assert first[0] == second[0] != third[0]
    assert first[1] == third[1] != second[1]


def test_what_a_model_wrote_is_no_data():
    class Asked:
        refused = False

        def call(self, function, given, written):
            self.given, self.written = given, written
            return [0.0]

    asked = Asked()
    request = {"completions": ["a"], "messages": [[{"content": "b"}]], "answer": ["c"]}
    assert scoring_worker.answer_request(print, asked, request) == {"scores": [0.0]}
    assert (asked.given, asked.written) == (["c"], ["a", "b"])
