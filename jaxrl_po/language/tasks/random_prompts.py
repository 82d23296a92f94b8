"""Generates prompts of random tokens, for measurements that depend only on sizes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxrl_po import config
from jaxrl_po.config import COUNT, Interval, check_size, static
from jaxrl_po.language.tasks.types import Prompt, Task


@config.record
class RandomPromptsSettings:
    """Settings of `--task=random`."""

    prompt_tokens: int = static(64, "length of a prompt", unit="tokens", within=COUNT)
    answer_tokens: int = static(
        64, "longest completion, unless --problem.max_new_tokens says otherwise", within=COUNT
    )


class Words(NamedTuple):
    """Tokenizer whose words are numbers; its last token is PAD and the last but one is EOS."""

    size: int

    @property
    def pad(self) -> int:
        """Id of the padding token, which is the last id."""
        return self.size - 1

    @property
    def eos(self) -> int:
        """Id of the end-of-sequence token, which is the last id but one."""
        return self.size - 2

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a completion: only EOS."""
        return (self.eos,)

    def encode(self, text: str) -> list[int]:
        """Returns the numbers in a text."""
        return [int(word) for word in text.split()]

    def decode(self, tokens: list[int], *, pad: str = "") -> str:
        """Returns the tokens before the first EOS as numbers; `pad` replaces PAD, if not empty."""
        end = tokens.index(self.eos) if self.eos in tokens else len(tokens)
        words = (pad if token == self.pad else str(token) for token in tokens[:end])
        return " ".join(word for word in words if word)

    def decode_rows(self, tokens: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> list[str]:
        """Decodes all rows, `[B, T]`: their unmasked tokens without EOS."""
        kept = mask & (tokens != self.eos)
        return [self.decode(row[keep].tolist()) for row, keep in zip(tokens, kept, strict=True)]


def random_prompts(vocabulary: int, prompt_tokens: int = 64, answer_tokens: int = 64) -> Task:
    """Builds a task of random prompts that scores a completion by its first token, modulo 7.

    Prompts are uniform over all tokens but EOS and PAD; scores are in [0, 1].

    Args:
      vocabulary: number of tokens, at least 10.
      prompt_tokens: number of tokens in a prompt.
      answer_tokens: number of tokens in the longest completion.

    Raises:
      ConfigError: an argument is outside its range.
    """
    vocabulary = check_size("vocabulary", vocabulary, Interval(10))
    prompt_tokens = check_size("prompt_tokens", prompt_tokens, COUNT)
    answer_tokens = check_size("answer_tokens", answer_tokens, COUNT)
    words = Words(vocabulary)

    def sample(key: jax.Array, held_out: bool) -> Prompt:
        del held_out
        tokens = jax.random.randint(key, (prompt_tokens,), 0, words.eos)
        return Prompt(tokens, jnp.int32(0), jnp.int32(0))

    return Task(
        "random prompts",
        words,
        prompt_tokens,
        answer_tokens,
        sample,
        lambda problem: jnp.full(answer_tokens, words.eos, jnp.int32),
        lambda problem, tokens: (tokens[0] % 7) / 6.0,
        lambda problem, tokens: jnp.zeros(tokens.shape[0]),
    )
