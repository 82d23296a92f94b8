"""Tasks whose prompts are generated and whose answers are verified inside the program.

A task is a tuple of pure functions of one example, so that a user's own is made the same way; callers `vmap`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.config import COUNT, ConfigError
from jaxrl_po.language.tokenizer import Tokenizer, make_tokenizer
from jaxrl_po.types import PyTree


class Prompt(NamedTuple):
    """One prompt.

    Attributes:
      tokens: `[L]`, int32, left-padded.
      pad: `[]`, int32, padding tokens on the left.
      problem: what the verifier needs.
    """

    tokens: jax.Array
    pad: jax.Array
    problem: PyTree


class Task(NamedTuple):
    """A verifiable task.

    Attributes:
      name: for logs and pictures.
      tokenizer: its alphabet.
      prompt_length: L, tokens of a prompt, padding included.
      answer_length: tokens of the longest right answer, EOS included.
      sample: `sample(key, held_out) -> Prompt`; consumes `key`. The two splits share no problem.
      demonstrate: `demonstrate(problem) -> tokens [answer_length]`, a right answer with EOS, then PAD.
      score: `score(problem, tokens [T]) -> []` float32 in [0, 1]: the raw accuracy of a completion.
      credit: `credit(problem, tokens [T]) -> [T]` float32: each token's share of a process reward, at most 1 in all.
    """

    name: str
    tokenizer: Tokenizer
    prompt_length: int
    answer_length: int
    sample: Callable[[jax.Array, bool], Prompt]
    demonstrate: Callable[[PyTree], jax.Array]
    score: Callable[[PyTree, jax.Array], jax.Array]
    credit: Callable[[PyTree, jax.Array], jax.Array]


HELD_OUT = 10  # one problem in so many is held out
MAX_DIGITS = 9  # a sum of two operands still fits an int32


def addition(num_digits: int, *, zero_pad: bool = True, reverse: bool = True) -> Task:
    """Addition of two numbers of up to `num_digits` digits: `034+058=` is answered by `290` and EOS, lowest digit first.

    One pair of operands in ten is held out, chosen by a hash of the unordered pair, so that b + a never gives away a + b.

    Args:
      num_digits: digits of an operand, in [1, 9]; grades the difficulty.
      zero_pad: operands and sum fill their width with zeros; otherwise prompts are ragged and sums vary in length.
      reverse: lowest digit first, the order in which carries propagate.

    Returns:
      The task.

    Raises:
      ConfigError: `num_digits` outside its range.

    Example:
      >>> task = addition(2)
      >>> prompt = task.sample(jax.random.key(0), False)
      >>> text = task.tokenizer.decode(prompt.tokens.tolist())
      >>> len(text), float(task.score(prompt.problem, task.demonstrate(prompt.problem)))
      (6, 1.0)
    """
    if num_digits not in COUNT or num_digits > MAX_DIGITS:
        raise ConfigError(f"num_digits must lie in [1, {MAX_DIGITS}], got {num_digits}")
    tokenizer = make_tokenizer("0123456789+=")
    zero, plus, equals = tokenizer.ids["0"], tokenizer.ids["+"], tokenizer.ids["="]
    powers = 10 ** jnp.arange(MAX_DIGITS + 1, dtype=jnp.uint32)
    prompt_length, answer_length = 2 * num_digits + 2, num_digits + 2

    def width(x: jax.Array, padded: int) -> jax.Array:
        return jnp.int32(padded) if zero_pad else jnp.maximum(1, jnp.sum(x >= powers, dtype=jnp.int32))

    def digit(x: jax.Array, place: jax.Array) -> jax.Array:
        return zero + ((x // powers[jnp.clip(place, 0, MAX_DIGITS)]) % 10).astype(jnp.int32)

    def sample(key: jax.Array, held_out: bool) -> Prompt:
        # Of enough candidates one is of the split, but for a chance of 1e-16 (train) and 2e-12 (held out).
        candidates = jax.random.randint(key, (256 if held_out else 16, 2), 0, 10**num_digits).astype(jnp.uint32)
        chosen = jnp.argmax(is_held_out(candidates[:, 0], candidates[:, 1]) == held_out)
        a, b = candidates[chosen]
        width_a, width_b = width(a, num_digits), width(b, num_digits)
        pad = prompt_length - (width_a + width_b + 2)
        at = jnp.arange(prompt_length) - pad
        tokens = jnp.where(at < width_a, digit(a, width_a - 1 - at), plus)
        tokens = jnp.where(at > width_a, digit(b, width_a + width_b - at), tokens)
        tokens = jnp.where(at == width_a + 1 + width_b, equals, tokens)
        return Prompt(jnp.where(at < 0, tokenizer.pad, tokens).astype(jnp.int32), pad, (a, b))

    def demonstrate(problem: tuple[jax.Array, jax.Array]) -> jax.Array:
        total = problem[0] + problem[1]
        length = width(total, num_digits + 1)
        at = jnp.arange(answer_length)
        tokens = digit(total, at if reverse else length - 1 - at)
        return jnp.where(at < length, tokens, jnp.where(at == length, tokenizer.eos, tokenizer.pad)).astype(jnp.int32)

    return Task(
        f"{num_digits}-digit addition",
        tokenizer,
        prompt_length,
        answer_length,
        sample,
        demonstrate,
        score=lambda problem, tokens: exact_match(demonstrate(problem), tokens, tokenizer.pad),
        credit=lambda problem, tokens: token_match(demonstrate(problem), tokens, tokenizer.pad),
    )


def exact_match(answer: jax.Array, tokens: jax.Array, pad: int) -> jax.Array:
    """1 where the completion is the answer, EOS included, and nothing but padding follows; else 0.

    Args:
      answer: `[A]`, right answer, padded.
      tokens: `[T]`, completion, padded after EOS; T ≥ A.
      pad: id of PAD.
    """
    return jnp.all(_fill(answer, tokens, pad) == tokens).astype(jnp.float32)


def token_match(answer: jax.Array, tokens: jax.Array, pad: int) -> jax.Array:
    """1 / (length of the answer) for each token that stands where the answer has it, EOS included; else 0.

    Args:
      answer: `[A]`, right answer, padded.
      tokens: `[T]`, completion, padded after EOS; T ≥ A.
      pad: id of PAD.
    """
    answer = _fill(answer, tokens, pad)
    counts = answer != pad
    return ((answer == tokens) & counts) / jnp.sum(counts, dtype=jnp.float32)


def _fill(answer: jax.Array, tokens: jax.Array, pad: int) -> jax.Array:
    return jnp.concatenate([answer, jnp.full(tokens.shape[0] - answer.shape[0], pad, answer.dtype)])


def is_held_out(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether the unordered pair of uint32 operands belongs to the held-out split (one in ten, by a hash)."""
    low, high = jnp.minimum(a, b), jnp.maximum(a, b)
    return _mix(_mix(low) + high) % HELD_OUT == 0


def _mix(x: jax.Array) -> jax.Array:
    """A bijective 32-bit hash (two rounds of multiply and xor-shift)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
