"""Dr. GRPO: GRPO without the two divisions that bias it (Liu et al. 2025, arXiv:2503.20783, section 3).

No division by the group's std, which favours prompts that are nearly always or nearly never solved;
tokens are summed and divided by a constant, the token budget, and not by the response's length,
which favours long wrong responses.
"""

import jax
import optax

from jaxrl_po import advantages, divergences, losses
from jaxrl_po import config as config_lib
from jaxrl_po.algorithms import group_policy
from jaxrl_po.config import static
from jaxrl_po.masked import Mean
from jaxrl_po.types import Learner, Problem


@config_lib.record
class Config(group_policy.Clip, group_policy.Reference):
    """Hyperparameters of Dr. GRPO."""

    use_reference: bool = static(
        False, "penalise the distance to the reference, at first the initial policy"
    )


def make(
    config: Config, problem: Problem, optimizer: optax.GradientTransformation | None = None
) -> Learner:
    """Dr. GRPO on any problem in groups; arguments as for `grpo.make`."""

    def aggregate(elements: jax.Array, mask: jax.Array) -> Mean:
        return losses.fixed_length_mean(elements, mask, mask.shape[1])

    return group_policy.make(
        config,
        problem,
        optimizer,
        advantage=group_policy.of_outcomes(lambda r: advantages.group_relative(r, scale="none")),
        surrogate=group_policy.clipped(config),
        aggregate=aggregate,
        loss_kl=divergences.k3,
    )
