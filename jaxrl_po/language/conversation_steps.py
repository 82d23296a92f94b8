"""The steps of conversations as programs of their own: between writing and reading others reply.

All share one cache. A row has no gaps: each stands at a column of its own, so that what was said
is what a batch of dialogues holds.
"""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.language import sampling, transcript
from jaxrl_po.language.sampling import PLAIN, Decoding
from jaxrl_po.language.stopping import Ends
from jaxrl_po.language.transcript import Conversations, Written
from jaxrl_po.language.transformer import Transformer


class Rows(NamedTuple):
    """B dialogues between two steps; L columns of the prompt, N after it.

    Attributes:
      tokens: `[B, L + N]`, int32: left-padded prompt, then what was said; PAD after it.
      pad: `[B]`, int32, padding tokens on the left.
      length: `[B]`, int32, tokens after the prompt.
      logits: `[B, V]`, of the token that comes next, after reading.
      cache: keys and values of all tokens but the last, which may be missing.
      keys: `[B]`, typed; token t after the prompt is drawn with `fold_in(key, t)`.
      log_prob: `[B, N]`, nats, of the sampled tokens.
      sampled: `[B, N]`, bool.
      message_end: `[B, N]`, bool.
      kept: `[B, N, …]`, what each sampled token was drawn from, see `sampling.Completions`.
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
        """L."""
        return self.tokens.shape[1] - self.sampled.shape[1]


# Rows that write `[B]`, the state of `Ends`, and all rows; their logits are of the first token.
Writing = tuple[jax.Array, Any, Rows]


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
) -> Rows:
    """Reads the prompts.

    Args:
      model: the policy.
      params: its parameters.
      prompt: `[B, L]`, int32, left-padded; the members of a group may have different ones.
      pad: `[B]`, int32.
      keys: `[B]`, see `Rows`.
      columns: N.
      pad_token: fills the columns to come.
      decoding: that of `write`.
    """
    rows, prompt_length = prompt.shape
    logits, cache, pad = sampling.prefill(
        model, params, prompt, pad, prompt_length + columns - 1, group_size=1
    )
    no = jnp.zeros((rows, columns), bool)
    return Rows(
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


def write(
    model: Transformer,
    params: Any,
    rows: Rows,
    writes: jax.Array,
    *,
    decoding: Decoding,
    ends: Ends,
    greedy: bool = False,
) -> tuple[Rows, jax.Array, jax.Array]:
    """A message of each row that writes, until all have ended or spent their budget.

    Args:
      model: the policy.
      params: its parameters.
      rows: after reading.
      writes: `[B]`, bool.
      decoding: its budget, above 0, is that of a message.
      ends: what ends a message.
      greedy: write the most likely tokens.

    Returns:
      The rows, their messages `[B, T]` and the length of these `[B]`, 0 for rows that do not write.
    """
    budget, begun = decoding.max_new_tokens, rows.length

    def feed(params: Any, t: jax.Array, loop: Writing) -> tuple[jax.Array, Writing]:
        del t  # a row that waits is fed its last token again, which leaves it as it is
        *others, rows = loop
        logits, cache = _feed(model, params, rows, 1)
        return logits, (*others, rows._replace(cache=cache))

    def emit(t: jax.Array, logits: jax.Array, loop: Writing) -> Writing:
        """The next token of every row that writes."""
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


def read(model: Transformer, params: Any, rows: Rows, reply: jax.Array, length: jax.Array) -> Rows:
    """The rows after each has read its reply.

    Args:
      model: the policy.
      params: its parameters.
      rows: after a message.
      reply: `[B, R]`, int32, read up to `length`; R below L.
      length: `[B]`, int32; 0 where a row is to read nothing, and will not write again.
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
    rows: Rows, reward: jax.Array, ended: jax.Array, turns: jax.Array, *, most: int
) -> Conversations:
    """What was said, with a reward `[B]` at the last sampled token of each row.

    Args:
      rows: after the last message.
      reward: `[B]`, reward units.
      ended: see `Conversations`.
      turns: see `Conversations`.
      most: S, tokens that may have been sampled.
    """
    last = rows.sampled & (jnp.cumsum(rows.sampled[:, ::-1], axis=1)[:, ::-1] == 1)
    written = Written(
        tokens=rows.tokens[:, rows.prompt_length :],
        log_prob=rows.log_prob,
        sampled=rows.sampled,
        message_end=rows.message_end,
        reward=jnp.where(last, reward[:, None], 0.0),
        kept=rows.kept,
    )
    return transcript.gather(written, most, state=None, ended=ended, turns=turns)


def _feed(model: Transformer, params: Any, rows: Rows, count: int) -> tuple[jax.Array, Any]:
    """Logits after the last token `[B, V]` and the cache, once the last `count` tokens were fed.

    Tokens that were fed before give what they gave, so that all rows can be fed equally many.
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
    """The buffer `[B, …]` with a value at one column of each row that is `here`."""
    column = jnp.where(here, at, buffer.shape[1])
    return jax.vmap(lambda row, value, at: row.at[at].set(value, mode="drop"))(
        buffer, value, column
    )
