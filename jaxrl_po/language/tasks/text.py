"""Writes numbers and texts of varying length as tokens, under jit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.language.tasks.types import Prompt
from jaxrl_po.language.tokenizer import Tokenizer
from jaxrl_po.types import PyTree

MAX_DIGITS = 9  # a sum of two such numbers still fits an int32
MAX_FACTOR_DIGITS = 4  # a product of two such numbers still fits an int32
MAX_LENGTH = 64  # largest number of digits in a list


class Piece(NamedTuple):
    """Text of varying length.

    Attributes:
      tokens: tokens of the text, followed by arbitrary tokens, `[N]`, int32.
      length: number of valid tokens from the first on, in [0, N], `[]`.
    """

    tokens: jax.Array | np.ndarray
    length: jax.Array | int


def digits(x: jax.Array, places: int) -> jax.Array:
    """Computes the lowest digits of `x`, lowest first: `floor(x / 10^i) mod 10`.

    Args:
      x: number, `[]`, uint32.
      places: number of digits, at most 10.

    Returns:
      Digits, `[places]`, int32.

    Example:
      >>> digits(jnp.uint32(340), 4).tolist()
      [0, 4, 3, 0]
    """
    return (x // _powers(places) % 10).astype(jnp.int32)


def numeral(
    x: jax.Array, places: int, tokenizer: Tokenizer, *, zero_pad: bool = True, reverse: bool = True
) -> Piece:
    """Writes a number; the alphabet lists the digits in order, from `0`.

    Args:
      x: number to write, `[]`, uint32, below 10^places.
      places: width of the number, in digits.
      tokenizer: tokenizer of the alphabet.
      zero_pad: True to fill the width with leading zeros; without them 0 is written `0`.
      reverse: True to write the lowest digit first.

    Returns:
      `Piece` of up to `places` tokens.
    """
    length = places if zero_pad else jnp.maximum(1, jnp.sum(x >= _powers(places), dtype=jnp.int32))
    position = np.arange(places)
    order = position if reverse else jnp.maximum(length - 1 - position, 0)
    return Piece(tokenizer.ids["0"] + digits(x, places)[order], length)


LOWEST_FIRST = "answers are written lowest digit first"


def literal(text: str, tokenizer: Tokenizer) -> Piece:
    """Encodes a fixed text."""
    return Piece(np.array(tokenizer.encode(text), np.int32), len(text))


def write_prompt(
    pieces: Sequence[Piece], length: int, tokenizer: Tokenizer, problem: PyTree
) -> Prompt:
    """Concatenates the pieces and pads them on the left to `length` tokens."""
    tokens, keep = _concatenate(pieces)
    pad = length - jnp.sum(keep, dtype=jnp.int32)
    return Prompt(_place(tokens, keep, pad, length, tokenizer), pad, problem)


def write_answer(pieces: Sequence[Piece], length: int, tokenizer: Tokenizer) -> jax.Array:
    """Concatenates the pieces, then EOS, then padding up to `length` tokens."""
    tokens, keep = _concatenate([*pieces, Piece(np.array([tokenizer.eos], np.int32), 1)])
    return _place(tokens, keep, jnp.int32(0), length, tokenizer)


def _concatenate(pieces: Sequence[Piece]) -> tuple[jax.Array, jax.Array | np.ndarray]:
    keep: list[Any] = [np.arange(piece.tokens.shape[0]) < piece.length for piece in pieces]
    # Fixed lengths stay in NumPy, also for the cumulative sum in `_place`: XLA aborts on some
    # cumulative sums of constants under shard_map.
    xp = np if all(isinstance(one, np.ndarray) for one in keep) else jnp
    return jnp.concatenate([piece.tokens for piece in pieces]), xp.concatenate(keep)


def _place(
    tokens: jax.Array,
    keep: jax.Array | np.ndarray,
    start: jax.Array,
    length: int,
    tokenizer: Tokenizer,
) -> jax.Array:
    # Invalid tokens get the index `length`, which is out of bounds, so that they are dropped.
    position = jnp.where(keep, start + keep.cumsum() - 1, length)
    return jnp.full(length, tokenizer.pad, jnp.int32).at[position].set(tokens, mode="drop")


def _powers(places: int) -> np.ndarray:
    return np.array([10**i for i in range(places)], np.uint32)
