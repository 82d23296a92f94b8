"""Optimizers by name, each method's default optimizer, and learning-rate schedules."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from jaxrl_po import config as config_lib
from jaxrl_po.backend import Target
from jaxrl_po.config import NON_NEGATIVE, POSITIVE, ConfigError, Number, common, number, static
from jaxrl_po.types import ActorCritic, Optimizer, Problem, PyTree

# Number of parameters above which the optimizer state has an array per leaf, for sharding.
FLAT_UP_TO = 2**20
AUTO, LINEAR, COSINE, CONSTANT = SCHEDULES = ("auto", "linear", "cosine", "constant")
OPTIMIZERS = ("adam", "adamw", "lion", "muon", "rmsprop", "sgd")
DECAYED = ("adamw", "lion", "muon")  # names of optimizers with weight decay


@config_lib.record
class Optimization:
    """Optimizer and step size; fields of every method with a learning rate."""

    learning_rate: Number = common.number(3e-4, "step size", within=POSITIVE)
    max_grad_norm: Number = number(0.5, "clip of the gradient's global norm", within=POSITIVE)
    optimizer_epsilon: Number = number(
        1e-5, "ε of the optimizer, outside the square root", within=POSITIVE
    )
    optimizer: str = static(
        AUTO,
        "optimizer of the gradient, whose norm is clipped first; auto is the method's own",
        choices=(AUTO, *OPTIMIZERS),
    )
    weight_decay: Number = number(
        1e-4,
        "decoupled weight decay per unit of step size",
        within=NON_NEGATIVE,
        when=("optimizer", *DECAYED),
    )
    schedule: str = static(
        AUTO,
        "decay of learning_rate to 0 in decay_iterations: linear or cosine; constant "
        "disables the decay; auto takes linear",
        choices=SCHEDULES,
    )
    warm_up_iterations: int = static(
        0,
        "length of the linear warm-up of learning_rate; 0 disables it",
        unit="iterations",
        within=NON_NEGATIVE,
    )
    decay_iterations: int = static(
        0,
        "length of the decay of learning_rate to 0; 0 keeps it constant",
        unit="iterations",
        within=NON_NEGATIVE,
        when=("schedule", AUTO, LINEAR, COSINE),
    )

    def validate(self) -> None:
        """Raises ConfigError for a field out of range or without effect."""
        config_lib.check(self)


def scale(config: Optimization, step: jax.Array) -> jax.Array | float:
    """Returns the factor of all updates in an iteration: warm-up times decay, a number from 1 to 0.

    Args:
      config: source of `schedule`, `warm_up_iterations` and `decay_iterations`.
      step: `[]`, number of completed iterations (not gradient steps).

    Example:
      >>> config = Optimization(schedule="cosine", warm_up_iterations=4, decay_iterations=2)
      >>> [round(float(scale(config, jnp.int32(t))), 3) for t in range(3)]
      [0.25, 0.25, 0.0]
    """
    falling = cosine_decay if config.schedule == COSINE else decay
    if config.warm_up_iterations:
        rise = warm_up(step, config.warm_up_iterations)
        return rise * falling(step, config.decay_iterations)
    return falling(step, config.decay_iterations)


def decay(step: jax.Array, iterations: int) -> jax.Array | float:
    """Computes the linear decay `max(0, 1 − step / iterations)`, or 1 if `iterations` is 0.

    Args:
      step: `[]`, number of completed iterations (not gradient steps).
      iterations: length of the decay in iterations, static; 0 disables the decay.

    Example:
      >>> float(decay(jnp.int32(25), 100))
      0.75
    """
    return jnp.maximum(0.0, 1.0 - step / iterations) if iterations else 1.0


def cosine_decay(step: jax.Array, iterations: int) -> jax.Array | float:
    """Computes cosine decay `½(1 + cos(π min(step / iterations, 1)))`, or 1 if `iterations` is 0.

    Args:
      step: `[]`, number of completed iterations (not gradient steps).
      iterations: length of the decay in iterations, static; 0 disables the decay.

    Example:
      >>> round(float(cosine_decay(jnp.int32(25), 100)), 3), cosine_decay(jnp.int32(25), 0)
      (0.854, 1.0)
    """
    done = jnp.minimum(step / iterations, 1.0) if iterations else 0.0
    return 0.5 * (1.0 + jnp.cos(jnp.pi * done)) if iterations else 1.0


def warm_up(step: jax.Array, iterations: int) -> jax.Array | float:
    """Computes the linear warm-up `min(1, (step + 1) / iterations)`, or 1 if `iterations` is 0.

    Args:
      step: `[]`, number of completed iterations (not gradient steps).
      iterations: length of the warm-up in iterations, static; 0 disables the warm-up.

    Example:
      >>> float(warm_up(jnp.int32(4), 20)), float(warm_up(jnp.int32(30), 20))
      (0.25, 1.0)
    """
    return jnp.minimum(1.0, (step + 1) / iterations) if iterations else 1.0


def choose_optimizer(
    config: Optimization,
    problem: Problem,
    given: Optimizer,
    default: Callable[..., optax.GradientTransformation],
) -> optax.GradientTransformation:
    """Returns the user's optimizer, the optimizer that the config names, or the default.

    Args:
      config: source of step size, gradient-norm clip and Adam's ε for a named or default optimizer.
      problem: source of the hidden matrices of its networks, for Muon.
      given: optax transformation of the user, or None.
      default: `(learning_rate, *, max_grad_norm, epsilon) -> optimizer`, the method's own.

    Raises:
      ConfigError: a field that the user's optimizer replaces is set, `schedule` is set without
        `decay_iterations`, or the problem does not state its hidden matrices and Muon needs them.
    """
    decays = config.schedule == CONSTANT or bool(config.decay_iterations)
    config_lib.require_effect(config, "schedule", decays, "decay_iterations is above 0")
    if given is not None:
        if config.optimizer != AUTO:
            raise ConfigError(
                "optimizer", f"must be {AUTO} beside make(optimizer=…), got {config.optimizer}"
            )
        for name in ("learning_rate", "max_grad_norm", "optimizer_epsilon", "weight_decay"):
            own = "the optimizer is the method's own; leave it out"
            config_lib.require_unset(config, name, own)
        return given
    clip, epsilon = config.max_grad_norm, config.optimizer_epsilon
    if config.optimizer == AUTO:
        return default(config.learning_rate, max_grad_norm=clip, epsilon=epsilon)
    return in_float32(optax.chain(optax.clip_by_global_norm(clip), by_name(config, problem)))


def by_name(config: Optimization, problem: Problem) -> optax.GradientTransformation:
    """Returns the optax transformation that `config.optimizer` names, without a clip."""
    rate, decay = config.learning_rate, {"weight_decay": config.weight_decay}
    epsilon = {"eps": config.optimizer_epsilon}
    makers: dict[str, Callable[[], optax.GradientTransformation]] = {
        "adam": lambda: optax.adam(rate, **epsilon),
        "adamw": lambda: optax.adamw(rate, **epsilon, **decay),
        "lion": lambda: optax.lion(rate, **decay),
        "muon": lambda: optax.contrib.muon(
            rate,
            **decay,
            adam_weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=matrices(problem),
        ),
        "rmsprop": lambda: optax.rmsprop(rate, decay=0.99, eps_in_sqrt=False, **epsilon),
        "sgd": lambda: optax.sgd(rate),
    }
    return makers[config.optimizer]()


def matrices(problem: Problem) -> Callable[[PyTree], PyTree]:
    """Returns `params -> axes`.

    Axes are input and output axis of each hidden matrix, None for other leaves.

    Muon orthogonalises hidden matrices and leaves all other parameters to Adam (Jordan 2024,
    "Muon"): the layer that reads the observation or embeds the tokens, the layer that gives the
    output, tables, biases and scales. The last two axes of a hidden matrix are its rows and
    columns; stacked blocks of a transformer have a leading axis.

    Raises:
      ConfigError: the problem has networks that do not state their hidden matrices.
    """
    hidden = problem.hidden_matrices
    if hidden is None:
        raise ConfigError(
            "optimizer",
            "must not be muon with a network of your own; give "
            "make(optimizer=optax.contrib.muon(learning_rate, muon_weight_dimension_numbers=…))",
        )

    def axes(params: PyTree) -> PyTree:
        both = isinstance(params, ActorCritic)
        marked = hidden(params) if both else hidden(ActorCritic(params)).policy
        return jax.tree.map(_last_two, params, marked)

    return axes


def _last_two(leaf: jax.Array, hidden: bool) -> Any:
    return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1) if hidden else None


def adam(
    learning_rate: Number,
    *,
    max_grad_norm: Number,
    epsilon: Number = 1e-5,
    flat_up_to: int = FLAT_UP_TO,
) -> optax.GradientTransformation:
    """Builds Adam on gradients clipped by their global norm.

    Args:
      learning_rate: step size, possibly traced.
      max_grad_norm: largest global norm of a gradient; larger gradients are scaled down.
      epsilon: Adam's constant ε, outside the square root.
      flat_up_to: largest number of parameters in one flat vector, see `flat_if_small`.
    """
    return chain_clipped(
        optax.scale_by_adam(eps=epsilon),
        learning_rate,
        max_grad_norm=max_grad_norm,
        flat_up_to=flat_up_to,
    )


def chain_clipped(
    direction: optax.GradientTransformation,
    learning_rate: Number,
    *,
    max_grad_norm: Number,
    flat_up_to: int = FLAT_UP_TO,
) -> optax.GradientTransformation:
    """Chains a clip of the global norm, a direction such as Adam's, and a step size; see `adam`."""
    clip, scale = optax.clip_by_global_norm(max_grad_norm), optax.scale(-1.0 * learning_rate)
    return in_float32(flat_if_small(optax.chain(clip, direction, scale), flat_up_to))


