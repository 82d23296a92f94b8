"""Composes collect, estimate and improve into a `Learner`."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_po import divergences, masked, minibatches
from jaxrl_po.config import ConfigError, Number
from jaxrl_po.distributions import log_ratio
from jaxrl_po.masked import Mean
from jaxrl_po.types import (
    ActorCritic,
    Batch,
    Learner,
    Metrics,
    Problem,
    PyTree,
    Samples,
    TrainState,
)

Estimate = Callable[[TrainState, Batch], Samples]
Improve = Callable[[TrainState, Samples, jax.Array], tuple[TrainState, Metrics]]


def make(
    problem: Problem,
    *,
    estimate: Estimate,
    improve: Improve,
    init_optimizer: Callable[[ActorCritic], PyTree],
    init_reference: Callable[[ActorCritic], PyTree] = lambda params: None,
    kl_coefficient: Number = 0.0,
    num_parts: int = 1,
    axis_name: str | None = None,
) -> Learner:
    """Builds the learner `state → collect → estimate → improve → state`.

    Args:
      problem: where samples come from.
      estimate: `estimate(state, batch) -> samples`.
      improve: `improve(state, samples, key) -> (state, metrics)`; consumes `key`.
      init_optimizer: `params -> opt_state`, over the subtree that is optimised by gradient; frozen
        parameters are left out of `params`.
      init_reference: `params -> reference parameters`; the default holds none.
      kl_coefficient: initial β of an adaptive penalty.
      num_parts: parts of a batch, one after another, in which the learner computes the old policy's
        log-probabilities where the sampler's are not exact (`Problem.exact_sampler`).
      axis_name: device axis over which rows are sharded, or None.

    Returns:
      The `Learner`. Metrics come pooled over devices.
    """

    def init(key: jax.Array) -> TrainState:
        problem_key, key = jax.random.split(key)
        params, collector = problem.init(problem_key)
        return TrainState(
            params=params,
            opt_state=init_optimizer(params.trained()),
            reference_params=init_reference(params),
            kl_coefficient=jnp.asarray(kl_coefficient, jnp.float32),
            collector=collector,
            key=key,
            step=jnp.int32(0),
        )

    def sample(state: TrainState) -> tuple[TrainState, Batch]:
        state, key = next_key(state)
        collector, batch = problem.collect(state.params, state.collector, key)
        batch = zero_masked(batch)
        return state._replace(collector=collector), batch._replace(
            metrics=masked.psum(batch.metrics, axis_name)
        )

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        require_reward(batch)
        state, key = next_key(state)
        measured: Metrics = {
            "frac_masked": Mean(
                jnp.sum(~batch.mask, dtype=jnp.float32), jnp.float32(batch.mask.size)
            )
        }
        if not problem.exact_sampler:
            batch, distance = recompute_log_prob(
                problem, state.params, batch, num_parts=num_parts, axis_name=axis_name
            )
            measured |= distance
        samples = estimate(state, batch)
        state, metrics = improve(state, samples, key)
        metrics = {**batch.metrics, **masked.psum({**metrics, **measured}, axis_name)}
        return state._replace(step=state.step + 1), metrics

    return Learner(init, sample, update)


def next_key(state: TrainState) -> tuple[TrainState, jax.Array]:
    """The state with the key that follows, and a key to consume now."""
    following, key = jax.random.split(state.key)
    return state._replace(key=following), key


def require_reward(batch: Batch) -> None:
    """Raises ConfigError where nothing has given the batch its reward."""
    if batch.reward is None:
        raise ConfigError(
            "reward must be given between `learner.sample` and `learner.update`, jitted apart: "
            "this problem is scored outside the program"
        )


def recompute_log_prob(
    problem: Problem, params: ActorCritic, batch: Batch, *, num_parts: int, axis_name: str | None
) -> tuple[Batch, Metrics]:
    """The batch with the old policy's log-probabilities by the learner's own pass, and how far the sampler's are from them.

    A sampler in bfloat16, token by token through a cache, rounds otherwise than the learner's whole
    pass; a ratio of the two policies of which one is the sampler's would start beside 1. Rows that
    were sampled before an earlier update keep what their sampler gave: the parameters that would
    reproduce it are gone.

    Args:
      problem: whose `apply` is the learner's pass.
      params: that collected the batch.
      batch: with `sampler_log_prob`.
      num_parts: parts of the rows, one after another, as far as they divide.
      axis_name: device axis, or None.

    Returns:
      The batch, and the metrics `sampler_kl`, the k3 estimate of KL(μ ‖ π_old) in nats, and
      `sampler_max_ratio`, the largest of π_old / μ and μ / π_old of one token, both over the rows
      that are fresh.
    """

    def log_prob(part: tuple[PyTree, jax.Array]) -> jax.Array:
        inputs, action = part
        return problem.apply(params, inputs)[0].log_prob(action)

    rows, own = (
        minibatches.split((batch.inputs, batch.action), math.gcd(num_parts, batch.mask.shape[0])),
        batch.mask.shape,
    )
    recomputed = masked.zero(jax.lax.map(log_prob, rows).reshape(own), batch.mask)
    fresh = batch.mask if batch.age is None else batch.mask & (batch.age == 0)[:, None]
    largest = jnp.where(fresh, jnp.abs(log_ratio(recomputed, batch.sampler_log_prob)), 0.0).max()
    largest = largest if axis_name is None else jax.lax.pmax(largest, axis_name)
    return batch._replace(log_prob=jnp.where(fresh, recomputed, batch.log_prob)), {
        "sampler_kl": masked.total(divergences.k3(batch.sampler_log_prob, recomputed), fresh),
        "sampler_max_ratio": Mean(jnp.exp(largest), jnp.float32(1.0)),
    }


ZEROED = (
    "action",
    "log_prob",
    "sampler_log_prob",
    "reward",
    "value",
    "next_value",
    "terminated",
    "truncated",
)


def zero_masked(batch: Batch) -> Batch:
    """Zeroes the masked slots of the fields that losses and estimators read, once, so that no NaN there reaches a gradient.

    By name: `inputs` are the problem's own, and what it keeps there for a reward (an answer, say)
    may have any shape.

    Args:
      batch: see `Batch`; `mask` is bool `[B, T]`.

    Returns:
      The batch with zeros (False) in the masked slots of `ZEROED`.
    """

    def zero(leaf: jax.Array) -> jax.Array:
        return masked.zero(leaf, batch.mask)

    return batch._replace(**{name: jax.tree.map(zero, getattr(batch, name)) for name in ZEROED})
