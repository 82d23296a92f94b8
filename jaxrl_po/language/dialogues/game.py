"""Turns environments of pure functions into dialogues.

Messages are actions, replies are observations.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.language.dialogue import Dialogue, Reply
from jaxrl_po.language.tasks.types import Prompt
from jaxrl_po.language.tokenizer import AnyTokenizer
from jaxrl_po.types import PyTree


class GameState(NamedTuple):
    """State of an episode.

    Attributes:
      inner: state of the environment.
      total: sum of rewards so far, `[]`, float32.
    """

    inner: PyTree
    total: jax.Array


def game(
    name: str,
    tokenizer: AnyTokenizer,
    reset: Callable[[jax.Array], tuple[PyTree, PyTree]],
    step: Callable[[jax.Array, PyTree, Any], tuple[PyTree, PyTree, jax.Array, jax.Array]],
    *,
    write: Callable[[PyTree], Reply],
    read: Callable[[jax.Array, jax.Array], Any],
    observation_length: int,
    message_length: int,
    max_turns: int,
    accuracy: Callable[[PyTree, jax.Array], jax.Array],
    demonstrate: Callable[[PyTree, jax.Array], jax.Array] | None = None,
) -> Dialogue:
    """Builds a dialogue whose policy reads the environment's observations and writes actions.

    Args:
      name: name for logs and plots.
      tokenizer: tokenizer of observations and actions.
      reset: `reset(key) -> (observation, state)`; consumes `key`. Episodes do not have a train and
        a test split.
      step: `step(key, state, action) -> (observation, state, reward [], terminated [])`; consumes
        `key`.
      write: `write(observation) -> Reply` of `observation_length` tokens at most; the first
        observation is the prompt, filled with PAD on the left.
      read: `read(message [T], length []) -> action`, returns a legal action for every message.
      observation_length: number of tokens of the longest observation.
      message_length: number of tokens of the longest action, its end included.
      max_turns: largest number of actions in an episode; a longer episode is cut, which is a
        truncation.
      accuracy: `accuracy(state, total reward []) -> []` float32 in [0, 1], returns the success of
        an episode.
      demonstrate: `demonstrate(state, key) -> tokens [message_length]`, returns a good action; None
        if warm starts are not needed.

    Returns:
      Dialogue that plays the environment. The metric `return` is the sum of rewards, which is also
      the raw score of an episode in its group.
    """

    def begin(key: jax.Array, held_out: bool) -> tuple[Prompt, GameState]:
        del held_out
        observation, inner = reset(key)
        said = write(observation)
        pad = observation_length - said.length
        shifted = jnp.roll(said.tokens, pad)
        tokens = jnp.where(jnp.arange(observation_length) < pad, tokenizer.pad, shifted)
        # An empty observation is written as one PAD, since a prompt needs at least one token.
        pad = jnp.minimum(pad, observation_length - 1).astype(jnp.int32)
        return Prompt(tokens.astype(jnp.int32), pad), GameState(inner, jnp.float32(0.0))

    def respond(
        state: GameState, message: jax.Array, written: jax.Array, key: jax.Array
    ) -> tuple[GameState, Reply, jax.Array, jax.Array]:
        action = read(message, written)
        observation, inner, reward, terminated = step(key, state.inner, action)
        reward = jnp.asarray(reward, jnp.float32)
        after = GameState(inner, state.total + reward)
        return after, write(observation), reward, jnp.asarray(terminated, bool)

    shown = None
    if demonstrate is not None:
        act = demonstrate

        def shown(state: GameState, key: jax.Array) -> jax.Array:
            return act(state.inner, key)

    return Dialogue(
        name=name,
        tokenizer=tokenizer,
        prompt_length=observation_length,
        message_length=message_length,
        reply_length=observation_length,
        max_turns=max_turns,
        reset=begin,
        respond=respond,
        accuracy=lambda state: accuracy(state.inner, state.total),
        demonstrate=shown,
        score=lambda state: state.total,
        measures={"return": lambda state: state.total},
    )
