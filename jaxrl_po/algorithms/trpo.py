"""Implements TRPO: a natural step, then a backtracking line search (arXiv:1502.05477).

`max_θ E[r · A] s.t. E[KL(old ‖ new)] ≤ δ` (appendix C): conjugate gradient for x = F⁻¹g, step
length √(2δ / xᵀFx), and backtracking until the surrogate has improved and the exact KL is at most
δ. If no candidate passes, the policy does not change by a single bit.

The problem decides between trajectories (`control.make_problem`; the paper's "single path") and
vine (`control.make_vine`).
"""

import functools

from jaxrl_po import config as config_lib
from jaxrl_po import trust_region
from jaxrl_po.algorithms import npg
from jaxrl_po.algorithms.actor_critic import Advantage
from jaxrl_po.backend import Target
from jaxrl_po.config import COUNT, Interval, Number, number, static
from jaxrl_po.natural_updates import Surrogate
from jaxrl_po.types import Learner, Problem


@config_lib.record
class Config(npg.Config):
    """Hyperparameters of TRPO: natural step and line search."""

    backtrack: Number = number(
        0.8,
        "factor on the step after each rejected candidate",
        within=Interval(0.0, 1.0, True, True),
    )
    backtracks: int = static(10, "most candidates of the line search", within=COUNT)


def make(
    config: Config,
    problem: Problem,
    *,
    surrogate: Surrogate | None = None,
    advantage: Advantage | None = None,
    target: Target | None = None,
) -> Learner:
    """Builds TRPO for any problem with a separate critic, or without critic.

    Args:
      config: hyperparameters, see `Config`.
      problem: source of samples, control or language.
      surrogate: surrogate to minimise, see `npg.make`.
      advantage: advantage estimator, see `ppo.make`.
      target: platform and devices of the compiled program; None stands for the problem's target.

    Returns:
      `Learner` of TRPO.

    Raises:
      ConfigError: a field is invalid; the error names the field.
    """
    config.validate()
    search = functools.partial(
        trust_region.line_search,
        max_kl=config.max_kl,
        backtrack=config.backtrack,
        iterations=config.backtracks,
    )
    return npg.make(
        config, problem, search=search, surrogate=surrogate, advantage=advantage, target=target
    )
