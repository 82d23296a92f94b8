"""Implements DAPO: GRPO with five changes, each with its own switch (arXiv:2503.14476).

The changes are clip-higher (`clip_higher`), dynamic sampling (`dynamic_sampling`), the token-level
loss (`token_level_loss`), overlong reward shaping (`overlong_filtering`, `soft_overlong`), and no
KL penalty (`use_reference`) (Yu et al. 2025). With all five changes undone, DAPO is GRPO.
"""

import jax
import jax.numpy as jnp

from jaxrl_po import config as config_lib
from jaxrl_po import divergences, losses
from jaxrl_po.advantages import informative
from jaxrl_po.algorithms import group_config, group_policy
from jaxrl_po.backend import Target
from jaxrl_po.config import (
    COUNT,
    NON_NEGATIVE,
    POSITIVE,
    ConfigError,
    Number,
    common,
    number,
    static,
)
from jaxrl_po.dynamic_sampling import dynamic_sampling
from jaxrl_po.language import rewards
from jaxrl_po.types import Batch, Learner, Optimizer, Problem

OFF, REFILL, REWEIGHT = DYNAMIC = ("off", "refill", "reweight")


@config_lib.record
class Config(group_config.Clip, group_config.GroupScale, group_config.Reference):
    """Hyperparameters of DAPO from the paper, with a learning rate that suits small models."""

    clip_higher: bool = static(
        True, "clip from above at 1 + epsilon_high; if off, epsilon_low is used on both sides"
    )
    epsilon_high: Number = common.number(
        0.28,
        "the ratio is clipped from above at 1 + epsilon_high",
        within=group_config.CLIP,
        when=("clip_higher", True),
    )
    dynamic_sampling: str = static(
        REFILL,
        "groups whose members all score the same are kept (off), replaced by new ones (refill), or "
        "masked, so that the mean is over the other groups (reweight)",
        choices=DYNAMIC,
    )
    max_generation_batches: int = static(
        10, "most batches generated for one update", within=COUNT, when=("dynamic_sampling", REFILL)
    )
    carry_surplus: bool = static(
        False,
        "keep informative groups that do not fit into an update for the next one",
        when=("dynamic_sampling", REFILL),
    )
    train_prompts: int = static(
        0,
        "groups per update, over all devices; 0 for num_prompts, the groups of one generated batch",
        within=NON_NEGATIVE,
        when=("dynamic_sampling", REFILL),
    )
    token_level_loss: bool = static(
        True, "every token of the batch has the same weight; if off, every response"
    )
    overlong_filtering: bool = static(
        True,
        "mask responses that were cut at the token budget; the time limit of a control "
        "task does not count as a token budget",
    )
    soft_overlong: bool = static(
        True,
        "subtract up to overlong_factor from the reward of responses that end in the last "
        "overlong_cache tokens of the budget, before which there must be room for right answers; "
        "not on control",
    )
    overlong_cache: int = static(
        0,
        "number of tokens over which the penalty of soft_overlong grows; 0 for a fifth of "
        "the budget",
        unit="tokens",
        within=NON_NEGATIVE,
        when=("soft_overlong", True),
    )
    overlong_factor: Number = number(
        1.0,
        "largest penalty for length",
        unit="reward units",
        within=POSITIVE,
        when=("soft_overlong", True),
    )
    use_reference: bool = common.static(
        False, "KL penalty to a reference policy, at first the initial one"
    )

    @property
    def upper(self) -> Number:
        """Bound ε_high in effect: the ratio is clipped from above at 1 + ε_high."""
        return self.epsilon_high if self.clip_higher else self.epsilon_low

    def validate(self) -> None:
        """Raises ConfigError for a field out of range or without effect."""
        super().validate()
        if self.scale == group_config.MEAN and self.soft_overlong:
            raise ConfigError(
                "soft_overlong",
                "must be off where scale is mean: its penalty makes outcomes negative",
            )


def make(
    config: Config, problem: Problem, optimizer: Optimizer = None, *, target: Target | None = None
) -> Learner:
    """Builds the DAPO learner for any problem in groups.

    Args:
      config: hyperparameters, see `Config`.
      problem: source in groups of at least 2, whose raw scores decide which groups are informative.
      optimizer: any optax transformation with its own learning rate; None stands for Adam with
        gradients clipped by norm.
      target: platform and devices of the compiled program; None stands for the problem's target.

    Returns:
      `Learner` of DAPO.

    Raises:
      ConfigError: a field is invalid; the error names the field.
    """
    config.validate()
    for name in ("overlong_cache", "overlong_factor"):
        config_lib.require_effect(
            config,
            name,
            problem.truncated_is_overlong,
            "a truncated row is a response that was too long",
        )
    if config.dynamic_sampling == REFILL:
        problem = dynamic_sampling(
            problem,
            config.max_generation_batches,
            carry_surplus=config.carry_surplus,
            num_groups=config.train_prompts,
            axis_name=config.axis_name,
            name="train_prompts",
        )

    def reward_fn(batch: Batch) -> jax.Array:
        if not (config.soft_overlong and problem.truncated_is_overlong):
            return batch.reward
        budget = batch.mask.shape[1]
        cache = config.overlong_cache or rewards.overlong_cache(budget)
        penalty = rewards.soft_overlong(
            batch.mask.sum(axis=1), max_length=budget, cache=cache, factor=config.overlong_factor
        )
        # The token of the penalty does not matter, since an outcome is the sum of a row's rewards.
        return batch.reward.at[:, 0].add(penalty)

    def loss_mask_fn(batch: Batch) -> jax.Array:
        kept = batch.mask
        if config.overlong_filtering and problem.truncated_is_overlong:
            kept &= ~jnp.any(batch.truncated, axis=1, keepdims=True)
        if config.dynamic_sampling == REWEIGHT:
            kept &= jnp.repeat(informative(batch.score), batch.score.shape[1])[:, None]
        return kept

    return group_policy.make(
        config,
        problem.with_target(target),
        optimizer,
        group_advantage=group_policy.relative_to_group(config),
        surrogate=group_policy.choose_surrogate(config),
        aggregate=losses.token_mean if config.token_level_loss else losses.sequence_mean,
        reward_fn=reward_fn,
        loss_mask_fn=loss_mask_fn,
        loss_kl=divergences.k3,
    )
