"""GRPO: the group is the baseline (Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4).

G responses to one prompt are scored; each token's advantage is its response's `(R − mean) / std` in
the group. The clipped surrogate and `β · k3(π ‖ π_ref)` are averaged over the tokens of a response,
then over responses.

Few responses estimate mean and std crudely. Three switches do something about it, in any
combination: samples that enter the statistics only (`extra_samples`), a running estimate for
prompts that come again (`running_statistics`), and a larger group whose sum is divided by √G
(`group_divisor`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_po import advantages, divergences, losses
from jaxrl_po import config as config_lib
from jaxrl_po.algorithms import group_policy
from jaxrl_po.config import NON_NEGATIVE, UNIT, ConfigError, Number, number, static
from jaxrl_po.group_statistics import running_relative
from jaxrl_po.types import Learner, Problem

OUTCOME, PROCESS = SUPERVISIONS = ("outcome", "process")
SIZE, ROOT = DIVISORS = ("size", "root_size")


@config_lib.record
class Config(group_policy.Clip, group_policy.GroupScale, group_policy.Reference):
    """Hyperparameters of GRPO; the defaults suit small models from a warm start."""

    supervision: str = static(
        OUTCOME,
        "one advantage for a whole response, or for each token that of the rewards which "
        "follow it (section 4.1.3)",
        choices=SUPERVISIONS,
    )
    extra_samples: int = static(
        0,
        "responses of each group, among its group_size, that enter mean and std and are "
        "not trained on",
        within=NON_NEGATIVE,
    )
    running_statistics: bool = static(
        False,
        "mean and std are running estimates, of each prompt of a finite set or of each "
        "difficulty; else the group's own",
    )
    running_decay: Number = number(
        0.9,
        "weight that an outcome keeps in the running estimates from one iteration to the next",
        within=UNIT,
    )
    group_divisor: str = static(
        SIZE,
        "the sum of the surrogate over the G trained responses of a group is divided by G "
        "or by √G; penalty and entropy stay as they are, since a factor on all of them is "
        "lost on Adam",
        choices=DIVISORS,
    )

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range or without effect."""
        super().validate()
        config_lib.require_effect(
            self, "running_decay", self.running_statistics, "running_statistics is on"
        )
        if self.running_statistics and self.supervision == PROCESS:
            raise ConfigError(
                f"supervision must be {OUTCOME} with running_statistics, which are of "
                f"outcomes, got {PROCESS}"
            )


def make(
    config: Config, problem: Problem, optimizer: optax.GradientTransformation | None = None
) -> Learner:
    """GRPO on any problem in groups: completions of one prompt, or episodes from one initial state.

    Args:
      config: see `Config`.
      problem: with group_size of at least 2; for process supervision, with rewards along the
        response; for running statistics, with strata (then a group may have one member).
      optimizer: any optax transformation in place of Adam behind a gradient-norm clip; it brings
        its own step size.

    Returns:
      The learner.

    Raises:
      ConfigError: names the field that cannot work.
    """
    config.validate()
    settings: dict[str, Any] = {
        "scale": config.scale,
        "ddof": config.ddof,
        "epsilon": config.std_epsilon,
    }
    if config.running_statistics:
        problem = running_relative(
            problem, decay=config.running_decay, axis_name=config.axis_name, **settings
        )

    def process(reward: jax.Array, mask: jax.Array, step_end: jax.Array) -> jax.Array:
        group_policy.require_group(reward)
        return jax.vmap(lambda *group: advantages.process_relative(*group, **settings))(
            reward, mask, step_end
        )

    def already_relative(reward: jax.Array, mask: jax.Array, step_end: jax.Array) -> jax.Array:
        del step_end
        return jnp.broadcast_to(reward.sum(axis=-1, keepdims=True), mask.shape)

    relative = {PROCESS: process, OUTCOME: group_policy.group_relative(config)}[config.supervision]
    relative = already_relative if config.running_statistics else relative

    def advantage(reward: jax.Array, mask: jax.Array, step_end: jax.Array) -> jax.Array:
        weight = (
            (reward.shape[1] - config.extra_samples) ** 0.5 if config.group_divisor == ROOT else 1.0
        )
        return weight * relative(reward, mask, step_end)

    return group_policy.make(
        config,
        problem,
        optimizer,
        advantage=advantage,
        surrogate=group_policy.clipped(config),
        aggregate=losses.sequence_mean,
        extra_samples=config.extra_samples,
        loss_kl=divergences.k3,
    )
