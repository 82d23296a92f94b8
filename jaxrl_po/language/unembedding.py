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
LISTED = 512
"""Tokens of a larger vocabulary that a filter of the sampler keeps at most."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Listed:
    """Categorical over a list of K actions per element; every other has probability 0.

    Attributes:
      logits: `[E*, K]`, unnormalised log-probabilities of the actions of the list.
      action: `[E*, K]`, int32: the list, and -1 in slots that hold none.

    Example:
      >>> pair = Listed(jnp.zeros(3), jnp.array([7, 4, -1]))
      >>> print(round(float(pair.log_prob(jnp.int32(4))), 4), pair.log_prob(jnp.int32(0)))
      -0.6931 -inf
    """

    logits: jax.Array
    action: jax.Array

    def slots(self) -> Categorical:
        """The distribution over the K slots."""
        return Categorical(jnp.where(self.action >= 0, self.logits, -jnp.inf))

    def sample(self, key: jax.Array) -> jax.Array:
        """One int32 action per batch element, `E*`; consumes `key`."""
        return self._in(self.slots().sample(key))

    def mode(self) -> jax.Array:
        """The most likely action, `E*`; the first of the list wins a tie."""
        return self._in(self.slots().mode())

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log-probability of `action` `E*`, in nats; -inf of an action that is not listed."""
        chex.assert_shape(action, self.logits.shape[:-1])
        chosen = self.action == action[..., None]
        return jnp.max(jnp.where(chosen, self.slots().log_probs(), -jnp.inf), axis=-1)

    def entropy(self) -> jax.Array:
        """`−Σ_a p log p`, `E*`, in nats; 0 with one action."""
        return self.slots().entropy()

    def kl(self, other: "Listed") -> jax.Array:
        """Exact KL(self ‖ other), `E*`, in nats, where both have the same list."""
        return self.slots().kl(other.slots())

    def _in(self, slot: jax.Array) -> jax.Array:
        return jnp.take_along_axis(self.action, slot[..., None], axis=-1)[..., 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unembedded:
    """Categorical over V tokens with logits `hidden @ matrix`, computed a few rows at a time.

    Values and gradients equal those of `restricted(hidden @ matrix, kept)`. Above `AT_ONCE` logits
    the backward pass computes them again: one more product with the matrix in exchange for several
    arrays of `[E*, V]`.

    Attributes:
      hidden: `[E*, D]`, float32 at least.
      matrix: `[D, V]`.
      at_once: logits that are held at a time, on each device.
      over_rows: see `Transformer`.
      kept: `[E*, K]`, int32, the tokens that the policy is restricted to, see `restricted`; None
        for all.
    """

    hidden: jax.Array
    matrix: jax.Array
    at_once: int = dataclasses.field(default=AT_ONCE, metadata={"static": True})
    over_rows: Callable[..., Any] = dataclasses.field(
        default=lambda function: function, metadata={"static": True}
    )
    kept: jax.Array | None = None

    @property
    def logits(self) -> jax.Array:
        """Those of all tokens, kept or not, `[E*, V]`, float32 at least."""
        return _logits(self.hidden, self.matrix)

    def sample(self, key: jax.Array) -> jax.Array:
        """One int32 token per batch element, `E*`; consumes `key`."""
        keys = jax.random.split(key, self.hidden.shape[:-1])
        drawn: jax.Array = self._by_rows(
            lambda rows, keys: jax.vmap(lambda row, key: row.sample(key))(rows, keys), keys
        )
        return drawn

    def mode(self) -> jax.Array:
        """The most likely token, `E*`; the lowest id wins a tie, or the first one of a list."""
        return self._by_rows(lambda rows: rows.mode())

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log-probability of `action` `E*`, in nats."""
        chex.assert_shape(action, self.hidden.shape[:-1])

        def of_rows(rows: Categorical | Listed, action: jax.Array) -> jax.Array:
            if isinstance(rows, Listed):
                return rows.log_prob(action)
            chosen = jnp.take_along_axis(rows.logits, action[:, None], axis=1)[:, 0]
            return chosen - jax.nn.logsumexp(rows.logits, axis=1)

        return self._by_rows(of_rows, action)

    def entropy(self) -> jax.Array:
        """`−Σ_a p log p`, `E*`, in nats."""
        return self._by_rows(lambda rows: rows.entropy())

    def log_prob_and_entropy(self, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Both of the same logits, which are computed once for the two."""
        chex.assert_shape(action, self.hidden.shape[:-1])

        def of_rows(rows: Categorical | Listed, action: jax.Array) -> tuple[jax.Array, jax.Array]:
            if isinstance(rows, Listed):
                return rows.log_prob(action), rows.entropy()
            logits = rows.logits
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
        """Exact KL(self ‖ other), `E*`, in nats, where both keep the same tokens."""
        chex.assert_equal_shape([self.hidden, other.hidden])
        return self._by_rows(lambda mine, its: mine.kl(its), other=other)

    def _by_rows(
        self, function: Callable[..., Any], *arrays: jax.Array, other: "Unembedded | None" = None
    ) -> Any:
        """`function(rows, *arrays [C, …]) -> [C]` over C rows at a time, `E*`.

        The function may return several arrays. With another distribution, its rows follow ours.
        """
        shape = self.hidden.shape[:-1]
        each = [self] if other is None else [self, other]
        matrices = [one.matrix for one in each]
        split = jax.tree.map(
            lambda array: array.reshape(-1, *array.shape[len(shape) :]),
            ([(one.hidden, one.kept) for one in each], arrays),
        )
        at_once = max(1, self.at_once // self.matrix.shape[1])

        def of_some(
            matrices: list[jax.Array], rows: list[tuple[jax.Array, Any]], arrays: tuple[Any, ...]
        ) -> Any:
            distributions = (
                restricted(_logits(hidden, matrix), kept)
                for (hidden, kept), matrix in zip(rows, matrices, strict=True)
            )
            return function(*distributions, *arrays)

        def of_all(matrices: list[jax.Array], rows: Any) -> Any:
            # Computed again, what is held would take as much memory.
            held = jax.tree.leaves(rows)[0].shape[0] <= at_once
            of_rows = of_some if held else jax.checkpoint(of_some)
            return _map_rows(lambda part: of_rows(matrices, *part), rows, at_once)

        found = self.over_rows(of_all)(matrices, split)
        return jax.tree.map(lambda x: x.reshape(shape), found)


def restricted(logits: jax.Array, kept: jax.Array | None) -> Categorical | Listed:
    """The policy over the tokens that the sampler kept: `π(a) 1[a ∈ S] / π(S)`.

    Args:
      logits: `[E*, V]`, divided by the temperature.
      kept: S: bool `[E*, V]`, or int32 `[E*, K]`, ids of which -1 are none; None for all tokens. In
        a slot without a sample nothing needs to be kept: its distribution is some finite one.
    """
    if kept is None:
        return Categorical(logits)
    if kept.dtype == bool:
        among = kept | ~kept.any(axis=-1, keepdims=True)
        return Categorical(jnp.where(among, logits, -jnp.inf))
    return Listed(jnp.take_along_axis(logits, jnp.maximum(kept, 0), axis=-1), kept)


def next_tokens(
    model: Any,
    params: PyTree,
    tokens: jax.Array,
    pad: jax.Array,
    *,
    last: int = 0,
    temperature: float = 1.0,
    position: jax.Array | None = None,
    kept: jax.Array | None = None,
    **reading: Any,
) -> Categorical | Listed | Unembedded:
    """The distribution of the token after each of the last ones, `[B, last]`, or after some.

    Args:
      model: a `Transformer`, one over a base (`lora.over`), or a custom module.
      params: what it is applied to.
      tokens: `[B, N]`, int32, left-padded.
      pad: `[B]`, int32.
      last: how many; 0 for all.
      temperature: divides the logits.
      position: `[B, S]`, int32 below `last`: after which of them; None for all.
      kept: `[B, S, …]`, the tokens that the policy is restricted to, see `restricted`.
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
        return restricted(some(logits) / temperature, kept)
    hidden, _ = model.apply(params, tokens, pad, last=last, unembed=False, **reading)
    matrix = core.unembedding(whole)
    return Unembedded(some(hidden) / temperature, matrix, kept=kept, over_rows=core.over_rows)


def _logits(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
    """`[C, V]`, in float32 at least."""
    logits = hidden @ matrix
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _map_rows(function: Callable[[Any], Any], rows: Any, at_once: int) -> Any:
    """A function of parts of `at_once` rows, and of the shorter last one; leaves `[N, …]`."""
    count = jax.tree.leaves(rows)[0].shape[0]
    whole = count // at_once
    found = []
    if whole:
        parts = jax.tree.map(
            lambda x: x[: whole * at_once].reshape(whole, at_once, *x.shape[1:]), rows
        )
        mapped = jax.lax.map(function, parts)
        found.append(jax.tree.map(lambda x: x.reshape(-1), mapped))
    if whole * at_once < count:
        found.append(function(jax.tree.map(lambda x: x[whole * at_once :], rows)))
    return jax.tree.map(lambda *each: jnp.concatenate(each), *found)
