"""Samples conversations under jit: one decode loop, whose rows progress independently."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.language import sampling, transcript
from jaxrl_po.language.dialogue import Dialogue, Reply, like
from jaxrl_po.language.sampling import DecodeRows, Decoding
from jaxrl_po.language.stopping import ends_of
from jaxrl_po.language.tasks.types import Prompt
from jaxrl_po.language.transcript import Conversations, WrittenColumns
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.types import PyTree


class Turn(NamedTuple):
    """Progress of each row in its dialogue, leaves `[B, …]`.

    Attributes:
      state: state of the environment.
      message: tokens of the message that the row is writing, `[B, M]`.
      written: number of tokens of the message that have been written, `[B]`.
      reply: reply to the previous message.
      read: number of tokens of the reply that the policy has read, `[B]`.
      turns: number of complete messages, `[B]`.
      done: True if the environment has ended the dialogue, `[B]`, bool.
      matched: state of the stop strings in the message, see `Ends.begin`.
    """

    state: PyTree
    message: jax.Array
    written: jax.Array
    reply: Reply
    read: jax.Array
    turns: jax.Array
    done: jax.Array
    matched: Any


def converse(
    model: Transformer,
    params: Any,
    dialogue: Dialogue,
    prompt: Prompt,
    state: PyTree,
    keys: jax.Array,
    *,
    group_size: int,
    decoding: Decoding,
    greedy: bool = False,
    noise: float = 0.0,
    with_kept: bool = False,
) -> Conversations:
    """Samples `group_size` dialogues from each of P starting states.

    Each step of the loop feeds every row one token: the next token of its pending reply, or a
    sampled token. A row does not wait for another row to finish its turn, and a row that reads does
    not slow down a row that writes.

    Args:
      model: transformer of the policy.
      params: parameters of the policy.
      dialogue: environment that replies to the policy, see `Dialogue`.
      prompt: prompts, tokens `[P, L]` and pad `[P]`.
      state: states that `reset` returned with the prompts, leaves `[P, …]`.
      keys: keys `[P]`, typed or raw, consumed. Token t is counted from the end of the prompt,
        replies included; member g draws token t with `fold_in(fold_in(key, g), t)`, and the reply
        to a message that ends with token t has t + N in place of t.
      group_size: dialogues per starting state, G.
      decoding: sampling filters and the token budget of one message, above 0, see `Decoding`.
      greedy: True to write the most likely tokens.
      noise: std of the noise on the logits, see `sampling.draw`.
      with_kept: True to record the tokens that each token was drawn from.

    Returns:
      Sampled dialogues as `Conversations`.
    """
    budget, prompt_length = decoding.max_new_tokens, prompt.tokens.shape[1]
    columns = dialogue.longest(budget)
    row_keys = sampling.member_keys(keys, group_size)
    cached = prompt_length + columns - 1
    logits, cache, pad = sampling.prefill(
        model, params, prompt.tokens, prompt.pad, cached, group_size=group_size
    )
    state = jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), state)

    def live(rows: DecodeRows) -> jax.Array:
        return ~_over(dialogue, rows.own[0])

    turn = _begin(dialogue, state, row_keys.shape[0], budget)
    nothing = jnp.zeros((row_keys.shape[0], columns), bool)
    said = WrittenColumns(
        tokens=jnp.full(nothing.shape, dialogue.tokenizer.pad, jnp.int32),
        log_prob=nothing.astype(logits.dtype),
        sampled=nothing,
        message_end=nothing,
        reward=nothing.astype(jnp.float32),
        kept=sampling.no_tokens(logits, decoding, columns) if with_kept else None,
    )
    rows = DecodeRows(turn.read, pad, row_keys, cache, (turn, said))
    feed = sampling.in_columns(model, prompt_length)
    emit = functools.partial(_emit, dialogue, decoding, greedy, noise)
    turn, said = sampling.decode(model, params, feed, emit, live, logits, rows, steps=columns)
    most = dialogue.max_turns * budget
    return transcript.gather(said, most, state=turn.state, ended=turn.done, turns=turn.turns)


def _over(dialogue: Dialogue, turn: Turn) -> jax.Array:
    return turn.done | (turn.turns >= dialogue.max_turns)


def _begin(dialogue: Dialogue, state: PyTree, rows: int, budget: int) -> Turn:
    """Returns the turns of all rows before their first token."""
    nothing = jnp.zeros(rows, jnp.int32)
    return Turn(
        state=state,
        message=jnp.full((rows, budget), dialogue.tokenizer.pad, jnp.int32),
        written=nothing,
        reply=Reply(jnp.zeros((rows, dialogue.reply_length), jnp.int32), nothing),
        read=nothing,
        turns=nothing,
        done=jnp.zeros(rows, bool),
        matched=ends_of(dialogue.tokenizer).begin(rows),
    )


def _emit(
    dialogue: Dialogue,
    decoding: Decoding,
    greedy: bool,
    noise: float,
    t: jax.Array,
    logits: jax.Array,
    rows: DecodeRows,
) -> DecodeRows:
    """Emits token t of every row: of its reply, sampled, or PAD once the row's dialogue is over."""
    (turn, said), budget = rows.own, decoding.max_new_tokens
    token, log_prob, kept = sampling.draw(
        logits, rows.keys, t, decoding, greedy=greedy, noise=noise
    )
    over = _over(dialogue, turn)
    reads = turn.read < turn.reply.length
    writes = ~reads & ~over
    if dialogue.reply_length:
        at = jnp.minimum(turn.read, dialogue.reply_length - 1)[:, None]
        replied = jnp.take_along_axis(turn.reply.tokens, at, axis=1)[:, 0]
        token = jnp.where(reads, replied, token)
    token = jnp.where(over, dialogue.tokenizer.pad, token)
    here = writes[:, None] & (jnp.arange(budget)[None] == turn.written[:, None])
    written = turn.written + writes
    matched, ends_here = ends_of(dialogue.tokenizer).after(turn.matched, token)
    complete = writes & (ends_here | (written == budget))
    turn = turn._replace(
        message=jnp.where(here, token[:, None], turn.message),
        written=written,
        read=turn.read + reads,
        matched=None if matched is None else jnp.where(writes, matched, turn.matched),
    )
    columns = dialogue.longest(budget)
    turn, reward = jax.lax.cond(
        sampling.anywhere(complete),
        functools.partial(_answer, dialogue),
        lambda turn, complete, keys: (turn, jnp.zeros(complete.shape, jnp.float32)),
        turn,
        complete,
        jax.vmap(jax.random.fold_in, (0, None))(rows.keys, columns + t),
    )
    column = WrittenColumns(token, jnp.where(writes, log_prob, 0.0), writes, complete, reward)
    held = sampling.write_kept_tokens(said.kept, kept, writes, t)
    said = jax.tree.map(
        lambda x, new: sampling.write_column(x, new, t), said._replace(kept=None), column
    )._replace(kept=held)
    return rows._replace(token=token, own=(turn, said))


