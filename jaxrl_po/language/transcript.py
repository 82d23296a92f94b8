"""What was said in a batch of dialogues."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.types import PyTree


class Conversations(NamedTuple):
    """B = P·G dialogues, group-major; N tokens after the prompt, S of them sampled at most.

    Attributes:
      tokens: `[B, N]`, int32: messages and replies in turn, without gaps; PAD after the end.
      position: `[B, S]`, int32 below N: where each sampled token stands among them.
      action: `[B, S]`, int32, the sampled tokens.
      log_prob: `[B, S]`, nats, under the distribution that each was drawn from.
      mask: `[B, S]`, bool, False after the last sampled token.
      message_end: `[B, S]`, bool, the last token of each message.
      reward: `[B, S]`, reward units, at the ends of messages.
      state: the environment's last state, leaves `[B, …]`.
      ended: `[B]`, bool, whether the dialogue was done within its turns.
      turns: `[B]`, int32, messages.
      kept: `[B, S, …]`, what each was drawn from, see `sampling.Completions`.
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


class Written(NamedTuple):
    """Dialogues column by column, leaves `[B, N]`.

    Attributes:
      tokens: see `Conversations`.
      log_prob: of the sampled ones.
      sampled: bool, whether the policy wrote the token.
      message_end: bool, whether it is the last one of a message.
      reward: at the ends of messages.
      kept: `[B, N, …]`, see `Conversations`.
    """

    tokens: jax.Array
    log_prob: jax.Array
    sampled: jax.Array
    message_end: jax.Array
    reward: jax.Array
    kept: jax.Array | None = None


def gather(
    written: Written, most: int, *, state: PyTree, ended: jax.Array, turns: jax.Array
) -> Conversations:
    """Sampled tokens to the front, in order, so that nothing that follows sees the gaps.

    Args:
      written: column by column.
      most: S, tokens that may have been sampled.
      state: see `Conversations`, as for the others.
      ended: likewise.
      turns: likewise.
    """
    position = jnp.argsort(~written.sampled, axis=1, stable=True)[:, :most].astype(jnp.int32)
    sampled: Written = jax.tree.map(
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
