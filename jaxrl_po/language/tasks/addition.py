"""Defines the addition of two numbers."""

import jax
import jax.numpy as jnp

from jaxrl_po import config
from jaxrl_po.config import Interval, check_size, common, static, static_value
from jaxrl_po.language.tasks.split import make_draw
from jaxrl_po.language.tasks.text import (
    LOWEST_FIRST,
    MAX_DIGITS,
    literal,
    numeral,
    write_answer,
    write_prompt,
)
from jaxrl_po.language.tasks.types import Prompt, Task
from jaxrl_po.language.tasks.verify import one_answer
from jaxrl_po.language.tokenizer import make_tokenizer

Pair = tuple[jax.Array, jax.Array]


@config.record
class AdditionSettings:
    """Settings of `--task=addition`."""

    num_digits: int = common.static(
        3, "digits of an operand", unit="digits", within=Interval(1, MAX_DIGITS)
    )
    zero_pad: bool = static(
        True,
        "pad operands and sum with zeros to their full width; otherwise prompts and answers "
        "vary in length",
    )
    reverse: bool = static(True, "answer with the lowest digit first, the order of the carries")


def addition(num_digits: int, *, zero_pad: bool = True, reverse: bool = True) -> Task:
    """Builds addition of two numbers: `034+058=` is answered by `2900` and EOS, reversed digits.

    One pair of operands in ten is held out, by a hash of the unordered pair, so that a + b and
    b + a are in the same split. The stratum is the number of carries, 0 to `num_digits`.

    Args:
      num_digits: maximum digits of an operand, in [1, 9]; sets the difficulty.
      zero_pad: True to zero-pad operands and sum to their full width; otherwise prompts and sums
        vary in length.
      reverse: True to write the sum lowest digit first, the order of the carries.

    Returns:
      `Task` of addition.

    Raises:
      ConfigError: `num_digits` is outside its range.

    Example:
      >>> task = addition(2)
      >>> prompt = task.sample(jax.random.key(0), False)
      >>> text = task.tokenizer.decode(prompt.tokens.tolist())
      >>> len(text), float(task.score(prompt.problem, task.demonstrate(prompt.problem)))
      (6, 1.0)
    """
    num_digits = check_size("num_digits", num_digits, Interval(1, MAX_DIGITS))
    zero_pad = static_value("zero_pad", zero_pad, bool)
    reverse = static_value("reverse", reverse, bool)
    tokenizer = make_tokenizer("0123456789+=")
    plus, equals = literal("+", tokenizer), literal("=", tokenizer)
    prompt_length, answer_length = 2 * num_digits + 2, num_digits + 2
    draw = make_draw([(0, 10**num_digits)] * 2, canonical=jnp.sort, advice="raise num_digits")

    def sample(key: jax.Array, held_out: bool) -> Prompt:
        a, b = draw(key, held_out)
        first, second = (
            numeral(x, num_digits, tokenizer, zero_pad=zero_pad, reverse=False) for x in (a, b)
        )
        return write_prompt([first, plus, second, equals], prompt_length, tokenizer, (a, b))

    def demonstrate(problem: Pair) -> jax.Array:
        total = numeral(
            problem[0] + problem[1], num_digits + 1, tokenizer, zero_pad=zero_pad, reverse=reverse
        )
        return write_answer([total], answer_length, tokenizer)

    def carries(problem: Pair) -> jax.Array:
        # Column i carries exactly where the last i + 1 digits overflow.
        columns = jnp.array([10 ** (i + 1) for i in range(num_digits)], jnp.uint32)
        a, b = problem
        return jnp.sum(a % columns + b % columns >= columns, dtype=jnp.int32)

    task = one_answer(
        f"{num_digits}-digit addition", tokenizer, prompt_length, answer_length, sample, demonstrate
    )
    note = LOWEST_FIRST if reverse else ""
    return task._replace(strata=num_digits + 1, stratum=carries, note=note)
