"""A finite list of prompts with their answers."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.config import ConfigError
from jaxrl_po.language.tasks.types import Prompt, Task
from jaxrl_po.language.tasks.verify import exact_answer
from jaxrl_po.language.tokenizer import AnyTokenizer


class Example(NamedTuple):
    """One prompt and its correct answer.

    Attributes:
      prompt: a text, or its ids.
      answer: a text.
    """

    prompt: str | tuple[int, ...]
    answer: str


def table(
    name: str, tokenizer: AnyTokenizer, train: Sequence[Example], test: Sequence[Example]
) -> Task:
    """A task over two lists of prompts, drawn uniformly; only the exact answer is correct.

    The problem is the row in `[*train, *test]`. The lists are constants of the program: meant for
    thousands, not for millions.

    Args:
      name: for logs and plots.
      tokenizer: see `make_tokenizer`, which has every character of them, or that of a pretrained
        model.
      train: at least one example.
      test: at least one example, held out.

    Returns:
      The task.

    Raises:
      ConfigError: a list is empty, shares a prompt with the other, or contains an empty prompt or
        a character that the tokenizer lacks.

    Example:
      >>> from jaxrl_po.language.tokenizer import make_tokenizer
      >>> train, test = [Example("up:", "down")], [Example("east:", "west")]
      >>> task = table("opposites", make_tokenizer(":adenopstuw"), train, test)
      >>> prompt = task.sample(jax.random.key(0), True)
      >>> task.tokenizer.decode(prompt.tokens.tolist()), int(prompt.problem)
      ('east:', 1)
    """
    for split, examples in (("train", train), ("test", test)):
        if not examples:
            raise ConfigError(f"{split} must hold at least one prompt")
    if shared := {example.prompt for example in train} & {example.prompt for example in test}:
        raise ConfigError(
            f"train and test must share no prompt, but both hold {min(map(str, shared))!r}"
        )
    rows = [
        (
            tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt),
            [*tokenizer.encode(answer), tokenizer.eos],
        )
        for prompt, answer in (*train, *test)
    ]
    if not all(prompt for prompt, _ in rows):
        raise ConfigError("prompts must not be empty")
    prompt_length, answer_length = (max(map(len, column)) for column in zip(*rows, strict=True))
    tokens = np.array(
        [[tokenizer.pad] * (prompt_length - len(prompt)) + prompt for prompt, _ in rows], np.int32
    )
    answers = np.array(
        [answer + [tokenizer.pad] * (answer_length - len(answer)) for _, answer in rows], np.int32
    )
    pad = np.array([prompt_length - len(prompt) for prompt, _ in rows], np.int32)

    def sample(key: jax.Array, held_out: bool) -> Prompt:
        first, last = (len(train), len(rows)) if held_out else (0, len(train))
        row = jax.random.randint(key, (), first, last)
        return Prompt(jnp.asarray(tokens)[row], jnp.asarray(pad)[row], row)

    def demonstrate(row: jax.Array) -> jax.Array:
        return jnp.asarray(answers)[row]

    # Any text may be an answer: none is malformed.
    return exact_answer(name, tokenizer, prompt_length, answer_length, sample, demonstrate)
