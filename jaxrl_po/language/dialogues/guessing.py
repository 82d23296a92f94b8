"""What games of guesses share: as few of them as possible, and a lost game counts as one more."""

from typing import Any

import jax
import jax.numpy as jnp


def counted(state: Any, max_turns: int) -> jax.Array:
    """Guesses of a game `[]`, float32; `max_turns` + 1 where it was lost.

    Args:
      state: with `guesses` and `won`.
      max_turns: guesses at most.
    """
    return jnp.where(state.won, state.guesses, max_turns + 1).astype(jnp.float32)


def reward(state: Any, max_turns: int) -> jax.Array:
    """(max_turns + 1 − g) / max_turns where the game is won after g guesses; 0 elsewhere."""
    return jnp.where(state.won, (max_turns + 1.0 - state.guesses) / max_turns, 0.0)
