"""`--config.optimizer` and `--config.schedule`: optimizers and schedules of optax by name."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from optax import contrib

from jaxrl_po import config, optimizers
from jaxrl_po.algorithms import a2c
from jaxrl_po.config import NON_NEGATIVE, ConfigError, Number, number, static
from jaxrl_po.types import Learner, Problem, PyTree


def matrices(params: PyTree) -> PyTree:
    """Which axes of each parameter Muon orthogonalises; None for those that Adam takes.

    Blocks of a transformer are stacked, `[layers, inputs, outputs]`. Embedding and output layer are
    no hidden matrices (Muon's page).
    """

    def of(path: Any, leaf: jax.Array) -> contrib.MuonDimensionNumbers | None:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        stacked = "blocks" in names
        if leaf.ndim != 2 + stacked or {"embedding", "output"} & set(names):
            return None
        return contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(of, params)


AUTO, CONSTANT, COSINE = "auto", "constant", "cosine"
# Each from the settings, after the gradient's norm is clipped.
OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "adam": lambda s: optax.adam(s.learning_rate, eps=s.optimizer_epsilon),
    "adamw": lambda s: optax.adamw(
        s.learning_rate, eps=s.optimizer_epsilon, weight_decay=s.weight_decay
    ),
    "lion": lambda s: optax.lion(s.learning_rate, weight_decay=s.weight_decay),
    "muon": lambda s: contrib.muon(
        s.learning_rate,
        weight_decay=s.weight_decay,
        adam_weight_decay=s.weight_decay,
        muon_weight_dimension_numbers=matrices,
    ),
    "rmsprop": lambda s: optax.rmsprop(
        s.learning_rate, decay=0.99, eps=s.optimizer_epsilon, eps_in_sqrt=False
    ),
    "sgd": lambda s: optax.sgd(s.learning_rate),
}
DECAYED = ("adamw", "lion", "muon")


@config.record
class Choice:
    """The optimizer of a method that takes gradient steps."""

    optimizer: str = static(
        AUTO,
        "optimizer of the gradient, whose norm is clipped first; auto is the method's own",
        choices=(AUTO, *OPTIMIZERS),
    )
    weight_decay: Number = number(
        1e-4, "decoupled weight decay per unit of step size", within=NON_NEGATIVE
    )
    schedule: str = static(
        AUTO,
        "how learning_rate falls to 0 in decay_iterations: linear, cosine (in gradient steps), or "
        "constant, not at all; auto is the method's own",
        choices=(AUTO, "linear", COSINE, CONSTANT),
    )

    def validate(self) -> None:
        """Raises ConfigError for a field without effect."""
        super().validate()  # type: ignore[misc]  # of the method
        decayed = self.optimizer in DECAYED
        config.require_effect(
            self, "weight_decay", decayed, f"optimizer is one of {', '.join(DECAYED)}"
        )
        schedule = "decay_iterations" in vars(self)
        config.require_effect(self, "schedule", schedule, "the method has decay_iterations")


@functools.cache
def settings_of(algorithm: Any) -> type:
    """The record of `--config.*`: the method's own, with `Choice` where it has a step size."""
    if not hasattr(algorithm.Config, "learning_rate"):
        return algorithm.Config

    class Config(Choice, algorithm.Config):
        pass

    Config.__doc__ = algorithm.Config.__doc__
    return config.record(Config)


def make(algorithm: Any, settings: Any, problem: Problem, **more: Any) -> Learner:
    """`algorithm.make`, with the optimizer and the schedule that the settings name."""
    chosen, schedule = (vars(settings).get(name, AUTO) for name in ("optimizer", "schedule"))
    of_method: Callable[..., Learner] = algorithm.make
    if schedule == CONSTANT and settings.decay_iterations:
        raise ConfigError("decay_iterations must be left out with schedule=constant")
    if chosen == AUTO and schedule != COSINE:
        return of_method(settings, problem, **more)
    if chosen == AUTO:
        chosen = "rmsprop" if algorithm is a2c else "adam"
    parts = [optax.clip_by_global_norm(settings.max_grad_norm), OPTIMIZERS[chosen](settings)]
    unread = ("learning_rate", "max_grad_norm", "optimizer_epsilon")  # which the optimizer has
    plain = {name: getattr(algorithm.Config, name) for name in unread}
    if schedule == COSINE and settings.decay_iterations:
        each = (vars(settings).get(name, 1) for name in ("num_epochs", "num_minibatches"))
        steps = math.prod([settings.decay_iterations, *each])
        parts.append(optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, steps)))
        plain["decay_iterations"] = 0
    optimizer = optimizers.in_float32(optax.chain(*parts))
    return of_method(dataclasses.replace(settings, **plain), problem, optimizer, **more)
