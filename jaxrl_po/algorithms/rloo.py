"""Implements RLOO: REINFORCE with a leave-one-out baseline (arXiv:2402.14740, eq. 8).

A response is one action: its log-probability is the sum over its tokens, its reward the outcome
minus `β · (log π − log π_ref)` (Ahmadian et al. 2024). The ratio is not clipped; in the first
update on a batch, `−r · A` has the gradient of `−log π · A`.
"""

import functools

from jaxrl_po import advantages, divergences, losses
from jaxrl_po import config as config_lib
from jaxrl_po.algorithms import group_config, group_policy, surrogates
from jaxrl_po.backend import Target
from jaxrl_po.types import Learner, Optimizer, Problem


@config_lib.record
class Config(group_config.Reference):
    """Hyperparameters of RLOO."""


def make(
    config: Config, problem: Problem, optimizer: Optimizer = None, *, target: Target | None = None
) -> Learner:
    """Builds RLOO for any problem in groups; `grpo.make` documents the arguments."""
    return group_policy.make(
        config,
        problem.with_target(target),
        optimizer,
        group_advantage=group_policy.outcome_advantage(advantages.leave_one_out),
        surrogate=surrogates.plain,
        # the mean over responses of sums over tokens
        aggregate=functools.partial(losses.fixed_length_mean, length=1),
        reward_kl=divergences.k1,
    )
