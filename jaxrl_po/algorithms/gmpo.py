"""Implements GMPO: the geometric mean of a response's clipped ratios (arXiv:2507.20673).

The loss is `−A · exp(mean_t s · min(s · log r, s · clip(log r, −ε_low, ε_high)))`, s the sign of A
(Zhao et al. 2025).
"""

import jax
import jax.numpy as jnp

from jaxrl_po import config as config_lib
from jaxrl_po import divergences, losses
from jaxrl_po.algorithms import group_config, group_policy, surrogates
from jaxrl_po.backend import Target
from jaxrl_po.config import POSITIVE, Number, common
from jaxrl_po.divergences import log_ratio
from jaxrl_po.types import Learner, Optimizer, Problem, Samples


@config_lib.record
class Config(group_config.GroupScale, group_config.OptionalReference):
    """Hyperparameters of GMPO; the clip applies to log-ratios and is wide, as in the paper."""

    epsilon_low: Number = common.number(
        0.4, "the log-ratio is clipped from below at −epsilon_low", unit="nats", within=POSITIVE
    )
    epsilon_high: Number = common.number(
        0.4, "the log-ratio is clipped from above at epsilon_high", unit="nats", within=POSITIVE
    )


def make(
    config: Config, problem: Problem, optimizer: Optimizer = None, *, target: Target | None = None
) -> Learner:
    """Builds GMPO for any problem in groups; `grpo.make` documents the arguments."""

    @surrogates.row_wise  # sums over the unmasked slots of a row
    def surrogate(log_prob: jax.Array, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
        clipped = losses.clipped_log_ratio(
            log_prob,
            samples.log_prob,
            samples.advantage,
            epsilon_low=config.epsilon_low,
            epsilon_high=config.epsilon_high,
        )
        zeros = jnp.zeros_like(clipped)
        whole = losses.sequence_log_ratio(clipped, zeros, samples.mask)
        moved = clipped != log_ratio(log_prob, samples.log_prob)
        elements = losses.surrogate(whole, zeros, samples.advantage)
        return elements, surrogates.clip_fractions(moved, samples.advantage)

    return group_policy.make(
        config,
        problem.with_target(target),
        optimizer,
        group_advantage=group_policy.relative_to_group(config),
        surrogate=surrogate,
        aggregate=losses.sequence_mean,
        loss_kl=divergences.k3,
    )
