"""Evaluates a postfix expression under jit by a stack machine over tokens, one step per token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.language.tokenizer import Tokenizer

OPERATORS = "+-*"


class Result(NamedTuple):
    """Result of evaluating a completion.

    Attributes:
      parses: True for valid postfix that leaves one value, then EOS, then only padding, `[]`, bool.
      uses_all: True if each given number was used exactly once, and no other number, `[]`, bool.
      value: value of the expression, `[]`, int32; valid only if `parses` and `uses_all` are True,
        since the value may overflow otherwise.
    """

    parses: jax.Array
    uses_all: jax.Array
    value: jax.Array


class _Machine(NamedTuple):
    stack: jax.Array  # [S]
    depth: jax.Array
    number: jax.Array  # value of the digits read so far
    read: jax.Array  # number of the digits read so far
    free: jax.Array  # [K], bool, True for given numbers that are not used yet
    given: jax.Array  # bool, True if all numbers used so far were given and unused
    parses: jax.Array
    ended: jax.Array


def execute(numbers: jax.Array, tokens: jax.Array, places: int, tokenizer: Tokenizer) -> Result:
    """Evaluates a completion; `places` digits push a number, an operator joins the top two values.

    Numbers have their highest digit first. If each given number x is used at most once, no value
    exceeds the product of the max(x, 2): a sum or a difference of two values of at least 2 is at
    most their product.

    Args:
      numbers: given numbers, `[K]`, int32, at least 1.
      tokens: tokens of the completion, `[T]`, int32.
      places: number of digits in each number.
      tokenizer: tokenizer of the alphabet; digits follow `0`, and `-` and `*` follow `+`.

    Returns:
      The result of the evaluation.

    Example:
      >>> from jaxrl_po.language.tokenizer import make_tokenizer
      >>> tokenizer = make_tokenizer("0123456789+-*")
      >>> tokens = jnp.array([*tokenizer.encode("37*2-"), tokenizer.eos])
      >>> [x.item() for x in execute(jnp.array([2, 3, 7]), tokens, 1, tokenizer)]
      [True, True, 19]
    """
    zero, plus = tokenizer.ids["0"], tokenizer.ids[OPERATORS[0]]
    slots = jnp.arange(tokens.shape[0] // places + 1)

    def step(machine: _Machine, token: jax.Array) -> tuple[_Machine, None]:
        is_digit = (token >= zero) & (token < zero + 10)
        is_operator = (token >= plus) & (token < plus + len(OPERATORS))
        is_eos = token == tokenizer.eos
        number, read = machine.number * 10 + token - zero, machine.read + 1
        push = is_digit & (read == places)
        same = machine.free & (numbers == number)
        # A number that is given twice is used up one at a time.
        first = same & (jnp.cumsum(same) == 1)
        # only illegal operators, which clear `parses`, need the clamp
        a = machine.stack[jnp.maximum(machine.depth - 2, 0)]
        b = machine.stack[jnp.maximum(machine.depth - 1, 0)]
        joined = jnp.stack([a + b, a - b, a * b])[jnp.clip(token - plus, 0, len(OPERATORS) - 1)]
        top = jnp.where(push, machine.depth, machine.depth - 2)
        legal = is_digit | (
            (machine.read == 0)
            & ((is_operator & (machine.depth >= 2)) | (is_eos & (machine.depth == 1)))
        )
        more = is_digit & ~push
        return _Machine(
            stack=jnp.where(
                (push | is_operator) & (slots == top),
                jnp.where(push, number, joined),
                machine.stack,
            ),
            depth=machine.depth + push - is_operator,
            number=jnp.where(more, number, 0),
            read=jnp.where(more, read, 0),
            free=machine.free & ~(push & first),
            given=machine.given & (~push | jnp.any(same)),
            parses=machine.parses & jnp.where(machine.ended, token == tokenizer.pad, legal),
            ended=machine.ended | is_eos,
        ), None

    zero_count, true = jnp.int32(0), jnp.bool_(True)
    start = _Machine(
        stack=jnp.zeros_like(slots),
        depth=zero_count,
        number=zero_count,
        read=zero_count,
        free=jnp.ones(numbers.shape, bool),
        given=true,
        parses=true,
        ended=~true,
    )
    machine, _ = jax.lax.scan(step, start, tokens)
    return Result(
        machine.parses & machine.ended, machine.given & ~jnp.any(machine.free), machine.stack[0]
    )
