"""Action distributions as pytrees: `sample`, `mode`, `log_prob`, `entropy` and the exact `kl`.

Everything is in nats and computed in float32 at least. The parameters carry the batch shape, so
that `vmap`, `scan` and masks see plain arrays. A distribution of your own must be a pytree with
these five methods.
"""

import dataclasses
import math
from typing import Protocol

import chex
import jax
import jax.numpy as jnp


class Distribution(Protocol):
    """What a policy returns, of batch shape `E*`; an action may have an event axis as well."""

    def sample(self, key: jax.Array) -> jax.Array:
        """One action per batch element; consumes `key`."""

    def mode(self) -> jax.Array:
        """The most likely action per batch element."""

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log-probability (or density) of `action`, `E*`, in nats."""

    def entropy(self) -> jax.Array:
        """Entropy `E*`, in nats (differential for densities)."""

    def kl(self, other: "Distribution") -> jax.Array:
        """The exact KL(self ‖ other) `E*`, in nats."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Categorical:
    """Categorical distribution over the last axis of `logits`.

    Attributes:
      logits: `[E*, A]`, unnormalised log-probabilities; `-inf` excludes an action.

    Example:
      >>> coin = Categorical(jnp.zeros(2))
      >>> print(round(float(coin.entropy()), 4), round(float(coin.log_prob(jnp.int32(1))), 4))
      0.6931 -0.6931
    """

    logits: jax.Array

    def sample(self, key: jax.Array) -> jax.Array:
        """One int32 action per batch element, `E*`; consumes `key`."""
        return jax.random.categorical(key, _wide(self.logits)).astype(jnp.int32)

    def mode(self) -> jax.Array:
        """The most likely action, `E*`; the lowest index wins a tie."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def log_probs(self) -> jax.Array:
        """Log-probabilities of all actions, `[E*, A]`, float32."""
        return jax.nn.log_softmax(_wide(self.logits))

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log-probability of `action` `E*`, in nats."""
        chex.assert_shape(action, self.logits.shape[:-1])
        # A masked sum: the gradient of indexing is a scatter, ten times as slow on a CPU.
        chosen = jax.nn.one_hot(action, self.logits.shape[-1], dtype=bool)
        return jnp.sum(jnp.where(chosen, self.log_probs(), 0.0), axis=-1)

    def entropy(self) -> jax.Array:
        """`−Σ_a p log p`, `E*`, in nats; excluded actions contribute 0."""
        log_probs = self.log_probs()
        return -_expectation(log_probs, log_probs)

    def kl(self, other: "Categorical") -> jax.Array:
        """Exact KL(self ‖ other) = `Σ_a p (log p − log q)`, `E*`, in nats."""
        chex.assert_equal_shape([self.logits, other.logits])
        return _expectation(self.log_probs(), self.log_probs() - other.log_probs())


def _wide(x: jax.Array) -> jax.Array:
    """`x` in float32 at least, so that sampling and scoring use the same distribution."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _expectation(log_probs: jax.Array, x: jax.Array) -> jax.Array:
    """`Σ_a p x` over the last axis; an action with p = 0 contributes 0 and no NaN gradient."""
    possible = jnp.isfinite(log_probs)
    return jnp.sum(jnp.exp(log_probs) * jnp.where(possible, x, 0.0), axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiagonalGaussian:
    """Independent Gaussians over the last axis: the event is a vector of D action components.

    Attributes:
      mean: `[E*, D]`.
      log_std: `[E*, D]`, natural logarithm of the standard deviation.

    Example:
      >>> standard = DiagonalGaussian(jnp.zeros(1), jnp.zeros(1))
      >>> print(round(float(standard.log_prob(jnp.zeros(1))), 4))
      -0.9189
    """

    mean: jax.Array
    log_std: jax.Array

    def sample(self, key: jax.Array) -> jax.Array:
        """One unclipped action per batch element, `[E*, D]`; consumes `key`."""
        mean, log_std = _wide(self.mean), _wide(self.log_std)
        return mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape, mean.dtype)

    def mode(self) -> jax.Array:
        """The mean, `[E*, D]`."""
        return self.mean

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log-density of `action` `[E*, D]` summed over D, `E*`, in nats."""
        chex.assert_equal_shape([action, self.mean])
        mean, log_std = _wide(self.mean), _wide(self.log_std)
        z = (action - mean) * jnp.exp(-log_std)
        return -jnp.sum(0.5 * jnp.square(z) + log_std + 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self) -> jax.Array:
        """Differential entropy `Σ_d (log_std + ½ log(2πe))`, `E*`, in nats."""
        return jnp.sum(_wide(self.log_std) + 0.5 * math.log(2 * math.pi * math.e), axis=-1)

    def kl(self, other: "DiagonalGaussian") -> jax.Array:
        """Exact KL(self ‖ other), `E*`, in nats."""
        chex.assert_equal_shape([self.mean, other.mean])
        mean, log_std, other_mean, other_log_std = map(
            _wide, (self.mean, self.log_std, other.mean, other.log_std)
        )
        variance_ratio = jnp.exp(2.0 * (log_std - other_log_std))
        z = (mean - other_mean) * jnp.exp(-other_log_std)
        return 0.5 * jnp.sum(
            variance_ratio + jnp.square(z) - 1.0 + 2.0 * (other_log_std - log_std), axis=-1
        )


MAX_LOG_RATIO = 20.0


def ratio(log_prob: jax.Array, old_log_prob: jax.Array) -> jax.Array:
    """Probability ratio `exp(clip(log_prob − old_log_prob, ±20))`, in float32 at least.

    Without the clamp one token could overflow `exp` and turn a whole update into NaN; beyond it the
    gradient is 0. The result lies in [2e-9, 5e8].

    Example:
      >>> float(ratio(jnp.log(0.5), jnp.log(0.25)))
      2.0
    """
    chex.assert_equal_shape([log_prob, old_log_prob])
    return jnp.exp(log_ratio(log_prob, old_log_prob))


def log_ratio(log_prob: jax.Array, old_log_prob: jax.Array) -> jax.Array:
    """`clip(log_prob − old_log_prob, ±20)`, in float32 at least."""
    dtype = jnp.promote_types(jnp.result_type(log_prob, old_log_prob), jnp.float32)
    return jnp.clip(
        log_prob.astype(dtype) - old_log_prob.astype(dtype), -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
