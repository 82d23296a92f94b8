"""Weights and masks of methods in groups, for a sampler μ that is not the trained policy."""

import jax
import jax.numpy as jnp

from jaxrl_po import config as config_lib
from jaxrl_po import token_weights
from jaxrl_po.algorithms import surrogates
from jaxrl_po.config import NON_NEGATIVE, POSITIVE, ConfigError, Number, number, static
from jaxrl_po.types import Problem, Samples

NONE, TRUNCATE, MASK = CORRECTIONS = ("none", "truncate", "mask")


@config_lib.record
class Corrections:
    """Settings of token weights and of a mask of responses; both are off by default."""

    correction: str = static(
        NONE,
        "weight of a token where the sampler is not the old policy: ρ = π_old / π_sampler, "
        "truncated at correction_high (TIS), or 0 outside the two bounds (mask, IcePop)",
        choices=CORRECTIONS,
    )
    correction_low: Number = number(
        0.5,
        "smallest ρ = π_old / π_sampler that correction=mask keeps",
        within=NON_NEGATIVE,
        when=("correction", MASK),
    )
    correction_high: Number = number(
        5.0,
        "largest ρ = π_old / π_sampler; a larger weight is truncated to correction_high, or masked",
        within=POSITIVE,
        when=("correction", TRUNCATE, MASK),
    )
    mask_off_policy: bool = static(
        False,
        "drop a token with a negative advantage where log π_sampler − log π, averaged over its "
        "response, exceeds off_policy_kl (DeepSeek-V3.2)",
    )
    off_policy_kl: Number = number(
        0.5,
        "largest mean of log π_sampler − log π over a response whose tokens mask_off_policy keeps",
        unit="nats per token",
        within=NON_NEGATIVE,
        when=("mask_off_policy", True),
    )

    def validate(self) -> None:
        """Raises ConfigError for a field out of range or without effect."""
        config_lib.check(self)
        if self.correction == MASK:
            config_lib.require_order(
                self.correction_low, self.correction_high, "correction_low", "correction_high"
            )


def require_mismatch(config: Corrections, problem: Problem, steps: int) -> None:
    """Raises ConfigError for a correction that does not have an effect.

    Args:
      config: config with corrections.
      problem: problem that states whether the sampler differs from the learner.
      steps: number of gradient steps on one batch.
    """
    config_lib.require_effect(
        config,
        "correction",
        not problem.log_prob_matches_sampler,
        "the sampler differs from the learner, and old_log_prob is learner",
    )
    config_lib.require_effect(
        config,
        "mask_off_policy",
        steps > 1 or not problem.log_prob_matches_sampler,
        "a batch has several gradient steps, or the sampler differs from the learner",
    )


def require_uncorrected(config: Corrections) -> None:
    """Raises ConfigError for a correction if the method's ratio is already π / μ."""
    if config.correction != NONE:
        raise ConfigError(
            "correction",
            f"must be {NONE} for this method, whose ratio is to the sampler already, got "
            f"{config.correction}",
        )


def weight(config: Corrections, samples: Samples) -> jax.Array:
    """Computes the weight of each token under `config.correction`, from its log-probabilities."""
    sampled = samples.columns["sampler_log_prob"]
    if config.correction == MASK:
        return token_weights.masked_weight(
            samples.log_prob, sampled, config.correction_low, config.correction_high
        )
    return token_weights.truncated_weight(samples.log_prob, sampled, config.correction_high)


def apply_correction(
    config: Corrections, elements: jax.Array, log_prob: jax.Array, samples: Samples
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Weights and masks the elements `[B, T]` of a surrogate; returns the weights as metrics.

    Args:
      config: config with corrections.
      elements: elements of the surrogate to minimise.
      log_prob: `[B, T]`, nats, log-probabilities of the policy being trained.
      samples: samples of the iteration, see `Samples`.
    """
    others = {}
    if config.correction != NONE:
        others["sampler_weight"] = weight(config, samples)
        elements = elements * others["sampler_weight"]
    if config.mask_off_policy:
        kept = token_weights.off_policy_mask(
            log_prob,
            surrogates.sampler_log_prob(samples),
            samples.advantage,
            samples.mask,
            config.off_policy_kl,
        )
        others["off_policy"] = (~kept).astype(jnp.float32)
        elements = jnp.where(kept, elements, 0.0)
    return elements, others
