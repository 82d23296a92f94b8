"""Finds ends of completions: one of some tokens, or a token whose text completes a stop string."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxrl_po.config import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class Stops:
    """Stop strings, each of which ends a text, as an automaton (Aho and Corasick 1975).

    A state is the longest proper prefix of a stop string that is also a suffix of the text so far;
    0 is the empty prefix. Tokens that lead from every state to the same next state are of one kind.

    Attributes:
      strings: stop strings, none of them empty.
      kind: class of each token, `[V]`; tokens of one class have the same transitions.
      after: next state, `[kinds, states]`.
      found: True if a stop string is completed on the way to the next state, `[kinds, states]`,
        bool.
    """

    strings: tuple[str, ...]
    kind: npt.NDArray[np.int32]
    after: npt.NDArray[np.int32]
    found: npt.NDArray[np.bool_]


def make_stops(strings: Sequence[str], texts: Sequence[bytes]) -> Stops:
    """Builds the automaton of stop strings.

    Args:
      strings: stop strings, each of which ends a text.
      texts: text of each of the `V` tokens.

    Raises:
      ConfigError: a stop string is empty.

    Example:
      >>> stops = make_stops(["ab"], [b"a", b"b", b"xa", b"c"])
      >>> ends, state = Ends((3,), stops), jnp.zeros(1, jnp.int32)
      >>> for token in (2, 1):
      ...     state, ended = ends.after(state, jnp.array([token]))
      ...     print(ended)
      [False]
      [ True]
    """
    patterns = [string.encode() for string in strings]
    if not all(patterns):
        raise ConfigError("stop_strings", "must not be empty texts")
    states = sorted({pattern[:n] for pattern in patterns for n in range(len(pattern))}, key=len)
    numbers = {state: number for number, state in enumerate(states)}
    longest = len(states[-1])

    def follow(state: bytes, byte: int) -> int:
        text = (state + bytes([byte]))[-longest:] if longest else b""
        return next(numbers[text[i:]] for i in range(len(text) + 1) if text[i:] in numbers)

    def completes(state: bytes, byte: int) -> bool:
        return any(pattern in state + bytes([byte]) for pattern in patterns)

    used = sorted(set(b"".join(patterns)))
    after = {byte: np.array([follow(state, byte) for state in states], np.int32) for byte in used}
    found = {byte: np.array([completes(state, byte) for state in states]) for byte in used}
    nothing, nowhere = np.zeros(len(states), bool), np.zeros(len(states), np.int32)
    rows: dict[bytes, int] = {}
    kinds: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]] = []
    kind = np.zeros(len(texts), np.int32)
    for token, text in enumerate(texts):
        state, ended = np.arange(len(states), dtype=np.int32), nothing
        for byte in text:
            ended = ended | found.get(byte, nothing)[state]
            state = after.get(byte, nowhere)[state]
        row = state.tobytes() + ended.tobytes()
        if row not in rows:
            rows[row] = len(kinds)
            kinds.append((state, ended))
        kind[token] = rows[row]
    return Stops(
        tuple(strings),
        kind,
        np.stack([state for state, _ in kinds]),
        np.stack([ended for _, ended in kinds]),
    )


class Ends(NamedTuple):
    """Tokens and strings that end a completion.

    Attributes:
      tokens: ids that each end a completion.
      stops: automaton of the stop strings; None if only tokens end completions, which is faster.
    """

    tokens: tuple[int, ...]
    stops: Stops | None = None

    def begin(self, rows: int) -> jax.Array | None:
        """Returns the state before the first token, `[B]`; None without stop strings."""
        return None if self.stops is None else jnp.zeros(rows, jnp.int32)

    def after(self, state: jax.Array | None, token: jax.Array) -> tuple[Any, jax.Array]:
        """Returns the next state, and True where the text ends with the token, both `[B]`."""
        ended = jnp.isin(token, jnp.asarray(self.tokens, jnp.int32))
        if self.stops is None:
            return state, ended
        kind = jnp.asarray(self.stops.kind)[token]
        return (
            jnp.asarray(self.stops.after)[kind, state],
            ended | jnp.asarray(self.stops.found)[kind, state],
        )

    def mark(self, tokens: jax.Array) -> jax.Array:
        """Marks the ends in texts `[B, T]`, bool; tokens after a first end continue its text."""
        _, ended = jax.lax.scan(self.after, self.begin(tokens.shape[0]), tokens.T)
        return ended.T


def ends_of(tokenizer: Any) -> Ends:
    """Returns the ends of a completion for a tokenizer, which may lack stop strings."""
    return Ends(tuple(tokenizer.ends), getattr(tokenizer, "stops", None))
