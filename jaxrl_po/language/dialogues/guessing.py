"""Defines functions of guessing games; fewer guesses are better, a lost game counts as one more."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_po.language.dialogue import Dialogue
from jaxrl_po.language.tokenizer import Tokenizer

Measure = Callable[[Any], jax.Array]


def game_of_guesses(
    *, max_turns: int, measures: Mapping[str, Measure] | None = None, **fields: Any
) -> Dialogue:
    """Builds a dialogue from functions whose state has the fields `guesses` and `won`.

    Args:
      max_turns: largest number of guesses; a lost game counts as one guess more.
      measures: metrics in addition to `guesses`, whose negative is the raw score.
      **fields: other fields of `Dialogue`.
    """

    def counted(state: Any) -> jax.Array:
        return jnp.where(state.won, state.guesses, max_turns + 1).astype(jnp.float32)

    return Dialogue(
        max_turns=max_turns,
        accuracy=lambda state: state.won.astype(jnp.float32),
        score=lambda state: -counted(state),
        measures={"guesses": counted, **(measures or {})},
        **fields,
    )


def reward(state: Any, max_turns: int) -> jax.Array:
    """Computes (max_turns + 1 − g) / max_turns for a game won after g guesses, 0 otherwise."""
    return jnp.where(state.won, (max_turns + 1.0 - state.guesses) / max_turns, 0.0)


def read_guess(
    message: jax.Array, written: jax.Array, length: int, symbols: int, tokenizer: Tokenizer
) -> tuple[jax.Array, jax.Array]:
    """Returns a message's digits `[length]`, and True if it is digits below `symbols` and EOS."""
    digits = message[:length] - tokenizer.ids["0"]
    ended = (written == length + 1) & (message[length] == tokenizer.eos)
    return digits, ended & ((digits >= 0) & (digits < symbols)).all()