def _answer(
    dialogue: Dialogue, turn: Turn, complete: jax.Array, keys: jax.Array
) -> tuple[Turn, jax.Array]:
    """Applies the environment's answers to the rows whose messages are complete."""
    state, reply, reward, done = jax.vmap(dialogue.respond)(
        turn.state, turn.message, turn.written, keys
    )
    answered = _begin(dialogue, state, *turn.message.shape)._replace(
        reply=reply, turns=turn.turns + 1, done=done
    )
    turn = jax.tree.map(
        lambda new, old: jnp.where(complete.reshape(-1, *[1] * (new.ndim - 1)), new, old),
        like(answered, turn),
        turn,
    )
    return turn, jnp.where(complete, reward, 0.0).astype(jnp.float32)


def play_demonstrations(dialogue: Dialogue, keys: jax.Array) -> tuple[Prompt, jax.Array, jax.Array]:
    """Plays dialogues of the train split with demonstrated messages.

    Args:
      dialogue: dialogue with `demonstrate`.
      keys: keys `[B]`, consumed.

    Returns:
      Prompts, and tokens `[B, N]` of messages and replies with the mask `[B, N]` of the messages.
    """
    assert dialogue.demonstrate is not None
    demonstrate = dialogue.demonstrate
    length, pad = dialogue.message_length, dialogue.tokenizer.pad
    ends = jnp.asarray(dialogue.tokenizer.ends, jnp.int32)
    columns = dialogue.longest(length)
    slots = jnp.arange(columns)

    def put(tokens: jax.Array, piece: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
        """Writes `count` tokens of a piece from `start` on; drops tokens out of bounds."""
        here = jnp.arange(piece.shape[0])
        at = jnp.where(here < count, start + here, columns)
        return tokens.at[at].set(piece.astype(tokens.dtype), mode="drop")

    def demonstrated(key: jax.Array) -> tuple[Prompt, jax.Array, jax.Array]:
        reset_key, key = jax.random.split(key)
        prompt, state = dialogue.reset(reset_key, False)

        def turn(carry: Any, key: jax.Array) -> tuple[Any, None]:
            state, tokens, mask, used, done = carry
            demonstrate_key, respond_key = jax.random.split(key)
            message = demonstrate(state, demonstrate_key).astype(jnp.int32)
            is_end = jnp.isin(message, ends)
            written = jnp.where(is_end.any(), jnp.argmax(is_end) + 1, length).astype(jnp.int32)
            state_after, reply, _, over = dialogue.respond(state, message, written, respond_key)
            count = jnp.where(done, 0, written)
            tokens = put(tokens, message, used, count)
            mask = mask | ((slots >= used) & (slots < used + count))
            used = used + count
            heard = jnp.where(done | over, 0, reply.length).astype(jnp.int32)
            tokens = put(tokens, reply.tokens, used, heard)
            after = like(state_after, state)
            state = jax.tree.map(lambda new, old: jnp.where(done, old, new), after, state)
            return (state, tokens, mask, used + heard, done | over), None

        start = (
            state,
            jnp.full(columns, pad, jnp.int32),
            jnp.zeros(columns, bool),
            jnp.int32(0),
            jnp.bool_(False),
        )
        turn_keys = jax.random.split(key, dialogue.max_turns)
        (_, tokens, mask, _, _), _ = jax.lax.scan(turn, start, turn_keys)
        return prompt, tokens, mask

    return jax.vmap(demonstrated)(keys)
