"""Defines tasks over a finite list of prompts with their answers."""

import functools
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.config import ConfigError
from jaxrl_po.language.tasks.texts import Texts, make_texts, match
from jaxrl_po.language.tasks.types import Prompt, Task
from jaxrl_po.language.tasks.verify import exact_match, token_match, with_eos
from jaxrl_po.language.tokenizer import AnyTokenizer


class Example(NamedTuple):
    """Prompt with its correct answer.

    Attributes:
      prompt: prompt as a text, or its ids.
      answer: correct answer as a text.
    """

    prompt: str | tuple[int, ...]
    answer: str


class TableRows(NamedTuple):
    """Table of R prompts, padded on the left, and their answers, padded on the right.

    Attributes:
      tokens: tokens of the prompts, `[R, L]`, int32.
      pad: padding tokens on the left, `[R]`, int32.
      answer: tokens of the answers, EOS included, `[R, A]`, int32.
      texts: bytes of tokens and answers, or None for this package's `Tokenizer`, where each text
        has one tokenization.
    """

    tokens: Any
    pad: Any
    answer: Any
    texts: Texts | None = None


def make_rows(tokenizer: AnyTokenizer, examples: Sequence[Example]) -> TableRows:
    """Encodes examples as `TableRows`; raises ConfigError for an empty prompt."""
    texts = [
        (
            tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt),
            [*tokenizer.encode(answer), tokenizer.eos],
        )
        for prompt, answer in examples
    ]
    if not all(prompt for prompt, _ in texts):
        raise ConfigError("prompts", "must not be empty")
    before, after = (max(map(len, column)) for column in zip(*texts, strict=True))
    pad = tokenizer.pad
    read_texts: Callable[[], Sequence[bytes]] | None = getattr(tokenizer, "token_texts", None)
    return TableRows(
        tokens=np.array([[pad] * (before - len(x)) + x for x, _ in texts], np.int32),
        pad=np.array([before - len(x) for x, _ in texts], np.int32),
        answer=np.array([x + [pad] * (after - len(x)) for _, x in texts], np.int32),
        texts=read_texts and make_texts(read_texts(), [_spelt(tokenizer, x) for _, x in examples]),
    )


def _spelt(tokenizer: AnyTokenizer, answer: str) -> str:
    """Returns an answer as the tokenizer writes it, in the tokenizer's Unicode form and case."""
    written = tokenizer.decode(tokenizer.encode(answer))
    plain = (unicodedata.normalize("NFKC", text).casefold().strip() for text in (written, answer))
    return written if len(set(plain)) == 1 else answer  # a token may be unknown to the tokenizer


def table(
    name: str,
    tokenizer: AnyTokenizer,
    train: Sequence[Example],
    test: Sequence[Example],
    *,
    validation: Sequence[Example] = (),
    share_prompts: bool = False,
) -> Task:
    """Builds a task over lists of prompts; only the exact answer is correct.

    With the tokenizer of a pretrained model, any tokens whose text is the answer are correct; space
    around the text is ignored.

    Training draws uniformly; an evaluation asks each row of `test` once. The problem is the row in
    `[*train, *validation, *test]`. The lists are the task's `data`, an argument of the
    programs of a run.

    Args:
      name: name for logs and plots.
      tokenizer: tokenizer from `make_tokenizer` that has every character of the examples, or the
        tokenizer of a pretrained model.
      train: training examples, at least one.
      test: held-out examples, at least one.
      validation: held-out examples by which a run selects its best checkpoint. Without validation
        examples, a command takes every second example of `test` for validation, and tests on the
        other examples.
      share_prompts: True if the lists may have prompts in common, for callers that distinguish such
        prompts by other data.

    Returns:
      `Task` over the examples.

    Raises:
      ConfigError: a list is empty, shares a prompt with another list, or contains an empty prompt
        or a character that the tokenizer lacks.

    Example:
      >>> from jaxrl_po.language.tokenizer import make_tokenizer
      >>> train, test = [Example("up:", "down")], [Example("east:", "west")]
      >>> task = table("opposites", make_tokenizer(":adenopstuw"), train, test)
      >>> prompt = task.sample(jax.random.key(0), True)
      >>> task.tokenizer.decode(prompt.tokens.tolist()), int(prompt.problem)
      ('east:', 1)
    """
    if not (train and test):
        raise ConfigError("test" if train else "train", "must hold at least one prompt")
    found: dict[Any, str] = {}
    for split, examples in (("train", train), ("validation", validation), ("test", test)):
        for prompt, _ in examples:
            if found.setdefault(prompt, split) != split and not share_prompts:
                raise ConfigError(
                    split, f"must share no prompt with {found[prompt]}, but has {str(prompt)!r}"
                )
    rows = make_rows(tokenizer, [*train, *validation, *test])
    tested = range(len(train) + len(validation), len(rows.pad))

    def row(rows: TableRows, i: jax.Array) -> Prompt:
        return Prompt(jnp.asarray(rows.tokens)[i], jnp.asarray(rows.pad)[i], i)

    def sample(rows: TableRows, key: jax.Array, held_out: bool) -> Prompt:
        first, last = (tested.start, tested.stop) if held_out else (0, len(train))
        return row(rows, jax.random.randint(key, (), first, last))

    def demonstrate(rows: TableRows, row: jax.Array) -> jax.Array:
        return jnp.asarray(rows.answer)[row]

    def score(rows: TableRows, row: jax.Array, tokens: jax.Array) -> jax.Array:
        exact = exact_match(demonstrate(rows, row), with_eos(tokens, tokenizer), tokenizer.pad)
        if rows.texts is None:
            return exact
        return jnp.maximum(exact, match(rows.texts, row, tokens, tokenizer.ends).score)

    def credit(rows: TableRows, row: jax.Array, tokens: jax.Array) -> jax.Array:
        exact = token_match(demonstrate(rows, row), with_eos(tokens, tokenizer), tokenizer.pad)
        if rows.texts is None:
            return exact
        # The same text in other tokens has the same credit.
        found = match(rows.texts, row, tokens, tokenizer.ends)
        return jnp.where((found.score == 1.0) & (exact.sum() < 0.99), found.credit, exact)

    return Task(
        name,
        tokenizer,
        rows.tokens.shape[1],
        rows.answer.shape[1],
        sample=functools.partial(sample, rows),
        demonstrate=functools.partial(demonstrate, rows),
        score=functools.partial(score, rows),
        credit=functools.partial(credit, rows),
        row=functools.partial(row, rows),
        test=tested,
        validation=range(len(train), tested.start),
        data=rows,
    )  # Any text may be an answer, so no completion is malformed and `parses` remains None.
