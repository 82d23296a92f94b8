"""Action distributions as pytrees: `sample`, `mode`, `log_prob`, `entropy` and the exact `kl`.

All results are in nats and computed in float32 at least. The parameters carry the batch shape, so
that `vmap`, `scan` and masks see plain arrays. A user-defined distribution must be a pytree with
these five methods.
"""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.config import ConfigError
from jaxrl_po.divergences import exp_excess
from jaxrl_po.types import Distribution

# Number of actions above which sampling takes so long that a second pass is worth its cost;
# unlikely actions together are then likely enough to need finer random numbers.
MANY = 1024


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
        """Returns one int32 action per batch element, `E*`; consumes `key`."""
        logits = _wide(self.logits)
        gumbel = _gumbel if logits.shape[-1] > MANY else jax.random.gumbel
        return _argmax(logits + gumbel(key, logits.shape, logits.dtype))

    def mode(self) -> jax.Array:
        """Returns the most likely action, `E*`; the lowest index wins a tie."""
        return _argmax(self.logits)

    def log_probs(self) -> jax.Array:
        """Computes log-probabilities of all actions, `[E*, A]`, float32."""
        return jax.nn.log_softmax(_wide(self.logits))

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Computes the log-probability of `action` `E*`, in nats."""
        chex.assert_shape(action, self.logits.shape[:-1])
        # The masked sum replaces indexing: the gradient of indexing is a scatter, ten times as slow
        # on a CPU.
        chosen = jax.nn.one_hot(action, self.logits.shape[-1], dtype=bool)
        return jnp.sum(jnp.where(chosen, self.log_probs(), 0.0), axis=-1)

    def entropy(self) -> jax.Array:
        """Computes `−Σ_a p log p`, `E*`, in nats; excluded actions contribute 0."""
        log_probs = self.log_probs()
        return -_expectation(log_probs, log_probs)

    def kl(self, other: "Categorical") -> jax.Array:
        """Computes the exact KL(self ‖ other) = `Σ_a p (log p − log q)`, `E*`, nats, at least 0.

        The terms of the sum `Σ_a p (q/p − 1 − log(q/p))` do not cancel; a term is q if p = 0.
        """
        chex.assert_equal_shape([self.logits, other.logits])
        mine, its = self.log_probs(), other.log_probs()
        probs = jnp.exp(mine)
        possible = probs > 0.0
        gap = jnp.where(possible, its, 0.0) - jnp.where(possible, mine, 0.0)
        return jnp.sum(jnp.where(possible, probs * exp_excess(gap), jnp.exp(its)), axis=-1)


def _gumbel(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Draws standard Gumbel numbers up to 22.9; `jax.random.gumbel` ends at 15.9.

    Tokens down to e⁻²² of the largest probability are then drawn at their true rate; a large
    vocabulary has thousands of such tokens. The draw uses all 32 bits of a random word, as −log E
    with E = −log(1 − u), which is finest near 0.
    """
    uniform = (jax.random.bits(key, shape, jnp.uint32).astype(dtype) + 0.5) * 2.0**-32
    # The random number u may round up to 1.
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1.0 - 2.0**-24)))


def _argmax(x: jax.Array) -> jax.Array:
    """Returns the index of the largest number along the last axis, int32.

    The lowest index wins a tie.
    """
    size = x.shape[-1]
    if size <= MANY:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)
    # Takes two vectorised passes over computed numbers. XLA's `argmax` on a CPU is scalar and fused
    # with its input: the fused loop takes three times as long.
    x = jax.lax.optimization_barrier(x)
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.min(jnp.where(x < jnp.max(x, axis=-1, keepdims=True), size, index), axis=-1)


def _wide(x: jax.Array) -> jax.Array:
    """Widens `x` to float32 at least, so that sampling and scoring use the same distribution."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _expectation(log_probs: jax.Array, x: jax.Array) -> jax.Array:
    """Computes `Σ_a p x` over the last axis; an action with p = 0 adds 0 and no NaN gradient."""
    probs = jnp.exp(log_probs)
    return jnp.sum(probs * jnp.where(probs > 0.0, x, 0.0), axis=-1)


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
        """Returns one unclipped action per batch element, `[E*, D]`; consumes `key`."""
        mean, log_std = _wide(self.mean), _wide(self.log_std)
        return mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape, mean.dtype)

    def mode(self) -> jax.Array:
        """Returns the mean, `[E*, D]`."""
        return self.mean

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Computes the log-density of `action` `[E*, D]` summed over D, `E*`, in nats."""
        chex.assert_equal_shape([action, self.mean])
        mean, log_std = _wide(self.mean), _wide(self.log_std)
        z = (action - mean) * jnp.exp(-log_std)
        return -jnp.sum(0.5 * jnp.square(z) + log_std + 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self) -> jax.Array:
        """Computes the differential entropy `Σ_d (log_std + ½ log(2πe))`, `E*`, in nats."""
        return jnp.sum(_wide(self.log_std) + 0.5 * math.log(2 * math.pi * math.e), axis=-1)

    def kl(self, other: "DiagonalGaussian") -> jax.Array:
        """Computes the exact KL(self ‖ other), `E*`, in nats, never negative."""
        chex.assert_equal_shape([self.mean, other.mean])
        mean, log_std, other_mean, other_log_std = map(
            _wide, (self.mean, self.log_std, other.mean, other.log_std)
        )
        z = (mean - other_mean) * jnp.exp(-other_log_std)
        # v is the ratio of the variances; a component contributes v − 1 − log v.
        spread = exp_excess(2.0 * (log_std - other_log_std))
        return 0.5 * jnp.sum(spread + jnp.square(z), axis=-1)


