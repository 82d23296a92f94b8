"""What games of guesses share: as few of them as possible, and a lost game counts as one more."""

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
    """A dialogue whose state has `guesses` and `won`.

    Args:
      max_turns: guesses at most; a lost game counts as one more.
      measures: beside `guesses`, whose negative is the raw score.
      **fields: the others of `Dialogue`.
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
    """(max_turns + 1 − g) / max_turns where the game is won after g guesses; 0 elsewhere."""
    return jnp.where(state.won, (max_turns + 1.0 - state.guesses) / max_turns, 0.0)


def read(
    message: jax.Array, written: jax.Array, length: int, symbols: int, tokenizer: Tokenizer
) -> tuple[jax.Array, jax.Array]:
    """The digits `[length]` of a message, and whether it is these, below `symbols`, and EOS."""
    digits = message[:length] - tokenizer.ids["0"]
    ended = (written == length + 1) & (message[length] == tokenizer.eos)
    return digits, ended & ((digits >= 0) & (digits < symbols)).all()
