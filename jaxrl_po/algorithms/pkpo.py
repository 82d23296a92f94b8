"""Implements PKPO, which maximises the best of k responses (arXiv:2505.15201).

The score of a response is replaced by its gain over the maximum of k − 1 other responses (Walder
and Karkhanis 2025, eq. 33); with scores of 0 and 1 the objective is pass@k. As in RLOO a response
is one action, and the ratio is not clipped.
"""

import functools

import jax

from jaxrl_po import config as config_lib
from jaxrl_po import divergences, group_advantages, losses
from jaxrl_po.algorithms import group_config, group_policy, surrogates
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError, Interval, static
from jaxrl_po.types import Learner, Optimizer, Problem


@config_lib.record
class Config(group_config.OptionalReference):
    """Hyperparameters of PKPO."""

    k: int = static(
        4,
        "number k of responses whose best score is maximised, at most group_size",
        within=Interval(2),
    )

    def validate(self) -> None:
        """Raises ConfigError for a field out of range or without effect."""
        super().validate()
        config_lib.require_unset(
            self, "mask_off_policy", "advantages can be negative: PKPO's never are"
        )


def make(
    config: Config, problem: Problem, optimizer: Optimizer = None, *, target: Target | None = None
) -> Learner:
    """Builds PKPO for any problem in groups of at least k; `grpo.make` documents the arguments."""

    def advantage(reward: jax.Array, mask: jax.Array, step_end: jax.Array) -> jax.Array:
        if config.k > reward.shape[1]:
            raise ConfigError(
                "k", f"must be at most group_size = {reward.shape[1]}, got {config.k}"
            )
        relative = functools.partial(group_advantages.pass_at_k, k=config.k)
        return group_policy.outcome_advantage(relative)(reward, mask, step_end)

    return group_policy.make(
        config,
        problem.with_target(target),
        optimizer,
        group_advantage=advantage,
        surrogate=surrogates.plain,
        # the mean over responses of sums over tokens
        aggregate=functools.partial(losses.fixed_length_mean, length=1),
        loss_kl=divergences.k3,
    )
