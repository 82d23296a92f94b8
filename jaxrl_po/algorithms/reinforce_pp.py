"""Implements REINFORCE++: advantages normalised over the whole batch (arXiv:2501.03262).

The return of token t is the outcome minus `β · Σ_{u ≥ t} k1`, whitened over all tokens of the
batch; a k1 that may be rounding error counts as 0. With `group_baseline` the group's mean is
subtracted from the outcome first, and the KL penalty to the reference is in the loss instead, as k2
(Hu et al. 2025).
"""

import jax
import jax.numpy as jnp

from jaxrl_po import advantages, divergences, losses
from jaxrl_po import config as config_lib
from jaxrl_po.algorithms import group_config, group_policy
from jaxrl_po.backend import Target
from jaxrl_po.config import static
from jaxrl_po.types import Learner, Optimizer, Problem


@config_lib.record
class Config(group_config.Clip, group_config.Reference):
    """Hyperparameters of REINFORCE++."""

    group_baseline: bool = static(
        False, "subtract the group's mean from each outcome (REINFORCE++-baseline)"
    )


def make(
    config: Config, problem: Problem, optimizer: Optimizer = None, *, target: Target | None = None
) -> Learner:
    """Builds REINFORCE++ for any problem, in groups if `group_baseline`; see `grpo.make`."""
    centred = group_policy.outcome_advantage(lambda r: advantages.group_relative(r, scale="none"))

    def reward_to_go(reward: jax.Array, mask: jax.Array, step_end: jax.Array) -> jax.Array:
        del step_end
        returns = jnp.flip(jnp.cumsum(jnp.flip(reward, axis=-1), axis=-1), axis=-1)
        return jnp.where(mask, returns, 0.0)

    def distance(log_prob: jax.Array, reference_log_prob: jax.Array) -> jax.Array:
        """Computes k1, but 0 where k1 may be rounding error, which whitening would magnify."""
        k1 = divergences.k1(log_prob, reference_log_prob)
        return jnp.where(jnp.abs(k1) > divergences.ROUNDING, k1, 0.0)

    def advantage(reward: jax.Array, mask: jax.Array, step_end: jax.Array) -> jax.Array:
        raw = (centred if config.group_baseline else reward_to_go)(reward, mask, step_end)
        return advantages.whiten(raw, mask, axis_name=config.axis_name)

    return group_policy.make(
        config,
        problem.with_target(target),
        optimizer,
        group_advantage=advantage,
        surrogate=group_policy.choose_surrogate(config),
        aggregate=losses.token_mean,
        reward_kl=None if config.group_baseline else distance,
        loss_kl=divergences.k2 if config.group_baseline else None,
    )
