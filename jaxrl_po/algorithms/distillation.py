"""Implements on-policy distillation, in which a frozen teacher rewards every token.

The surrogate is `−r · stop_gradient(log π_teacher − log π)`, r = π / μ against the sampler μ: a
policy gradient of KL(policy ‖ teacher) on the student's own responses, one token at a time (Agarwal
et al. 2024, arXiv:2306.13649; Lu 2025, "On-policy distillation", Thinking Machines). Distillation
does not use the verifier's scores.
"""

import jax
import jax.numpy as jnp

from jaxrl_po import config as config_lib
from jaxrl_po import divergences, losses
from jaxrl_po.algorithms import corrections, group_config, group_policy, surrogates
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError
from jaxrl_po.divergences import log_ratio
from jaxrl_po.types import Batch, Learner, Optimizer, Problem, Samples


@config_lib.record
class Config(group_config.OptionalReference):
    """Hyperparameters of on-policy distillation."""

    def validate(self) -> None:
        """Raises ConfigError for a field out of range or without effect."""
        super().validate()
        corrections.require_uncorrected(self)
        config_lib.require_unset(self, "mask_off_policy", "advantages are of whole responses")


def make(
    config: Config, problem: Problem, optimizer: Optimizer = None, *, target: Target | None = None
) -> Learner:
    """Builds distillation for a problem with a teacher (`teacher.with_teacher`).

    A group may have one member.
    """

    def no_advantage(reward: jax.Array, mask: jax.Array, step_end: jax.Array) -> jax.Array:
        del reward, step_end
        return jnp.zeros(mask.shape)

    def loss_mask(batch: Batch) -> jax.Array:
        if "teacher_log_prob" not in batch.columns:
            raise ConfigError("teacher", "must be given for distillation: it is the only signal")
        return batch.mask

    def surrogate(log_prob: jax.Array, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
        # The log-ratio serves as an advantage: no gradient passes through it.
        towards = log_ratio(samples.columns["teacher_log_prob"], log_prob)
        return losses.surrogate(log_prob, surrogates.sampler_log_prob(samples), towards), {
            "teacher_kl": -towards
        }

    return group_policy.make(
        config,
        problem.with_target(target),
        optimizer,
        group_advantage=no_advantage,
        surrogate=surrogate,
        aggregate=losses.token_mean,
        loss_mask_fn=loss_mask,
        loss_kl=divergences.k3,
    )
