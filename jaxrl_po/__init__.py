"""Policy optimisation in JAX as one idea, collect → estimate → improve, from REINFORCE to DAPO.

The names in `__all__` are modules. Each module is imported at its first use, which starts no JAX
backend.

Example:
  >>> import jaxrl_po
  >>> jaxrl_po.ppo.Config(epsilon_high=0.28).epsilon_high
  0.28
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from jaxrl_po.version import __version__ as __version__

if TYPE_CHECKING:
    from jaxrl_po import (
        advantages,
        control,
        divergences,
        language,
        learner,
        losses,
        run,
        trust_region,
        updates,
    )
    from jaxrl_po.algorithms import (
        a2c,
        cispo,
        dapo,
        distillation,
        dppo,
        dr_grpo,
        gmpo,
        group_policy,
        grpo,
        gspo,
        kl_cov,
        npg,
        pkpo,
        ppo,
        ppo_penalty,
        reinforce,
        reinforce_pp,
        rloo,
        sapo,
        sft,
        trpo,
    )

__all__ = [
    "a2c",
    "advantages",
    "cispo",
    "control",
    "dapo",
    "distillation",
    "divergences",
    "dppo",
    "dr_grpo",
    "gmpo",
    "group_policy",
    "grpo",
    "gspo",
    "kl_cov",
    "language",
    "learner",
    "losses",
    "npg",
    "pkpo",
    "ppo",
    "ppo_penalty",
    "reinforce",
    "reinforce_pp",
    "rloo",
    "run",
    "sapo",
    "sft",
    "trpo",
    "trust_region",
    "updates",
]

_LIBRARY = (
    *("advantages", "control", "divergences", "language", "learner", "losses", "run"),
    *("trust_region", "updates"),
)


if not TYPE_CHECKING:  # otherwise a type checker would accept any name as a module

    def __getattr__(name: str) -> ModuleType:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        package = "jaxrl_po" if name in _LIBRARY else "jaxrl_po.algorithms"
        return importlib.import_module(f"{package}.{name}")

    def __dir__() -> list[str]:
        return [*globals(), *__all__]
