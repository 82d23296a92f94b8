"""Flax actors and critics for control: orthogonal initialisation without LAPACK, multilayer perceptrons, two policy heads."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_po.distributions import Categorical, DiagonalGaussian

Activation = Callable[[jax.Array], jax.Array]
Initializer = Callable[..., jax.Array]


def orthogonal(scale: float = 1.0, *, tolerance: float = 1e-5, max_iterations: int = 100) -> Initializer:
    """Haar-distributed orthogonal initialiser that is made of matrix products alone.

    The polar factor of a Gaussian matrix X is Haar-distributed; Newton–Schulz, `X ← 1.5 X − 0.5 X XᵀX`, converges to it from
    any X with spectral norm below √3. A QR factorisation would do the same, but several of them in one vmapped program
    deadlock on the CPU.

    Args:
      scale: factor on the orthogonal matrix; the small dimension's vectors have this norm.
      tolerance: stops when no element of `XᵀX − I` exceeds it.
      max_iterations: bound for the rare ill-conditioned draw (a 64 × 64 Gaussian takes 21 in the median, 38 at worst).

    Returns:
      `init(key, shape, dtype)`, which consumes `key`; axes before the last count as one.

    Example:
      >>> import jax
      >>> w = orthogonal(2.0)(jax.random.key(0), (4, 2), jnp.float32)
      >>> bool(jnp.allclose(w.T @ w, 4.0 * jnp.eye(2), atol=1e-3))
      True
    """

    def init(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
        rows, columns = math.prod(shape[:-1]), shape[-1]
        x = jax.random.normal(key, (max(rows, columns), min(rows, columns)), jnp.float32)
        x = x / jnp.linalg.norm(x)
        identity = jnp.eye(x.shape[1])

        def residual(x: jax.Array) -> jax.Array:
            return jnp.abs(x.T @ x - identity).max()

        def unfinished(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
            x, iteration = carry
            return (residual(x) > tolerance) & (iteration < max_iterations)

        def newton_schulz(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, iteration = carry
            return 1.5 * x - 0.5 * x @ (x.T @ x), iteration + 1

        x, _ = jax.lax.while_loop(unfinished, newton_schulz, (x, jnp.int32(0)))
        x = x if rows >= columns else x.T
        return (scale * x).reshape(shape).astype(dtype)

    return init


class MLP(nn.Module):
    """Multilayer perceptron, orthogonal √2 in the hidden layers.

    Attributes:
      hidden: width of each hidden layer.
      outputs: width of the output.
      activation: after each hidden layer.
      output_scale: scale of the orthogonal output layer (.01 for a policy, 1 for a critic).
    """

    hidden: Sequence[int]
    outputs: int
    activation: Activation = nn.tanh
    output_scale: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[E*, D]` to `[E*, outputs]`."""
        for width in self.hidden:
            x = self.activation(nn.Dense(width, kernel_init=orthogonal(math.sqrt(2.0)))(x))
        return nn.Dense(self.outputs, kernel_init=orthogonal(self.output_scale))(x)


def flatten(observation: jax.Array, rank: int) -> jax.Array:
    """Merges the last `rank` axes: an image becomes a vector, `[E*, H, W, C]` to `[E*, H·W·C]`."""
    return observation.reshape(*observation.shape[: observation.ndim - rank], -1)


class CategoricalPolicy(nn.Module):
    """Observation `[E*, …]` of `observation_rank` axes to a categorical distribution over `num_actions`."""

    num_actions: int
    hidden: Sequence[int] = (64, 64)
    activation: Activation = nn.tanh
    observation_rank: int = 1

    @nn.compact
    def __call__(self, observation: jax.Array) -> Categorical:
        """Returns the distribution, batch shape `E*`."""
        x = flatten(observation, self.observation_rank)
        return Categorical(MLP(self.hidden, self.num_actions, self.activation, output_scale=0.01)(x))


class GaussianPolicy(nn.Module):
    """Observation `[E*, …]` to a diagonal Gaussian over `action_size` components; log σ does not depend on the state."""

    action_size: int
    hidden: Sequence[int] = (64, 64)
    activation: Activation = nn.tanh
    initial_log_std: float = 0.0
    observation_rank: int = 1

    @nn.compact
    def __call__(self, observation: jax.Array) -> DiagonalGaussian:
        """Returns the distribution, batch shape `E*`."""
        x = flatten(observation, self.observation_rank)
        mean = MLP(self.hidden, self.action_size, self.activation, output_scale=0.01)(x)
        log_std = self.param("log_std", nn.initializers.constant(self.initial_log_std), (self.action_size,))
        return DiagonalGaussian(mean, jnp.broadcast_to(log_std, mean.shape))


class Critic(nn.Module):
    """Observation `[E*, …]` to a value `[E*]`, in reward units."""

    hidden: Sequence[int] = (64, 64)
    activation: Activation = nn.tanh
    observation_rank: int = 1

    @nn.compact
    def __call__(self, observation: jax.Array) -> jax.Array:
        """Returns the value of each observation."""
        return MLP(self.hidden, 1, self.activation, output_scale=1.0)(flatten(observation, self.observation_rank))[..., 0]
