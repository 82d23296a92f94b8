"""Implements CISPO, which clips the importance weight, not the gradient (arXiv:2506.13585).

The surrogate is `−stop_gradient(clip(r, 1 − ε_low, 1 + ε_high)) · A · log π` (MiniMax 2025, eq. 4
and 5).
"""

import jax
import jax.numpy as jnp

from jaxrl_po import config as config_lib
from jaxrl_po import divergences, losses
from jaxrl_po.algorithms import group_config, group_policy
from jaxrl_po.backend import Target
from jaxrl_po.config import POSITIVE, Interval, Number, common
from jaxrl_po.divergences import ratio
from jaxrl_po.types import Learner, Optimizer, Problem, Samples


@config_lib.record
class Config(group_config.GroupScale, group_config.OptionalReference):
    """Hyperparameters of CISPO; by default ratios are not clipped from below, as in the paper."""

    epsilon_low: Number = common.number(
        1.0, "the weight is clipped from below at 1 − epsilon_low", within=Interval(0.0, 1.0, True)
    )
    epsilon_high: Number = common.number(
        4.0, "the weight is clipped from above at 1 + epsilon_high", within=POSITIVE
    )


def make(
    config: Config, problem: Problem, optimizer: Optimizer = None, *, target: Target | None = None
) -> Learner:
    """Builds CISPO for any problem in groups; `grpo.make` documents the arguments."""

    def surrogate(log_prob: jax.Array, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
        elements = losses.cispo(
            log_prob,
            samples.log_prob,
            samples.advantage,
            epsilon_low=config.epsilon_low,
            epsilon_high=config.epsilon_high,
        )
        r = ratio(log_prob, samples.log_prob)
        clipped = {
            "clip_fraction_low": r < 1.0 - config.epsilon_low,
            "clip_fraction_high": r > 1.0 + config.epsilon_high,
        }
        return elements, {name: x.astype(jnp.float32) for name, x in clipped.items()}

    return group_policy.make(
        config,
        problem.with_target(target),
        optimizer,
        group_advantage=group_policy.relative_to_group(config),
        surrogate=surrogate,
        aggregate=losses.token_mean,
        loss_kl=divergences.k3,
    )
