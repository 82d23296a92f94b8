"""GRPO: the group is the baseline (Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4).

G responses to one prompt are scored; each token's advantage is its response's `(R − mean) / std` in the group. The clipped
surrogate and `β · k3(π ‖ π_ref)` are averaged over the tokens of a response, then over responses.
"""

import functools

import jax
import optax

from jaxrl_po import advantages, divergences, losses
from jaxrl_po import config as config_lib
from jaxrl_po.algorithms import group_policy
from jaxrl_po.config import static
from jaxrl_po.types import Learner, Problem

OUTCOME, PROCESS = SUPERVISIONS = ("outcome", "process")


@config_lib.record
class Config(group_policy.Clip, group_policy.GroupScale, group_policy.Reference):
    """Hyperparameters of GRPO; the defaults suit small models from a warm start."""

    supervision: str = static(
        OUTCOME,
        "one advantage for a whole response, or for each token that of the rewards which follow it (section 4.1.3)",
        choices=SUPERVISIONS,
    )


def make(config: Config, problem: Problem, optimizer: optax.GradientTransformation | None = None) -> Learner:
    """GRPO on any problem in groups: completions of one prompt, or episodes from one initial state.

    Args:
      config: see `Config`.
      problem: with group_size of at least 2; for process supervision, with rewards along the response.
      optimizer: any optax transformation in place of Adam behind a gradient-norm clip; it brings its own step size.

    Returns:
      The learner.

    Raises:
      ConfigError: names the field that cannot work.
    """

    def process(reward: jax.Array, mask: jax.Array) -> jax.Array:
        group_policy.require_group(reward)
        return jax.vmap(
            functools.partial(advantages.process_relative, scale=config.scale, ddof=config.ddof, epsilon=config.std_epsilon)
        )(reward, mask)

    return group_policy.make(
        config,
        problem,
        optimizer,
        advantage=process if config.supervision == PROCESS else group_policy.group_relative(config),
        surrogate=group_policy.clipped(config),
        aggregate=losses.sequence_mean,
        loss_kl=divergences.k3,
    )
