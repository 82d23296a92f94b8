"""Implements GRPO: the group is the baseline (Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4).

In GRPO, G responses to one prompt are scored; the advantage of each token is its response's `(R −
mean) / std` in the group. The clipped surrogate and `β · k3(π ‖ π_ref)` are averaged over the
tokens of a response, then over responses.

With few responses in a group, its mean and std are noisy. Three options reduce the noise, in any
combination: samples for the statistics only (`extra_samples`), running estimates for prompts that
recur (`running_statistics`), and larger groups whose sum is divided by √G (`group_divisor`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_po import config as config_lib
from jaxrl_po import divergences, group_advantages, losses
from jaxrl_po.algorithms import actor_critic, group_config, group_policy
from jaxrl_po.algorithms.actor_critic import TURN
from jaxrl_po.algorithms.surrogates import Surrogate
from jaxrl_po.backend import Target
from jaxrl_po.config import NON_NEGATIVE, UNIT, ConfigError, Number, number, static
from jaxrl_po.group_statistics import running_relative
from jaxrl_po.types import Learner, Optimizer, Problem

OUTCOME, PROCESS = "outcome", "process"
SUPERVISIONS = (OUTCOME, PROCESS, TURN)
SIZE, ROOT = DIVISORS = ("size", "root_size")


@config_lib.record
class Config(group_config.Clip, group_config.GroupScale, group_config.Reference):
    """Hyperparameters of GRPO; the defaults suit small models from a warm start."""

    supervision: str = static(
        OUTCOME,
        "outcome: one advantage per response; process: for each token the sum of the "
        "normalised rewards of later steps (section 4.1.3); turn: for each turn of a "
        "dialogue the rewards of this and later turns, normalised over the group's turns "
        "of the same number",
        choices=SUPERVISIONS,
    )
    extra_samples: int = static(
        0,
        "number of responses of each group, out of group_size, that enter mean and std "
        "only and are not trained on",
        within=NON_NEGATIVE,
    )
    running_statistics: bool = static(
        False,
        "take mean and std from running estimates, per prompt of a finite set or per "
        "difficulty, instead of from the group",
    )
    running_decay: Number = number(
        0.9,
        "factor on the weight of earlier outcomes in the running estimates, per iteration",
        within=UNIT,
        when=("running_statistics", True),
    )
    group_divisor: str = static(
        SIZE,
        "divide the sum of the surrogate over a group's G trained responses by G or by √G; KL "
        "penalty and entropy are not affected (Adam would cancel a factor on the whole loss)",
        choices=DIVISORS,
    )

    def validate(self) -> None:
        """Raises ConfigError for a field out of range or without effect."""
        super().validate()
        if self.running_statistics and self.supervision != OUTCOME:
            raise ConfigError(
                "supervision", f"must be {OUTCOME} with running_statistics, got {self.supervision}"
            )
        relative_to_group = self.scale in (group_config.STD, group_config.CENTRED)
        if not relative_to_group and (self.running_statistics or self.supervision != OUTCOME):
            raise ConfigError(
                "scale",
                f"must be {group_config.STD} or {group_config.CENTRED} unless supervision is "
                f"{OUTCOME} and running_statistics is off, got {self.scale}",
            )


def make(
    config: Config,
    problem: Problem,
    optimizer: Optimizer = None,
    *,
    surrogate: Surrogate | None = None,
    target: Target | None = None,
) -> Learner:
    """Builds GRPO for any problem in groups: completions of a prompt, or episodes from a state.

    Args:
      config: hyperparameters, see `Config`.
      problem: source with a group_size of at least 2; process supervision needs rewards along the
        response; running statistics need strata (then a group may have one member).
      optimizer: any optax transformation with its own learning rate; None stands for Adam with
        gradients clipped by norm.
      surrogate: surrogate objective, see `ppo.make`; None stands for the clipped surrogate.
      target: platform and devices of the compiled program; None stands for the problem's target.

    Returns:
      `Learner` of GRPO.

    Raises:
      ConfigError: a field is invalid; the error names the field.
    """
    config.validate()
    if config.supervision == TURN:
        actor_critic.require_turns(problem, "supervision", f"{OUTCOME} or {PROCESS}")
    settings: dict[str, Any] = {
        "scale": config.scale,
        "ddof": config.ddof,
        "epsilon": config.std_epsilon,
    }
    if config.running_statistics:
        problem = running_relative(
            problem, decay=config.running_decay, axis_name=config.axis_name, **settings
        )

    def along(estimator: Callable[..., jax.Array]) -> group_policy.GroupAdvantage:
        """Returns an advantage that varies along the response, from an estimator for one group."""

        def advantage(reward: jax.Array, mask: jax.Array, step_end: jax.Array) -> jax.Array:
            group_policy.require_group(reward)
            return jax.vmap(lambda *group: estimator(*group, **settings))(reward, mask, step_end)

        return advantage

    def already_relative(reward: jax.Array, mask: jax.Array, step_end: jax.Array) -> jax.Array:
        del step_end
        return jnp.broadcast_to(reward.sum(axis=-1, keepdims=True), mask.shape)

    relative = {
        OUTCOME: group_policy.relative_to_group(config),
        PROCESS: along(group_advantages.process_relative),
        TURN: along(group_advantages.turn_relative),
    }[config.supervision]
    relative = already_relative if config.running_statistics else relative

    def advantage(reward: jax.Array, mask: jax.Array, step_end: jax.Array) -> jax.Array:
        # The aggregate `sequence_mean` divides by G, so that a factor √G leaves 1 / √G.
        weight = (
            (reward.shape[1] - config.extra_samples) ** 0.5 if config.group_divisor == ROOT else 1.0
        )
        return weight * relative(reward, mask, step_end)

    return group_policy.make(
        config,
        problem.with_target(target),
        optimizer,
        group_advantage=advantage,
        surrogate=group_policy.choose_surrogate(config, surrogate),
        aggregate=losses.sequence_mean,
        extra_samples=config.extra_samples,
        loss_kl=divergences.k3,
    )
