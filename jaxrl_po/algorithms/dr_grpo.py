"""Dr. GRPO: GRPO without the two divisions that bias it (Liu et al. 2025, arXiv:2503.20783).

Section 3: division by the group's std gives more weight to prompts that are nearly always or nearly
never solved, and division by a response's length favours long wrong responses. In Dr. GRPO
advantages are only centred, and token sums are divided by a constant, the token budget.
"""

import jax

from jaxrl_po import advantages, divergences, losses
from jaxrl_po import config as config_lib
from jaxrl_po.algorithms import group_config, group_policy
from jaxrl_po.backend import Target
from jaxrl_po.masked import Mean
from jaxrl_po.types import Learner, Optimizer, Problem


@config_lib.record
class Config(group_config.Clip, group_config.OptionalReference):
    """Hyperparameters of Dr. GRPO."""


def make(
    config: Config, problem: Problem, optimizer: Optimizer = None, *, target: Target | None = None
) -> Learner:
    """Builds Dr. GRPO for any problem in groups; `grpo.make` documents the arguments."""

    def aggregate(elements: jax.Array, mask: jax.Array) -> Mean:
        return losses.fixed_length_mean(elements, mask, mask.shape[1])

    return group_policy.make(
        config,
        problem.with_target(target),
        optimizer,
        group_advantage=group_policy.outcome_advantage(
            lambda r: advantages.group_relative(r, scale="none")
        ),
        surrogate=group_policy.choose_surrogate(config),
        aggregate=aggregate,
        loss_kl=divergences.k3,
    )
