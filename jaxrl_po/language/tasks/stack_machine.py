"""A stack machine over tokens: it verifies a postfix expression inside the program, one step for each token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.language.tokenizer import Tokenizer

OPERATORS = "+-*"


class Result(NamedTuple):
    """What a completion came to.

    Attributes:
      parses: `[]`, bool: postfix, one value left, EOS, nothing but padding behind it.
      uses_all: `[]`, bool: each given number was used exactly once, and no other.
      value: `[]`, int32, the value left; meaningful where both hold, otherwise it may have wrapped
        around.
    """

    parses: jax.Array
    uses_all: jax.Array
    value: jax.Array


class _Machine(NamedTuple):
    stack: jax.Array  # [S]
    depth: jax.Array
    number: jax.Array  # digits read so far, as a number
    read: jax.Array  # how many
    free: jax.Array  # [K], given numbers not used yet
    given: jax.Array  # whether all used so far were given and free
    parses: jax.Array
    ended: jax.Array


def run(numbers: jax.Array, tokens: jax.Array, places: int, tokenizer: Tokenizer) -> Result:
    """Runs a completion: `places` digits push a number, highest digit first; an operator joins the two values on top.

    Where each given number x is used once at most, no value exceeds the product of the max(x, 2): a
    sum or a difference of two values of at least 2 is at most their product.

    Args:
      numbers: `[K]`, int32, at least 1, what may be used.
      tokens: `[T]`, int32, completion.
      places: digits of every number.
      tokenizer: the alphabet; digits follow `0`, and `-` and `*` follow `+`.

    Returns:
      A `Result`.

    Example:
      >>> from jaxrl_po.language.tokenizer import make_tokenizer
      >>> tokenizer = make_tokenizer("0123456789+-*")
      >>> tokens = jnp.array([*tokenizer.encode("37*2-"), tokenizer.eos])
      >>> [x.item() for x in run(jnp.array([2, 3, 7]), tokens, 1, tokenizer)]
      [True, True, 19]
    """
    zero, plus = tokenizer.ids["0"], tokenizer.ids[OPERATORS[0]]
    at = jnp.arange(tokens.shape[0] // places + 1)

    def step(machine: _Machine, token: jax.Array) -> tuple[_Machine, None]:
        is_digit = (token >= zero) & (token < zero + 10)
        is_operator = (token >= plus) & (token < plus + len(OPERATORS))
        is_eos = token == tokenizer.eos
        number, read = machine.number * 10 + token - zero, machine.read + 1
        push = is_digit & (read == places)
        same = machine.free & (numbers == number)
        first = same & (jnp.cumsum(same) == 1)
        a, b = (
            machine.stack[jnp.maximum(machine.depth - 2, 0)],
            machine.stack[jnp.maximum(machine.depth - 1, 0)],
        )
        joined = jnp.stack([a + b, a - b, a * b])[jnp.clip(token - plus, 0, len(OPERATORS) - 1)]
        top = jnp.where(push, machine.depth, machine.depth - 2)
        legal = is_digit | (
            (machine.read == 0)
            & ((is_operator & (machine.depth >= 2)) | (is_eos & (machine.depth == 1)))
        )
        more = is_digit & ~push
        return _Machine(
            stack=jnp.where(
                (push | is_operator) & (at == top), jnp.where(push, number, joined), machine.stack
            ),
            depth=machine.depth + push - is_operator,
            number=jnp.where(more, number, 0),
            read=jnp.where(more, read, 0),
            free=machine.free & ~(push & first),
            given=machine.given & (~push | jnp.any(same)),
            parses=machine.parses & jnp.where(machine.ended, token == tokenizer.pad, legal),
            ended=machine.ended | is_eos,
        ), None

    nothing, yes = jnp.int32(0), jnp.bool_(True)
    start = _Machine(
        jnp.zeros_like(at), nothing, nothing, nothing, jnp.ones(numbers.shape, bool), yes, yes, ~yes
    )
    machine, _ = jax.lax.scan(step, start, tokens)
    return Result(
        machine.parses & machine.ended, machine.given & ~jnp.any(machine.free), machine.stack[0]
    )
