"""Parses and writes tool calls in a chat template: JSON between tags, as in Qwen and Hermes."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_po.config import ConfigError
from jaxrl_po.language.pretrained.templates import ChatTemplate
from jaxrl_po.language.pretrained.text import TextTokenizer

Tool = Mapping[str, Any]
"""Schema of a tool, `{"type": "function", "function": {"name", "description", "parameters"}}`."""
Message = Mapping[str, Any]
USER, ASSISTANT, TOOL = "user", "assistant", "tool"
PROBES = "probe_of_one", "probe_of_two"
DEEPEST = 64  # nesting levels of a call's arguments: far below the limit for writing JSON


class Call(NamedTuple):
    """Tool call parsed from a message.

    Attributes:
      name: name of the tool; empty if the name cannot be parsed.
      arguments: arguments of the call, by name.
      error: reason why the call is invalid; empty for a valid call.
    """

    name: str
    arguments: dict[str, Any]
    error: str = ""


class Tools(NamedTuple):
    """Format that a chat template uses for tools, their calls and their results.

    Attributes:
      tokenizer: tokenizer of the model.
      render: `render(messages, add_generation_prompt=…) -> text`, renders messages with the tools.
      names: names of the tools.
      opening: tag before the JSON of a call.
      closing: tag that follows the JSON of a call.
      foreign: texts of tokens outside the vocabulary of the model.
    """

    tokenizer: TextTokenizer
    render: Callable[..., str]
    names: tuple[str, ...]
    opening: str
    closing: str
    foreign: tuple[str, ...] = ()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids of a prompt, which ends with the opening of the assistant's message.

        Raises:
          ConfigError: the template refuses the messages.
        """
        return self.tokenizer.encode(self.render(messages))

    def text(self, message: Sequence[int]) -> str:
        """Returns a message's text without its end.

        Special tokens remain, since tags may be special.
        """
        kept = [token for token in message if token not in self.tokenizer.ends]
        text: str = self.tokenizer.rules.decode(kept, skip_special_tokens=False)
        return text

    def calls(self, text: str) -> list[Call]:
        """Parses the calls of a message, in order, without evaluating them.

        An opening tag without its closing tag counts as an invalid call.
        """
        if not self.names:
            return []
        found = []
        for part in text.split(self.opening)[1:]:
            inner, closed, _ = part.partition(self.closing)
            found.append(
                self._read(inner) if closed else Call("", {}, f"{self.closing} is missing")
            )
        return found

    def _read(self, inner: str) -> Call:
        try:
            call = json.loads(inner)
        except (ValueError, RecursionError) as error:
            return Call("", {}, f"the call is not JSON: {error}")
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return Call("", {}, "the call must be an object with name and arguments")
        name, arguments = call["name"], call.get("arguments", {})
        if name not in self.names:
            return Call(name, {}, f"Tool {name} not found.")
        if not isinstance(arguments, dict):
            return Call(name, {}, "arguments must be an object")
        if _is_deep(arguments):
            return Call(name, {}, f"arguments must be nested at most {DEEPEST} times")
        return Call(name, arguments)

    def reply(self, results: Sequence[Message]) -> list[int]:
        """Returns the ids that the template adds for the results of a message's calls.

        The returned ids begin with the end of the message and finish with the opening of the next
        message.

        Args:
          results: messages of the role `tool`, each with `name` and `content`.
        """
        calling = _dialogue((str(results[0]["name"]),), {PROBES[0]: ""})
        whole = self.render([*calling, *results])
        at = whole.find(self.closing, whole.find(PROBES[0]))
        rest = whole[at + len(self.closing) :]
        # The policy itself writes any text between a call and the end of its message.
        bare = rest.lstrip()
        ends = [self.tokenizer.rules.id_to_token(end) for end in self.tokenizer.ends]
        return self.tokenizer.encode(
            bare if any(end and bare.startswith(end) for end in ends) else rest
        )


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [one for each in inner for one in each if isinstance(one, dict | list)]
    return bool(level)


