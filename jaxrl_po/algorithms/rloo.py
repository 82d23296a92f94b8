"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740, eq. 8).

A response is one action: its log-probability is the sum over its tokens, its reward the outcome
minus `β · (log π − log π_ref)`. Nothing is clipped; in the first update on a batch, `−r · A` has
the gradient of `−log π · A`.
"""

import jax
import optax

from jaxrl_po import advantages, divergences, losses
from jaxrl_po import config as config_lib
from jaxrl_po.algorithms import group_policy
from jaxrl_po.masked import Mean
from jaxrl_po.types import Learner, Problem, Samples


@config_lib.record
class Config(group_policy.Reference):
    """Hyperparameters of RLOO."""


def make(
    config: Config, problem: Problem, optimizer: optax.GradientTransformation | None = None
) -> Learner:
    """RLOO on any problem in groups; arguments as for `grpo.make`."""

    def surrogate(log_prob: jax.Array, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
        return losses.surrogate(log_prob, samples.log_prob, samples.advantage), {}

    def sequence_sum(elements: jax.Array, mask: jax.Array) -> Mean:
        # Mean over responses of the sum over tokens.
        return losses.fixed_length_mean(elements, mask, 1)

    return group_policy.make(
        config,
        problem,
        optimizer,
        advantage=group_policy.outcome_advantage(advantages.leave_one_out),
        surrogate=surrogate,
        aggregate=sequence_sum,
        reward_kl=divergences.k1,
    )
