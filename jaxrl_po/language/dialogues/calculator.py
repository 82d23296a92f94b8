"""Defines sums with a calculator: the policy may ask for values before it answers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po import config
from jaxrl_po.config import Interval, check_size, common, static, static_value
from jaxrl_po.language.dialogue import Dialogue, Reply
from jaxrl_po.language.tasks.split import make_draw
from jaxrl_po.language.tasks.types import Prompt
from jaxrl_po.language.tokenizer import Tokenizer, make_tokenizer

MAX_DIGITS = 8  # a sum of two such numbers fits into int32


@config.record
class CalculatorSettings:
    """Settings of `--task=calculator`."""

    num_digits: int = common.static(
        6, "digits of a number", unit="digits", within=Interval(1, MAX_DIGITS)
    )
    tool: bool = static(
        True, "reply with the values of expressions; off measures the worth of the calculator"
    )
    max_turns: int = common.static(3, "messages, the answer included", within=Interval(1, 64))


class CalculatorState(NamedTuple):
    """State of a dialogue about one sum.

    Attributes:
      terms: the two numbers to add, `[2]`, int32.
      turns: number of messages so far, `[]`, int32.
      used: True if the calculator gave a value and a turn was left to use it, `[]`, bool.
      right: True if the answer was right, `[]`, bool.
    """

    terms: jax.Array
    turns: jax.Array
    used: jax.Array
    right: jax.Array


class Expression(NamedTuple):
    """Parser state of an expression, numbers joined by `+`.

    Attributes:
      total: sum of the numbers before the current number, `[]`, int32.
      number: value of the current number so far, `[]`, int32.
      digits: number of digits of the current number so far, `[]`, int32.
      plus: number of `+` signs so far, `[]`, int32.
      legal: True while the expression is valid, `[]`, bool.
    """

    total: jax.Array
    number: jax.Array
    digits: jax.Array
    plus: jax.Array
    legal: jax.Array


def calculator(num_digits: int = 6, *, tool: bool = True, max_turns: int = 3) -> Dialogue:
    """Builds sums of two numbers, where the policy may use a calculator.

    The prompt is `123456+654321?`. A message that begins with `=` is the answer and ends the
    dialogue: `=777777` and EOS. Any other message is an expression, one number or two joined by
    `+`, of at most 8 digits each, and the reply is the expression's value of `num_digits` + 1
    digits, or `!` if the expression is invalid or its value is longer. The reward is 1 for the
    right answer, at the answer's end. One pair in ten, in either order, is held out.

    Demonstrations ask for the sum and then answer with the reply.

    Args:
      num_digits: number of digits of a summand, in [1, 8], padded with zeros; values and answers
        have one more digit.
      tool: True if the calculator replies with values. False measures the worth of the calculator:
        the reply is always `!`, and demonstrations answer immediately.
      max_turns: largest number of messages, the answer included.

    Returns:
      Dialogue with the metric `calls`, the share of dialogues in which the calculator gave a value.

    Raises:
      ConfigError: an argument is outside its range.
    """
    num_digits = check_size("num_digits", num_digits, Interval(1, MAX_DIGITS))
    tool = static_value("tool", tool, bool)
    max_turns = check_size("max_turns", max_turns, Interval(1, 64))
    tokenizer = make_tokenizer("0123456789+=?!")
    zero, plus, equals, wrong = (tokenizer.ids[c] for c in "0+=!")
    places, size = num_digits + 1, 2 * num_digits + 2
    draw = make_draw([(0, 10**num_digits)] * 2, canonical=jnp.sort, advice="raise num_digits")

    def digits_of(value: jax.Array, count: int) -> jax.Array:
        return zero + decimals(value, count)

    def right_answer(state: CalculatorState) -> jax.Array:
        value = digits_of(state.terms.sum(), places)
        return jnp.concatenate([jnp.asarray([equals]), value, jnp.asarray([tokenizer.eos])])

    def reset(key: jax.Array, held_out: bool) -> tuple[Prompt, CalculatorState]:
        terms = draw(key, held_out).astype(jnp.int32)
        signs = jnp.asarray(tokenizer.encode("+?"), jnp.int32)[:, None]
        tokens = jnp.concatenate([digits_of(terms, num_digits), signs], axis=1).reshape(-1)
        no = jnp.bool_(False)
        return Prompt(tokens, jnp.int32(0)), CalculatorState(terms, jnp.int32(0), no, no)

    def respond(
        state: CalculatorState, message: jax.Array, written: jax.Array, key: jax.Array
    ) -> tuple[CalculatorState, Reply, jax.Array, jax.Array]:
        del key
        answers = message[0] == equals
        right = (written == places + 2) & (message[: places + 2] == right_answer(state)).all()
        value, legal = evaluate_expression(message, written, tokenizer)
        legal = legal & (value < 10**places) & tool
        reply = jnp.where(legal, digits_of(value, places), wrong).astype(jnp.int32)
        turns = state.turns + 1
        # True if a later turn is left to use the value.
        read = legal & ~answers & (turns < max_turns)
        state = CalculatorState(state.terms, turns, state.used | read, right)
        reward = right.astype(jnp.float32)
        length = jnp.where(legal, places, 1).astype(jnp.int32)
        return state, Reply(reply, length), reward, answers | (turns == max_turns)

    def demonstrate(state: CalculatorState, key: jax.Array) -> jax.Array:
        del key
        signs = jnp.asarray([plus, tokenizer.eos])[:, None]
        terms = digits_of(state.terms, num_digits)
        question = jnp.concatenate([terms, signs], axis=1).reshape(-1)
        answer = jnp.append(right_answer(state), jnp.full(size, tokenizer.pad))[:size]
        asks = (state.turns == 0) & tool & (max_turns > 1)
        return jnp.where(asks, question, answer).astype(jnp.int32)

    return Dialogue(
        name=f"sums of {num_digits} digits with a calculator"
        if tool
        else f"sums of {num_digits} digits",
        tokenizer=tokenizer,
        prompt_length=size,
        message_length=size,
        reply_length=places,
        max_turns=max_turns,
        reset=reset,
        respond=respond,
        accuracy=lambda state: state.right.astype(jnp.float32),
        demonstrate=demonstrate,
        measures={"calls": lambda state: state.used.astype(jnp.float32)},
    )


def decimals(value: jax.Array, count: int) -> jax.Array:
    """Returns the last `count` decimal digits of numbers, int32: `E*` to `[E*, count]`."""
    powers = 10 ** jnp.arange(count - 1, -1, -1, dtype=jnp.int32)
    return (value[..., None] // powers.reshape(*[1] * value.ndim, count) % 10).astype(jnp.int32)


def evaluate_expression(
    message: jax.Array, written: jax.Array, tokenizer: Tokenizer
) -> tuple[jax.Array, jax.Array]:
    """Returns the value of an expression, and True if the message is a valid expression."""
    zero, plus = tokenizer.ids["0"], tokenizer.ids["+"]

    def read(found: Expression, token: jax.Array) -> Expression:
        is_digit, is_plus = (token >= zero) & (token < zero + 10), token == plus
        fits = jnp.where(is_digit, found.digits < MAX_DIGITS, found.digits > 0)
        signs = found.plus + is_plus
        return Expression(
            total=jnp.where(is_plus, found.total + found.number, found.total),
            number=jnp.where(is_digit, found.number * 10 + token - zero, 0),
            digits=jnp.where(is_digit, found.digits + 1, 0),
            plus=signs,
            legal=found.legal & (is_digit | is_plus) & fits & (signs < 2),
        )

    def step(found: Expression, at: jax.Array) -> tuple[Expression, None]:
        # The last token is the end of the message.
        inside, after = at < written - 1, read(found, message[at])
        return jax.tree.map(lambda new, old: jnp.where(inside, new, old), after, found), None

    none = jnp.int32(0)
    start = Expression(none, none, none, none, jnp.bool_(True))
    found, _ = jax.lax.scan(step, start, jnp.arange(message.shape[0]))
    ended = message[jnp.maximum(written - 1, 0)] == tokenizer.eos
    return found.total + found.number, found.legal & ended & (found.digits > 0)