def detect_format(
    template: ChatTemplate,
    tokenizer: TextTokenizer,
    tools: Sequence[Tool],
    arguments: Mapping[str, Any] | None = None,
) -> Tools:
    """Finds out how a template writes tools, by rendering calls of probe tools.

    Args:
      template: chat template of the model.
      tokenizer: tokenizer of the model.
      tools: schemas of the tools; empty for an environment without tools.
      arguments: further arguments of the template.

    Raises:
      ConfigError: the template does not show tools or their results, or does not write calls as
        JSON between tags.
    """
    given = dict(arguments or {})
    render: Callable[..., str] = functools.partial(
        template.render, **given, tools=list(tools) or None
    )
    names = tuple(tool["function"]["name"] for tool in tools)
    added = tokenizer.rules.get_added_tokens_decoder()
    foreign = tuple(token.content for i, token in added.items() if i >= tokenizer.size)
    if not tools:
        return Tools(tokenizer, render, (), "", "", foreign)
    bare = render(_dialogue(()), add_generation_prompt=False)
    for name in names:
        if name not in bare:
            raise ConfigError("chat_template", f"does not show the tool {name}: it has no tools")
    opening, closing = _tags(render(_dialogue(PROBES), add_generation_prompt=False))
    found = Tools(tokenizer, render, names, opening, closing, foreign)
    result = {"role": TOOL, "name": names[0], "content": PROBES[0]}
    if PROBES[0] not in render([*_dialogue(names[:1]), result]):
        raise ConfigError("chat_template", "does not show the results of tools")
    found.reply([result])
    return found


def _dialogue(
    names: Sequence[str], arguments: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Returns the messages of a question and of an answer that calls tools."""
    given = dict(arguments or {})
    calls = [{"type": "function", "function": {"name": name, "arguments": given}} for name in names]
    answer = {"role": ASSISTANT, "content": "", **({"tool_calls": calls} if calls else {})}
    return [{"role": USER, "content": ""}, answer]


def _tags(text: str) -> tuple[str, str]:
    """Finds the tags before and after a call, in a text with two calls of `PROBES`.

    Example:
      >>> _tags('answer: <c>{"name": "probe_of_one", "arguments": {}}</c>'
      ...       '<c>{"name": "probe_of_two", "arguments": {}}</c> end')
      ('<c>', '</c>')
    """
    (start, first), (second, last) = (_object(text, name) for name in PROBES)
    between = text[first:second]
    closing, opening = _shared(between, text[last:]), _shared(between[::-1], text[:start][::-1])
    # The texts before and after a call may overlap where they meet: an opening tag begins with a
    # bracket.
    cuts = range(max(len(between) - opening, 0), closing + 1)
    cut = next((cut for cut in cuts if between[cut:].lstrip()[:1] in ("<", "[")), 0)
    tags = between[cut:].strip(), between[:cut].strip()
    if not all(tags) or tags[0] == tags[1]:
        raise ConfigError(
            "chat_template",
            'must write each call of a tool as JSON between tags, such as <tool_call>{"name": …, '
            '"arguments": …}</tool_call>',
        )
    return tags


def _shared(one: str, other: str) -> int:
    """Returns the length of the common prefix of two texts."""
    differ = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _object(text: str, name: str) -> tuple[int, int]:
    """Returns the positions at which the JSON of a call begins and ends."""
    at = text.find(name)
    start = text.rfind("{", 0, max(at, 0))
    try:
        call, end = json.JSONDecoder().raw_decode(text, start) if start >= 0 else (None, 0)
    except ValueError:
        call = None
    if not isinstance(call, dict) or call.get("name") != name or "arguments" not in call:
        raise ConfigError(
            "chat_template",
            "must write calls of tools as JSON with name and arguments; it "
            f"{'writes them otherwise' if at >= 0 else 'does not show them'}",
        )
    return start, end
