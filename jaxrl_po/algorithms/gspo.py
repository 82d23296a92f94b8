"""Implements GSPO: GRPO with a ratio and a clip of the whole sequence (arXiv:2507.18071).

The sequence ratio is `s = (π(y|x) / π_old(y|x))^(1/|y|)` (Zheng et al. 2025, eq. 5 and 7).
"""

import jax
import jax.numpy as jnp

from jaxrl_po import config as config_lib
from jaxrl_po import divergences, losses
from jaxrl_po.algorithms import group_config, group_policy, surrogates
from jaxrl_po.backend import Target
from jaxrl_po.config import Number, common
from jaxrl_po.types import Learner, Optimizer, Problem, Samples


@config_lib.record
class Config(group_config.Clip, group_config.GroupScale, group_config.OptionalReference):
    """Hyperparameters of GSPO, whose ratio is a geometric mean over tokens.

    The clip is therefore narrow.
    """

    epsilon_low: Number = common.number(
        3e-4, "the ratio is clipped from below at 1 − epsilon_low", within=group_config.CLIP
    )
    epsilon_high: Number = common.number(
        4e-4, "the ratio is clipped from above at 1 + epsilon_high", within=group_config.CLIP
    )


def make(
    config: Config, problem: Problem, optimizer: Optimizer = None, *, target: Target | None = None
) -> Learner:
    """Builds GSPO for any problem in groups; `grpo.make` documents the arguments."""
    clipped = group_policy.choose_surrogate(config)

    @surrogates.row_wise  # sums over the unmasked slots of a row
    def surrogate(log_prob: jax.Array, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
        log_ratio = losses.sequence_log_ratio(log_prob, samples.log_prob, samples.mask)
        return clipped(log_ratio, samples._replace(log_prob=jnp.zeros_like(log_ratio)))

    return group_policy.make(
        config,
        problem.with_target(target),
        optimizer,
        group_advantage=group_policy.relative_to_group(config),
        surrogate=surrogate,
        aggregate=losses.sequence_mean,
        loss_kl=divergences.k3,
    )
