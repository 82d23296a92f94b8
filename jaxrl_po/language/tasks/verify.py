"""Verifies completions by a fixed number of token comparisons that never evaluate text as code."""

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
    """Builds a task whose demonstrations are the only correct answers.

    Answers consist of the first `symbols` characters of the alphabet.
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
    """Returns 1, `[]`, if the completion is the answer with EOS, then only padding; otherwise 0.

    Args:
      answer: tokens of the right answer, padded, `[A]`.
      tokens: tokens of the completion, padded after EOS, `[T]`, T ≥ A.
      pad: id of PAD.
    """
    return jnp.all(fill(answer, tokens, pad) == tokens).astype(float)


def token_match(answer: jax.Array, tokens: jax.Array, pad: int) -> jax.Array:
    """Returns 1 / (length of the answer) for each token that matches, EOS included, or 0, `[T]`.

    Args:
      answer: tokens of the right answer, padded, `[A]`.
      tokens: tokens of the completion, padded after EOS, `[T]`, T ≥ A.
      pad: id of PAD.
    """
    answer = fill(answer, tokens, pad)
    counts = answer != pad
    return ((answer == tokens) & counts) / jnp.sum(counts, dtype=float)


def with_eos(tokens: jax.Array, tokenizer: AnyTokenizer) -> jax.Array:
    """Replaces the end of a completion, any of `tokenizer.ends`, by EOS, `[T]`.

    Args:
      tokens: tokens of the completion, padded after its end, `[T]`.
      tokenizer: tokenizer whose `ends` are replaced.
    """
    if len(tokenizer.ends) == 1:
        return tokens
    # PAD may be one of the ends: only the first end in the tokens is the end.
    ended = jnp.cumsum(jnp.isin(tokens, jnp.array(tokenizer.ends)))
    last = jnp.diff(ended, prepend=0).astype(bool) & (ended == 1)
    return jnp.where(last, tokenizer.eos, jnp.where(ended > 0, tokenizer.pad, tokens))


def fill(answer: jax.Array, tokens: jax.Array, pad: int) -> jax.Array:
    """Pads the answer to the length of the completion."""
    return jnp.concatenate([answer, jnp.full(tokens.shape[0] - answer.shape[0], pad, answer.dtype)])


def is_word(tokens: jax.Array, symbols: int, tokenizer: Tokenizer) -> jax.Array:
    """Returns True, `[]`, for one or more allowed characters, EOS, then only padding.

    Args:
      tokens: tokens of the completion, `[T]`.
      symbols: number of allowed characters, the first ones of the alphabet.
      tokenizer: tokenizer of the alphabet.
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
    """Extracts the answer after the last separator; any text may precede the separator.

    Args:
      tokens: tokens of the completion, `[T]`.
      separator: one character.
      tokenizer: tokenizer of the alphabet.

    Returns:
      Answer, shifted to the left, then padding, `[T]`; and True if the completion has a separator
      with neither EOS nor padding before it, `[]`, bool.
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
    """Builds `score` and `parses` of a task whose answer follows the last `#`, after any text.

    Args:
      answer: `answer(problem) -> tokens [A]`, returns the only correct answer with EOS, then
        padding.
      tokenizer: tokenizer of the alphabet, digits first.
    """

    def score(problem: PyTree, tokens: jax.Array) -> jax.Array:
        word, separated = after_separator(tokens, "#", tokenizer)
        return separated * exact_match(answer(problem), word, tokenizer.pad)

    def parses(problem: PyTree, tokens: jax.Array) -> jax.Array:
        word, separated = after_separator(tokens, "#", tokenizer)
        return separated & is_word(word, 10, tokenizer)

    return score, parses


def at_end(reward: jax.Array, tokens: jax.Array, tokenizer: Tokenizer) -> jax.Array:
    """Places the reward at the first EOS, and 0 at other tokens, `[T]`."""
    is_eos = tokens == tokenizer.eos
    return jnp.where(is_eos & (jnp.cumsum(is_eos) == 1), reward, 0.0)


def last_token_only(problem: PyTree, tokens: jax.Array) -> jax.Array:
    """Implements `Task.step_end` for a task whose credit is its score, at EOS."""
    del problem
    return jnp.zeros(tokens.shape, bool)
