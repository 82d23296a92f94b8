"""Composes the functions collect, estimate and improve into a `Learner`."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_po import divergences, masked, minibatches
from jaxrl_po.config import ConfigError, Number
from jaxrl_po.divergences import log_ratio, ratio
from jaxrl_po.masked import Mean
from jaxrl_po.types import (
    ActorCritic,
    Batch,
    CollectorState,
    Learner,
    Metrics,
    Problem,
    PyTree,
    Samples,
    TrainState,
    undonated,
)

# Replicated entry of the collector's state: policies of the last k iterations, `[k, …]`, the oldest
# first.
EARLIER_POLICIES = "earlier_policies"

Estimate = Callable[[TrainState, Batch], Samples]
Improve = Callable[[TrainState, Samples, jax.Array], tuple[TrainState, Metrics]]


def unshared(tree: PyTree) -> PyTree:
    """Returns copies of the arrays in a tree; an original is freed as soon as it is copied."""
    leaves, structure = jax.tree.flatten(tree)
    del tree
    for i, leaf in enumerate(leaves):
        leaves[i] = jnp.copy(leaf) if hasattr(leaf, "dtype") else leaf
    return jax.tree.unflatten(structure, leaves)


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
      problem: source of samples.
      estimate: `estimate(state, batch) -> samples`.
      improve: `improve(state, samples, key) -> (state, metrics)`; consumes `key`.
      init_optimizer: `params -> opt_state`, for the subtree that is trained by gradient; `params`
        exclude the frozen parameters.
      init_reference: `params -> reference parameters`; by default a learner has no reference
        parameters.
      kl_coefficient: initial coefficient β of an adaptive penalty.
      num_parts: number of parts in which the old policy's log-probabilities are recomputed, to
        bound memory, if the sampler is not exact (`Problem.log_prob_matches_sampler`).
      axis_name: device axis that rows are sharded over, or None.

    Returns:
      The `Learner`. Metrics of the `Learner` are pooled over devices.
    """

    def init(key: jax.Array) -> TrainState:
        problem_key, key = jax.random.split(key)
        params, collector = problem.init(problem_key)
        if staleness := problem.staleness:
            earlier = jax.tree.map(lambda x: jnp.repeat(x[None], staleness, 0), params.policy)
            collector = collector.add(replicated={EARLIER_POLICIES: earlier})
        # The state can be donated: its leaves share no buffer with each other, as leaves of policy
        # and reference would, or with arrays of the user. Under `jax.jit` no array is copied.
        return TrainState(
            params=unshared(params._replace(frozen=None))._replace(frozen=undonated(params.frozen)),
            opt_state=unshared(init_optimizer(params.without_frozen())),
            reference_params=unshared(init_reference(params)),
            kl_coefficient=unshared(jnp.asarray(kl_coefficient, jnp.float32)),
            collector=unshared(collector),
            key=key,
            step=unshared(jnp.int32(0)),
        )

    def collect(state: TrainState, key: jax.Array) -> tuple[CollectorState, Batch]:
        if not problem.staleness:
            return problem.collect(state.params, state.collector, key)
        earlier = state.collector.replicated[EARLIER_POLICIES]
        oldest = state.params._replace(policy=jax.tree.map(lambda x: x[0], earlier))
        later = jax.tree.map(
            lambda x, now: jnp.concatenate([x[1:], now[None]]), earlier, state.params.policy
        )
        collector, batch = problem.collect(oldest, state.collector.remove(EARLIER_POLICIES), key)
        return collector.add(replicated={EARLIER_POLICIES: later}), batch

    def sample(state: TrainState) -> tuple[TrainState, Batch]:
        state, key = next_key(state)
        collector, batch = collect(state, key)
        batch = zero_masked(batch)
        metrics = batch.metrics
        if not problem.log_prob_matches_sampler:
            batch, sampler_metrics = recompute_log_prob(
                problem, state.params, batch, num_parts=num_parts, axis_name=axis_name
            )
            metrics = masked.merge(metrics, sampler_metrics)
        return state._replace(collector=collector), batch._replace(
            metrics=masked.psum(metrics, axis_name)
        )

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        require_reward(batch)
        state, key = next_key(state)
        state, metrics = improve(state, estimate(state, batch), key)
        measured = masked.merge(metrics, {"frac_masked": masked.total(~batch.mask)})
        metrics = masked.merge(batch.metrics, masked.psum(measured, axis_name))
        return state._replace(step=state.step + 1), metrics

    init.problem = problem  # type: ignore[attr-defined]
    return Learner(init, sample, update)


