"""Implements DPPO: a trust region of the probability itself, not of the ratio (arXiv:2602.04879).

The surrogate is `−stop_gradient(min(r, c) · 1[inside]) · A · log π`; inside means `π − μ ≤ δ_high`
for A > 0 and `π − μ ≥ −δ_low` for A < 0, the binary form of the total variation between π and the
sampler μ.
"""

from typing import Any

import jax

from jaxrl_po import config as config_lib
from jaxrl_po import divergences, losses
from jaxrl_po.algorithms import corrections, group_config, group_policy, surrogates
from jaxrl_po.backend import Target
from jaxrl_po.config import POSITIVE, Number, number
from jaxrl_po.types import Learner, Optimizer, Problem, Samples


@config_lib.record
class Config(group_config.GroupScale, group_config.OptionalReference):
    """Hyperparameters of DPPO."""

    delta_low: Number = number(
        0.2, "largest fall of the probability of a sampled token", within=group_config.CLIP
    )
    delta_high: Number = number(
        0.2, "largest rise of the probability of a sampled token", within=group_config.CLIP
    )
    max_ratio: Number = number(
        20.0,
        "largest ratio π / π_sampler; larger ratios are truncated to max_ratio",
        within=POSITIVE,
    )

    def validate(self) -> None:
        """Raises ConfigError for a field out of range or without effect."""
        super().validate()
        corrections.require_uncorrected(self)


def make(
    config: Config, problem: Problem, optimizer: Optimizer = None, *, target: Target | None = None
) -> Learner:
    """Builds DPPO for any problem in groups; `grpo.make` documents the arguments."""
    bounds: Any = {"delta_low": config.delta_low, "delta_high": config.delta_high}

    def surrogate(log_prob: jax.Array, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
        tokens = log_prob, surrogates.sampler_log_prob(samples), samples.advantage
        outside = losses.outside_total_variation(*tokens, **bounds)
        elements = losses.dppo(*tokens, **bounds, max_ratio=config.max_ratio)
        return elements, surrogates.clip_fractions(outside, samples.advantage)

    return group_policy.make(
        config,
        problem.with_target(target),
        optimizer,
        group_advantage=group_policy.relative_to_group(config),
        surrogate=surrogate,
        aggregate=losses.token_mean,
        loss_kl=divergences.k3,
    )
