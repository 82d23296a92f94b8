"""Default optimizers of the methods, and learning-rate schedules."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from jaxrl_po.backend import Target
from jaxrl_po.config import Number
from jaxrl_po.types import PyTree

FLAT_UP_TO = 2**20  # parameters: above it the optimizer state is kept per leaf, for sharding


def decay(step: jax.Array, iterations: int) -> jax.Array | float:
    """Linear decay `max(0, 1 − step / iterations)`, or 1 if `iterations` is 0.

    Args:
      step: `[]`, completed iterations (not gradient steps).
      iterations: length of the decay, static; 0 keeps 1.

    Example:
      >>> float(decay(jnp.int32(25), 100))
      0.75
    """
    return jnp.maximum(0.0, 1.0 - step / iterations) if iterations else 1.0


def warm_up(step: jax.Array, iterations: int) -> jax.Array | float:
    """Linear warm-up `min(1, (step + 1) / iterations)`, or 1 if `iterations` is 0.

    Args:
      step: `[]`, completed iterations (not gradient steps).
      iterations: length of the warm-up, static; 0 for none.

    Example:
      >>> float(warm_up(jnp.int32(4), 20)), float(warm_up(jnp.int32(30), 20))
      (0.25, 1.0)
    """
    return jnp.minimum(1.0, (step + 1) / iterations) if iterations else 1.0


def adam(
    learning_rate: Number,
    *,
    max_grad_norm: Number,
    epsilon: Number = 1e-5,
    flat_up_to: int = FLAT_UP_TO,
) -> optax.GradientTransformation:
    """Adam on gradients clipped by their global norm.

    Args:
      learning_rate: step size, may be traced.
      max_grad_norm: gradients of a larger global norm are scaled down to it.
      epsilon: Adam's, outside the square root.
      flat_up_to: see `flat_if_small`.
    """
    return clipped(
        optax.scale_by_adam(eps=epsilon),
        learning_rate,
        max_grad_norm=max_grad_norm,
        flat_up_to=flat_up_to,
    )


def clipped(
    direction: optax.GradientTransformation,
    learning_rate: Number,
    *,
    max_grad_norm: Number,
    flat_up_to: int = FLAT_UP_TO,
) -> optax.GradientTransformation:
    """Steps in a direction, as Adam's, of gradients clipped by their global norm; see `adam`."""
    clip, scale = optax.clip_by_global_norm(max_grad_norm), optax.scale(-1.0 * learning_rate)
    return in_float32(flat_if_small(optax.chain(clip, direction, scale), flat_up_to))


def widened(tree: PyTree) -> PyTree:
    """The leaves, widened to float32 if they have fewer bits.

    Example:
      >>> print(widened(jnp.bfloat16(1.5)).dtype)
      float32
    """
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer, whose state and updates are float32 where parameters have fewer bits."""

    def init(params: PyTree) -> PyTree:
        return optimizer.init(widened(params))

    def update(gradient: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return optimizer.update(widened(gradient), state, widened(params))

    return optax.GradientTransformation(init, update)


def flat_if_small(
    optimizer: optax.GradientTransformation, flat_up_to: int
) -> optax.GradientTransformation:
    """The same optimizer, on one flat vector if there are few parameters.

    Leaf by leaf, the update of a small network is dominated by dispatch; the optimizer state of a
    large one is sharded leaf by leaf, like its parameters. Only the size decides, so that a
    checkpoint does not depend on the devices.

    Args:
      optimizer: any optax transformation.
      flat_up_to: largest number of parameters in one flat vector; 0 never flattens.

    Example:
      >>> params = {"a": jnp.zeros(2), "b": jnp.zeros(3)}
      >>> states = [flat_if_small(optax.trace(0.9), size).init(params) for size in (5, 4)]
      >>> [len(jax.tree.leaves(state)) for state in states]
      [1, 2]
    """
    flat = optax.flatten(optimizer)

    def chosen(tree: PyTree) -> optax.GradientTransformation:
        return flat if _is_small(tree, flat_up_to) else optimizer

    def init(params: PyTree) -> PyTree:
        return chosen(params).init(params)

    def update(gradient: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return chosen(gradient).update(gradient, state, params)

    return optax.GradientTransformation(init, update)


def norm(tree: PyTree) -> jax.Array:
    """Global norm. A small tree is flattened first, as in `flat_if_small`.

    The compiler then shares the flat vector and its norm with the clip: two dozen operations fewer.

    Example:
      >>> float(norm({"a": jnp.array([3.0]), "b": jnp.array([4.0])}))
      5.0
    """
    return optax.tree.norm(ravel_pytree(tree)[0] if _is_small(tree, FLAT_UP_TO) else tree)


class Flattening(NamedTuple):
    """The way from a tree to one vector, and back."""

    ravel: Callable[[PyTree], PyTree]
    unravel: Callable[[PyTree], PyTree]


def flattening(tree: PyTree, target: Target | None) -> Flattening:
    """One vector for the parameters of a small network on a GPU.

    Saves a dozen kernels per gradient step. On a CPU, where it would cost more than it saves,
    without a target, for large networks, and for leaves of several types, both functions return the
    tree unchanged.

    Example:
      >>> tree = {"a": jnp.ones(2), "b": jnp.zeros(3)}
      >>> flat = flattening(tree, Target("gpu", devices=1, cores=8))
      >>> flat.ravel(tree).tolist(), flat.unravel(flat.ravel(tree))["a"].tolist()
      ([1.0, 1.0, 0.0, 0.0, 0.0], [1.0, 1.0])
    """
    types = {leaf.dtype for leaf in jax.tree.leaves(tree)}
    plain = target is None or target.on_cpu
    if plain or len(types) > 1 or not _is_small(tree, FLAT_UP_TO):
        return Flattening(lambda tree: tree, lambda vector: vector)
    return Flattening(lambda tree: ravel_pytree(tree)[0], ravel_pytree(tree)[1])


def _is_small(tree: PyTree, flat_up_to: int) -> bool:
    return sum(leaf.size for leaf in jax.tree.leaves(tree)) <= flat_up_to
