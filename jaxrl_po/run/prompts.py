"""Prompts from JSONL files: each line has a `prompt`, an `answer` and any further columns."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_po.config import ConfigError
from jaxrl_po.language.tasks import Example, Task, table
from jaxrl_po.language.tokenizer import make_tokenizer
from jaxrl_po.types import PyTree

PROMPT, ANSWER = REQUIRED = ("prompt", "answer")
# Argument names of a reward function that are not columns of the file.
TAKEN = ("prompts", "completions", "completion_ids")


class Row(NamedTuple):
    """One prompt.

    Attributes:
      columns: `prompt`, `answer` and any others.
      place: file and line, for messages.
    """

    columns: Mapping[str, Any]
    place: str

    @property
    def prompt(self) -> str:
        """The prompt."""
        return str(self.columns[PROMPT])


def read_jsonl(path: str) -> list[Row]:
    """The rows of a file; empty lines are skipped.

    Raises:
      ConfigError: names the file, and the line that does not parse, lacks a column, or has other
        columns than the first line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(_parse(line, f"{path} line {number}"))
            if rows[-1].columns.keys() != rows[0].columns.keys():
                odd = min(rows[-1].columns.keys() ^ rows[0].columns.keys())
                raise ConfigError(
                    f"{rows[-1].place} must have the columns of {rows[0].place}: {odd!r} "
                    "stands in one of them only"
                )
    if not rows:
        raise ConfigError(f"{path} holds no prompts")
    return rows


def _parse(line: str, place: str) -> Row:
    try:
        columns = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON: {error}") from None
    if not isinstance(columns, dict):
        raise ConfigError(
            f"{place} must be an object with {PROMPT} and {ANSWER}, got {type(columns).__name__}"
        )
    for name in REQUIRED:
        if name not in columns:
            raise ConfigError(
                f"{place} lacks the column {name!r}; it has "
                f"{', '.join(map(repr, columns)) or 'none'}"
            )
        if not isinstance(columns[name], str):
            raise ConfigError(f"{place}: {name} must be text, got {columns[name]!r}")
    if clash := [name for name in TAKEN if name in columns]:
        raise ConfigError(
            f"{place}: the column {clash[0]!r} must have another name, by which reward "
            "functions get nothing else"
        )
    if not columns[PROMPT]:
        raise ConfigError(f"{place}: {PROMPT} must not be empty")
    return Row(columns, place)


def split(rows: Sequence[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    """Train and test rows, assigned by a hash of the prompt.

    So equal prompts are in the same split, and the order of the rows does not matter.

    Args:
      rows: of one file.
      fraction: approximate share of the prompts to hold out.

    Raises:
      ConfigError: one split is empty.

    Example:
      >>> rows = [Row({"prompt": f"{i}?", "answer": "!"}, "") for i in range(1000)]
      >>> train, test = split(rows, 0.1)
      >>> len(train), len(test)
      (900, 100)
    """
    words = [hashlib.blake2b(row.prompt.encode(), digest_size=8).digest() for row in rows]
    held_out = [int.from_bytes(word, "big") < fraction * 2**64 for word in words]
    train, test = (
        [row for row, out in zip(rows, held_out, strict=True) if out == side]
        for side in (False, True)
    )
    if not (train and test):
        raise ConfigError(
            f"test_fraction={fraction:g} leaves {len(train)} prompts to train on and "
            f"{len(test)} to test on; give more prompts, another fraction, or a file of "
            "test prompts"
        )
    return train, test


def make_task(
    name: str,
    train: Sequence[Row],
    test: Sequence[Row],
    *,
    characters: str = "",
    max_prompt_length: int = 0,
) -> Task:
    """A task over rows, with one token per character.

    Args:
      name: of the task.
      train: training rows.
      test: held-out rows.
      characters: the alphabet; empty takes the characters that occur.
      max_prompt_length: maximum length of a prompt, tokens; 0 for no maximum.

    Returns:
      The task: a completion is correct if it equals `answer`. Its columns are those of the rows,
      without the prompt.

    Raises:
      ConfigError: names the line whose prompt is too long, is in both splits, or has a character
        outside the alphabet.
    """
    rows = [*train, *test]
    where = {row.prompt: row.place for row in train}
    for row in test:
        if row.prompt in where:
            raise ConfigError(
                f"{row.place}: the test prompt {row.prompt!r} is a training prompt as well, "
                f"in {where[row.prompt]}"
            )
    occurring = {
        character
        for row in rows
        for text in (row.prompt, row.columns[ANSWER])
        for character in text
    }
    tokenizer = make_tokenizer(characters or "".join(sorted(occurring)))
    for row in rows:
        if 0 < max_prompt_length < len(row.prompt):
            raise ConfigError(
                f"{row.place}: the prompt has {len(row.prompt)} tokens, more than "
                f"{max_prompt_length}"
            )
        for column in REQUIRED:
            if unknown := set(row.columns[column]) - set(tokenizer.characters):
                raise ConfigError(
                    f"{row.place}: character {min(unknown)!r} of its {column} is not among "
                    f"{tokenizer.characters!r}"
                )
    task = table(
        name,
        tokenizer,
        *([Example(row.prompt, row.columns[ANSWER]) for row in split] for split in (train, test)),
    )
    names = [column for column in rows[0].columns if column != PROMPT]

    def columns(problem: PyTree) -> dict[str, list[Any]]:
        return {
            column: [rows[i].columns[column] for i in np.asarray(problem).tolist()]
            for column in names
        }

    return task._replace(columns=columns)
