"""Prompts from JSONL files: lines with `prompt` or `messages`, `answer` and further columns."""

import bisect
import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_po.config import ConfigError, Json
from jaxrl_po.language.pretrained import ChatTemplate, TextTokenizer
from jaxrl_po.language.pretrained.tools import ASSISTANT
from jaxrl_po.language.tasks import Example, Task, table
from jaxrl_po.language.tokenizer import AnyTokenizer, make_tokenizer
from jaxrl_po.types import PyTree

PROMPT, ANSWER, MESSAGES = "prompt", "answer", "messages"
COMPLETION, TEXT = "completion", "text"  # columns of demonstrations
CHAT = "chat"  # value of task.template that makes a prompt a user's message
# Keyword arguments of reward functions that do not come from columns of the file.
TAKEN = ("prompts", "completions", "completion_ids")
TWICE = "a prompt begins with what the tokenizer adds, such as BOS: it is not written twice"


class PromptEncoder(NamedTuple):
    """Conversion of prompts to the tokens of a pretrained model.

    Attributes:
      tokenizer: tokenizer of the pretrained model.
      template: chat template that makes a prompt from messages; None if the model has no template.
      context: maximal number of tokens in a text; 0 if the model states no maximum.
      arguments: arguments of the chat template, besides the messages.
    """

    tokenizer: TextTokenizer
    template: ChatTemplate | None
    context: int = 0
    arguments: Mapping[str, Any] = {}

    def encode(self, row: "Row") -> tuple[int, ...]:
        """Returns the token ids of a row's prompt: messages in the chat template, or plain text.

        If the last message is the assistant's, the completion continues that message.

        Raises:
          ConfigError: the model has no template, the template refuses the messages, or a token
            is outside the model's vocabulary.
        """
        template, messages = self.template, row.columns.get(MESSAGES)
        if messages is not None and template is None:
            raise row.error(f"{MESSAGES} need a model with a chat template")
        try:
            if messages is None or template is None:
                if self.tokenizer.begins(row.prompt):
                    warnings.warn(TWICE, stacklevel=2)
                return tuple(self.tokenizer.encode(row.prompt, special=True))
            continued = {"continue_final_message": messages[-1]["role"] == ASSISTANT}
            # The template itself writes the BOS token, if the model has one.
            text = template.render(messages, **continued | dict(self.arguments))
            return tuple(self.tokenizer.encode(text))
        except ConfigError as error:
            raise row.error(str(error)) from None


class Row(NamedTuple):
    """One prompt of a file, with its further columns.

    Attributes:
      columns: values of `prompt` or `messages`, `answer` and any other columns, by name.
      place: file and line of the row, for error messages.
      flag: name of the setting that names the file, for error messages.
    """

    columns: Mapping[str, Any]
    place: str
    flag: str = "task.train"

    def error(self, message: str) -> ConfigError:
        """Returns the error for an invalid row, with the row's file and line."""
        return ConfigError(self.flag, f"{self.place}: {message}")

    @property
    def prompt(self) -> str:
        """Returns the text of the prompt; a prompt of messages is returned as JSON."""
        if MESSAGES in self.columns:
            return json.dumps(self.columns[MESSAGES], sort_keys=True)
        return str(self.columns[PROMPT])

    def worded(self, template: str, system: str) -> "Row":
        """Returns the row with its prompt inserted in a template, and with a system message.

        Raises:
          ConfigError: the row has messages where a prompt is needed, or already a system message.
        """
        columns = dict(self.columns)
        if template and MESSAGES in columns:
            raise self.error(f"{MESSAGES} have no need of task.template")
        if template not in ("", CHAT):
            columns[PROMPT] = template.replace("{prompt}", columns[PROMPT])
        if template == CHAT or (system and PROMPT in columns):
            columns[MESSAGES] = [{"role": "user", "content": columns.pop(PROMPT)}]
        if system:
            if columns[MESSAGES][0]["role"] == "system":
                raise self.error("a system message stands beside task.system")
            columns[MESSAGES] = [{"role": "system", "content": system}, *columns[MESSAGES]]
        return self._replace(columns=columns)

    def demonstrations(self) -> "list[Row]":
        """Returns a row per answer: the completion, each message of the assistant, or the text.

        Raises:
          ConfigError: the row has neither completion, answer, assistant's message nor text.
        """
        columns = self.columns
        if TEXT in columns:
            return [self._replace(columns={PROMPT: "", ANSWER: columns[TEXT]})]
        if COMPLETION in columns:
            kept = {name: value for name, value in columns.items() if name != COMPLETION}
            return [self._replace(columns=kept | {ANSWER: columns[COMPLETION]})]
        if columns.get(ANSWER) is not None:
            return [self]
        messages = columns.get(MESSAGES, [])
        said = [i for i, each in enumerate(messages) if i and each["role"] == ASSISTANT]
        if not said:
            raise self.error(
                f"must have {COMPLETION}, {ANSWER}, {TEXT}, or {MESSAGES} in which the assistant "
                f"answers; it has {', '.join(map(repr, columns))}"
            )
        pairs = [{MESSAGES: messages[:i], ANSWER: messages[i]["content"]} for i in said]
        return [self._replace(columns=each) for each in pairs]

    def identity(self, whole: bool) -> str:
        """Returns the text that distinguishes rows: the prompt, or all columns if `whole`."""
        return json.dumps(self.columns, sort_keys=True) if whole else self.prompt


