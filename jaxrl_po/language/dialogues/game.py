"""Any environment of pure functions as a dialogue: a message is an action, a reply what is seen."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.language.dialogue import Dialogue, Reply
from jaxrl_po.language.tasks.types import Prompt
from jaxrl_po.language.tokenizer import AnyTokenizer
from jaxrl_po.types import PyTree


class State(NamedTuple):
    """An episode.

    Attributes:
      inner: the environment's state.
      total: `[]`, float32, the sum of rewards.
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
    """The dialogue in which the policy reads observations and writes actions.

    Args:
      name: for logs and plots.
      tokenizer: of both.
      reset: `reset(key) -> (observation, state)`; consumes `key`. Episodes are not split.
      step: `step(key, state, action) -> (observation, state, reward [], terminated [])`; consumes
        `key`.
      write: `write(observation) -> Reply` of `observation_length` tokens at most; the first one is
        the prompt, filled with PAD on the left.
      read: `read(message [T], length []) -> action`, legal for every message.
      observation_length: tokens of the longest observation.
      message_length: tokens of the longest action, its end included.
      max_turns: actions of an episode; one that is longer is cut, which is a truncation.
      accuracy: `accuracy(state, total reward []) -> []` float32 in [0, 1]: how well an episode
        went.
      demonstrate: `demonstrate(state, key) -> tokens [message_length]`; None for none.

    Returns:
      The dialogue; its metric is `return`, the sum of rewards, also the raw score of a group.
    """

    def begin(key: jax.Array, held_out: bool) -> tuple[Prompt, State]:
        del held_out
        observation, inner = reset(key)
        said = write(observation)
        pad = observation_length - said.length
        shifted = jnp.roll(said.tokens, pad)
        tokens = jnp.where(jnp.arange(observation_length) < pad, tokenizer.pad, shifted)
        # An empty observation is read as one PAD: a prompt has a token.
        pad = jnp.minimum(pad, observation_length - 1).astype(jnp.int32)
        return Prompt(tokens.astype(jnp.int32), pad), State(inner, jnp.float32(0.0))

    def respond(
        state: State, message: jax.Array, written: jax.Array, key: jax.Array
    ) -> tuple[State, Reply, jax.Array, jax.Array]:
        action = read(message, written)
        observation, inner, reward, terminated = step(key, state.inner, action)
        reward = jnp.asarray(reward, jnp.float32)
        after = State(inner, state.total + reward)
        return after, write(observation), reward, jnp.asarray(terminated, bool)

    shown = None
    if demonstrate is not None:
        act = demonstrate

        def shown(state: State, key: jax.Array) -> jax.Array:
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