def widened(tree: PyTree) -> PyTree:
    """Widens a tree's leaves to float32 if they have fewer bits.

    Example:
      >>> print(widened(jnp.bfloat16(1.5)).dtype)
      float32
    """
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Gives an optimizer a float32 state and float32 updates if the parameters have fewer bits."""

    def init(params: PyTree) -> PyTree:
        return optimizer.init(widened(params))

    def update(gradient: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return optimizer.update(widened(gradient), state, widened(params))

    return optax.GradientTransformation(init, update)


def flat_if_small(
    optimizer: optax.GradientTransformation, flat_up_to: int
) -> optax.GradientTransformation:
    """Returns an optimizer that works on one flat vector if there are few parameters.

    Leaf by leaf, the update of a small network is dominated by dispatch; the optimizer state of a
    large network is sharded leaf by leaf, like its parameters. Only the number of parameters
    decides, so that a checkpoint does not depend on the devices.

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
    """Computes the global norm of a tree. A small tree is flattened first, as in `flat_if_small`.

    The compiler then shares the flat vector and its norm with the clip, which saves two dozen
    operations.

    Example:
      >>> float(norm({"a": jnp.array([3.0]), "b": jnp.array([4.0])}))
      5.0
    """
    return optax.tree.norm(ravel_pytree(tree)[0] if _is_small(tree, FLAT_UP_TO) else tree)


class Flattening(NamedTuple):
    """Functions that map a tree to one vector, and back."""

    ravel: Callable[[PyTree], PyTree]
    unravel: Callable[[PyTree], PyTree]


def flattening(tree: PyTree, target: Target | None) -> Flattening:
    """Builds the flattening of a small network's parameters into one vector, for a GPU.

    The flat vector saves a dozen kernels per gradient step. The functions return the tree unchanged
    on a CPU, where flattening would cost more than it saves, without a target, for large networks,
    and for leaves of several types.

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
