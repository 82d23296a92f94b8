"""Defines higher or lower: find a number by guesses, each answered with the number's direction."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po import config
from jaxrl_po.config import Interval, check_size, common, static
from jaxrl_po.language.dialogue import Dialogue, Reply
from jaxrl_po.language.dialogues import guessing
from jaxrl_po.language.tasks.types import Prompt
from jaxrl_po.language.tokenizer import make_tokenizer

DIGITS = 2


@config.record
class HigherLowerSettings:
    """Settings of `--task=higher_lower`."""

    numbers: int = static(64, "numbers to choose from", within=Interval(2, 10**DIGITS))
    max_turns: int = common.static(
        10,
        "largest number of guesses; a lost game counts as one guess more",
        within=Interval(1, 100),
    )


class HigherLowerState(NamedTuple):
    """State of a game.

    Attributes:
      number: number that must be found, `[]`, int32.
      low: smallest number that fits all replies, `[]`, int32.
      high: largest number that fits all replies, `[]`, int32.
      guesses: number of guesses so far, `[]`, int32.
      won: True if the number was found, `[]`, bool.
    """

    number: jax.Array
    low: jax.Array
    high: jax.Array
    guesses: jax.Array
    won: jax.Array


def higher_lower(numbers: int = 64, *, max_turns: int = 10) -> Dialogue:
    """Builds the game: find a number from 0 to `numbers` − 1 in as few guesses as possible.

    A guess is two digits and EOS; the reply is `<` if the number is lower, `>` if it is higher and
    `!` after a message that is not a number of two digits. The reward, at the end of a game won
    after g guesses, is (max_turns + 1 − g) / max_turns: a lost game counts as `max_turns` + 1
    guesses and gives 0.

    Numbers are not split into a train and a test part: every game draws from all of them. Binary
    search takes 5.125 guesses on average for 64 numbers, the right guess included. Demonstrations
    guess a random number that fits all replies.

    Args:
      numbers: count of numbers that a game draws from, in [2, 100].
      max_turns: largest number of guesses.

    Returns:
      Dialogue with the metric `guesses` (`max_turns` + 1 for a lost game).

    Raises:
      ConfigError: an argument is outside its range.
    """
    numbers = check_size("numbers", numbers, Interval(2, 10**DIGITS))
    max_turns = check_size("max_turns", max_turns, Interval(1, 100))
    tokenizer = make_tokenizer("0123456789?<>!")
    zero, lower, higher, wrong = (tokenizer.ids[c] for c in "0<>!")
    start = Prompt(jnp.asarray(tokenizer.encode("?"), jnp.int32), jnp.int32(0))

    def reset(key: jax.Array, held_out: bool) -> tuple[Prompt, HigherLowerState]:
        del held_out
        none, last = jnp.int32(0), jnp.int32(numbers - 1)
        number = jax.random.randint(key, (), 0, numbers)
        return start, HigherLowerState(number, none, last, none, jnp.bool_(False))

    def respond(
        state: HigherLowerState, message: jax.Array, written: jax.Array, key: jax.Array
    ) -> tuple[HigherLowerState, Reply, jax.Array, jax.Array]:
        del key
        digits, legal = guessing.read_guess(message, written, DIGITS, 10, tokenizer)
        guess = 10 * digits[0] + digits[1]
        is_lower, is_higher = legal & (state.number < guess), legal & (state.number > guess)
        guesses = state.guesses + 1
        won = legal & (guess == state.number)
        state = HigherLowerState(
            number=state.number,
            low=jnp.where(is_higher, jnp.maximum(state.low, guess + 1), state.low),
            high=jnp.where(is_lower, jnp.minimum(state.high, guess - 1), state.high),
            guesses=guesses,
            won=won,
        )
        said = jnp.where(is_lower, lower, jnp.where(is_higher, higher, wrong)).astype(jnp.int32)
        reward = guessing.reward(state, max_turns)
        return state, Reply(said[None], jnp.int32(1)), reward, won | (guesses == max_turns)

    def demonstrate(state: HigherLowerState, key: jax.Array) -> jax.Array:
        guess = jax.random.randint(key, (), state.low, state.high + 1)
        return jnp.stack([zero + guess // 10, zero + guess % 10, jnp.int32(tokenizer.eos)])

    return guessing.game_of_guesses(
        name=f"higher or lower, {numbers} numbers",
        tokenizer=tokenizer,
        prompt_length=1,
        message_length=DIGITS + 1,
        reply_length=1,
        max_turns=max_turns,
        reset=reset,
        respond=respond,
        demonstrate=demonstrate,
    )
