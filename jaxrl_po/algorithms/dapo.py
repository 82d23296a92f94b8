"""DAPO: GRPO with five changes, each a switch of its own (Yu et al. 2025, arXiv:2503.14476).

Clip-higher (`clip_higher`), dynamic sampling (`dynamic_sampling`), the token-level loss
(`token_level_loss`), overlong reward shaping (`overlong_filtering`, `soft_overlong`), and no
penalty on the distance to a reference (`use_reference`). All off is GRPO.
"""

import jax
import jax.numpy as jnp
import optax

from jaxrl_po import config as config_lib
from jaxrl_po import divergences, losses
from jaxrl_po.advantages import informative
from jaxrl_po.algorithms import group_policy
from jaxrl_po.config import COUNT, NON_NEGATIVE, POSITIVE, Number, number, static
from jaxrl_po.dynamic_sampling import dynamic_sampling
from jaxrl_po.language import rewards
from jaxrl_po.types import Batch, Learner, Problem

OFF, REFILL, REWEIGHT = DYNAMIC = ("off", "refill", "reweight")


@config_lib.record
class Config(group_policy.Clip, group_policy.GroupScale, group_policy.Reference):
    """Hyperparameters of DAPO; the defaults are the paper's, but for a step size that suits small models."""

    clip_higher: bool = static(
        True, "clip from above at epsilon_high; off clips at epsilon_low on both sides"
    )
    epsilon_high: Number = number(
        0.28, "the ratio is clipped from above at 1 + epsilon_high", within=group_policy.CLIP
    )
    dynamic_sampling: str = static(
        REFILL,
        "groups whose members all score the same: trained on as they are, replaced by "
        "fresh ones, or left out of the mean, which weighs the others by 1 / (1 − share "
        "left out)",
        choices=DYNAMIC,
    )
    max_generation_batches: int = static(
        10, "batches generated for one update at most", within=COUNT
    )
    carry_surplus: bool = static(
        False, "keep informative groups that an update has no room for, for the next one"
    )
    train_prompts: int = static(
        0,
        "groups of one update, over all devices; 0 takes num_prompts, the groups of one "
        "generated batch",
        within=NON_NEGATIVE,
    )
    token_level_loss: bool = static(
        True, "every token of the batch weighs the same; off, every response"
    )
    overlong_filtering: bool = static(
        True,
        "leave responses that were cut at the token budget out of the loss; an episode's "
        "time limit is no such budget",
    )
    soft_overlong: bool = static(
        True,
        "take up to overlong_factor from the reward of responses in the last "
        "overlong_cache tokens of the budget, which must leave room for right answers "
        "before them; not on control",
    )
    overlong_cache: int = static(
        0,
        "tokens over which that punishment grows; 0 takes a fifth of the budget",
        unit="tokens",
        within=NON_NEGATIVE,
    )
    overlong_factor: Number = number(
        1.0, "the full punishment", unit="reward units", within=POSITIVE
    )
    use_reference: bool = static(
        False, "penalise the distance to the reference, at first the initial policy"
    )

    @property
    def upper(self) -> Number:
        """ε at which the ratio is clipped from above."""
        return self.epsilon_high if self.clip_higher else self.epsilon_low

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range or without effect."""
        super().validate()
        config_lib.require_effect(self, "epsilon_high", self.clip_higher, "clip_higher is on")
        for name in ("max_generation_batches", "carry_surplus", "train_prompts"):
            config_lib.require_effect(
                self, name, self.dynamic_sampling == REFILL, f"dynamic_sampling is {REFILL}"
            )
        for name in ("overlong_cache", "overlong_factor"):
            config_lib.require_effect(self, name, self.soft_overlong, "soft_overlong is on")


def make(
    config: Config, problem: Problem, optimizer: optax.GradientTransformation | None = None
) -> Learner:
    """DAPO on any problem in groups.

    Args:
      config: see `Config`.
      problem: with group_size of at least 2; its raw scores decide which groups are informative.
      optimizer: any optax transformation in place of Adam behind a gradient-norm clip; it brings
        its own step size.

    Returns:
      The learner.

    Raises:
      ConfigError: names the field that cannot work.
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
        )

    def reward_fn(batch: Batch) -> jax.Array:
        if not (config.soft_overlong and problem.truncated_is_overlong):
            return batch.reward
        budget = batch.mask.shape[1]
        cache = config.overlong_cache or rewards.overlong_cache(budget)
        punishment = rewards.soft_overlong(
            batch.mask.sum(axis=1), max_length=budget, cache=cache, factor=config.overlong_factor
        )
        return batch.reward.at[:, 0].add(punishment)

    def loss_mask_fn(batch: Batch) -> jax.Array:
        kept = batch.mask
        if config.overlong_filtering and problem.truncated_is_overlong:
            kept &= ~jnp.any(batch.truncated, axis=1, keepdims=True)
        if config.dynamic_sampling == REWEIGHT:
            kept &= jnp.repeat(informative(batch.score), batch.score.shape[1])[:, None]
        return kept

    return group_policy.make(
        config,
        problem,
        optimizer,
        advantage=group_policy.group_relative(config),
        surrogate=group_policy.clipped(config),
        aggregate=losses.token_mean if config.token_level_loss else losses.sequence_mean,
        reward_fn=reward_fn,
        loss_mask_fn=loss_mask_fn,
        loss_kl=divergences.k3,
    )