# Nodes and weights of Gauss–Hermite quadrature: E f(x) ≈ Σ w f(x) for a standard normal x.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(20)
_WEIGHTS = _WEIGHTS / math.sqrt(2 * math.pi)
# ∫ f(u) log(1 + e^(−2u)) du over [0, 8] ≈ Σ w f(u), by Gauss and Legendre.
_PLACES, _BEND = np.polynomial.legendre.leggauss(20)
_PLACES = 4.0 * (_PLACES + 1.0)
_BEND = 4.0 * _BEND * np.log1p(np.exp(-2.0 * _PLACES))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TanhGaussian:
    """Distribution of `tanh(u)` with u from a diagonal Gaussian; stored and scored actions are u.

    `log π(u) = log N(u) − Σ_d log(1 − tanh²(u_d))`, the density of tanh(u) (Haarnoja et al. 2018,
    arXiv:1801.01290, appendix C). Tanh is a bijection, so the KL equals the KL of the two
    Gaussians.

    Attributes:
      mean: `[E*, D]`, mean of u.
      log_std: `[E*, D]`, logarithm of the standard deviation of u.

    Example:
      >>> standard = TanhGaussian(jnp.zeros(1), jnp.zeros(1))
      >>> print(round(float(standard.log_prob(jnp.ones(1))), 4))
      -0.5514
    """

    mean: jax.Array
    log_std: jax.Array

    def gaussian(self) -> DiagonalGaussian:
        """Returns the Gaussian distribution of u."""
        return DiagonalGaussian(self.mean, self.log_std)

    def sample(self, key: jax.Array) -> jax.Array:
        """Returns one u per batch element, `[E*, D]`; consumes `key`."""
        return self.gaussian().sample(key)

    def mode(self) -> jax.Array:
        """Returns the mean of u, `[E*, D]`, whose tanh is the usual greedy action."""
        return self.mean

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Computes the log-density of tanh(u) at u = `action` `[E*, D]`: `E*`, nats, over all D."""
        return self.gaussian().log_prob(action) - jnp.sum(_log_slope(_wide(action)), axis=-1)

    def entropy(self) -> jax.Array:
        """Computes the differential entropy of tanh(u), `E*`, nats, by quadrature to about 1e-3."""
        # Each formula gets only σ for which the formula holds: otherwise the gradient of the unused
        # formula may be NaN.
        mean, std = _wide(self.mean), jnp.exp(_wide(self.log_std))
        small, large = jnp.where(std < 1.0, std, 1.0), jnp.where(std < 1.0, 1.0, std)
        # For a narrow Gaussian: E log(1 − tanh²(u)) at the nodes of Gauss and Hermite.
        u = mean[..., None] + jnp.multiply.outer(small, _NODES.astype(std.dtype))
        narrow = _log_slope(u) @ _WEIGHTS.astype(std.dtype)
        # For a wide Gaussian these nodes would miss the bend at 0: 2 log 2 − 2 E|u| is computed in
        # closed form, and the rest, −2 log(1 + e^(−2|u|)), at the nodes of Gauss and Legendre.
        distance = (jnp.subtract.outer(mean, side * _PLACES.astype(std.dtype)) for side in (-1, 1))
        density = sum(jnp.exp(-0.5 * jnp.square(x / large[..., None])) for x in distance)
        bend = (density @ _BEND.astype(std.dtype)) / (large * math.sqrt(2 * math.pi))
        folded = large * math.sqrt(2 / math.pi) * jnp.exp(-0.5 * jnp.square(mean / large))
        folded += mean * jax.scipy.special.erf(mean / (large * math.sqrt(2)))
        wide = 2.0 * (math.log(2.0) - folded) - 2.0 * bend
        slope = jnp.where(std < 1.0, narrow, wide)
        return self.gaussian().entropy() + jnp.sum(slope, axis=-1)

    def kl(self, other: "TanhGaussian") -> jax.Array:
        """Computes the exact KL(self ‖ other), `E*`, in nats."""
        return self.gaussian().kl(other.gaussian())


def _log_slope(u: jax.Array) -> jax.Array:
    """Computes `log(1 − tanh²(u)) = 2 (log 2 − u − softplus(−2u))`, without cancellation."""
    return 2.0 * (math.log(2.0) - u - jax.nn.softplus(-2.0 * u))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MultiCategorical:
    """Distribution of independent simultaneous choices; an event has one option for each choice.

    Attributes:
      logits: `[E*, A]`, concatenated logits of all choices; `-inf` excludes an option.
      sizes: number of options of each choice; their sum is A.

    Example:
      >>> dice = MultiCategorical(jnp.zeros(8), (2, 6))
      >>> print(round(float(dice.log_prob(jnp.array([1, 5]))), 4))
      -2.4849
    """

    logits: jax.Array
    sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def parts(self) -> list[Categorical]:
        """Returns the distribution of each choice."""
        ends = np.cumsum(self.sizes)
        return [
            Categorical(self.logits[..., end - size : end])
            for end, size in zip(ends, self.sizes, strict=True)
        ]

    def sample(self, key: jax.Array) -> jax.Array:
        """Returns one option of each choice, `[E*, D]`, int32; consumes `key`."""
        keys = jax.random.split(key, len(self.sizes))
        each = [part.sample(key) for part, key in zip(self.parts(), keys, strict=True)]
        return jnp.stack(each, axis=-1)

    def mode(self) -> jax.Array:
        """Returns the most likely option of each choice, `[E*, D]`."""
        return jnp.stack([part.mode() for part in self.parts()], axis=-1)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Computes the log-probability of `action` `[E*, D]`, `E*`, in nats."""
        chex.assert_shape(action, (*self.logits.shape[:-1], len(self.sizes)))
        return sum(
            (part.log_prob(action[..., i]) for i, part in enumerate(self.parts())),
            start=jnp.zeros(self.logits.shape[:-1]),
        )

    def entropy(self) -> jax.Array:
        """Returns the sum of the choices' entropies, `E*`, in nats."""
        return sum(
            (part.entropy() for part in self.parts()), start=jnp.zeros(self.logits.shape[:-1])
        )

    def kl(self, other: "MultiCategorical") -> jax.Array:
        """Computes the exact KL(self ‖ other), the sum over choices, `E*`, in nats."""
        return sum(
            (mine.kl(its) for mine, its in zip(self.parts(), other.parts(), strict=True)),
            start=jnp.zeros(self.logits.shape[:-1]),
        )


