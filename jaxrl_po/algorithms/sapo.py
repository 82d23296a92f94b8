"""Implements SAPO: GRPO with a soft gate in place of the clip (arXiv:2511.20347).

The surrogate is `−(4/τ) σ(τ (r − 1)) · A`, with a narrower gate for negative advantages (Gao et al.
2025).
"""

import jax

from jaxrl_po import config as config_lib
from jaxrl_po import divergences, losses
from jaxrl_po.algorithms import group_config, group_policy
from jaxrl_po.backend import Target
from jaxrl_po.config import POSITIVE, Number, number
from jaxrl_po.types import Learner, Optimizer, Problem, Samples


@config_lib.record
class Config(group_config.GroupScale, group_config.OptionalReference):
    """Hyperparameters of SAPO; the temperatures are the paper's."""

    temperature_positive: Number = number(
        1.0, "τ of tokens with a positive advantage; a larger τ narrows the gate", within=POSITIVE
    )
    temperature_negative: Number = number(
        1.05, "τ of tokens without a positive advantage", within=POSITIVE
    )


def make(
    config: Config, problem: Problem, optimizer: Optimizer = None, *, target: Target | None = None
) -> Learner:
    """Builds SAPO for any problem in groups; `grpo.make` documents the arguments."""

    def surrogate(log_prob: jax.Array, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
        return losses.sapo(
            log_prob,
            samples.log_prob,
            samples.advantage,
            temperature_positive=config.temperature_positive,
            temperature_negative=config.temperature_negative,
        ), {}

    return group_policy.make(
        config,
        problem.with_target(target),
        optimizer,
        group_advantage=group_policy.relative_to_group(config),
        surrogate=surrogate,
        aggregate=losses.sequence_mean,
        loss_kl=divergences.k3,
    )
