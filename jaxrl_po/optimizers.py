"""The methods' own optimizers, and how their step size rises and falls."""

import jax
import jax.numpy as jnp
import optax

from jaxrl_po.config import Number
from jaxrl_po.types import PyTree

FLAT_UP_TO = 2**20  # parameters: above it, the state of an optimizer is worth cutting over devices


def decay(step: jax.Array, iterations: int) -> jax.Array | float:
    """Linear decay `max(0, 1 − step / iterations)`, counted in iterations (not minibatches); 1 when `iterations` is 0.

    Args:
      step: `[]`, iterations done.
      iterations: length of the decay, static; 0 keeps 1.

    Example:
      >>> float(decay(jnp.int32(25), 100))
      0.75
    """
    return jnp.maximum(0.0, 1.0 - step / iterations) if iterations else 1.0


def warm_up(step: jax.Array, iterations: int) -> jax.Array | float:
    """Linear warm-up `min(1, (step + 1) / iterations)`, counted in iterations; 1 when `iterations` is 0.

    Args:
      step: `[]`, iterations done.
      iterations: length of the rise, static; 0 leaves it out.

    Example:
      >>> float(warm_up(jnp.int32(4), 20)), float(warm_up(jnp.int32(30), 20))
      (0.25, 1.0)
    """
    return jnp.minimum(1.0, (step + 1) / iterations) if iterations else 1.0


def adam(
    learning_rate: Number,
    *,
    max_grad_norm: Number,
    epsilon: float = 1e-5,
    flat_up_to: int = FLAT_UP_TO,
) -> optax.GradientTransformation:
    """Adam behind a clip of the global gradient norm.

    Args:
      learning_rate: size of a step, may be traced.
      max_grad_norm: gradients of a larger global norm are scaled down to it.
      epsilon: Adam's, outside the root.
      flat_up_to: see `flat_if_small`.

    Returns:
      The transformation.
    """
    return flat_if_small(
        optax.chain(
            optax.clip_by_global_norm(max_grad_norm),
            optax.scale_by_adam(eps=epsilon),
            optax.scale(-1.0 * learning_rate),
        ),
        flat_up_to,
    )


def rmsprop(
    learning_rate: Number, *, max_grad_norm: Number, decay: float = 0.99, epsilon: float = 1e-5
) -> optax.GradientTransformation:
    """RMSProp behind a clip of the global gradient norm; A2C's optimizer.

    Args:
      learning_rate: size of a step, may be traced.
      max_grad_norm: gradients of a larger global norm are scaled down to it.
      decay: of the mean square.
      epsilon: outside the root.

    Returns:
      The transformation.
    """
    return flat_if_small(
        optax.chain(
            optax.clip_by_global_norm(max_grad_norm),
            optax.scale_by_rms(decay=decay, eps=epsilon, eps_in_sqrt=False),
            optax.scale(-1.0 * learning_rate),
        ),
        FLAT_UP_TO,
    )


def flat_if_small(
    optimizer: optax.GradientTransformation, flat_up_to: int
) -> optax.GradientTransformation:
    """The same optimizer, on one flat vector where there are few parameters.

    The update of a small network leaf by leaf is bound by dispatch; the state of a large one is cut
    over devices leaf by leaf, as its parameters are. Size alone decides, so that a checkpoint does
    not depend on the devices.

    Args:
      optimizer: any optax transformation.
      flat_up_to: parameters at most of one flat vector; 0 never flattens.

    Example:
      >>> params = {"a": jnp.zeros(2), "b": jnp.zeros(3)}
      >>> [len(jax.tree.leaves(flat_if_small(optax.trace(0.9), size).init(params))) for size in (5, 4)]
      [1, 2]
    """
    flat = optax.flatten(optimizer)

    def fitting(tree: PyTree) -> optax.GradientTransformation:
        return flat if sum(leaf.size for leaf in jax.tree.leaves(tree)) <= flat_up_to else optimizer

    def init(params: PyTree) -> PyTree:
        return fitting(params).init(params)

    def update(gradient: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return fitting(gradient).update(gradient, state, params)

    return optax.GradientTransformation(init, update)
