"""A frozen reference policy beside the one that is trained: its log-probabilities, and a price on the distance to it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_po import learner
from jaxrl_po.algorithms.actor_critic import Policy
from jaxrl_po.config import Number
from jaxrl_po.types import Batch, Samples, TrainState

Divergence = Callable[[jax.Array, jax.Array], jax.Array]
"""`(log_prob [B, T], reference_log_prob [B, T]) -> [B, T]`, nats."""


def beside(
    estimate: learner.Estimate,
    policy: Policy,
    *,
    reward_kl: Divergence | None = None,
    coefficient: Callable[[TrainState], Number] = lambda state: 0.0,
) -> learner.Estimate:
    """The same estimate, with `reference_log_prob` and, for k1, of the rewards `r_t − β (log π(a_t) − log π_ref(a_t))`.

    Args:
      estimate: of the rewards of the batch.
      policy: see `actor_critic.policy_of`.
      reward_kl: estimate of KL(policy ‖ reference) at the sampled tokens, or None to leave the
        rewards as they are.
      coefficient: state to β, reward units per nat.

    Returns:
      The estimate. Source: Ziegler et al. 2019 (arXiv:1909.08593), eq. 2; Ouyang et al. 2022
      (arXiv:2203.02155), eq. 2.
    """

    def with_reference(state: TrainState, batch: Batch) -> Samples:
        log_prob = policy(state.reference_params, batch).log_prob(batch.action)
        if reward_kl is not None:
            kl = jnp.where(batch.mask, reward_kl(batch.log_prob, log_prob), 0.0)
            batch = batch._replace(reward=batch.reward - coefficient(state) * kl)
        return estimate(state, batch)._replace(reference_log_prob=log_prob)

    return with_reference
