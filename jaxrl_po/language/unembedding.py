"""The distribution over a large vocabulary, whose logits are never held for all tokens at once."""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxrl_po.distributions import Categorical
from jaxrl_po.language.lora import Adapted
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.types import PyTree

HELD = 4096
"""Largest vocabulary whose logits are kept for a whole batch, which is faster."""
AT_ONCE = 2**24
"""Logits kept at a time for larger vocabularies: 64 MiB in float32."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unembedded:
    """Categorical over V tokens with logits `hidden @ matrix`, computed a few rows at a time.

    Values and gradients equal those of `Categorical(hidden @ matrix)`. Above `AT_ONCE` logits the
    backward pass computes them again: one more product with the matrix in exchange for several
    arrays of `[E*, V]`.

    Attributes:
      hidden: `[E*, D]`, float32 at least.
      matrix: `[D, V]`.
      at_once: logits that are held at a time.
    """

    hidden: jax.Array
    matrix: jax.Array
    at_once: int = dataclasses.field(default=AT_ONCE, metadata={"static": True})

    @property
    def logits(self) -> jax.Array:
        """All of them, `[E*, V]`, float32 at least."""
        return _logits(self.hidden, self.matrix)

    def sample(self, key: jax.Array) -> jax.Array:
        """One int32 token per batch element, `E*`; consumes `key`."""
        keys = jax.random.split(key, self.hidden.shape[:-1])

        def of_rows(hidden: jax.Array, matrices: Any, key: jax.Array) -> jax.Array:
            logits = _logits(hidden, matrices[0])
            return jax.vmap(lambda row, key: Categorical(row).sample(key))(logits, key)

        drawn: jax.Array = self._by_rows(of_rows, keys)
        return drawn

    def mode(self) -> jax.Array:
        """The most likely token, `E*`; the lowest id wins a tie."""
        return self._by_rows(lambda hidden, m: Categorical(_logits(hidden, m[0])).mode())

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log-probability of `action` `E*`, in nats."""
        chex.assert_shape(action, self.hidden.shape[:-1])

        def of_rows(hidden: jax.Array, matrices: Any, action: jax.Array) -> jax.Array:
            logits = _logits(hidden, matrices[0])
            chosen = jnp.take_along_axis(logits, action[:, None], axis=1)[:, 0]
            return chosen - jax.nn.logsumexp(logits, axis=1)

        return self._by_rows(of_rows, action)

    def entropy(self) -> jax.Array:
        """`−Σ_a p log p`, `E*`, in nats."""
        return self._by_rows(lambda hidden, m: Categorical(_logits(hidden, m[0])).entropy())

    def log_prob_and_entropy(self, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Both of the same logits, which are computed once for the two."""
        chex.assert_shape(action, self.hidden.shape[:-1])

        def of_rows(
            hidden: jax.Array, matrices: Any, action: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            logits = _logits(hidden, matrices[0])
            # Not `log_softmax`, which alone would read the logits: XLA for a CPU then makes it a
            # part of their product, which takes up to 3.5 times as long.
            largest = jax.lax.stop_gradient(jnp.max(logits, axis=1))
            below = logits - largest[:, None]
            power = jnp.exp(below)
            total = jnp.sum(power, axis=1)
            log_total = jnp.log(total)
            is_chosen = jax.nn.one_hot(action, logits.shape[1], dtype=bool)
            chosen = jnp.sum(jnp.where(is_chosen, logits, 0.0), axis=1) - largest
            entropy = log_total - jnp.sum(power * below, axis=1) / total
            return chosen - log_total, entropy

        both: tuple[jax.Array, jax.Array] = self._by_rows(of_rows, action)
        return both

    def kl(self, other: "Unembedded") -> jax.Array:
        """Exact KL(self ‖ other), `E*`, in nats."""
        chex.assert_equal_shape([self.hidden, other.hidden])

        def of_rows(hidden: jax.Array, matrices: Any, others: jax.Array) -> jax.Array:
            mine, its = (
                Categorical(_logits(*each)) for each in zip((hidden, others), matrices, strict=True)
            )
            return mine.kl(its)

        return self._by_rows(of_rows, other.hidden, matrices=(self.matrix, other.matrix))

    def _by_rows(
        self, function: Callable[..., Any], *arrays: jax.Array, matrices: Any = None
    ) -> Any:
        """`function(hidden [C, D], matrices, *rows [C, …]) -> [C]` over C rows at a time, `E*`.

        The function may return several arrays.
        """
        shape = self.hidden.shape[:-1]
        matrices = (self.matrix,) if matrices is None else matrices
        rows = [array.reshape(-1, *array.shape[len(shape) :]) for array in (self.hidden, *arrays)]
        at_once = max(1, self.at_once // self.matrix.shape[1])
        held = rows[0].shape[0] <= at_once  # computed again, they would take as much memory
        of_rows = function if held else jax.checkpoint(function)
        found = _map_rows(lambda hidden, *arrays: of_rows(hidden, matrices, *arrays), rows, at_once)
        return jax.tree.map(lambda x: x.reshape(shape), found)


def next_tokens(
    model: Any,
    params: PyTree,
    tokens: jax.Array,
    pad: jax.Array,
    *,
    last: int = 0,
    temperature: float = 1.0,
    position: jax.Array | None = None,
    **reading: Any,
) -> Categorical | Unembedded:
    """The distribution of the token after each of the last ones, `[B, last]`, or after some.

    Args:
      model: a `Transformer`, one over a base (`lora.over`), or a custom module.
      params: what it is applied to.
      tokens: `[B, N]`, int32, left-padded.
      pad: `[B]`, int32.
      last: how many; 0 for all.
      temperature: divides the logits.
      position: `[B, S]`, int32 below `last`: after which of them; None for all.
      **reading: further arguments of the model, such as `prompt`.
    """

    def some(outputs: jax.Array) -> jax.Array:
        if position is None:
            return outputs
        return jnp.take_along_axis(outputs, position[..., None], axis=1)

    whole, core = params, model
    if isinstance(model, Adapted):
        whole, core = model.base, model.model
    if not isinstance(core, Transformer) or core.vocabulary <= HELD:
        logits, _ = model.apply(params, tokens, pad, last=last, **reading)
        return Categorical(some(logits) / temperature)
    hidden, _ = model.apply(params, tokens, pad, last=last, unembed=False, **reading)
    return Unembedded(some(hidden) / temperature, core.unembedding(whole))


def _logits(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
    """`[C, V]`, in float32 at least."""
    logits = hidden @ matrix
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _map_rows(function: Callable[..., Any], rows: list[jax.Array], at_once: int) -> Any:
    """A function of parts of `at_once` rows, and of the shorter last one."""
    count = rows[0].shape[0]
    whole = count // at_once
    found = []
    if whole:
        parts = [row[: whole * at_once].reshape(whole, at_once, *row.shape[1:]) for row in rows]
        mapped = jax.lax.map(lambda part: function(*part), parts)
        found.append(jax.tree.map(lambda x: x.reshape(-1), mapped))
    if whole * at_once < count:
        found.append(function(*(row[whole * at_once :] for row in rows)))
    return jax.tree.map(lambda *each: jnp.concatenate(each), *found)
