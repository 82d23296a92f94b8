"""Compares a completion's text with an answer, whatever tokens the text is written in.

A tokenizer that merges digits writes 12 as one token, whereas a model may write 12 as two tokens.
The program compares texts byte by byte, with the bytes of each token in a table.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SPACE = b" \t\n\r\v\f"
LONGEST = 64  # number of bytes stored per token; a longer token never matches an answer
LONGEST_ANSWER = 512  # number of bytes; a longer answer must match token by token


class Texts(NamedTuple):
    """Bytes of V tokens and of R answers; space around a text is ignored.

    Attributes:
      token: bytes of each token, then zeros, `[V, W]`, uint8.
      length: number of bytes of each token, 0 for a special token, `[V]`, int32.
      before: number of bytes of space at the beginning of each token, `[V]`, int32.
      after: number of bytes of space at the end of each token, `[V]`, int32.
      answer: bytes of each answer, then zeros, `[R, A]`, uint8.
      size: number of bytes of each answer, or −1 if more than `LONGEST_ANSWER`, `[R]`, int32.
    """

    token: Any
    length: Any
    before: Any
    after: Any
    answer: Any
    size: Any


class Match(NamedTuple):
    """Result of comparing a completion with an answer.

    Attributes:
      score: 1 if the completion ends and its text is the answer, else 0, `[]`.
      credit: each token's share of the answer's bytes and its end, at most 1 in all, `[T]`.
    """

    score: jax.Array
    credit: jax.Array


def make_texts(tokens: Sequence[bytes], answers: Sequence[str]) -> Texts:
    """Builds the tables of bytes.

    Args:
      tokens: bytes that each token adds to a text; empty for a special token.
      answers: texts of the right answers.
    """
    spelt = [answer.encode().strip(SPACE) for answer in answers]
    sizes = [len(answer) if len(answer) <= LONGEST_ANSWER else -1 for answer in spelt]
    return Texts(
        token=_table([token[:LONGEST] for token in tokens]),
        length=np.array([len(token) for token in tokens], np.int32),
        before=np.array([len(token) - len(token.lstrip(SPACE)) for token in tokens], np.int32),
        after=np.array([len(token) - len(token.rstrip(SPACE)) for token in tokens], np.int32),
        answer=_table([answer[:LONGEST_ANSWER] for answer in spelt]),
        size=np.array(sizes, np.int32),
    )


def _table(texts: Sequence[bytes]) -> np.ndarray[Any, Any]:
    width = max(1, *map(len, texts))
    joined = b"".join(text.ljust(width, b"\0") for text in texts)
    return np.frombuffer(joined, np.uint8).reshape(len(texts), width)


def match(texts: Texts, row: jax.Array, tokens: jax.Array, ends: tuple[int, ...]) -> Match:
    """Compares the text of a completion with the answer of a row.

    Args:
      texts: tables of bytes.
      row: index of the answer, `[]`, int32.
      tokens: tokens of the completion, `[T]`, int32; anything may follow its end.
      ends: ids that end a completion; the first of them in `tokens` ends it.
    """
    each, answer, size, length, before, after = (
        jnp.asarray(x)
        for x in (texts.token, texts.answer, texts.size, texts.length, texts.before, texts.after)
    )
    last = tokens.shape[0] - 1
    is_end = jnp.isin(tokens, jnp.array(ends))
    written = jnp.cumsum(is_end) == 0
    lengths = jnp.where(written, length[tokens], 0)
    stop = jnp.cumsum(lengths)
    solid = written & (before[tokens] < length[tokens])
    first, final = jnp.argmax(solid), last - jnp.argmax(solid[::-1])
    begin = (stop - lengths)[first] + before[tokens[first]]
    end = jnp.where(solid.any(), stop[final] - after[tokens[final]], begin)
    place = begin + jnp.arange(answer.shape[1])
    owner = jnp.minimum(jnp.searchsorted(stop, place, side="right"), last)
    inside = place - (stop - lengths)[owner]
    byte = each[tokens[owner], jnp.minimum(inside, each.shape[1] - 1)]
    wanted = jnp.arange(answer.shape[1]) < size[row]
    equal = wanted & (byte == answer[row]) & (place < end) & (inside < each.shape[1])
    ended = is_end & (jnp.cumsum(is_end) == 1) & (end - begin == size[row])
    share = 1.0 / jnp.maximum(size[row] + 1.0, 1.0)
    credit = share * (ended + jnp.zeros(last + 1).at[owner].add(equal.astype(float)))
    return Match((ended.any() & (equal == wanted).all()).astype(float), credit)
