"""Implements KL-Cov: a penalty on the few tokens through which entropy falls (arXiv:2505.22617).

The surrogate is `−r · A`, plus `β |log r|` where `(A − mean A)(log π_old − mean log π_old)` is
largest. The penalised tokens are chosen once for each batch, from all of its tokens, while π is
π_old.
"""

import jax
import jax.numpy as jnp

from jaxrl_po import config as config_lib
from jaxrl_po import divergences, losses, token_weights
from jaxrl_po.algorithms import group_config, group_policy
from jaxrl_po.backend import Target
from jaxrl_po.config import NON_NEGATIVE, Interval, Number, common, number
from jaxrl_po.divergences import log_ratio
from jaxrl_po.types import Learner, Optimizer, Problem, Samples


@config_lib.record
class Config(group_config.GroupScale, group_config.OptionalReference):
    """Hyperparameters of KL-Cov; in a small batch, the paper's shares select a single token."""

    share: Number = number(
        0.002,
        "share of the tokens that are penalised, at least one token",
        within=Interval(0, 1, True),
    )
    penalty: Number = common.number(
        1.0, "β, weight of |log r| at the penalised tokens", within=NON_NEGATIVE
    )


def make(
    config: Config, problem: Problem, optimizer: Optimizer = None, *, target: Target | None = None
) -> Learner:
    """Builds KL-Cov for any problem in groups; `grpo.make` documents the arguments."""

    def select(samples: Samples) -> jax.Array:
        return token_weights.top_covariance(
            samples.log_prob,
            samples.advantage,
            samples.mask,
            config.share,
            axis_name=config.axis_name,
        )

    def surrogate(log_prob: jax.Array, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
        distance = jnp.abs(log_ratio(log_prob, samples.log_prob))
        # Before the first step r is 1 up to rounding, whose sign must not choose a gradient.
        moved = samples.columns["penalized"] & (distance > divergences.ROUNDING)
        penalty = jnp.where(moved, config.penalty * distance, 0.0)
        return losses.surrogate(log_prob, samples.log_prob, samples.advantage) + penalty, {}

    return group_policy.make(
        config,
        problem.with_target(target),
        optimizer,
        group_advantage=group_policy.relative_to_group(config),
        surrogate=surrogate,
        aggregate=losses.token_mean,
        loss_kl=divergences.k3,
        select=select,
    )
