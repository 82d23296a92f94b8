"""TRPO: the natural step, then a search for a gain inside the region (Schulman et al. 2015, arXiv:1502.05477, appendix C).

`max_θ E[r · A] s.t. E[KL(old ‖ new)] ≤ δ`: conjugate gradient for F⁻¹g, the length √(2δ / xᵀFx),
and back-tracking until the surrogate has risen and the exact KL is within δ. Where no step passes,
the policy stays bit for bit.

Single path or vine is the problem's matter: `control.make_problem` or `control.make_vine`.
"""

import functools

from jaxrl_po import config as config_lib
from jaxrl_po import trust_region, updates
from jaxrl_po.algorithms import npg
from jaxrl_po.config import COUNT, Interval, Number, number, static
from jaxrl_po.types import Learner, Problem


@config_lib.record
class Config(npg.Config):
    """Hyperparameters of TRPO: the natural step's, and the search's."""

    backtrack: Number = number(
        0.8, "factor on the step after each refusal", within=Interval(0.0, 1.0, True, True)
    )
    backtracks: int = static(10, "candidates of the line search at most", within=COUNT)


def make(
    config: Config, problem: Problem, *, surrogate: updates.Surrogate | None = None
) -> Learner:
    """TRPO on any problem with a critic of its own, or none.

    Args:
      config: see `Config`.
      problem: control or language.
      surrogate: see `npg.make`.

    Returns:
      The learner.

    Raises:
      ConfigError: names the field that cannot work.
    """
    config.validate()
    search = functools.partial(
        trust_region.line_search,
        max_kl=config.max_kl,
        backtrack=config.backtrack,
        iterations=config.backtracks,
    )
    return npg.make(config, problem, search=search, surrogate=surrogate)
