"""Defines countdown: build an expression from given numbers that reaches a target."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po import config
from jaxrl_po.config import Interval, check_size, static
from jaxrl_po.language.tasks.split import make_draw
from jaxrl_po.language.tasks.stack_machine import OPERATORS, execute
from jaxrl_po.language.tasks.text import Piece, literal, numeral, write_answer, write_prompt
from jaxrl_po.language.tasks.types import Prompt, Task
from jaxrl_po.language.tasks.verify import at_end, last_token_only
from jaxrl_po.language.tokenizer import make_tokenizer

MAX_NUMBERS = 8
LARGEST = 2**31 - 1  # the largest int32


@config.record
class CountdownSettings:
    """Settings of `--task=countdown`."""

    num_numbers: int = static(
        3, "given numbers, each to be used once", within=Interval(2, MAX_NUMBERS)
    )
    max_number: int = static(
        9, "largest given number; max_number ** num_numbers below 2 ** 31", within=Interval(2)
    )


class Countdown(NamedTuple):
    """Problem of countdown.

    Attributes:
      numbers: given numbers in the order of the prompt, `[K]`, int32.
      target: number that the expression must reach, `[]`, int32.
      solution: tokens of one correct answer, with EOS, `[A]`, int32.
    """

    numbers: jax.Array
    target: jax.Array
    solution: jax.Array


def countdown(num_numbers: int, *, max_number: int) -> Task:
    """Builds countdown: `3,7,2>13=` asks for 13 from 3, 7, 2, for example `32*7+` and EOS.

    An expression is right if it is postfix (`32*7+` or `723*+`), uses **every given number exactly
    once** (a number given twice, twice) and `+`, `-`, `*`; intermediate values may be negative.
    Numbers are zero-padded (`03`), highest digit first, so that no separators are needed.

    A stack machine verifies the expression, one step per token. Any correct expression scores 1;
    `credit` is the score, at EOS, since part of an expression is neither right nor wrong. A
    completion parses if it is postfix that leaves one value, whatever numbers it uses.

    Targets are solvable by construction: numbers in random order are combined one by one with the
    value so far, by a random operator that keeps the value in [0, 10^(digits + 1)); differences
    subtract the smaller number from the larger. One multiset of numbers in ten is held out, with
    all its targets.

    Args:
      num_numbers: number K of given numbers, in [2, 8]; sets the difficulty.
      max_number: largest possible number, at least 2 (the smallest is 1); max_number^K < 2^31, so
        that no value overflows.

    Returns:
      `Task` whose problem is a `Countdown`.

    Raises:
      ConfigError: an argument is outside its range, or there are so few numbers that a split would
        be empty.

    Example:
      >>> task = countdown(3, max_number=9)
      >>> prompt = task.sample(jax.random.key(0), False)
      >>> len(task.tokenizer.decode(prompt.tokens.tolist()))
      9
      >>> float(task.score(prompt.problem, prompt.problem.solution))
      1.0
    """
    num_numbers = check_size("num_numbers", num_numbers, Interval(2, MAX_NUMBERS))
    largest = max(n for n in range(2, 46_341) if n**num_numbers <= LARGEST)
    max_number = check_size("max_number", max_number, Interval(2, largest))
    tokenizer = make_tokenizer("0123456789" + OPERATORS + ",>=")
    places = len(str(max_number))
    prompt_length = num_numbers * (places + 1) + places + 2
    answer_length = num_numbers * (places + 1)  # K numbers, K − 1 operators, EOS
    limit = 10 ** (places + 1)
    draw = make_draw(
        [(1, max_number + 1)] * num_numbers,
        canonical=jnp.sort,
        advice="raise max_number or num_numbers",
    )

    def write(x: jax.Array, width: int) -> Piece:
        return numeral(x.astype(jnp.uint32), width, tokenizer, reverse=False)

    def construct(key: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        order_key, operator_key = jax.random.split(key)
        numbers = jax.random.permutation(order_key, numbers)
        # The argmax of uniform noise over the permitted operators draws one of them uniformly.
        noise = jax.random.uniform(operator_key, (num_numbers, len(OPERATORS)))
        value, text = numbers[0], write(numbers[0], places).tokens
        for i in range(1, num_numbers):
            x, operand = numbers[i], write(numbers[i], places).tokens
            values = jnp.stack([value + x, jnp.abs(value - x), value * x])
            operator = jnp.argmax(jnp.where(values < limit, noise[i], -1.0))
            reverse = (operator == OPERATORS.index("-")) & (x > value)
            joined = jnp.where(
                reverse, jnp.concatenate([operand, text]), jnp.concatenate([text, operand])
            )
            value = values[operator]
            text = jnp.append(joined, tokenizer.ids[OPERATORS[0]] + operator.astype(jnp.int32))
        return value, write_answer([Piece(text, answer_length - 1)], answer_length, tokenizer)

    def sample(key: jax.Array, held_out: bool) -> Prompt:
        draw_key, construct_key = jax.random.split(key)
        numbers = draw(draw_key, held_out).astype(jnp.int32)
        target, solution = construct(construct_key, numbers)
        pieces: list[Piece] = []
        for i in range(num_numbers):
            mark = literal("," if i + 1 < num_numbers else ">", tokenizer)
            pieces += [write(numbers[i], places), mark]
        pieces += [write(target, places + 1), literal("=", tokenizer)]
        return write_prompt(pieces, prompt_length, tokenizer, Countdown(numbers, target, solution))

    def score(problem: Countdown, tokens: jax.Array) -> jax.Array:
        result = execute(problem.numbers, tokens, places, tokenizer)
        return (result.parses & result.uses_all & (result.value == problem.target)).astype(float)

    return Task(
        f"countdown of {num_numbers} numbers up to {max_number}",
        tokenizer,
        prompt_length,
        answer_length,
        sample,
        demonstrate=lambda problem: problem.solution,
        score=score,
        credit=lambda problem, tokens: at_end(score(problem, tokens), tokens, tokenizer),
        parses=lambda problem, tokens: execute(problem.numbers, tokens, places, tokenizer).parses,
        step_end=last_token_only,
    )
