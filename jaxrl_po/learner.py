"""Composes collect, estimate and improve into a `Learner`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_po import masked
from jaxrl_po.config import ConfigError, Number
from jaxrl_po.types import ActorCritic, Batch, Learner, Metrics, Problem, PyTree, Samples, Step, TrainState

Estimate = Callable[[TrainState, Batch], Samples]
Improve = Callable[[TrainState, Samples, jax.Array], tuple[TrainState, Metrics]]


def make(
    problem: Problem,
    *,
    estimate: Estimate,
    improve: Improve,
    init_optimizer: Callable[[ActorCritic], PyTree],
    init_reference: Callable[[ActorCritic], PyTree] = lambda params: (),
    kl_coefficient: Number = 0.0,
    axis_name: str | None = None,
) -> Learner:
    """Builds the learner `state → collect → estimate → improve → state`.

    Args:
      problem: where samples come from.
      estimate: `estimate(state, batch) -> samples`.
      improve: `improve(state, samples, key) -> (state, metrics)`; consumes `key`.
      init_optimizer: `params -> opt_state`, over the subtree that is optimised by gradient.
      init_reference: `params -> reference parameters`; the default holds none.
      kl_coefficient: initial β of an adaptive penalty.
      axis_name: device axis over which rows are sharded, or None.

    Returns:
      A `Learner`, whose step is a `Step`. Metrics come pooled over devices.
    """

    def init(key: jax.Array) -> TrainState:
        problem_key, key = jax.random.split(key)
        params, actor = problem.init(problem_key)
        return TrainState(
            params=params,
            opt_state=init_optimizer(params),
            reference_params=init_reference(params),
            kl_coefficient=jnp.asarray(kl_coefficient, jnp.float32),
            actor=actor,
            key=key,
            step=jnp.int32(0),
        )

    def sample(state: TrainState) -> tuple[TrainState, Batch]:
        _, collect_key, _ = jax.random.split(state.key, 3)
        actor, batch = problem.collect(state.params, state.actor, collect_key)
        batch = zero_masked(batch)
        return state._replace(actor=actor), batch._replace(metrics=masked.psum(batch.metrics, axis_name))

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        require_reward(batch)
        key, _, improve_key = jax.random.split(state.key, 3)  # as `sample` split it
        samples = estimate(state, batch)
        state, metrics = improve(state._replace(key=key), samples, improve_key)
        frac_masked = masked.Mean(jnp.sum(~batch.mask, dtype=jnp.float32), jnp.float32(batch.mask.size))
        metrics = {**batch.metrics, **masked.psum({**metrics, "frac_masked": frac_masked}, axis_name)}
        return state._replace(step=state.step + 1), metrics

    return Learner(init, Step(sample, update))


def require_reward(batch: Batch) -> None:
    """Raises ConfigError where nothing has given the batch its reward."""
    if isinstance(batch.reward, tuple):
        raise ConfigError(
            "reward must be given between `step.sample` and `step.update`, jitted apart: this problem is scored outside the program"
        )


def zero_masked(batch: Batch) -> Batch:
    """Zeroes every slot behind the mask, once, so that no NaN there can reach a gradient through a `where`.

    Leaves that lead with `[B, T]` are zeroed. Token sequences, whose leaves lead with `[B]` and another length, are left: their
    padding is a token of the vocabulary.

    Args:
      batch: see `Batch`; `mask` is bool `[B, T]`.

    Returns:
      The batch with zeros (False) in the masked slots.
    """
    mask = batch.mask

    def zero(leaf: Any) -> Any:
        if leaf.shape[:2] != mask.shape:
            return leaf
        return jnp.where(mask.reshape(mask.shape + (1,) * (leaf.ndim - 2)), leaf, jnp.zeros((), leaf.dtype))

    return jax.tree.map(zero, batch._replace(metrics={}, score=jnp.zeros(0)))._replace(metrics=batch.metrics, score=batch.score)
