"""Modular arithmetic."""

import jax
import jax.numpy as jnp

from jaxrl_po.config import Interval
from jaxrl_po.language.tasks.split import make_draw
from jaxrl_po.language.tasks.text import (
    LOWEST_FIRST,
    MAX_FACTOR_DIGITS,
    literal,
    number,
    write_answer,
    write_prompt,
)
from jaxrl_po.language.tasks.types import Prompt, Task, check_size
from jaxrl_po.language.tasks.verify import one_answer
from jaxrl_po.language.tokenizer import make_tokenizer

Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def modular(num_digits: int, *, modulus_digits: int = 1) -> Task:
    """The remainder of a b + c: the answer to `(12*34+56)%7=` is `2` and EOS.

    Answers have their lowest digit first; all numbers are zero-padded to their full width.

    One problem in ten is held out, chosen by a hash of the unordered pair of factors, c, and the
    modulus.

    Args:
      num_digits: digits of a, b and c, in [1, 4]; sets the difficulty.
      modulus_digits: digits of the modulus (at least 2), in [1, 4]; sets it too.

    Returns:
      The task.

    Raises:
      ConfigError: an argument outside its range.

    Example:
      >>> task = modular(2)
      >>> problem = tuple(jnp.uint32(x) for x in (12, 34, 56, 7))
      >>> task.tokenizer.decode(task.demonstrate(problem).tolist())
      '2'
    """
    check_size("num_digits", num_digits, Interval(1, MAX_FACTOR_DIGITS))
    check_size("modulus_digits", modulus_digits, Interval(1, MAX_FACTOR_DIGITS))
    tokenizer = make_tokenizer("0123456789(*+)%=")
    prompt_length, answer_length = 3 * num_digits + modulus_digits + 6, modulus_digits + 1
    draw = make_draw(
        [(0, 10**num_digits)] * 3 + [(2, 10**modulus_digits)],
        canonical=_sort_factors,
        advice="raise num_digits",
    )

    def sample(key: jax.Array, held_out: bool) -> Prompt:
        a, b, c, modulus = draw(key, held_out)
        pieces = [literal("(", tokenizer)]
        for x, mark in ((a, "*"), (b, "+"), (c, ")%")):
            pieces += [number(x, num_digits, tokenizer, reverse=False), literal(mark, tokenizer)]
        pieces += [
            number(modulus, modulus_digits, tokenizer, reverse=False),
            literal("=", tokenizer),
        ]
        return write_prompt(pieces, prompt_length, tokenizer, (a, b, c, modulus))

    def demonstrate(problem: Operands) -> jax.Array:
        a, b, c, modulus = problem
        return write_answer(
            [number((a * b + c) % modulus, modulus_digits, tokenizer)], answer_length, tokenizer
        )

    name = f"{num_digits}-digit arithmetic, modulus of {modulus_digits}"
    task = one_answer(name, tokenizer, prompt_length, answer_length, sample, demonstrate)
    return task._replace(note=LOWEST_FIRST if modulus_digits > 1 else "")


def _sort_factors(rows: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.sort(rows[..., :2]), rows[..., 2:]], axis=-1)
