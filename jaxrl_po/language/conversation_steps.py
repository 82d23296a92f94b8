"""Splits conversations into separate programs: other code replies between writing and reading.

All steps share one cache. A row does not have gaps: each row has its own position of
the next token, so that its tokens are laid out as in a batch of dialogues.
"""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.language import sampling, transcript
from jaxrl_po.language.sampling import PLAIN, Decoding
from jaxrl_po.language.stopping import Ends
from jaxrl_po.language.transcript import Conversations, WrittenColumns
from jaxrl_po.language.transformer import Transformer


class DialogueRows(NamedTuple):
    """Rows of B dialogues between two steps; L columns of the prompt, N columns after it.

    Attributes:
      tokens: `[B, L + N]`, int32: left-padded prompt, then messages and replies, then PAD.
      pad: padding tokens on the left, `[B]`, int32.
      length: tokens after the prompt, `[B]`, int32.
      logits: logits of the next token, valid after reading, `[B, V]`.
      cache: keys and values of all tokens; those of the last token may be missing.
      keys: typed keys, `[B]`; token t after the prompt is drawn with `fold_in(key, t)`.
      log_prob: log-probabilities of the sampled tokens, `[B, N]`, nats.
      sampled: True for tokens that the policy sampled, `[B, N]`, bool.
      message_end: True for the last token of a message, `[B, N]`, bool.
      kept: tokens that each sampled token was drawn from, `[B, N, …]`, see `sampling.Completions`.
    """

    tokens: jax.Array
    pad: jax.Array
    length: jax.Array
    logits: jax.Array
    cache: Any
    keys: jax.Array
    log_prob: jax.Array
    sampled: jax.Array
    message_end: jax.Array
    kept: jax.Array | None

    @property
    def prompt_length(self) -> int:
        """Number L of columns of the prompt."""
        return self.tokens.shape[1] - self.sampled.shape[1]


# Triple of the mask `[B]` of rows that write, the state of `Ends`, and all rows with logits of the
# first token.
Writing = tuple[jax.Array, Any, DialogueRows]


def begin(
    model: Transformer,
    params: Any,
    prompt: jax.Array,
    pad: jax.Array,
    keys: jax.Array,
    *,
    columns: int,
    pad_token: int,
    decoding: Decoding = PLAIN,
) -> DialogueRows:
    """Reads the prompts and returns the rows before the first message.

    Args:
      model: transformer of the policy.
      params: parameters of the policy.
      prompt: tokens `[B, L]`, int32, left-padded; members of a group may have different prompts.
      pad: padding tokens on the left, `[B]`, int32.
      keys: typed keys `[B]` that draw the tokens, see `DialogueRows`.
      columns: number N of columns after the prompt.
      pad_token: id that fills these columns.
      decoding: sampling settings, the same `Decoding` that `write_messages` gets.
    """
    rows, prompt_length = prompt.shape
    logits, cache, pad = sampling.prefill(
        model, params, prompt, pad, prompt_length + columns - 1, group_size=1
    )
    no = jnp.zeros((rows, columns), bool)
    return DialogueRows(
        tokens=jnp.pad(prompt, ((0, 0), (0, columns)), constant_values=pad_token),
        pad=pad,
        length=jnp.zeros(rows, jnp.int32),
        logits=logits,
        cache=cache,
        keys=keys,
        log_prob=jnp.zeros((rows, columns), logits.dtype),
        sampled=no,
        message_end=no,
        kept=sampling.no_tokens(logits, decoding, columns),
    )