def allow(distribution: Distribution, legal: jax.Array) -> Distribution:
    """Restricts a distribution to the legal actions; illegal actions have probability 0.

    If a choice has no legal action, no action is excluded: a NaN in one step would make all of the
    batch NaN. The problem that collects the batch counts steps without a legal action.

    Args:
      distribution: distribution over discrete actions.
      legal: bool, `[E*, A]`, in the order of the distribution's logits.

    Raises:
      ConfigError: the actions are not discrete, or their number differs from the number of flags in
        `legal`.

    Example:
      >>> two = allow(Categorical(jnp.zeros(3)), jnp.array([True, False, True]))
      >>> [round(float(p), 2) for p in jnp.exp(two.log_probs())]
      [0.5, 0.0, 0.5]
    """
    if not isinstance(distribution, Categorical | MultiCategorical):
        raise ConfigError(
            "policy",
            "must return a Categorical or a MultiCategorical where the environment gives an "
            f"action_mask, got {type(distribution).__name__}",
        )
    sizes = (
        distribution.sizes
        if isinstance(distribution, MultiCategorical)
        else (distribution.logits.shape[-1],)
    )
    if distribution.logits.shape != legal.shape:
        raise ConfigError(
            "policy",
            f"must have a logit for each of the {legal.shape[-1]} flags of action_mask, got "
            f"{type(distribution).__name__} over {' and '.join(map(str, sizes))} options",
        )
    kept = legal | ~jnp.repeat(
        possible(legal, sizes), np.array(sizes), axis=-1, total_repeat_length=sum(sizes)
    )
    logits = jnp.where(kept, _wide(distribution.logits), -jnp.inf)
    return dataclasses.replace(distribution, logits=logits)


def possible(legal: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """Returns whether each choice has a legal option: bool, `[E*, len(sizes)]`.

    Example:
      >>> possible(jnp.array([True, False, False, False]), (2, 2)).tolist()
      [True, False]
    """
    ends = np.cumsum(sizes)
    return jnp.stack(
        [legal[..., end - size : end].any(axis=-1) for end, size in zip(ends, sizes, strict=True)],
        axis=-1,
    )


def log_prob_and_entropy(
    distribution: Distribution, action: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes log-probability and entropy, `E*` each, nats, in one pass if possible."""
    at_once = getattr(distribution, "log_prob_and_entropy", None)
    if at_once is None:
        return distribution.log_prob(action), distribution.entropy()
    both: tuple[jax.Array, jax.Array] = at_once(action)
    return both
