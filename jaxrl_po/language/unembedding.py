"""Distribution over a large vocabulary that never stores the logits of all tokens at once."""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxrl_po.distributions import Categorical
from jaxrl_po.language.lora import AdaptedModel
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.types import PyTree

HELD = 4096
"""Largest vocabulary whose logits are stored for a whole batch, which is faster."""
AT_ONCE = 2**24
"""Number of logits stored at a time for larger vocabularies: 64 MiB in float32."""
LISTED = 512
"""Largest number of tokens that a filter of the sampler keeps of a larger vocabulary."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ListedCategorical:
    """Categorical distribution over a list of K actions per element.

    Other actions have probability 0.

    Attributes:
      logits: unnormalised log-probabilities of the listed actions, `[E*, K]`.
      action: ids of the listed actions, -1 in unused slots, `[E*, K]`, int32.

    Example:
      >>> pair = ListedCategorical(jnp.zeros(3), jnp.array([7, 4, -1]))
      >>> print(round(float(pair.log_prob(jnp.int32(4))), 4), pair.log_prob(jnp.int32(0)))
      -0.6931 -inf
    """

    logits: jax.Array
    action: jax.Array

    def slots(self) -> Categorical:
        """Returns the distribution over the K slots."""
        return Categorical(jnp.where(self.action >= 0, self.logits, -jnp.inf))

    def sample(self, key: jax.Array) -> jax.Array:
        """Draws one int32 action per batch element, `E*`; consumes `key`."""
        return self._in(self.slots().sample(key))

    def mode(self) -> jax.Array:
        """Returns the most likely action, `E*`; the first action in the list wins a tie."""
        return self._in(self.slots().mode())

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Computes the log-probability of `action` `E*`, in nats.

        -inf for an action that is not listed.
        """
        chex.assert_shape(action, self.logits.shape[:-1])
        chosen = self.action == action[..., None]
        return jnp.max(jnp.where(chosen, self.slots().log_probs(), -jnp.inf), axis=-1)

    def entropy(self) -> jax.Array:
        """Computes the entropy `−Σ_a p log p`, `E*`, in nats; 0 with a single action."""
        return self.slots().entropy()

    def kl(self, other: "ListedCategorical") -> jax.Array:
        """Computes the exact KL(self ‖ other), `E*`, in nats; both must have the same list."""
        return self.slots().kl(other.slots())

    def _in(self, slot: jax.Array) -> jax.Array:
        return jnp.take_along_axis(self.action, slot[..., None], axis=-1)[..., 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unembedded:
    """Categorical distribution over V tokens with logits `hidden @ matrix`, few rows at a time.

    Values and gradients equal those of `restricted(hidden @ matrix, kept)`. Above `AT_ONCE`
    logits the backward pass recomputes the logits: one more product with the matrix saves several
    arrays of `[E*, V]`.

    Attributes:
      hidden: hidden vectors, `[E*, D]`, float32 at least.
      matrix: output matrix, `[D, V]`.
      at_once: number of logits that are stored at a time, on each device.
      over_rows: `over_rows(f)(params, rows)`, computes `f(params, rows)` on the devices of the
        rows, see `Transformer`.
      kept: tokens that the policy is restricted to, see `restricted`, `[E*, K]`, int32; None for
        all tokens.
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
        """Logits of all tokens, kept or not, `[E*, V]`, float32 at least."""
        return _logits(self.hidden, self.matrix)

    def sample(self, key: jax.Array) -> jax.Array:
        """Draws one int32 token per batch element, `E*`; consumes `key`."""
        keys = jax.random.split(key, self.hidden.shape[:-1])
        drawn: jax.Array = self._by_rows(
            lambda rows, keys: jax.vmap(lambda row, key: row.sample(key))(rows, keys), keys
        )
        return drawn

    def mode(self) -> jax.Array:
        """Returns the most likely token, `E*`; the lowest id, or first of a list, wins a tie."""
        return self._by_rows(lambda rows: rows.mode())

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Computes the log-probability of `action` `E*`, in nats."""
        chex.assert_shape(action, self.hidden.shape[:-1])

        def of_rows(rows: Categorical | ListedCategorical, action: jax.Array) -> jax.Array:
            if isinstance(rows, ListedCategorical):
                return rows.log_prob(action)
            chosen = jnp.take_along_axis(rows.logits, action[:, None], axis=1)[:, 0]
            return chosen - jax.nn.logsumexp(rows.logits, axis=1)

        return self._by_rows(of_rows, action)

    def entropy(self) -> jax.Array:
        """Computes the entropy `−Σ_a p log p`, `E*`, in nats."""
        return self._by_rows(lambda rows: rows.entropy())

    def log_prob_and_entropy(self, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns log-probability and entropy; computes their logits only once."""
        chex.assert_shape(action, self.hidden.shape[:-1])

        def of_rows(
            rows: Categorical | ListedCategorical, action: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            if isinstance(rows, ListedCategorical):
                return rows.log_prob(action), rows.entropy()
            logits = rows.logits
            # `log_softmax` would be the only reader of the logits: XLA for a CPU then fuses it into
            # their product, which takes up to 3.5 times as long.
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
        """Computes the exact KL(self ‖ other), `E*`, in nats; both must keep the same tokens."""
        chex.assert_equal_shape([self.hidden, other.hidden])
        return self._by_rows(lambda mine, its: mine.kl(its), other=other)

    def _by_rows(
        self, function: Callable[..., Any], *arrays: jax.Array, other: "Unembedded | None" = None
    ) -> Any:
        """Applies `function(rows, *arrays [C, …]) -> [C]` to C rows at a time, `E*`.

        The function may return several arrays. With another distribution, the function receives the
        rows of `other` after the rows of `self`.
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
            # Rows that fit at once are not recomputed: recomputation would need as much memory.
            held = jax.tree.leaves(rows)[0].shape[0] <= at_once
            of_rows = of_some if held else jax.checkpoint(of_some)
            return _map_rows(lambda part: of_rows(matrices, *part), rows, at_once)

        found = self.over_rows(of_all)(matrices, split)
        return jax.tree.map(lambda x: x.reshape(shape), found)


def restricted(logits: jax.Array, kept: jax.Array | None) -> Categorical | ListedCategorical:
    """Restricts the policy to the tokens that the sampler kept: `π(a) 1[a ∈ S] / π(S)`.

    Args:
      logits: logits divided by the temperature, `[E*, V]`.
      kept: tokens S, bool `[E*, V]` or int32 ids `[E*, K]` with -1 in unused slots; None for all
        tokens. An element without a sample may keep no token: its distribution is then an arbitrary
        finite one.
    """
    if kept is None:
        return Categorical(logits)
    if kept.dtype == bool:
        among = kept | ~kept.any(axis=-1, keepdims=True)
        return Categorical(jnp.where(among, logits, -jnp.inf))
    return ListedCategorical(jnp.take_along_axis(logits, jnp.maximum(kept, 0), axis=-1), kept)


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
) -> Categorical | ListedCategorical | Unembedded:
    """Computes the distribution of the token after each of the last tokens, or after some of them.

    The batch shape is `[B, last]`, or `[B, S]` with `position`.

    Args:
      model: `Transformer`, a transformer over a base (`lora.over`), or a custom module.
      params: parameters that the model is applied to.
      tokens: tokens that the model reads, `[B, N]`, int32, left-padded.
      pad: padding tokens on the left, `[B]`, int32.
      last: number of last tokens; 0 for all tokens.
      temperature: divisor of the logits.
      position: indices of the tokens among the last ones, `[B, S]`, int32 below `last`; None for
        all tokens.
      kept: tokens that the policy is restricted to, see `restricted`, `[B, S, …]`.
      **reading: further arguments of the model, such as `prompt`.
    """

    def some(outputs: jax.Array) -> jax.Array:
        if position is None:
            return outputs
        return jnp.take_along_axis(outputs, position[..., None], axis=1)

    whole, core = params, model
    if isinstance(model, AdaptedModel):
        whole, core = model.base, model.model
    if not isinstance(core, Transformer) or core.vocabulary <= HELD:
        logits, _ = model.apply(params, tokens, pad, last=last, **reading)
        return restricted(some(logits) / temperature, kept)
    hidden, _ = model.apply(params, tokens, pad, last=last, unembed=False, **reading)
    matrix = core.unembedding(whole)
    return Unembedded(some(hidden) / temperature, matrix, kept=kept, over_rows=core.over_rows)


def _logits(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
    """Computes logits `[C, V]`, in float32 at least."""
    logits = hidden @ matrix
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _map_rows(function: Callable[[Any], Any], rows: Any, at_once: int) -> Any:
    """Applies a function to parts of `at_once` rows and to the shorter remainder.

    Leaves `[N, …]`.
    """
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
