"""Conversion of decimal numbers to another base."""

import jax

from jaxrl_po.config import Interval
from jaxrl_po.language.tasks.split import make_draw
from jaxrl_po.language.tasks.text import (
    LOWEST_FIRST,
    MAX_DIGITS,
    literal,
    number,
    write_answer,
    write_prompt,
)
from jaxrl_po.language.tasks.types import Prompt, Task, check_size
from jaxrl_po.language.tasks.verify import one_answer
from jaxrl_po.language.tokenizer import make_tokenizer

NUMERALS = "0123456789abcdef"


def base_conversion(num_digits: int, *, base: int) -> Task:
    """A decimal number in another base: for base 2 the answer to `06=` is `0110000` and EOS.

    Answers have their lowest digit first. Numbers are zero-padded to `num_digits` digits, answers
    to the length of the longest one. One number in ten is held out.

    Args:
      num_digits: decimal digits, in [1, 9]; sets the difficulty.
      base: of the answer, in [2, 16]; digits above 9 are `a` to `f`.

    Returns:
      The task.

    Raises:
      ConfigError: an argument outside its range.

    Example:
      >>> task = base_conversion(3, base=16)
      >>> task.tokenizer.decode(task.demonstrate(jax.numpy.uint32(250)).tolist())
      'af0'
    """
    check_size("num_digits", num_digits, Interval(1, MAX_DIGITS))
    check_size("base", base, Interval(2, len(NUMERALS)))
    tokenizer = make_tokenizer(NUMERALS[: max(10, base)] + "=")
    places = next(places for places in range(1, 32) if base**places >= 10**num_digits)
    draw = make_draw([(0, 10**num_digits)], advice="raise num_digits")

    def sample(key: jax.Array, held_out: bool) -> Prompt:
        x = draw(key, held_out)[0]
        decimal = number(x, num_digits, tokenizer, reverse=False)
        return write_prompt([decimal, literal("=", tokenizer)], num_digits + 1, tokenizer, x)

    def demonstrate(problem: jax.Array) -> jax.Array:
        return write_answer([number(problem, places, tokenizer, base=base)], places + 1, tokenizer)

    name = f"{num_digits}-digit numbers to base {base}"
    return one_answer(
        name, tokenizer, num_digits + 1, places + 1, sample, demonstrate, symbols=base
    )._replace(note=LOWEST_FIRST)