def read_jsonl(
    path: str, *, answers: bool = True, texts: bool = False, flag: str = "task.train"
) -> list[Row]:
    """Reads the prompt rows of a JSONL file and skips empty lines.

    Args:
      path: path of the file.
      answers: whether each row must have an answer.
      texts: whether a row may consist of a text without a prompt.
      flag: name of the setting that names the file, for error messages.

    Raises:
      ConfigError: a line does not parse, lacks a column, or has other columns than the first line;
        the message names the file and the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            flag, f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            # Concatenated files may contain byte order marks at the start of later lines.
            row = Row({}, f"{path} line {number}", flag)
            rows.append(_parse(line.removeprefix("\ufeff"), row, answers, texts))
            if rows[-1].columns.keys() != rows[0].columns.keys():
                odd = min(rows[-1].columns.keys() ^ rows[0].columns.keys())
                raise rows[-1].error(
                    f"must have the columns of {rows[0].place}: {odd!r} stands in one of them only"
                )
    if not rows:
        raise ConfigError(flag, f"{path} holds no prompts")
    return rows


def _parse(line: str, row: Row, answers: bool, texts: bool) -> Row:
    try:
        columns = json.loads(line)
        if "\\ud" in line.lower():  # may be half of a surrogate pair, which cannot be encoded
            json.dumps(columns, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise row.error(f"is not JSON: {error}") from None
    if not isinstance(columns, dict):
        raise row.error(
            f"must be an object with {PROMPT} and {ANSWER}, got {type(columns).__name__}"
        )
    for name in (COMPLETION, TEXT):
        if texts and not isinstance(columns.get(name, ""), str):
            raise row.error(f"{name} must be text, got {columns[name]!r}")
    if texts and TEXT in columns:
        return row._replace(columns=columns)
    chat = MESSAGES in columns
    if chat and PROMPT in columns:
        raise row.error(f"must have {PROMPT} or {MESSAGES}, not both")
    for name in (MESSAGES if chat else PROMPT, *([ANSWER] if answers else [])):
        if name not in columns:
            raise row.error(f"lacks the column {name!r}; it has {', '.join(map(repr, columns))}")
    answer = columns.get(ANSWER, "")
    if answer is None and not answers:
        answer = ""  # an empty text passes the checks; reward functions still get None
    if isinstance(answer, int) and not isinstance(answer, bool):
        columns[ANSWER] = answer = str(answer)
    if not isinstance(answer, str):
        raise row.error(f"{ANSWER} must be text or a whole number, got {answer!r}")
    if clash := [name for name in TAKEN if name in columns]:
        raise row.error(
            f"the column {clash[0]!r} must have another name: reward functions get that one"
        )
    if chat:
        _check_chat(columns[MESSAGES], row)
    if not chat and not isinstance(columns[PROMPT], str):
        raise row.error(f"{PROMPT} must be text, got {columns[PROMPT]!r}")
    if not chat and not columns[PROMPT]:
        raise row.error(f"{PROMPT} must not be empty")
    return row._replace(columns=columns)


def _check_chat(messages: Any, row: Row) -> None:
    """Raises ConfigError, with message number and field, unless every message has a text."""
    if not messages or not isinstance(messages, list):
        got = "an empty list" if messages == [] else type(messages).__name__
        raise row.error(f"{MESSAGES} must be a list of messages, got {got}")
    for number, message in enumerate(messages, 1):
        where = f"message {number} of {len(messages)}"
        if not isinstance(message, dict):
            raise row.error(
                f"{where} must be an object with role and content, got {type(message).__name__}"
            )
        for name in ("role", "content"):
            value = message.get(name)
            if not isinstance(value, str):
                got = "null" if value is None else f"a {type(value).__name__}"
                calls = "; tool calls are not read" * bool(message.get("tool_calls"))
                raise row.error(f"{where}: {name} must be text, got {got}{calls}")


class PromptColumns:
    """Function that returns the columns of prompt rows, without the prompt; see `tasks.Task`.

    Args:
      rows: prompt rows; a problem of the task is an index into this sequence.
    """

    def __init__(self, rows: Sequence[Row]):
        self.rows = rows

    def __call__(self, problem: PyTree) -> Json:
        """Returns each column of the rows with the given indices, as lists `[B]`."""
        chosen = [self.rows[i].columns for i in np.asarray(problem).tolist()]
        names = [name for name in self.rows[0].columns if name not in (PROMPT, MESSAGES)]
        return {name: [each[name] for each in chosen] for name in names}

    def answered(self) -> bool:
        """Returns whether each row has an answer; an answer may be empty but not null."""
        return all(row.columns.get(ANSWER) is not None for row in self.rows)


def hash_split(
    rows: Sequence[Row], fraction: float, parts: int = 1, *, whole: bool = False
) -> list[list[Row]]:
    """Splits prompt rows into training rows and equal held-out parts, by a hash of the prompt.

    Equal prompts therefore fall into the same part, and the order of the rows does not matter.

    Args:
      rows: prompt rows of a single file.
      fraction: approximate share of the prompts to hold out; each part gets at least one prompt.
      parts: number of held-out parts.
      whole: whether rows with equal prompts differ if any of their columns differ.

    Raises:
      ConfigError: the split leaves no row to train on.

    Example:
      >>> rows = [Row({"prompt": f"{i}?", "answer": "!"}, "") for i in range(1000)]
      >>> [len(part) for part in hash_split(rows, 0.1, 2)]
      [900, 50, 50]
    """
    words = [
        int.from_bytes(hashlib.blake2b(row.identity(whole).encode(), digest_size=8).digest(), "big")
        for row in rows
    ]
    distinct = sorted(set(words))
    held_out = max(parts, bisect.bisect_left(distinct, fraction * 2**64))
    if held_out >= len(distinct):
        another = " or another fraction" * (len(distinct) > parts)
        raise ConfigError(
            "task.test_fraction",
            f"{fraction:g} of {len(distinct)} prompts leaves none to train on; give at least "
            f"{parts + 1} different prompts{another}",
        )
    ends = [distinct[held_out * part // parts] for part in range(1, parts + 1)]
    places = [bisect.bisect(ends, word) for word in words]
    return [
        [row for row, place in zip(rows, places, strict=True) if place == part]
        for part in (parts, *range(parts))
    ]


def make_task_from_rows(
    name: str,
    train: Sequence[Row],
    test: Sequence[Row],
    *,
    validation: Sequence[Row] = (),
    characters: str = "",
    max_prompt_length: int = 0,
    text: PromptEncoder | None = None,
    whole: bool = False,
) -> Task:
    """Makes a task from prompt rows, in a pretrained model's tokens, or one token per character.

    Args:
      name: name of the task.
      train: training rows.
      test: held-out rows.
      validation: held-out rows that select a checkpoint, disjoint from `train`.
      characters: alphabet of the tokenizer; empty for the characters that occur in the rows.
      max_prompt_length: maximum number of tokens in a prompt; 0 for no maximum.
      text: conversion of prompts for a pretrained model; None for one token per character.
      whole: whether to distinguish rows by all of their columns, so that prompts may repeat.

    Returns:
      The task of the rows. A completion is correct if it equals `answer`, or if the completion is
      empty and the rows have no answer. The task has the columns of the rows, without the prompt.

    Raises:
      ConfigError: a prompt is too long, is in both training and test rows, or cannot be written in
        the tokens; the message names the line.
    """
    known = [*train, *validation]
    rows = [*known, *test]
    where = {row.identity(whole): row.place for row in known}
    for row in test:
        if (identity := row.identity(whole)) in where:
            raise row.error(
                f"the test prompt {identity!r} is a training prompt as well: {where[identity]}"
            )
    tokenizer: AnyTokenizer
    if text is None:
        tokenizer = _alphabet(rows, characters)
        ids = [tuple(tokenizer.encode(row.prompt)) for row in rows]
    else:
        tokenizer, ids = text.tokenizer, [text.encode(row) for row in rows]
    ids = [prompt or (tokenizer.eos,) for prompt in ids]  # EOS precedes a text without a prompt
    context = 0 if text is None else text.context
    for row, prompt in zip(rows, ids, strict=True):
        for limit, what in (
            (max_prompt_length, " of task.max_prompt_length"),
            (context, ", the context of the model"),
        ):
            if 0 < limit < len(prompt):
                raise row.error(f"the prompt has {len(prompt)} tokens, more than {limit}{what}")
    examples = [
        Example(prompt, row.columns.get(ANSWER) or "")
        for row, prompt in zip(rows, ids, strict=True)
    ]
    task = table(
        name,
        tokenizer,
        examples[: len(train)],
        examples[len(known) :],
        validation=examples[len(train) : len(known)],
        share_prompts=whole,
    )
    return task._replace(columns=PromptColumns(rows))


def _alphabet(rows: Sequence[Row], characters: str) -> AnyTokenizer:
    """Makes a character tokenizer; raises ConfigError for unknown characters or for messages."""
    texts = [(row, PROMPT, row.prompt) for row in rows]
    texts += [(row, ANSWER, row.columns.get(ANSWER) or "") for row in rows]
    tokenizer = make_tokenizer(characters or "".join(sorted(set("".join(t for *_, t in texts)))))
    for row, column, written in texts:
        if MESSAGES in row.columns:
            raise row.error(f"{MESSAGES} need a pretrained model, whose chat template writes them")
        if unknown := set(written) - set(tokenizer.characters):
            raise row.error(
                f"{column} must not hold {min(unknown)!r}, only {tokenizer.characters!r}"
            )
    return tokenizer
