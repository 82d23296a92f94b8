"""Defines Mastermind: find a code by guesses, each answered with the number of right symbols."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po import config
from jaxrl_po.config import Interval, check_size, common, static
from jaxrl_po.language.dialogue import Dialogue, Reply
from jaxrl_po.language.dialogues import guessing
from jaxrl_po.language.tasks.types import Prompt
from jaxrl_po.language.tokenizer import make_tokenizer

ALPHABET = "0123456789"
MAX_CODES = 4096


@config.record
class MastermindSettings:
    """Settings of `--task=mastermind`."""

    length: int = common.static(3, "symbols of a code", within=Interval(1, 6))
    symbols: int = static(
        4, "symbols to choose from; symbols ** length at most 4096", within=Interval(2, 10)
    )
    max_turns: int = common.static(
        8, "largest number of guesses; a lost game counts as one guess more", within=Interval(1, 64)
    )


class MastermindState(NamedTuple):
    """State of a game.

    Attributes:
      code: index of the code that must be found, `[]`, int32.
      possible: True for the codes that fit all replies, `[C]`, bool.
      guesses: number of guesses so far, `[]`, int32.
      won: True if the code was found, `[]`, bool.
      malformed: number of messages that were not a code, `[]`, int32.
    """

    code: jax.Array
    possible: jax.Array
    guesses: jax.Array
    won: jax.Array
    malformed: jax.Array


def mastermind(length: int = 3, *, symbols: int = 4, max_turns: int = 8) -> Dialogue:
    """Builds Mastermind: find a code of `length` symbols in as few guesses as possible.

    A code may repeat symbols. A guess is the symbols and EOS; the reply is two digits: the number
    of symbols at the right place, and the number of further symbols that belong to another place.
    A message that is not a code costs a turn, and the reply is `!!`. The reward, at the end of a
    game won after g guesses, is (max_turns + 1 − g) / max_turns: a lost game counts as
    `max_turns` + 1 guesses and gives 0.

    Codes are not split into a train and a test part: every game draws from all of them. The optimal
    mean number of guesses, with repeats, is 2.333 for codes of 2 symbols from 3 symbols, 2.813 for
    2 from 4, 2.704 for 3 from 3 and 3.219 for 3 from 4 (exact search). Demonstrations guess at
    random among the codes that fit all replies.

    Args:
      length: number of symbols in a code, in [1, 6].
      symbols: number of different symbols, in [2, 10]; at most 4,096 codes.
      max_turns: largest number of guesses.

    Returns:
      Dialogue with the metrics `guesses` (`max_turns` + 1 for a lost game) and `malformed`
      (messages of a game that are not codes).

    Raises:
      ConfigError: an argument is outside its range.
    """
    length = check_size("length", length, Interval(1, 6))
    symbols = check_size("symbols", symbols, Interval(2, 10))
    max_turns = check_size("max_turns", max_turns, Interval(1, 64))
    check_size("symbols", symbols**length, Interval(2, MAX_CODES), part="symbols ** length")
    tokenizer = make_tokenizer(ALPHABET + ">!")
    zero, wrong = tokenizer.ids["0"], tokenizer.ids["!"]
    codes = jnp.asarray(list(itertools.product(range(symbols), repeat=length)), jnp.int32)
    places = jnp.asarray(symbols ** np.arange(length)[::-1], jnp.int32)
    counts = (codes[:, :, None] == jnp.arange(symbols)[None, None]).sum(axis=1)  # [C, symbols]
    start = Prompt(jnp.asarray(tokenizer.encode(">"), jnp.int32), jnp.int32(0))

    def feedback(guess: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Counts symbols at the right place and at another place, for each possible code `[C]`."""
        at_place = (codes == codes[guess][None]).sum(axis=1)
        shared = jnp.minimum(counts, counts[guess][None]).sum(axis=1)
        return at_place, shared - at_place

    def reset(key: jax.Array, held_out: bool) -> tuple[Prompt, MastermindState]:
        del held_out
        none = jnp.int32(0)
        code = jax.random.randint(key, (), 0, len(codes))
        return start, MastermindState(
            code, jnp.ones(len(codes), bool), none, jnp.bool_(False), none
        )

    def respond(
        state: MastermindState, message: jax.Array, written: jax.Array, key: jax.Array
    ) -> tuple[MastermindState, Reply, jax.Array, jax.Array]:
        del key
        digits, legal = guessing.read_guess(message, written, length, symbols, tokenizer)
        guess = jnp.where(legal, digits @ places, 0)
        at_place, elsewhere = feedback(guess)
        heard = at_place[state.code], elsewhere[state.code]
        fits = (at_place == heard[0]) & (elsewhere == heard[1])
        guesses = state.guesses + 1
        won = legal & (guess == state.code)
        state = MastermindState(
            code=state.code,
            possible=state.possible & (fits | ~legal),
            guesses=guesses,
            won=won,
            malformed=state.malformed + ~legal,
        )
        reply = Reply(jnp.where(legal, zero + jnp.stack(heard), wrong), jnp.int32(2))
        reward = guessing.reward(state, max_turns)
        return state, reply, reward, won | (guesses == max_turns)

    def demonstrate(state: MastermindState, key: jax.Array) -> jax.Array:
        guess = jax.random.categorical(key, jnp.where(state.possible, 0.0, -jnp.inf))
        eos = jnp.asarray([tokenizer.eos], jnp.int32)
        return jnp.concatenate([zero + codes[guess], eos])

    return guessing.game_of_guesses(
        name=f"Mastermind with {length} of {symbols} symbols",
        tokenizer=tokenizer,
        prompt_length=1,
        message_length=length + 1,
        reply_length=2,
        max_turns=max_turns,
        reset=reset,
        respond=respond,
        demonstrate=demonstrate,
        measures={"malformed": lambda state: state.malformed.astype(jnp.float32)},
    )