def write_messages(
    model: Transformer,
    params: Any,
    rows: DialogueRows,
    writes: jax.Array,
    *,
    decoding: Decoding,
    ends: Ends,
    greedy: bool = False,
) -> tuple[DialogueRows, jax.Array, jax.Array]:
    """Samples a message for each row that writes, until all have ended or spent their budget.

    Args:
      model: transformer of the policy.
      params: parameters of the policy.
      rows: rows that have read their prompt or reply.
      writes: True for the rows that write, `[B]`, bool.
      decoding: sampling filters and the token budget of one message, above 0.
      ends: tokens and strings that end a message.
      greedy: True to write the most likely tokens.

    Returns:
      Updated rows, their messages `[B, T]` and the messages' lengths `[B]`, 0 for rows that do not
      write.
    """
    budget, begun = decoding.max_new_tokens, rows.length

    def feed(params: Any, t: jax.Array, loop: Writing) -> tuple[jax.Array, Writing]:
        del t  # a waiting row is fed its last token again, which does not change the row
        *others, rows = loop
        logits, cache = _feed(model, params, rows, 1)
        return logits, (*others, rows._replace(cache=cache))

    def emit(t: jax.Array, logits: jax.Array, loop: Writing) -> Writing:
        """Draws the next token of every row that writes."""
        writing, matched, rows = loop
        token, log_prob, kept = sampling.draw(
            logits, rows.keys, rows.length, decoding, greedy=greedy
        )
        matched, complete = ends.after(matched, token)
        complete |= t + 1 == budget
        prompt = rows.prompt_length
        rows = rows._replace(
            tokens=_put(rows.tokens, token, prompt + rows.length, writing),
            log_prob=_put(rows.log_prob, log_prob, rows.length, writing),
            sampled=_put(rows.sampled, writing, rows.length, writing),
            message_end=_put(rows.message_end, complete, rows.length, writing),
            kept=rows.kept
            if kept is None or rows.kept is None
            else _put(rows.kept, kept, rows.length, writing),
            length=rows.length + writing,
        )
        return writing & ~complete, matched, rows

    first = writes, ends.begin(len(begun)), rows
    rows = sampling.decode(
        model, params, feed, emit, operator.itemgetter(0), rows.logits, first, steps=budget
    )
    at = rows.prompt_length + begun[:, None] + jnp.arange(budget)[None]
    message = jnp.take_along_axis(rows.tokens, at, axis=1, mode="clip")
    return rows, message, rows.length - begun


def read_replies(
    model: Transformer, params: Any, rows: DialogueRows, reply: jax.Array, length: jax.Array
) -> DialogueRows:
    """Returns the rows after each row has read its reply.

    Args:
      model: transformer of the policy.
      params: parameters of the policy.
      rows: rows that have written a message.
      reply: tokens of the replies, `[B, R]`, int32, read up to `length`; R is below L.
      length: lengths of the replies, `[B]`, int32; 0 for a row that does not read and will not
        write again.
    """
    width = reply.shape[1]
    column = jnp.arange(width)[None]
    at = rows.prompt_length + rows.length[:, None] + column
    at = jnp.where(column < length[:, None], at, rows.tokens.shape[1])
    tokens = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(rows.tokens, at, reply)
    rows = rows._replace(tokens=tokens, length=rows.length + length)
    # The last token of the message may not have been fed yet.
    logits, cache = _feed(model, params, rows, width + 1)
    return rows._replace(logits=logits, cache=cache)


def finish(
    rows: DialogueRows, reward: jax.Array, ended: jax.Array, turns: jax.Array, *, most: int
) -> Conversations:
    """Returns the conversations, with a reward at the last sampled token of each row.

    Args:
      rows: rows that have written their last message.
      reward: reward of each row, `[B]`, reward units.
      ended: True for dialogues that were done within their turns, `[B]`, bool.
      turns: number of messages, `[B]`, int32.
      most: largest number S of tokens that a row may have sampled.
    """
    last = rows.sampled & (jnp.cumsum(rows.sampled[:, ::-1], axis=1)[:, ::-1] == 1)
    written = WrittenColumns(
        tokens=rows.tokens[:, rows.prompt_length :],
        log_prob=rows.log_prob,
        sampled=rows.sampled,
        message_end=rows.message_end,
        reward=jnp.where(last, reward[:, None], 0.0),
        kept=rows.kept,
    )
    return transcript.gather(written, most, state=None, ended=ended, turns=turns)


def _feed(model: Transformer, params: Any, rows: DialogueRows, count: int) -> tuple[jax.Array, Any]:
    """Feeds the last `count` tokens.

    Returns the logits after the last token `[B, V]` and the cache.

    Feeding a token again gives the same result, so that all rows can be fed the same number of
    tokens.
    """

    def row(tokens: jax.Array, pad: jax.Array, length: jax.Array, cache: Any) -> Any:
        start = rows.prompt_length + length - count
        fed = jax.lax.dynamic_slice_in_dim(tokens, start, count)
        one = jax.tree.map(lambda x: x[None], (fed, pad, cache))
        logits, cache = model.apply(params, *one, start, last=1)
        return logits[0, 0], jax.tree.map(lambda x: x[0], cache)

    fed: tuple[jax.Array, Any] = jax.vmap(row)(rows.tokens, rows.pad, rows.length, rows.cache)
    return fed


def _put(buffer: jax.Array, value: jax.Array, at: jax.Array, here: jax.Array) -> jax.Array:
    """Writes a value into column `at` of each row of a buffer `[B, …]` where `here` is True."""
    column = jnp.where(here, at, buffer.shape[1])
    return jax.vmap(lambda row, value, at: row.at[at].set(value, mode="drop"))(
        buffer, value, column
    )