def next_key(state: TrainState) -> tuple[TrainState, jax.Array]:
    """Splits the state's key; returns the state with the next key, and a key to consume."""
    following, key = jax.random.split(state.key)
    return state._replace(key=following), key


def require_reward(batch: Batch) -> None:
    """Raises ConfigError if the batch does not have a reward yet."""
    if batch.reward is None:
        raise ConfigError(
            "reward",
            "must be given between learner.sample and learner.update, jitted apart: this problem "
            "is scored outside the program",
        )


def log_prob(problem: Problem, params: ActorCritic, batch: Batch, *, num_parts: int) -> jax.Array:
    """Computes log-probabilities `[B, T]`, nats, of the batch's actions by the policy of `params`.

    Args:
      problem: problem whose `apply` computes the policy.
      params: parameters of the policy; the critic is not evaluated.
      batch: batch with actions, see `Batch`.
      num_parts: largest number of parts to process one after another, to bound memory; the actual
        number of parts divides the rows.
    """

    def of_part(part: tuple[PyTree, jax.Array]) -> jax.Array:
        inputs, action = part
        return problem.apply(params._replace(value=None), inputs)[0].log_prob(action)

    parts = minibatches.split_rows(
        (batch.inputs, batch.action), math.gcd(num_parts, batch.mask.shape[0])
    )
    return jax.lax.map(of_part, parts).reshape(batch.mask.shape)


def recompute_log_prob(
    problem: Problem, params: ActorCritic, batch: Batch, *, num_parts: int, axis_name: str | None
) -> tuple[Batch, Metrics]:
    """Replaces the sampler's log-probabilities by results of `apply`, and measures the difference.

    A sampler that decodes in bfloat16 through a cache rounds differently from the learner's pass
    over complete sequences, so that a ratio to the sampler's log-probabilities would not start at
    1. Rows sampled before an earlier update keep the sampler's log-probabilities, because the
    parameters that sampled these rows are gone.

    Args:
      problem: problem whose `apply` is the learner's pass over sequences.
      params: parameters under which the batch was collected.
      batch: batch with `sampler_log_prob`.
      num_parts: largest number of parts to process one after another; the actual number of parts
        divides the rows.
      axis_name: name of the device axis, or None.

    Returns:
      Batch with the new log-probabilities, and metrics over the fresh rows: `sampler_kl`, the k3
      estimate of KL(μ ‖ π_old) in nats, `learner_kl`, the k3 estimate of KL(π_old ‖ μ), and
      `sampler_max_ratio`, the largest of π_old / μ and μ / π_old at any token.
    """
    recomputed = log_prob(problem, params, batch, num_parts=num_parts)
    recomputed = masked.zero(recomputed, batch.mask)
    sampled, fresh = batch.columns["sampler_log_prob"], batch.fresh()
    largest = jnp.where(fresh, jnp.abs(log_ratio(recomputed, sampled)), 0.0).max()
    largest = largest if axis_name is None else jax.lax.pmax(largest, axis_name)
    return batch._replace(log_prob=jnp.where(fresh, recomputed, batch.log_prob)), {
        "sampler_kl": masked.total(divergences.k3(sampled, recomputed), fresh),
        # The samples are drawn from μ: each sample counts π_old / μ times.
        "learner_kl": masked.total(
            ratio(recomputed, sampled) * divergences.k3(recomputed, sampled), fresh
        ),
        "sampler_max_ratio": Mean(jnp.exp(largest), jnp.float32(1.0)),
    }


ZEROED = (
    *("action", "log_prob", "reward", "value", "next_value", "terminated", "truncated"),
    "columns",  # names of the columns `[B, T]`
)


def zero_masked(batch: Batch) -> Batch:
    """Zeroes the masked slots of the fields that losses and estimators read.

    Slots are zeroed once, so that a NaN in a masked slot does not reach a gradient. The zeroed
    fields are named, because `inputs` belong to the problem, and data that the problem stores in
    `inputs` for a reward (an answer, say) may have any shape.

    Args:
      batch: batch whose `mask` is bool `[B, T]`, see `Batch`.

    Returns:
      Batch with zeros (False) in the masked slots of the fields in `ZEROED`.
    """

    def zero(leaf: jax.Array) -> jax.Array:
        return masked.zero(leaf, batch.mask) if leaf.ndim > 1 else leaf

    return batch._replace(**{name: jax.tree.map(zero, getattr(batch, name)) for name in ZEROED})
