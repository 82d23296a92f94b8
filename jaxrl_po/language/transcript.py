"""Records the messages and replies in a batch of dialogues."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.types import PyTree


class Conversations(NamedTuple):
    """Batch of B = P·G dialogues, group-major; N tokens after the prompt, at most S sampled.

    Attributes:
      tokens: messages and replies in turn, without gaps, then PAD, `[B, N]`, int32.
      position: index of each sampled token in `tokens`, `[B, S]`, int32 below N.
      action: sampled tokens, `[B, S]`, int32.
      log_prob: log-probability of each sampled token under the distribution that it was drawn from,
        `[B, S]`, nats.
      mask: False after the last sampled token, `[B, S]`, bool.
      message_end: True for the last token of each message, `[B, S]`, bool.
      reward: rewards at the ends of messages, `[B, S]`, reward units.
      state: the environment's last state, leaves `[B, …]`.
      ended: True if the dialogue was done within its turns, `[B]`, bool.
      turns: number of messages, `[B]`, int32.
      kept: tokens that each sampled token was drawn from, `[B, S, …]`, see `sampling.Completions`.
    """

    tokens: jax.Array
    position: jax.Array
    action: jax.Array
    log_prob: jax.Array
    mask: jax.Array
    message_end: jax.Array
    reward: jax.Array
    state: PyTree
    ended: jax.Array
    turns: jax.Array
    kept: jax.Array | None = None


class WrittenColumns(NamedTuple):
    """Dialogues column by column, leaves `[B, N]`.

    Attributes:
      tokens: messages and replies in turn, without gaps, then PAD, int32.
      log_prob: log-probabilities of the sampled tokens, nats.
      sampled: True if the policy wrote the token, bool.
      message_end: True for the last token of a message, bool.
      reward: rewards at the ends of messages, reward units.
      kept: tokens that each sampled token was drawn from, `[B, N, …]`, see `Conversations`.
    """

    tokens: jax.Array
    log_prob: jax.Array
    sampled: jax.Array
    message_end: jax.Array
    reward: jax.Array
    kept: jax.Array | None = None


def gather(
    written: WrittenColumns, most: int, *, state: PyTree, ended: jax.Array, turns: jax.Array
) -> Conversations:
    """Moves sampled tokens to the front, in order, so that later code sees no gaps between them.

    Args:
      written: dialogues column by column.
      most: largest number S of tokens that a row may have sampled.
      state: last state of the environment, leaves `[B, …]`, or None.
      ended: True for dialogues that were done within their turns, `[B]`, bool.
      turns: number of messages, `[B]`, int32.
    """
    position = jnp.argsort(~written.sampled, axis=1, stable=True)[:, :most].astype(jnp.int32)
    sampled: WrittenColumns = jax.tree.map(
        lambda x: jnp.take_along_axis(x, jnp.expand_dims(position, range(2, x.ndim)), axis=1),
        written,
    )
    return Conversations(
        tokens=written.tokens,
        position=position,
        action=sampled.tokens,
        log_prob=sampled.log_prob,
        mask=sampled.sampled,
        message_end=sampled.message_end,
        reward=sampled.reward,
        state=state,
        ended=ended,
        turns=turns,
        kept=sampled.kept,
    )
