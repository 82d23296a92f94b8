"""KL penalty to a frozen reference policy, in the rewards or (for `group_policy`) in the loss."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_po import config as config_lib
from jaxrl_po import divergences, learner, masked
from jaxrl_po.config import NON_NEGATIVE, POSITIVE, ConfigError, Number, common, number, static
from jaxrl_po.masked import Mean
from jaxrl_po.types import Batch, Learner, Metrics, Problem, Samples, TrainState

Divergence = Callable[[jax.Array, jax.Array], jax.Array]
"""`(log_prob [B, T], reference_log_prob [B, T]) -> [B, T]`, estimates a KL, nats."""

# Replicated entry of the collector's state: coefficient β, `[]`.
COEFFICIENT = "reference_kl_coefficient"


@config_lib.record
class ReferenceSettings:
    """KL penalty to the initial policy, in the reward of each step."""

    enabled: bool = static(False, "subtract β · (log π − log π_ref) from the reward of each step")
    kl_coefficient: Number = common.number(
        0.05,
        "coefficient β of the KL penalty; the initial value if β is adapted",
        unit="reward units per nat",
        within=NON_NEGATIVE,
        when=("enabled", True),
    )
    adapt: bool = static(
        False, "change β by up to 2 % per iteration, towards target_kl", when=("enabled", True)
    )
    target_kl: Number = number(
        0.1,
        "target KL(policy ‖ reference) per step, for an adapted β",
        unit="nats",
        within=POSITIVE,
        when=("adapt", True),
    )


def with_reference_kl(
    inner: Learner,
    problem: Problem,
    settings: ReferenceSettings,
    *,
    num_parts: int = 1,
    axis_name: str | None = None,
) -> Learner:
    """Returns the learner with rewards `r_t − β (log π(a_t|s_t) − log π_ref(a_t|s_t))`.

    In these rewards π is the old policy and π_ref the initial policy. The penalty is the KL penalty
    of RLHF with PPO; it applies to any learner that uses `Batch.reward`.

    Args:
      inner: learner on `problem`, without a reference policy.
      problem: source of samples.
      settings: settings of the penalty, see `ReferenceSettings`; `enabled` is ignored.
      num_parts: number of parts of a batch, see `learner.make`.
      axis_name: device axis that the rows are sharded over, or None.

    Returns:
      `Learner` with the metrics `reference_kl`, the k1 estimate of KL(old ‖ reference) in nats, and
      `reference_kl_coefficient`. Ziegler et al. 2019 (arXiv:1909.08593), eq. 2 and section 2.2;
      Ouyang et al. 2022 (arXiv:2203.02155), eq. 2.

    Example:
      `with_reference_kl(ppo.make(config, problem), problem, ReferenceSettings(kl_coefficient=0.1))`

    Raises:
      ConfigError: the policy did not sample the actions itself, or `inner` has a reference already.
    """
    if not problem.on_policy:
        raise ConfigError(
            "sampling", "must be from the policy itself for a KL penalty: set num_branches above 1"
        )

    @functools.wraps(inner.init)
    def init(key: jax.Array) -> TrainState:
        state = inner.init(key)
        if state.reference_params is not None:
            raise ConfigError(
                "use_reference", "must be off for a learner that has another reference"
            )
        if settings.adapt:
            beta = jnp.array(settings.kl_coefficient, jnp.float32)
            state = state._replace(collector=state.collector.add(replicated={COEFFICIENT: beta}))
        return state._replace(reference_params=jax.tree.map(jnp.copy, state.params.policy))

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        learner.require_reward(batch)
        beta = (
            state.collector.replicated[COEFFICIENT]
            if settings.adapt
            else jnp.asarray(settings.kl_coefficient, jnp.float32)
        )
        k1 = divergences.k1(batch.log_prob, reference_log_prob(problem, state, batch, num_parts))
        kl = masked.psum(masked.total(k1, batch.mask), axis_name)
        reward = batch.reward - beta * jnp.where(batch.mask, k1, 0.0)
        state, metrics = inner.update(state, batch._replace(reward=reward))
        if settings.adapt:
            adapted = divergences.adapt_proportionally(beta, kl.value(), settings.target_kl)
            after = jnp.where(kl.count > 0, adapted, beta)
            replicated = {**state.collector.replicated, COEFFICIENT: after}
            state = state._replace(collector=state.collector._replace(replicated=replicated))
        return state, {
            **metrics,
            "reference_kl": kl,
            "reference_kl_coefficient": Mean(beta, jnp.float32(1.0)),
        }

    return Learner(init, inner.sample, update)


def reference_log_prob(
    problem: Problem, state: TrainState, batch: Batch, num_parts: int
) -> jax.Array:
    """Computes the actions' log-probabilities `[B, T]` under the reference, nats, in parts."""
    params = state.params._replace(policy=state.reference_params)
    return learner.log_prob(problem, params, batch, num_parts=num_parts)


def with_reference_log_prob(
    estimate: learner.Estimate,
    problem: Problem,
    *,
    num_parts: int = 1,
    reward_kl: Divergence | None = None,
    coefficient: Number = 0.0,
) -> learner.Estimate:
    """Extends `estimate` by `reference_log_prob`, on rewards minus `β · reward_kl(π, π_ref)`.

    Args:
      estimate: `(state, batch) -> samples`, the function that is extended.
      problem: problem that defines the policy.
      num_parts: number of parts of a batch, see `learner.make`.
      reward_kl: estimate of KL(policy ‖ reference) at the sampled tokens, or None without a penalty
        in the reward.
      coefficient: coefficient β, reward units per nat.
    """

    def with_reference(state: TrainState, batch: Batch) -> Samples:
        log_prob = reference_log_prob(problem, state, batch, num_parts)
        if reward_kl is not None:
            kl = jnp.where(batch.mask, reward_kl(batch.log_prob, log_prob), 0.0)
            batch = batch._replace(reward=batch.reward - coefficient * kl)
        return estimate(state, batch)._replace(reference_log_prob=log_prob)

    return with_reference
