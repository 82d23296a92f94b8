"""Defines multiplication of two numbers, with a chain of thought."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po import config
from jaxrl_po.config import Interval, check_size, common
from jaxrl_po.language.tasks.split import make_draw
from jaxrl_po.language.tasks.text import (
    LOWEST_FIRST,
    MAX_FACTOR_DIGITS,
    Piece,
    literal,
    numeral,
    write_answer,
    write_prompt,
)
from jaxrl_po.language.tasks.types import Prompt, Task
from jaxrl_po.language.tasks.verify import after_scratch, at_end, fill
from jaxrl_po.language.tokenizer import make_tokenizer

Pair = tuple[jax.Array, jax.Array]


@config.record
class MultiplicationSettings:
    """Settings of `--task=multiplication`."""

    num_digits: int = common.static(
        2, "digits of an operand", unit="digits", within=Interval(1, MAX_FACTOR_DIGITS)
    )


def multiplication(num_digits: int) -> Task:
    """Builds multiplication: `840+0630:8040#8040` and EOS is an answer to `12*34=`.

    Operands have their highest digit first, all other numbers their lowest digit first; all are
    zero-padded to full width. The chain of thought contains the product of the first operand with
    each digit of the second, shifted by zeros (48, then 360), and after each product but the first
    the sum so far (408); the answer follows `#`. Only the answer is scored: any text of any length
    may precede the last `#`.

    `credit` gives 1 / (2 num_digits) for each product and each sum that matches the demonstration,
    at the mark that ends the number, and as much for the score, at EOS.

    One pair of operands in ten is held out, by a hash of the unordered pair.

    Args:
      num_digits: number of digits in an operand, in [1, 4]; sets the difficulty.

    Returns:
      `Task` of multiplication.

    Raises:
      ConfigError: `num_digits` is outside its range.

    Example:
      >>> task = multiplication(2)
      >>> tokens = task.demonstrate((jnp.uint32(12), jnp.uint32(34)))
      >>> task.tokenizer.decode(tokens.tolist())
      '840+0630:8040#8040'
    """
    num_digits = check_size("num_digits", num_digits, Interval(1, MAX_FACTOR_DIGITS))
    tokenizer = make_tokenizer("0123456789*=+:#")
    draw = make_draw([(0, 10**num_digits)] * 2, canonical=jnp.sort, advice="raise num_digits")
    name = f"{num_digits}-digit multiplication"
    prompt_length, full = 2 * num_digits + 2, 2 * num_digits

    def sample(key: jax.Array, held_out: bool) -> Prompt:
        a, b = draw(key, held_out)
        first, second = (numeral(x, num_digits, tokenizer, reverse=False) for x in (a, b))
        return write_prompt(
            [first, literal("*", tokenizer), second, literal("=", tokenizer)],
            prompt_length,
            tokenizer,
            (a, b),
        )

    def answer(problem: Pair) -> jax.Array:
        return write_answer(
            [numeral(problem[0] * problem[1], full, tokenizer)], full + 1, tokenizer
        )

    # A product shifted by i places and the sum so far have num_digits + 1 + i digits; a mark ends
    # each number.
    widths = np.array([num_digits + 1 + i for i in range(num_digits) for _ in range(2 if i else 1)])
    ends = np.cumsum(widths + 1)
    starts = ends - widths - 1
    answer_length = int(ends[-1]) + full + 1
    share = 1.0 / (len(widths) + 1)

    def demonstrate(problem: Pair) -> jax.Array:
        a, b = problem
        pieces: list[Piece] = []
        for i in range(num_digits):
            width, unit = num_digits + 1 + i, np.uint32(10**i)
            product = numeral(a * (b // unit % 10 * unit), width, tokenizer)
            if i == 0:  # the first sum so far is the first product
                pieces += [product]
                continue
            total = numeral(a * (b % (10 * unit)), width, tokenizer)
            pieces += [literal("+", tokenizer), product, literal(":", tokenizer), total]
        pieces += [literal("#", tokenizer), numeral(a * b, full, tokenizer)]
        return write_answer(pieces, answer_length, tokenizer)

    score, parses = after_scratch(answer, tokenizer)

    def credit(problem: Pair, tokens: jax.Array) -> jax.Array:
        # A step is correct if the count of wrong tokens does not grow over it, its mark included.
        wrong = jnp.cumsum(fill(demonstrate(problem), tokens, tokenizer.pad) != tokens)
        wrong = jnp.concatenate([jnp.zeros(1, wrong.dtype), wrong])
        steps = jnp.zeros(tokens.shape[0]).at[ends - 1].set(wrong[ends] == wrong[starts])
        return share * (steps + at_end(score(problem, tokens), tokens, tokenizer))

    def step_end(problem: Pair, tokens: jax.Array) -> jax.Array:
        del problem
        return jnp.zeros(tokens.shape[0], bool).at[ends - 1].set(True)

    return Task(
        name,
        tokenizer,
        prompt_length,
        answer_length,
        sample,
        demonstrate,
        score,
        credit,
        parses,
        step_end=step_end,
        note=LOWEST_FIRST,
    )
