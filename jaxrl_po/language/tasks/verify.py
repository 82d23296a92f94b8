"""Shared verifiers: a fixed number of token comparisons; text is never evaluated as code."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_po.language.tasks.types import Prompt, Task
from jaxrl_po.language.tokenizer import AnyTokenizer, Tokenizer
from jaxrl_po.types import PyTree


def one_answer(
    name: str,
    tokenizer: Tokenizer,
    prompt_length: int,
    answer_length: int,
    sample: Callable[[jax.Array, bool], Prompt],
    demonstrate: Callable[[PyTree], jax.Array],
    *,
    symbols: int = 10,
) -> Task:
    """A task whose demonstrations are the only correct answers.

    They consist of the first `symbols` characters of the alphabet.
    """
    return Task(
        name,
        tokenizer,
        prompt_length,
        answer_length,
        sample,
        demonstrate,
        score=lambda problem, tokens: exact_match(demonstrate(problem), tokens, tokenizer.pad),
        credit=lambda problem, tokens: token_match(demonstrate(problem), tokens, tokenizer.pad),
        parses=lambda problem, tokens: is_word(tokens, symbols, tokenizer),
    )


def exact_match(answer: jax.Array, tokens: jax.Array, pad: int) -> jax.Array:
    """`[]`: 1 if the completion is the answer, EOS included, followed by padding only; else 0.

    Args:
      answer: `[A]`, right answer, padded.
      tokens: `[T]`, completion, padded after EOS; T ≥ A.
      pad: id of PAD.
    """
    return jnp.all(fill(answer, tokens, pad) == tokens).astype(float)


def token_match(answer: jax.Array, tokens: jax.Array, pad: int) -> jax.Array:
    """`[T]`: 1 / (length of the answer) for each token that matches it, EOS included; else 0.

    Args:
      answer: `[A]`, right answer, padded.
      tokens: `[T]`, completion, padded after EOS; T ≥ A.
      pad: id of PAD.
    """
    answer = fill(answer, tokens, pad)
    counts = answer != pad
    return ((answer == tokens) & counts) / jnp.sum(counts, dtype=float)


def with_eos(tokens: jax.Array, tokenizer: AnyTokenizer) -> jax.Array:
    """`[T]`: the completion with EOS in place of whichever of `tokenizer.ends` it ended with.

    Args:
      tokens: `[T]`, completion, padded after its end.
      tokenizer: gives the ends.
    """
    if len(tokenizer.ends) == 1:
        return tokens
    # PAD may be one of the ends: only the first of them is the end.
    ended = jnp.cumsum(jnp.isin(tokens, jnp.array(tokenizer.ends)))
    last = jnp.diff(ended, prepend=0).astype(bool) & (ended == 1)
    return jnp.where(last, tokenizer.eos, jnp.where(ended > 0, tokenizer.pad, tokens))


def fill(answer: jax.Array, tokens: jax.Array, pad: int) -> jax.Array:
    """The answer, padded to the length of the completion."""
    return jnp.concatenate([answer, jnp.full(tokens.shape[0] - answer.shape[0], pad, answer.dtype)])


def is_word(tokens: jax.Array, symbols: int, tokenizer: Tokenizer) -> jax.Array:
    """`[]`: whether a completion is one or more of the allowed characters, EOS, then padding only.

    Args:
      tokens: `[T]`.
      symbols: number of allowed characters, the first ones of the alphabet.
      tokenizer: the alphabet.
    """
    is_eos = tokens == tokenizer.eos
    ended = jnp.cumsum(is_eos)
    first = tokenizer.ids[tokenizer.characters[0]]
    allowed = (tokens >= first) & (tokens < first + symbols)
    after = (tokens == tokenizer.pad) | (is_eos & (ended == 1))
    return (ended[0] == 0) & (ended[-1] == 1) & jnp.all(jnp.where(ended == 0, allowed, after))


def after_separator(
    tokens: jax.Array, separator: str, tokenizer: Tokenizer
) -> tuple[jax.Array, jax.Array]:
    """The answer after the last separator; any text may precede it.

    Args:
      tokens: `[T]`, completion.
      separator: one character.
      tokenizer: the alphabet.

    Returns:
      `[T]`, the answer, shifted to the left, then padding; and `[]`, bool, whether there is a
      separator with neither EOS nor padding before it.
    """
    position = jnp.arange(tokens.shape[0])
    start = jnp.max(jnp.where(tokens == tokenizer.ids[separator], position + 1, 0))
    special = (tokens == tokenizer.eos) | (tokens == tokenizer.pad)
    # Padding takes the place of the text before the answer, and is rolled to the end.
    answer = jnp.roll(jnp.where(position >= start, tokens, tokenizer.pad), -start)
    return answer, (start > 0) & ~jnp.any(special & (position < start))


def after_scratch(
    answer: Callable[[PyTree], jax.Array], tokenizer: Tokenizer
) -> tuple[Callable[[PyTree, jax.Array], jax.Array], Callable[[PyTree, jax.Array], jax.Array]]:
    """`score` and `parses` of a task whose answer follows the last `#`, after any text.

    Args:
      answer: `answer(problem) -> tokens [A]`, the one correct answer with EOS, then padding.
      tokenizer: the alphabet, digits first.
    """

    def score(problem: PyTree, tokens: jax.Array) -> jax.Array:
        word, separated = after_separator(tokens, "#", tokenizer)
        return separated * exact_match(answer(problem), word, tokenizer.pad)

    def parses(problem: PyTree, tokens: jax.Array) -> jax.Array:
        word, separated = after_separator(tokens, "#", tokenizer)
        return separated & is_word(word, 10, tokenizer)

    return score, parses


def at_end(reward: jax.Array, tokens: jax.Array, tokenizer: Tokenizer) -> jax.Array:
    """`[T]`: the reward at the first EOS, else 0."""
    is_eos = tokens == tokenizer.eos
    return jnp.where(is_eos & (jnp.cumsum(is_eos) == 1), reward, 0.0)


def last_token_only(problem: PyTree, tokens: jax.Array) -> jax.Array:
    """`Task.step_end` of a task whose credit is its score, at EOS."""
    del problem
    return jnp.zeros(tokens.shape, bool)
